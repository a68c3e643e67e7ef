"""Where a server's states will lie before they reach the lake, looked at before weights load."""

from collections.abc import Sequence
from pathlib import Path

from hslake.errors import HslakeError, InvalidInput
from hslake.spec import LakeSpec
from hslake.staging.memory import part_bytes
from hslake.staging.space import disk_warning
from hslake_sglang import flags, settings

_GIB = 2**30


def plan_staging(
    lake_url: str,
    staging: Path,
    spec: LakeSpec,
    args: Sequence[str],
    part_tokens: int | None,
    max_parts: int | None,
) -> tuple[int, int, list[str]]:
    """(tokens of a part, parts of a writer, what to tell about them) for a server with `args`.

    Raises NoSpace when staging has no room for them, InvalidInput when a sample that the lake
    still lacks is longer than a part.
    """
    longest = longest_missing(lake_url, args)
    if part_tokens is not None and part_tokens < longest:
        raise InvalidInput(
            f"--part-tokens {part_tokens:,}: the longest planned sample that the lake lacks has "
            f"{longest:,} tokens and must fit one part: give at least so many"
        )
    writers = flags.writers(args)
    tokens, parts = settings.staging_size(
        staging, spec, part_tokens, max_parts, writers=writers, longest=longest
    )
    one = part_bytes(spec, tokens)
    notes = [
        f"staging: {writers} writer(s) of {parts} parts of {tokens:,} tokens in {staging}: "
        f"{one / _GIB:.2f} GiB a part, {one * parts * writers / _GIB:.2f} GiB in all"
    ]
    if max_parts is None and parts < settings.DEFAULT_PARTS:
        notes.append(
            f"staging: there is room for {parts} parts of a writer instead of "
            f"{settings.DEFAULT_PARTS}; fewer and smaller parts make capture wait for the compactor"
        )
    warning = disk_warning(staging)
    return tokens, parts, [*notes, *([f"WARNING: {warning}"] if warning else [])]


def longest_missing(lake_url: str, args: Sequence[str]) -> int:
    """Tokens of the longest planned sample that the lake lacks, without those that exceed
    --context-length; 0 without a plan, or when it cannot be read now."""
    context = flags.number(args, ["--context-length"], 10**9)
    sql = """
        select coalesce(max(p.length), 0) from plan p
        where p.length <= $context and not exists (
            from samples s where s.sample_id = p.sample_id and s.token_hash = p.token_hash
        )"""
    try:
        # The hook, which is in this package too, must do without what a lake needs.
        from hslake.lake import open_lake

        ((found,),) = open_lake(lake_url).sql(sql, {"context": context}).fetchall()
    except (HslakeError, ImportError):
        return 0
    return int(found)
