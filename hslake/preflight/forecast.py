"""The burst's checks: what it captured, what the compactor makes of it, and how long all takes."""

import math
from collections.abc import Sequence

from hslake.checks import Check, failed, passed, warned
from hslake.errors import HslakeError
from hslake.extract.drive import Limits
from hslake.extract.worklist import Worklist
from hslake.lake import Lake
from hslake.preflight import pace as paces
from hslake.preflight.burst import SHARE, Burst
from hslake.preflight.compaction import Compaction, measure
from hslake.preflight.probe import Rows
from hslake.preflight.report import Pace
from hslake.preflight.server import parts_of, tokens_in_flight
from hslake.preflight.target import bytes_left
from hslake.server import ServerStatus
from hslake.units import format_bytes, format_span


def burst_check(burst: Burst, listing: Worklist, compactor: bool, reach: int, rows: int) -> Check:
    """Whether the burst's probes arrived, and how fast. `reach`: tokens of the longest sample that
    all servers take; `rows`: staging of the server with the least."""
    name = "burst"
    probes = f"{burst.samples:,} probe{'s' * (burst.samples != 1)}"
    found = f"{probes}, {burst.tokens:,} tokens in {burst.seconds:.1f} s"
    if burst.tokens:
        found += f": {burst.rate:,.0f} tokens/s while capturing"
        if len(burst.rates) > 1:
            shares = ", ".join(f"{url} {rate:,.0f}" for url, rate in burst.rates.items())
            found += f" ({shares})"
    if burst.troubles:
        more = f" (and {len(burst.troubles) - 1} more)" if len(burst.troubles) > 1 else ""
        todo = "see the server's log: such requests would fail in the run too"
        return failed(name, f"{found}; failed: {burst.troubles[0]}{more}", todo)
    longest = max((i.length for i in listing.missing if i.length <= reach), default=0)
    which = "the longest sample"
    if any(i.length > reach for i in listing.missing):  # a check of its own says so
        which = "the longest sample that all servers take"
    if burst.longest >= longest:
        found += f"; {which} ({longest:,} tokens) among them"
    if burst.dropped:
        found += f"; the hook dropped {burst.dropped}"
    if burst.cut:
        found += "; ended early, to leave staging its room"
    if not compactor:
        found += f"; their rows stay in staging until a compactor comes (at most {SHARE:.0%} of it)"
    if not burst.tokens or burst.rough:
        todo = "raise --burst"
        if burst.cut:
            todo = "run `hslake compact LAKE --staging DIR --watch` beside it, which makes room"
        return warned(name, f"{found}; too little for a rate", todo)
    if burst.dropped:
        todo = "see the server's log why; extract would ask for them again"
        return warned(name, found, todo)
    if burst.longest < longest:
        todo = f"free staging rows (no probe may take more than {SHARE:.0%} of the free ones)"
        if longest > SHARE * rows:
            todo = f"no probe may take more than {SHARE:.0%} of staging: start the server with "
            todo += f"{math.ceil(longest / SHARE):,} rows or more for a try"
        text = f"{found}; {which} ({longest:,} tokens) was not tried"
        why = "tried before the run, it shows whether the server's memory holds it"
        return warned(name, text, f"{todo}: {why}")
    return passed(name, found)


def forecast(
    lake: Lake,
    listing: Worklist,
    burst: Burst,
    statuses: Sequence[ServerStatus],
    rows: Sequence[Rows],
    limits: Limits,
    *,
    looked: bool,
) -> tuple[list[Check], Pace]:
    """What the compactor would sustain, which of the three sets the pace, and for how long."""
    checks, compaction = _compactor(lake, burst, rows, looked)
    staging = None
    # The burst ran through this very staging: what it did is the evidence, not the model.
    seen = burst.turned > sum(s.capacity_rows for s in statuses) and not burst.rough
    if compaction is not None:
        flight = sum(
            tokens_in_flight([i.length for i in listing.missing], limits) for _ in statuses
        )
        parts = sum(parts_of(s) * len(s.writers) for s in statuses)
        quota = paces.Quota(parts, min(s.largest_reservation for s in statuses), flight)
        flow = paces.as_seen if seen else paces.through
        staging = flow(quota, burst.rate, compaction.rate)
    rate_of = compaction.rate if compaction else None
    blame, rate = paces.slowest(burst.rate, rate_of, staging)
    if seen and blame == paces.SERVER and burst.held_back > paces.HELD_BACK:
        blame = paces.STAGING
    left = sum(i.length for i in listing.missing)
    ratio = compaction.ratio if compaction else None
    stored, basis = bytes_left(lake, ratio)
    pace = Pace(
        burst.seconds,
        burst.samples,
        burst.tokens,
        burst.rate,
        burst.rates,
        staging,
        (paces.BURST if seen else paces.MODEL) if staging is not None else None,
        rate_of,
        blame,
        left,
        left / rate,
        lake.spec.codec,
        ratio,
        stored,
    )
    return [*checks, _verdict(pace, basis, burst)], pace


def _compactor(
    lake: Lake, burst: Burst, rows: Sequence[Rows], looked: bool
) -> tuple[list[Check], Compaction | None]:
    name, spec = "compactor", lake.spec
    if not rows:
        why = "its rows are gone already" if looked else "no --staging given"
        todo = "run preflight on the server's machine with --staging DIR"
        return [warned(name, f"not measured: {why}", todo)], None
    try:
        found = measure(spec, rows, lake.store)
    except (HslakeError, OSError) as error:
        todo = "mend the target or the machine's memory before the run"
        return [failed(name, f"{type(error).__name__}: {error}", todo)], None
    raw = format_bytes(found.tokens * spec.bytes_per_token)
    threads = f"{found.threads} thread{'s' * (found.threads > 1)}"
    speed = format_bytes(spec.bytes_per_token / found.code)
    text = (
        f"about {found.rate:,.0f} tokens/s: {speed}/s encoded, checked and hashed on "
        f"{threads}, {format_bytes(found.put_rate)}/s into the lake; {spec.codec} takes "
        f"{found.ratio:.3f} of {raw} captured"
    )
    if found.rate >= burst.rate:
        return [passed(name, text)], found
    slow = "writing to the lake" if found.put > found.code else "the processor"
    todo = f"{slow} holds it back, and the run goes at its pace: "
    if found.put > found.code:
        todo += "use a faster disk or a nearer store"
    elif spec.codec == "standard" and spec.dtype == "bfloat16":
        todo += "give it more cores, or create the lake with --codec bf16plane, which is faster"
    else:
        todo += "give it more cores, or a compactor on another machine for each server"
    return [warned(name, f"{text}; slower than the servers", todo)], found


def _verdict(pace: Pace, basis: str, burst: Burst) -> Check:
    """How long the rest of the plan takes, what it takes on disk, and what decides it."""
    name = "forecast"
    rates = {
        "server": pace.server_rate,
        "compactor": pace.compactor_rate,
        "both through this staging": pace.staging_rate,
    }
    told = ", ".join(f"{k} {v:,.0f}" for k, v in rates.items() if v is not None)
    size = f"{format_bytes(pace.stored_bytes)} to store ({basis})"
    time = f"{format_span(pace.eta_seconds)} for {pace.tokens_left:,} tokens"
    how = "; both as computed from its parts, which the burst was too short to turn over"
    if pace.staging_from == paces.BURST:
        how = f"; both as the burst ran, in which {burst.turned:,} rows came free again"
    found = f"{time}, {size}; the {pace.bottleneck} sets the pace ({told} tokens/s{how})"
    if pace.bottleneck == paces.STAGING:
        todo = "start the server with more --max-parts: rows come back too late for its speed"
        return warned(name, found, todo)
    if pace.bottleneck == paces.COMPACTOR:
        return warned(name, found, "see the compactor above; staging fills and servers wait for it")
    if pace.compactor_rate is None:
        found = f"{time} at the servers' {pace.server_rate:,.0f} tokens/s, {size}; "
        found += "whether staging and compactor keep up is not known"
    return passed(name, found)
