"""The order of preflight's checks: lake, target, staging, servers, and a timed burst."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hslake
from hslake.checks import FAIL, Check, failed, passed, warned
from hslake.errors import HslakeError, InvalidInput, without_secrets
from hslake.extract.drive import Limits
from hslake.extract.worklist import Worklist, worklist
from hslake.fingerprint import check_fingerprint, model_fingerprint
from hslake.lake import Lake
from hslake.lmhead import LmHead, find_head
from hslake.preflight.burst import Burst, compactor_seen, run_burst
from hslake.preflight.compaction import ROWS_BYTES
from hslake.preflight.forecast import burst_check, forecast
from hslake.preflight.probe import Rows, fetch_many
from hslake.preflight.prompts import Prompts, make_prompts
from hslake.preflight.report import Pace, PreflightReport
from hslake.preflight.server import Expected, Looked, check_server, gpu_memory
from hslake.preflight.staging import check_staging
from hslake.preflight.target import check_free_space, check_lake, check_plan, check_target
from hslake.progress import Bar, ProgressMaker, Silent
from hslake.server import Server, ServerStatus, new_session

_BURST = "burst"


@dataclass(frozen=True)
class _Captured:
    """The burst, where it was made, and its rows as far as they lie on this machine."""

    burst: Burst
    servers: list[tuple[Server, ServerStatus]]
    rows: list[Rows]
    compactor: bool
    reach: int  # tokens of the longest sample that all of them take


def preflight(
    lake_url: str,
    servers: Sequence[str],
    *,
    staging: Sequence[str | Path] = (),
    model: str | Path | None = None,
    burst_s: float = 0.0,
    limits: Limits = Limits(),
    probe_timeout: float = 20.0,
    progress: ProgressMaker = Silent,
) -> PreflightReport:
    """Check lake, plan, target, staging and every server; each server captures probes.

    `staging`: the servers' staging folders, as far as they are on this machine; without them the
    states themselves are not looked at. `model`: the model's folder, whose LM head tells whether
    `final` is what the server went on from. `burst_s`: seconds of a timed burst on all servers at
    once, 0 for none; `limits`: as extract will be given, which bound it too. `probe_timeout`:
    seconds the hook has to acknowledge a probe. Raises Missing or InvalidInput only when there is
    nothing to check (no lake, no server named, an impossible address).
    """
    if not servers:
        raise InvalidInput("no server given: name at least one with --server http://HOST:PORT")
    lake = hslake.open(lake_url)
    urls, roots = list(dict.fromkeys(servers)), [Path(s) for s in staging]
    with progress(3 + len(urls), "preflight") as bar:
        listing = worklist(lake)
        checks = [*check_lake(lake), check_plan(lake_url, listing), check_target(lake)]
        bar.advance(2)
        checks += check_staging(roots, lake)
        head, told = _head(lake, model)
        checks += told
        bar.advance()
        prompts = make_prompts(lake, listing)

        expected = Expected(
            lake.spec, listing.missing, prompts, limits, roots, head, probe_timeout, bar.note
        )
        told, ready = asyncio.run(_ask(urls, expected, bar))
        checks += told
    captured = None
    if burst_s > 0:  # with a bar of its own
        captured, told = asyncio.run(_burst(lake, ready, expected, burst_s, progress))
        checks += told
    told, pace = _after(lake, listing, captured, limits, roots)
    checks += told
    shown = [without_secrets(u) for u in urls]
    return PreflightReport(lake_url, shown, not any(c.result == FAIL for c in checks), checks, pace)


def _head(lake: Lake, model: str | Path | None) -> tuple[LmHead | None, list[Check]]:
    """The LM head to judge `final` by, and what there is to say about it."""
    name = "log-probs"
    if not lake.spec.has_final:
        return None, [passed(name, "the lake has no `final` stream to judge")]
    if model is None:
        todo = "give the model's folder with --model DIR: `final` is then compared with what the "
        text = "not judged: no --model given"
        return None, [warned(name, text, f"{todo}server itself says of the next tokens")]
    try:
        check_fingerprint(lake.spec.model.fingerprint, model_fingerprint(model), f"--model {model}")
    except InvalidInput as error:
        return None, [failed("model", str(error), "name the folder that the server was given")]
    except (HslakeError, OSError) as error:
        return None, [warned(name, f"not judged: {error}", "give --model the complete folder")]
    try:
        return find_head(model), []
    except (HslakeError, OSError, KeyError, ValueError) as error:
        todo = "compare a few samples with Hugging Face yourself (hslake capture-hf) before the run"
        return None, [warned(name, f"not judged: {error}", todo)]


async def _ask(
    urls: Sequence[str], expected: Expected, bar: Bar
) -> tuple[list[Check], dict[str, Looked]]:
    """The checks of every server, and what was seen of those that capture."""
    checks: list[Check] = []
    ready: dict[str, Looked] = {}
    async with new_session() as session:
        for url in urls:
            looked = await check_server(Server(url, session, request_timeout=300.0), expected)
            checks += looked.checks
            if looked.ready:
                ready[url] = looked
            bar.advance()
    return checks, ready


async def _burst(
    lake: Lake,
    ready: Mapping[str, Looked],
    expected: Expected,
    burst_s: float,
    progress: ProgressMaker,
) -> tuple[_Captured | None, list[Check]]:
    """The burst, or the check that says why there was none."""
    if not ready:
        todo = "mend what failed above, then run preflight again"
        return None, [warned(_BURST, "not run: no server is ready", todo)]
    reach = min(looked.longest for looked in ready.values())
    prompts: Prompts = expected.prompts.within(reach)
    if not prompts.planned:
        return None, [warned(_BURST, "not run: no planned sample is left", "plan samples first")]
    async with new_session() as session:
        clients = [Server(url, session) for url in ready]
        try:
            servers = [(client, await client.status()) for client in clients]
            return await _run(lake, servers, prompts, reach, expected, burst_s, progress)
        except HslakeError as error:
            return None, [failed(_BURST, str(error), "see the servers' logs")]


async def _run(
    lake: Lake,
    servers: list[tuple[Server, ServerStatus]],
    prompts: Prompts,
    reach: int,
    expected: Expected,
    burst_s: float,
    progress: ProgressMaker,
) -> tuple[_Captured | None, list[Check]]:
    roots = [root for root in expected.staging if root.is_dir()]
    compactor = compactor_seen(roots)
    with progress(burst_s, f"{_BURST} (seconds)") as bar:
        done = 0.0

        def tell(seconds: float, on_the_way: int) -> None:
            nonlocal done
            bar.advance(seconds - done)
            done = seconds
            over = "time is over, waiting for " if seconds >= burst_s else ""
            bar.note(f"{over}{on_the_way} probes on their way")

        burst = await run_burst(
            lake.spec,
            servers,
            prompts.planned,
            burst_s,
            expected.limits,
            compactor=compactor,
            tell=tell,
        )
    if burst is None:
        todo = (
            "run `hslake compact LAKE --staging DIR`, or start the server with larger --max-parts"
        )
        rows = sum(status.free_rows for _, status in servers)
        return None, [warned(_BURST, f"not run: only {rows:,} rows of staging are free", todo)]
    rows_there = await fetch_many(roots, burst.sample_ids, ROWS_BYTES)
    tight = [gpu_memory(s, await client.status(), client.url) for client, s in servers]
    captured = _Captured(burst, servers, rows_there, compactor, reach)
    return captured, [check for check in tight if check is not None]


def _after(
    lake: Lake,
    listing: Worklist,
    captured: _Captured | None,
    limits: Limits,
    roots: Sequence[Path],
) -> tuple[list[Check], Pace | None]:
    """What follows from the burst, and whether the target has room for the plan."""
    if captured is None:
        return [check_free_space(lake)], None
    statuses = [status for _, status in captured.servers]
    rows = min(status.capacity_rows for status in statuses)
    first = burst_check(captured.burst, listing, captured.compactor, captured.reach, rows)
    if not captured.burst.tokens:
        return [first, check_free_space(lake)], None
    checks, pace = forecast(
        lake, listing, captured.burst, statuses, captured.rows, limits, looked=bool(roots)
    )
    return [first, *checks, check_free_space(lake, pace.ratio)], pace
