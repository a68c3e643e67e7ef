"""The figures of /hslake/status as Prometheus text; names and meanings are in docs/sglang.md.

prometheus_client comes with SGLang; hslake itself does not need it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hslake.staging.metrics import LABELS, WRITERS, labels
from hslake.staging.status import NO_FIGURES

_STATES = ("open", "sealed", "done")

# (name, kind, key in a writer's status or its "hook", help)
_FIGURES = (
    *WRITERS,
    ("forwards", "counter", "forwards", "Forward passes whose rows were taken."),
    ("forward_seconds", "counter", "forward_s", "Time forward passes spent in the hook."),
    ("forwards_in_flight", "gauge", "in_flight", "Forward passes with copies not yet complete."),
    ("wait_seconds", "counter", "wait_s", "Time forward passes waited for staging."),
    ("wait_max_seconds", "gauge", "wait_max_s", "Longest wait of one forward pass."),
    ("copy_max_seconds", "gauge", "copy_max_s", "Longest copy from device to staging."),
    ("gpu_memory_bytes", "gauge", "gpu_bytes", "GPU memory the capture may take on this rank."),
    ("gpu_alloc_retries", "counter", "gpu_retries", "Allocations that freed kept memory first."),
    ("status_timestamp_seconds", "gauge", "updated_at", "Unix time of these figures."),
)


class Collector:
    """What a prometheus_client registry asks: the metrics of one status document."""

    def __init__(self, document: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        self._document, self._versions = document, dict(versions)

    def collect(self) -> Iterator[Any]:
        """Every metric; `hslake_armed` and `hslake_writers` also without any writer."""
        from prometheus_client import core

        document = self._document
        kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        writers = [
            (labels(w), {**NO_FIGURES, **w.get("hook", {}), **w}) for w in _writers(document)
        ]
        yield core.GaugeMetricFamily(
            "hslake_armed", "1 while every rank of this server captures.", document["armed"]
        )
        about = core.InfoMetricFamily("hslake", "Versions of this server.")
        about.add_metric((), self._versions)
        yield about
        yield core.GaugeMetricFamily("hslake_writers", "Writers of this server.", len(writers))
        for name, kind, key, text in _FIGURES:
            family = kinds[kind](f"hslake_{name}", text, labels=LABELS)
            for of, figures in writers:
                family.add_metric(of, figures[key])
            yield family
        copies = core.SummaryMetricFamily(
            "hslake_copy_seconds", "Copies from device to staging.", labels=LABELS
        )
        parts = core.GaugeMetricFamily(
            "hslake_parts", "Staging parts by state.", labels=(*LABELS, "state")
        )
        dropped = core.CounterMetricFamily(
            "hslake_dropped_attempts",
            "Attempts not captured; the driver asks again.",
            labels=(*LABELS, "reason"),
        )
        oldest = core.GaugeMetricFamily(
            "hslake_oldest_sealed_part_age_seconds",
            "How long a sealed part has waited for the compactor; 0 without one.",
            labels=LABELS,
        )
        for of, figures in writers:
            for kind, count in figures["dropped_by"].items():
                dropped.add_metric((*of, kind.replace(" ", "_")), count)
            oldest.add_metric(of, _waiting(figures["parts"]))
            copies.add_metric(of, int(figures["copies"]), figures["copy_s"])
            states = [part["state"] for part in figures["parts"]]
            for state in _STATES:
                parts.add_metric((*of, state), states.count(state))
        yield from (dropped, oldest, copies, parts)


def _waiting(parts: Sequence[Mapping[str, Any]]) -> float:
    """Seconds that the sealed part which waits longest has waited."""
    since = [p["sealed_at"] for p in parts if p["state"] == "sealed" and p.get("sealed_at")]
    return max(0.0, time.time() - min(since)) if since else 0.0


def _writers(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(document["writers"])


def text(document: Mapping[str, Any], versions: Mapping[str, str]) -> bytes:
    """A status document (hslake.staging.status) in Prometheus' text format 0.0.4.

    `versions`: labels of hslake_info. Raises ImportError where prometheus_client is missing.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(document, versions))
    return generate_latest(registry)
