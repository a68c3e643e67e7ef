"""Where a server's states will lie before they reach the lake, looked at before weights load."""

from collections.abc import Sequence
from pathlib import Path

from hslake.errors import HslakeError, InvalidInput
from hslake.spec import LakeSpec
from hslake.staging.memory import part_bytes
from hslake.staging.space import disk_warning
from hslake_sglang import flags, settings

_GIB = 2**30
_CONTEXT = "--context-length"


def plan_staging(
    lake_url: str,
    staging: Path,
    spec: LakeSpec,
    args: Sequence[str],
    part_tokens: int | None,
    max_parts: int | None,
    derived: int | None = None,
) -> tuple[int, int, list[str]]:
    """(tokens of a part, parts of a writer, what to tell about them) for a server with `args`.
    `derived`: the context in tokens without --context-length, where it is known.

    Raises NoSpace when staging has no room for them, InvalidInput when a sample that the lake
    still lacks is longer than a part.
    """
    context = flags.number(args, [_CONTEXT], derived or 0) or None
    longest, beyond = missing_lengths(lake_url, context)
    if part_tokens is not None and part_tokens < longest:
        raise InvalidInput(
            f"--part-tokens {part_tokens:,}: the longest planned sample that the lake lacks has "
            f"{longest:,} tokens and must fit one part: give at least so many, or a "
            f"{_CONTEXT} below that leaves longer samples out"
        )
    writers = flags.writers(args)
    tokens, parts = settings.staging_size(
        staging, spec, part_tokens, max_parts, writers=writers, longest=longest
    )
    one = part_bytes(spec, tokens)
    notes = []
    if beyond and context:
        notes.append(
            f"{beyond:,} planned samples that the lake lacks will not be captured: they do not fit "
            f"the server's context of {context:,} tokens ({_CONTEXT}, or what the model's config "
            "says); plan shorter ones, or give a longer context where the model has it"
        )
    notes.append(
        f"staging: {writers} writer(s) of {parts} parts of {tokens:,} tokens in {staging}: "
        f"{one / _GIB:.2f} GiB a part, {one * parts * writers / _GIB:.2f} GiB in all"
    )
    if max_parts is None and parts < settings.DEFAULT_PARTS:
        notes.append(
            f"staging: there is room for {parts} parts of a writer instead of "
            f"{settings.DEFAULT_PARTS}; fewer and smaller parts make capture wait for the compactor"
        )
    warning = disk_warning(staging)
    return tokens, parts, [*notes, *([f"WARNING: {warning}"] if warning else [])]


def missing_lengths(lake_url: str, context: int | None) -> tuple[int, int]:
    """(tokens of the longest planned sample that the lake lacks and a server with `context` tokens
    may take, how many are longer); zeros without a plan, or when it cannot be read now.

    SGLang refuses a prompt of its whole context, and of some tokens less.
    """
    sql = """
        select coalesce(max(p.length) filter (p.length < $context), 0),
               count(*) filter (p.length >= $context)
        from plan p where not exists (
            from samples s where s.sample_id = p.sample_id and s.token_hash = p.token_hash
                and coalesce(s.mask_hash = p.mask_hash, true)
        )"""
    try:
        # The hook, which is in this package too, must do without what a lake needs.
        from hslake.lake import open_lake

        ((longest, beyond),) = (
            open_lake(lake_url).sql(sql, {"context": context or 10**18}).fetchall()
        )
    except (HslakeError, ImportError):
        return 0, 0
    return int(longest), int(beyond)
