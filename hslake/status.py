"""`hslake status`: how far a lake is, what waits in staging, and how its servers are."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import hslake
from hslake import query
from hslake.ids import PROBE_PREFIX
from hslake.lake import Lake
from hslake.listeners import server_at
from hslake.server import (
    CAPTURED,
    Event,
    ServerDown,
    ServerStatus,
    WriterStatus,
    new_session,
    parse_status,
    whole_status,
)
from hslake.slot import unfit
from hslake.worklist import captured_attempts, of_lake, waiting_samples

_RATE_MINUTES = 15
_GAP_S = 30.0  # without a capture or a commit: no time of work
_IDLE_S = 60.0  # without a commit, at least, before nothing is taken to be going on


@dataclass(frozen=True)
class Coverage:
    """One source and split: samples planned = committed + waiting (in staging) + missing."""

    source: str
    split: str
    planned: int
    committed: int
    waiting: int
    missing: int
    planned_tokens: int
    committed_tokens: int
    waiting_tokens: int
    missing_tokens: int


@dataclass(frozen=True)
class WriterState:
    """One writer's staging: rows in all and free, what it captured and dropped since it started.

    `seen_at`: the server or staging folder that told. `samples_captured` leaves preflight's probes
    out; `tokens_captured` is the writer's own figure, with them. `updated_at`: UTC.
    """

    seen_at: str
    writer: str
    alive: bool
    armed: bool
    error: str | None
    capacity_rows: int
    free_rows: int
    samples_captured: int
    tokens_captured: int
    dropped: int
    updated_at: datetime


@dataclass(frozen=True)
class ServerState:
    """`state`: "up", or what is wrong."""

    url: str
    state: str


@dataclass(frozen=True)
class StatusReport:
    """Where a lake stands. `waiting`: captured, seen in staging and not committed; figures are None
    when neither server nor staging was given. What a server process that has ended left in staging
    is seen in the staging folder only, and counts as missing without it.

    `tokens_left`: planned and not committed. `tokens_per_second`: committed in the last quarter of
    an hour, over the time of it in which something was captured or committed; None without a commit
    in it. `eta_seconds` follows from it, None also when nothing is going on: commits have ceased,
    or no live writer stands behind the servers and staging folders that were named.
    `expected_bytes`: what the spec's estimate foresees for the tokens committed so far; None
    without an estimate.
    """

    lake: str
    version: int
    at: datetime
    coverage: list[Coverage]
    planned: int
    committed: int
    waiting: int | None
    missing: int
    planned_tokens: int
    committed_tokens: int
    tokens_left: int
    tokens_per_second: float | None
    eta_seconds: float | None
    stored_bytes: int
    raw_bytes: int
    forecast_bytes: int
    estimate_bytes: int | None
    expected_bytes: int | None
    servers: list[ServerState]
    writers: list[WriterState]


def status(
    lake_url: str, *, servers: Sequence[str] = (), staging: Sequence[str | Path] = ()
) -> StatusReport:
    """Coverage and storage from the lake; staging fill and health from `servers` and `staging`.

    A server that does not answer is a line of the report, not an error. Raises Missing (no lake, no
    staging folder), InvalidInput (an impossible address, staging of another lake).
    """
    from hslake.staging.check import check_roots

    roots = [Path(s) for s in staging]
    check_roots(roots, hslake.open(lake_url).spec)
    # Staging first: what is committed in between is then counted once, as committed.
    told = asyncio.run(_ask(list(dict.fromkeys(servers))))
    told += [(str(root), status) for root in roots for status in local_statuses(root)]
    lake = hslake.open(lake_url)
    answers = [s for _, s in told if isinstance(s, ServerStatus)]
    statuses = of_lake(answers, lake.spec.lake_id)
    waiting = _waiting(lake, statuses) if statuses else None
    rows = _coverage(lake, waiting or {})
    forecast = query.run(lake, "forecast").to_pylist()[0]
    rate, going_on = _rate(lake)
    writers = _writers(told)
    going_on = going_on and (not told or any(w.alive for w in writers))
    left = sum(r.planned_tokens - r.committed_tokens for r in rows)
    estimate = lake.spec.estimate
    expected = None
    if estimate.bytes and estimate.tokens:
        expected = round(estimate.bytes / estimate.tokens * forecast["committed_tokens"])
    return StatusReport(
        lake=lake_url,
        version=lake.version,
        at=datetime.now(UTC),
        coverage=rows,
        planned=sum(r.planned for r in rows),
        committed=sum(r.committed for r in rows),
        waiting=None if waiting is None else sum(r.waiting for r in rows),
        missing=sum(r.missing for r in rows),
        planned_tokens=sum(r.planned_tokens for r in rows),
        committed_tokens=sum(r.committed_tokens for r in rows),
        tokens_left=left,
        tokens_per_second=rate,
        eta_seconds=left / rate if rate and going_on else None,
        stored_bytes=forecast["stored_bytes"],
        raw_bytes=forecast["raw_bytes"],
        forecast_bytes=forecast["forecast_stored_bytes"],
        estimate_bytes=estimate.bytes,
        expected_bytes=expected,
        servers=[
            ServerState(url, _state(found, lake)) for url, found in told if url.startswith("http")
        ],
        writers=writers,
    )


def local_statuses(root: Path) -> list[ServerStatus]:
    """What a staging folder on this machine tells: one status for each page of events."""
    from hslake.staging import StatusReader

    reader = StatusReader(root)
    found: list[ServerStatus] = []
    while not found or found[-1].more:
        since = found[-1].cursors if found else None
        found.append(parse_status(reader.read(since), str(root)))
    return found


async def _ask(urls: Sequence[str]) -> list[tuple[str, ServerStatus | ServerDown]]:
    async with new_session() as session:
        servers = [server_at(url, session, status_timeout=10.0) for url in urls]
        found = await asyncio.gather(*(whole_status(server) for server in servers))
    return list(zip((s.url for s in servers), found, strict=True))


def _state(found: ServerStatus | ServerDown, lake: Lake) -> str:
    if isinstance(found, ServerDown):
        return str(found)
    return unfit(found, lake.spec.lake_id) or "up"


def _writers(told: Sequence[tuple[str, ServerStatus | ServerDown]]) -> list[WriterState]:
    """Every writer once: a server and its staging folder tell of the same ones."""
    found: dict[str, tuple[str, WriterStatus]] = {}
    for where, status in told:
        if isinstance(status, ServerStatus):
            for w in status.writers:
                found.setdefault(w.writer, (where, w))
    return [
        WriterState(
            where,
            w.writer,
            w.alive,
            w.armed,
            w.error,
            w.capacity_rows,
            w.free_rows,
            w.samples_captured - sum(map(_is_probe, w.events)),
            w.tokens_captured,
            w.dropped,
            datetime.fromtimestamp(w.updated_at, UTC),
        )
        for where, w in found.values()
    ]


def _is_probe(event: Event) -> bool:
    return event.state == CAPTURED and event.sample_id.startswith(PROBE_PREFIX)


def _waiting(lake: Lake, statuses: Sequence[ServerStatus]) -> dict[tuple[str, str], Counter[str]]:
    """(source, split) -> samples and tokens that lie captured in staging and are not committed."""
    names = waiting_samples(lake, captured_attempts(statuses))
    if not names:
        return {}
    rows = query.run(
        lake,
        """
        select p.source, p.split, count(*) as samples, sum(p.length)::bigint as tokens from plan p
        anti join samples s on s.sample_id = p.sample_id and s.token_hash = p.token_hash
        where p.sample_id in (select unnest($names)) group by all
        """,
        {"names": sorted(names)},
    )
    return {
        (r["source"], r["split"]): Counter(samples=r["samples"], tokens=r["tokens"])
        for r in rows.to_pylist()
    }


def _coverage(lake: Lake, waiting: dict[tuple[str, str], Counter[str]]) -> list[Coverage]:
    rows = []
    for r in query.run(lake, "select * from coverage order by source, split").to_pylist():
        held = waiting.get((r["source"], r["split"]), Counter())
        rows.append(
            Coverage(
                r["source"],
                r["split"],
                r["planned"],
                r["committed"],
                held["samples"],
                r["missing"] - held["samples"],
                r["planned_tokens"],
                r["committed_tokens"],
                held["tokens"],
                r["missing_tokens"] - held["tokens"],
            )
        )
    return rows


def _rate(lake: Lake) -> tuple[float | None, bool]:
    """Tokens committed a second while there was work, in the last minutes up to the last commit,
    and whether a commit was made lately, as commits go here.

    Signs of work are captures and commits; longer than _GAP_S without one, nothing went on.
    """
    row = query.run(
        lake,
        f"""
        with recent as (
            select captured_at, committed_at, length from samples
            where committed_at > now() - interval {_RATE_MINUTES} minute
        ), signs as (
            select captured_at as seen from recent union select committed_at from recent
        ), gaps as (
            select seen, epoch(seen - lag(seen) over (order by seen)) as gap from signs
        ), work as (select * from gaps where gap <= {_GAP_S}
        ), commits as (
            select made, sum(gap) as seconds from work
            asof join (select distinct committed_at as made from recent) c on work.seen <= c.made
            group by made
        )
        select (select sum(length) from recent) as tokens, (select sum(gap) from work) as seconds,
            epoch(now() - (select max(committed_at) from recent)) as since,
            (select max(seconds) from commits
             where made > (select min(committed_at) from recent)) as rhythm
        """,
    ).to_pylist()[0]
    if not row["tokens"] or not row["seconds"]:
        return None, False
    lately = row["since"] < max(_IDLE_S, 2 * (row["rhythm"] or 0.0))
    return float(row["tokens"]) / row["seconds"], lately
