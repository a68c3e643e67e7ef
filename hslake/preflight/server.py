"""Preflight's look at one server: is it well, does it serve this lake, do states arrive?"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import hslake
from hslake.checks import FAIL, Check, failed, passed, warned
from hslake.errors import HslakeError
from hslake.extract.drive import Limits
from hslake.extract.slot import unfit
from hslake.extract.worklist import Item
from hslake.lmhead import LmHead
from hslake.preflight.invariance import NAME as INVARIANCE
from hslake.preflight.invariance import check_invariance
from hslake.preflight.probe import Probe, Rows, capture, fetch
from hslake.preflight.prompts import Prompts
from hslake.preflight.states import check_log_probs, check_states, check_structure
from hslake.server import API_KEY, NotLetIn, Server, ServerDown, ServerStatus, context_limit
from hslake.spec import LakeSpec
from hslake.units import format_bytes


@dataclass(frozen=True)
class Expected:
    """What a server has to do: the lake's spec, the samples that are missing, prompts to try, and
    extract's limits. `head` is None when the model's folder was not given or cannot be judged by.
    """

    spec: LakeSpec
    missing: Sequence[Item]
    prompts: Prompts
    limits: Limits
    staging: Sequence[Path]
    head: LmHead | None
    wait_s: float
    tell: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Looked:
    """The checks of one server, and what the burst needs to know of it.

    `longest`: tokens that it takes at most; `ready`: it captures, so it may take part."""

    checks: list[Check]
    status: ServerStatus | None = None
    longest: int = 0
    ready: bool = False


async def check_server(server: Server, expected: Expected) -> Looked:
    """All checks of one server."""
    looked = await _check(server, expected)
    return replace(looked, checks=[replace(c, where=server.url) for c in looked.checks])


async def _check(server: Server, expected: Expected) -> Looked:
    spec = expected.spec
    try:
        status = await server.status()
    except ServerDown as error:
        todo = "start it with `hslake serve LAKE --staging DIR -- …`, or correct --server"
        if isinstance(error, NotLetIn):
            todo = f"export {API_KEY}=KEY, as the server was given with --api-key"
        return Looked([failed("server", str(error), todo)])
    checks = [await _healthy(server), _hook(status, spec)]
    if unfit(status, spec.lake_id):
        return Looked(checks)
    checks += [_same_version(status), _room(status)]
    limit, trouble = await _limit(server)
    checks.append(trouble or _longest_fits(status, expected, limit))
    checks.append(_in_flight(status, expected))
    longest = min(status.largest_reservation, limit or status.largest_reservation)
    probed = await _probe(server, status, expected, longest)
    ready = not any(c.result == FAIL and c.name == "probe" for c in probed)
    return Looked([*checks, *probed], status, longest, ready)


async def _healthy(server: Server) -> Check:
    if await server.healthy():
        return passed("server", f"{server.url} answers /health")
    todo = "look into the server's log; it may still be loading"
    return failed("server", f"{server.url}/health does not answer 200", todo)


def _hook(status: ServerStatus, spec: LakeSpec) -> Check:
    problem = unfit(status, spec.lake_id)
    if problem:
        todo = "start it with `hslake serve LAKE --staging DIR -- …`; its log says why not"
        if status.lake_id not in (None, spec.lake_id):
            todo = "start it with this lake, or name a server that captures for it"
        elif status.error:  # it was started so, and says itself what is wrong
            todo = "do as the reason says (the server's log has more), then restart the server"
        return failed("hook", problem, todo)
    engine = f"{status.engine.get('engine', '?')} {status.engine.get('engine_version', '?')}"
    writers = f"{len(status.writers)} writer{'s' * (len(status.writers) > 1)}"
    return passed("hook", f"armed for lake {spec.lake8}, {engine}, {writers}")


def _same_version(status: ServerStatus) -> Check:
    if status.hook_version == hslake.__version__:
        return passed("hook version", f"{status.hook_version}, as here")
    todo = "install the same hslake in the server's environment before a long run"
    found = f"the hook is {status.hook_version}, this hslake is {hslake.__version__}"
    return warned("hook version", found, todo)


def gpu_memory(before: ServerStatus, after: ServerStatus, url: str) -> Check | None:
    """A warning when the GPU ran out of memory between two statuses, and went on with what it
    freed: nothing is wrong, but the server stood still."""
    times = after.gpu_retries - before.gpu_retries
    if times <= 0 or after.cursors.keys() != before.cursors.keys():
        return None
    found = (
        f"{url}: the GPU's memory ran out {times} time{'s' * (times > 1)} during the burst, and "
    )
    found += "PyTorch freed what it kept before it went on: the server stands still meanwhile"
    return warned("GPU memory", found, "start it with a lower --mem-fraction-static")


def parts_of(status: ServerStatus) -> int:
    """Parts that the writer with the fewest of them may have."""
    return min(w.capacity_rows // max(1, w.largest_reservation) for w in status.writers)


def _room(status: ServerStatus) -> Check:
    name, free, rows = "staging room", status.free_rows, status.capacity_rows
    found = f"{free:,} of {rows:,} rows free"
    if free == 0:
        return failed(name, found, "run `hslake compact LAKE --staging DIR` to empty it")
    if parts_of(status) < 2:
        todo = "start the server with at least two parts: one fills while the other is compacted"
        return warned(name, f"{found}, in a single part", todo)
    if free < rows // 4:
        return warned(name, found, "run `hslake compact LAKE --staging DIR`, or extract will wait")
    return passed(name, found)


async def _limit(server: Server) -> tuple[int | None, Check | None]:
    """The longest prompt that the server takes, and a check when it does not tell."""
    try:
        return context_limit(await server.info()), None
    except ServerDown as error:
        todo = "see why /get_server_info does not answer"
        return None, warned("longest sample", str(error), todo)


def _longest_fits(status: ServerStatus, expected: Expected, limit: int | None) -> Check:
    name = "longest sample"
    if not expected.missing:
        return passed(name, "nothing is left to ask for")
    item = max(expected.missing, key=lambda i: i.length)
    tokens, rows = item.length, status.largest_reservation
    found = f"{item.sample_id!r} has {tokens:,} tokens"
    wrong, todos = [], []
    if tokens > rows:
        wrong.append(f"a staging part holds {rows:,}")
        todos.append(f"start the server with parts of at least {tokens:,} tokens")
    if limit is not None and tokens > limit:
        wrong.append(f"the server takes {limit:,}")
        todos.append("raise --context-length or the KV cache")
    if wrong:
        reach = min(rows, limit or rows)
        count = sum(i.length > reach for i in expected.missing)
        found = f"{found}, {' and '.join(wrong)}: {count:,} of the samples to capture are too long"
        return failed(name, found, f"{', and '.join(todos)}, or plan shorter samples")
    takes = "any" if limit is None else f"{limit:,}"
    found = f"{found}; parts hold {rows:,}, the server takes {takes}"
    told = str(status.engine.get("chunk_size", ""))
    chunk = int(told) if told.isdigit() else 0
    if chunk < 1:
        need = format_bytes(tokens * expected.spec.bytes_per_token)
        todo = "start it with --chunked-prefill-size 8192: one forward pass over all of it takes "
        return warned(name, f"{found}, and does not chunk", f"{todo}{need} more GPU memory")
    pieces = -(-tokens // chunk)
    how = f"in {pieces:,} chunks" if pieces > 1 else "in one chunk"
    return passed(name, f"{found}, {how} of {chunk:,}")


def _in_flight(status: ServerStatus, expected: Expected) -> Check:
    """Does staging hold what extract keeps on its way, while a part is with the compactor?"""
    name, limits = "in flight", expected.limits
    if not expected.missing:
        return passed(name, "nothing is left to ask for")
    lengths = [i.length for i in expected.missing]
    flight = tokens_in_flight(lengths, limits)
    longest = min(max(lengths), status.largest_reservation)
    size, parts = status.largest_reservation, parts_of(status) * len(status.writers)
    need = format_bytes(flight * expected.spec.bytes_per_token)
    found = f"{limits.requests} requests at once keep about {flight:,} tokens "
    found += f"({need}) on their way; staging has {parts} parts of {size:,}"
    # A sample never straddles parts: the end of each may stay empty, by less than the longest one.
    free = parts // len(status.writers) - 1
    usable = max(size, free * (size - longest)) * len(status.writers) if free > 0 else 0
    if usable >= flight:
        return passed(name, f"{found}, enough with one of them at the compactor")
    fits = max(1, int(limits.requests * max(usable, size // 2) / max(1, flight)))
    todo = "start it with more --max-parts or --part-tokens, or credits hold requests back: about "
    text = f"{found}, too few while one is at the compactor"
    return warned(name, text, f"{todo}{fits} are on their way then (--concurrency {fits})")


def tokens_in_flight(lengths: Sequence[int], limits: Limits) -> int:
    """Tokens that extract keeps on their way to one server."""
    mean = sum(lengths) / max(1, len(lengths))
    several = min(limits.requests, len(lengths)) * mean
    return int(max(min(several, limits.tokens), max(lengths, default=0)))


# -- the probes ---------------------------------------------------------------------------------


async def _probe(
    server: Server, status: ServerStatus, expected: Expected, longest: int
) -> list[Check]:
    spec, prompts = expected.spec, expected.prompts.within(longest)
    judge = expected.head is not None and spec.has_final
    expected.tell(f"{server.url}: probe")
    made = await capture(server, status, spec, prompts.probe, expected.wait_s, logprobs=judge)
    if isinstance(made, Check):
        return [made]
    found = f"{len(made.ids)} tokens captured and acknowledged"
    checks = [passed("probe", found)]
    try:
        rows = await fetch(expected.staging, made.sample_id)
    except HslakeError as error:
        todo = "do not extract: report this with the server's log and SGLang version"
        return [*checks, failed("structure", str(error), todo)]
    if rows is None:
        todo = "run preflight on the server's machine with --staging DIR, to look at the states"
        where = "; it is not in the --staging given" if expected.staging else ""
        checks.append(warned("states", f"not looked at{where}", todo))
        if judge:
            text = "not judged: the rows are not at hand"
            checks.append(warned("log-probs", text, todo))
        return checks
    checks.append(check_structure(rows, spec, made.ids))
    if checks[-1].result == FAIL:
        return checks
    checks.append(check_states(rows, spec, made.ids))
    return checks + await _batches(server, status, expected, prompts, (made, rows))


async def _batches(
    server: Server,
    status: ServerStatus,
    expected: Expected,
    prompts: Prompts,
    first: tuple[Probe, Rows],
) -> list[Check]:
    """Log-probs and batch invariance, on a longer prompt where staging has room for it."""
    spec, judge = expected.spec, expected.head is not None and expected.spec.has_final
    need = 2 * len(prompts.alone) + sum(len(ids) for ids in prompts.others)
    now = await server.status()
    probes, invariance = [first], None
    longest = max(len(prompts.alone), *(len(ids) for ids in prompts.others))
    if now.room(longest) < need:
        todo = "run `hslake compact LAKE --staging DIR`, then preflight again"
        text = f"not tried: it takes {need:,} rows of staging, {now.free_rows:,} free"
        if now.emptied().room(longest) < need:
            text += f" of {now.capacity_rows:,}, too few also when all are"
            todo = "start the server with more --part-tokens or --max-parts"
        invariance = warned(INVARIANCE, text, todo)
    else:
        expected.tell(f"{server.url}: one prompt alone and among others")
        alone = await capture(
            server, status, spec, prompts.alone, expected.wait_s, logprobs=judge, name=INVARIANCE
        )
        if isinstance(alone, Check):
            invariance = alone
        else:
            rows = await fetch(expected.staging, alone.sample_id)
            if rows is None:
                todo = "run preflight again: a compactor emptied the part before it was looked at"
                invariance = warned(INVARIANCE, "its rows are gone", todo)
            else:
                probes.append((alone, rows))
                invariance = await check_invariance(
                    server,
                    status,
                    spec,
                    (alone, rows),
                    prompts.others,
                    expected.staging,
                    expected.wait_s,
                )
    if not judge or expected.head is None:
        return [invariance]
    expected.tell(f"{server.url}: log-probs through the LM head")
    verdict = await asyncio.to_thread(
        check_log_probs,
        probes,
        spec,
        expected.head,
        lambda done: expected.tell(f"{server.url}: log-probs through the LM head, {done:.0%}"),
    )
    return [verdict, invariance]
