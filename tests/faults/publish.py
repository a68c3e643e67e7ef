"""One segment of a compactor, all of it in the caller's thread."""

from hslake.compact.line import Line
from hslake.compactreport import CompactReport
from hslake.lake import Lake
from hslake.picks import Pick
from hslake.segment.write import workers


def publish(lake: Lake, batch: list[Pick], report: CompactReport) -> None:
    """Store and commit `batch`, as often as a vacuum takes its segment away."""
    with workers(1) as threads:
        line = Line(threads, report, {}, lambda keys: None, lambda: False, None)
        try:
            line._commit(lake, batch, *line._fill(lake, batch))
        finally:
            line.close()
