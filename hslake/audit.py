"""Storage audit: growth of the lake against its estimate, and what the whole plan will take.

Bytes come from the manifest (every commit records what its segments hold), so no object is listed.
"""

import html
import io
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import hslake
from hslake import query
from hslake.errors import InvalidInput
from hslake.units import format_bytes, format_count

_INSTALL = "the report needs matplotlib: pip install 'hslake[report]'"


@dataclass(frozen=True)
class GrowthPoint:
    """Totals after one manifest version."""

    version: int
    committed_at: datetime
    samples: int
    tokens: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class AuditReport:
    """Bytes on disk so far, forecast for the whole plan, and the estimate they are held against.

    `ratio` (stored / raw) is `ratio_basis`: "measured", or "typical" of the codec before the first
    commit. `estimate_bytes` is the spec's, None when it has none; `of_estimate` = forecast /
    estimate. `passed` is False when the forecast exceeds `fail_over` bytes.
    """

    lake: str
    version: int
    planned_tokens: int
    committed_tokens: int
    missing_tokens: int
    raw_bytes: int
    stored_bytes: int
    ratio: float
    ratio_basis: str
    forecast_raw_bytes: int
    forecast_stored_bytes: int
    estimate_tokens: int | None
    estimate_bytes: int | None
    of_estimate: float | None
    fail_over: int | None
    passed: bool
    report: str | None
    growth: list[GrowthPoint]


def audit(
    lake_url: str, report: str | Path | None = None, fail_over: int | None = None
) -> AuditReport:
    """Audit the lake at its newest version.

    `report`: HTML file to write, with a plot (needs the extra `report`); `fail_over`: bytes that
    the forecast must not exceed. Raises InvalidInput; the caller decides what `passed` means.
    """
    if fail_over is not None and fail_over <= 0:
        raise InvalidInput(f"fail-over: found {fail_over} bytes, expected more than 0")
    if report is not None:
        _check_report(Path(report))
    lake = hslake.open(lake_url)
    found = query.run(lake, "forecast").to_pylist()[0]
    growth = [
        GrowthPoint(
            r["version"],
            r["committed_at"],
            r["total_samples"],
            r["total_tokens"],
            r["total_raw_bytes"],
            r["total_stored_bytes"],
        )
        for r in query.run(lake, "storage_growth").to_pylist()
    ]
    forecast = found["forecast_stored_bytes"]
    result = AuditReport(
        lake=lake_url,
        version=lake.version,
        planned_tokens=found["planned_tokens"],
        committed_tokens=found["committed_tokens"],
        missing_tokens=found["missing_tokens"],
        raw_bytes=found["raw_bytes"],
        stored_bytes=found["stored_bytes"],
        ratio=found["ratio"],
        ratio_basis=found["basis"],
        forecast_raw_bytes=found["forecast_raw_bytes"],
        forecast_stored_bytes=forecast,
        estimate_tokens=found["estimate_tokens"],
        estimate_bytes=found["estimate_bytes"],
        of_estimate=found["of_estimate"],
        fail_over=fail_over,
        passed=fail_over is None or forecast <= fail_over,
        report=None if report is None else str(report),
        growth=growth,
    )
    if report is not None:
        Path(report).write_text(render(result), "utf-8")
    return result


def lines(result: AuditReport) -> list[tuple[str, str]]:
    """The report as (what, value) for a person."""
    estimate = "none in the lake's spec (`create --estimate-bytes`)"
    if result.estimate_bytes is not None:
        share = f"; the forecast is {result.of_estimate:.1%} of it" if result.of_estimate else ""
        estimate = format_bytes(result.estimate_bytes) + share
    rows = [
        ("planned", f"{format_count(result.planned_tokens)} tokens"),
        (
            "committed",
            f"{format_count(result.committed_tokens)} tokens, "
            f"{format_count(result.missing_tokens)} missing",
        ),
        ("raw", format_bytes(result.raw_bytes)),
        ("stored", f"{format_bytes(result.stored_bytes)} in {len(result.growth)} commits"),
        ("ratio", f"{result.ratio:.4f} of raw ({result.ratio_basis})"),
        (
            "forecast",
            f"{format_bytes(result.forecast_stored_bytes)} for the whole plan "
            f"({format_bytes(result.forecast_raw_bytes)} raw)",
        ),
        ("estimate", estimate),
    ]
    if result.fail_over is not None:
        verdict = "passed" if result.passed else "FAILED"
        rows.append(("limit", f"{format_bytes(result.fail_over)}: {verdict}"))
    return rows


# -- HTML ---------------------------------------------------------------------------------------


def _check_report(path: Path) -> None:
    """Fail before the work, not after it."""
    if not path.parent.is_dir():
        raise InvalidInput(f"--report {path}: the directory {path.parent} does not exist")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidInput(f"--report: {_INSTALL}") from error


def render(result: AuditReport) -> str:
    """One self-contained HTML page: the numbers, an inline SVG plot and the commits."""
    cells = "".join(
        f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in lines(result)
    )
    commits = "".join(
        f"<tr><td>{p.version}</td><td>{p.committed_at:%Y-%m-%d %H:%M:%S}</td><td>{p.samples}</td>"
        f"<td>{p.tokens}</td><td>{format_bytes(p.raw_bytes)}</td>"
        f"<td>{format_bytes(p.stored_bytes)}</td></tr>"
        for p in result.growth[-200:]
    )
    title = html.escape(f"Storage audit of {result.lake} at version {result.version}")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: left }}
svg {{ max-width: 100%; height: auto }}
</style></head><body>
<h1>{title}</h1>
<table>{cells}</table>
{_plot(result)}
<h2>Commits{" (the last 200)" if len(result.growth) > 200 else ""}</h2>
<table><tr><th>version</th><th>committed (UTC)</th><th>samples</th><th>tokens</th><th>raw</th>
<th>stored</th></tr>{commits}</table>
</body></html>
"""


def _plot(result: AuditReport) -> str:
    """Stored and raw bytes over committed tokens, forecast, estimate and limit, as inline SVG."""
    from matplotlib.figure import Figure

    scale, unit = _scale(
        max(result.forecast_raw_bytes, result.raw_bytes, result.estimate_bytes or 0)
    )
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    x = [0.0, *(p.tokens / 1e6 for p in result.growth)]
    stored = [0.0, *(p.stored_bytes / scale for p in result.growth)]
    axes.plot(x, [0.0, *(p.raw_bytes / scale for p in result.growth)], color="#999", label="raw")
    axes.plot(x, stored, color="#0366d6", marker=".", label="stored")
    end = max(x[-1], x[-1] + result.missing_tokens / 1e6)
    axes.plot(
        [x[-1], end],
        [stored[-1], result.forecast_stored_bytes / scale],
        color="#0366d6",
        linestyle="--",
        label="forecast",
    )
    for value, name, colour in (
        (result.estimate_bytes, "estimate", "#2a9d3a"),
        (result.fail_over, "limit", "#d0312d"),
    ):
        if value is not None:
            axes.axhline(value / scale, color=colour, linestyle=":", label=name)
    axes.set_xlabel("tokens (millions)")
    axes.set_ylabel(unit)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def _scale(largest: int) -> tuple[float, str]:
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if largest >= factor:
            return factor, unit
    return 1e3, "kB"
