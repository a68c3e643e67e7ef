"""The report as lines: on top whether it goes well, when it is done, what is slow, what to do."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from rich.text import Text

from hslake.cli.common import cell
from hslake.status.report import (
    COMPACTOR,
    DRIVER,
    NOBODY,
    NOTHING,
    SERVER,
    STAGING,
    UP,
    Coverage,
    ServerState,
    StatusReport,
    WriterState,
)
from hslake.units import format_bytes, format_count, format_span

_BAR = 24
INDENT = 9  # columns of the names before the lines on top
_OLD_S = 15.0  # figures older than that say so
GOOD, BAD, DIM, HEAD = "green", "bold red", "dim", "bold"


def lines(r: StatusReport) -> list[Text]:
    """The screen, without a width: the caller cuts or wraps."""
    found: list[Text | str] = [_head(r), _bar(r), _done(r), _rate(r), _slow(r), *_needs(r)]
    found += ["", *_run(r), *_storage(r), *map(_compactor, r.compactors)]
    if r.servers:
        found += ["", *_table(*_servers(r.servers))]
    if r.writers:
        found += ["", *_table(*_writers(r.writers))]
    if r.coverage:  # last: it is long, and may fall off a small screen
        found += ["", *_coverage(r)]
    else:
        found += ["", _pair("plan", f"nothing is planned: hslake plan {r.lake} FILE --source NAME")]
    return [line if isinstance(line, Text) else Text(line) for line in found]


# -- the top --------------------------------------------------------------------------------------


def _head(r: StatusReport) -> Text:
    state, style = {
        NOTHING: ("DONE", GOOD),
        NOBODY: ("STOPPED", BAD),
    }.get(r.bottleneck.name, ("RUNNING", GOOD))
    if not r.planned:
        state, style = "EMPTY", "yellow"
    elif r.lake_error:
        state, style = "NOT READ", BAD
    text = Text.assemble((f"{state:<8}", f"bold {style}"), " ", (r.lake, HEAD))
    text.append(f"  version {r.version}, {r.at:%d %b %H:%M:%S} UTC", DIM)
    if r.lake_error or r.lake_age_seconds > _OLD_S:
        text.append(f"  the lake as {format_span(r.lake_age_seconds)} ago", BAD)
    return text


def _bar(r: StatusReport) -> Text:
    full = int(_BAR * r.done)
    text = Text(f"{_percent(r.done):>7}  ")
    text.append("█" * full, GOOD).append("░" * (_BAR - full), DIM)
    text.append(f"  {format_count(r.committed_tokens)} of {format_count(r.planned_tokens)} tokens")
    return text.append(f", {format_count(r.tokens_left)} left")


def _done(r: StatusReport) -> Text:
    if not r.tokens_left:
        return _pair("done", "now: all that is planned is committed" if r.planned else "")
    eta, soonest, latest = r.pace.eta_seconds, r.pace.eta_soonest, r.pace.eta_latest
    if eta is None:
        why = "nothing is going on now" if r.bottleneck.name == NOBODY else "too early to tell"
        return _pair("done", f"not known: {why}")
    if soonest is None or latest is None:
        return _pair("done", f"in about {format_span(eta)} (too early for a range)")
    dates = [f"{r.at + timedelta(seconds=s):%a %d %b %H:%M}" for s in (soonest, latest)]
    spans = f"{format_span(soonest)} to {format_span(latest)}"
    return _pair("done", f"in {spans}: {' to '.join(dict.fromkeys(dates))} UTC", HEAD)


def _rate(r: StatusReport) -> Text:
    if r.pace.now is None:
        return _pair("rate", "nothing was captured or committed lately")
    text = f"{r.pace.now:,.0f} tokens/s now"
    if r.pace.average is not None:
        live = [run.seconds for run in r.runs if run.live]
        over = f"over {format_span(max(live))}" if live and r.pace.basis == "run log" else "of late"
        text += f", {r.pace.average:,.0f} on average {over}"
    return _pair("rate", text)


def _slow(r: StatusReport) -> Text:
    name = r.bottleneck.name
    bad = {COMPACTOR, STAGING, DRIVER, NOBODY}
    style = BAD if name in bad else GOOD if name in (SERVER, NOTHING) else "yellow"
    said = f": {r.bottleneck.why}" if r.bottleneck.why else ""
    return _pair("slow", "").append(name, style).append(said)


def _needs(r: StatusReport) -> list[Text]:
    if not r.needs:
        return [_pair("to do", "nothing", GOOD)]
    first, *more = r.needs
    return [_pair("to do", first, BAD), *(_pair("", text, BAD) for text in more)]


def _pair(key: str, text: str, style: str = "") -> Text:
    return Text(f"{key:>7}  ").append(text, style)


# -- the rest -------------------------------------------------------------------------------------


def _coverage(r: StatusReport) -> list[Text]:
    columns = ["source", "split", "planned", "committed", "waiting", "missing", "percent"]
    waits = r.waiting is not None
    rows: list[list[Any]] = [
        [c.source, c.split, c.planned, c.committed, c.waiting if waits else None, c.missing, _of(c)]
        for c in r.coverage
    ]
    sums = [r.planned, r.committed, r.waiting, r.missing, _percent(r.done)]
    found = _table(columns, [*rows, ["(total)", "", *sums]])
    if not waits:
        told = "waiting counts as missing here: name --server or --staging to tell it apart"
        found.append(Text(f"({told})", DIM))
    elif r.missing and not r.whole_staging:
        told = "what servers that have ended left in staging counts as missing: see --staging"
        found.append(Text(f"({told})", DIM))
    return found


def _of(c: Coverage) -> str:
    return _percent(c.committed_tokens / max(1, c.planned_tokens))


def _percent(share: float) -> str:
    """Never 100 % before all is there."""
    return f"{min(share, 0.9999 if share < 1 else 1.0) * 100:.2f} %"


def _run(r: StatusReport) -> list[Text]:
    found = []
    for run in r.runs:
        state = "live" if run.live else run.outcome or "cut off"
        said = f"{state}, {run.command or 'a run'} on {run.host or '?'}: {run.captured:,} captured"
        said += f", {run.retried:,} retries, {run.dropped:,} dropped, {run.refused:,} refused"
        seen = (r.at - run.last_seen_at).total_seconds()
        found.append(_pair("run", f"{said} (heard {format_span(max(0.0, seen))} ago)"))
    if r.dropped_by:
        by = ", ".join(f"{n:,} {why}" for why, n in r.dropped_by.items())
        found.append(_pair("drops", by))
    found += [_pair("refused", f"{x.samples:,} {cell(x.reason, 100)}") for x in r.refusals]
    if r.canaries:
        found.append(_pair("canary", f"{r.canaries:,} asked"))
    if r.invalidated is not None:
        found.append(_pair("older", f"{r.invalidated:,} samples are of an older plan generation"))
    return found


def _storage(r: StatusReport) -> list[Text]:
    stored = f"{format_bytes(r.stored_bytes)} of {format_bytes(r.raw_bytes)} raw"
    if r.expected_bytes:
        stored += f"; {r.stored_bytes / r.expected_bytes:.1%} of what the estimate foresees so far"
    whole = f"{format_bytes(r.forecast_bytes)} for the whole plan"
    if r.estimate_bytes:
        whole += f", the estimate is {format_bytes(r.estimate_bytes)}"
    return [_pair("stored", stored), _pair("will be", whole)]


def _servers(servers: Sequence[ServerState]) -> tuple[list[str], list[list[Any]], list[str]]:
    columns = ["server", "tokens/s", "filled", "captured", "dropped", "state"]
    rows: list[list[Any]] = []
    for s in servers:
        state = s.state
        if s.state != UP and s.age_seconds is not None:
            state += f" (figures {format_span(s.age_seconds)} old)"
        filled = f"{1 - s.free_rows / s.capacity_rows:.0%}" if s.capacity_rows else None
        rate = None if s.tokens_per_second is None else round(s.tokens_per_second)
        rows.append([s.url, rate, filled, s.samples_captured, s.dropped, state])
    return columns, rows, ["" if s.state == UP else BAD for s in servers]


def _writers(writers: Sequence[WriterState]) -> tuple[list[str], list[list[Any]], list[str]]:
    columns = ["writer", "seen at", "filled", "sealed rows", "captured", "dropped", "state"]
    rows: list[list[Any]] = []
    for w in writers:
        filled = f"{1 - w.free_rows / max(1, w.capacity_rows):.0%}" if w.alive else None
        state = w.error or ("armed" if w.alive and w.armed else "ended")
        numbers = [w.sealed_rows, w.samples_captured, w.dropped]
        rows.append([w.writer[:8], w.seen_at, filled, *numbers, state])
    if len(rows) > 1:
        alive = [w for w in writers if w.alive]
        free, rooms = sum(w.free_rows for w in alive), sum(w.capacity_rows for w in alive)
        sums = [sum(row[k] for row in rows) for k in (3, 4, 5)]
        filled = f"{1 - free / rooms:.0%}" if rooms else None
        rows.append(["(total)", "", filled, *sums, ""])
    return columns, rows, [BAD if w.alive and w.error else "" for w in writers]


def _compactor(c: Any) -> Text:
    said = f"{c.url}: {c.tokens_per_second:,.0f} tokens/s, {c.backlog_samples:,} samples wait"
    return _pair("compact", said)


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], styles: Iterable[str] = ()
) -> list[Text]:
    """Rows under their columns; numbers and percentages to the right."""
    texts = [[f"{v:,}" if isinstance(v, int) else cell(v, 500) for v in row] for row in rows]
    right = [
        all(isinstance(row[i], int | None) or str(row[i]).endswith("%") for row in rows)
        for i in range(len(columns))
    ]
    widths = [max(len(c), *(len(t[i]) for t in texts)) for i, c in enumerate(columns)]

    def line(cells: Sequence[str], style: str) -> Text:
        put = (
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True)
        )
        return Text("  ".join(put).rstrip(), style, no_wrap=True)

    given = [*styles, *[""] * len(texts)]
    return [line(columns, DIM), *(line(t, s) for t, s in zip(texts, given, strict=False))]
