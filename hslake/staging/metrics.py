"""Names under which Prometheus gets the figures of writers, whoever tells of them: the server with
its hook, or a compactor beside them."""

from collections.abc import Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("writer", "dp_rank", "lake")
# (name, kind, key in a writer's status, help)
WRITERS = (
    ("captured_samples", "counter", "samples_captured", "Samples that are complete in staging."),
    ("captured_tokens", "counter", "tokens_captured", "Tokens of these samples."),
    ("captured_bytes", "counter", "bytes_captured", "Raw bytes of these samples, all streams."),
    ("free_rows", "gauge", "free_rows", "Staging rows that can be reserved now."),
    ("capacity_rows", "gauge", "capacity_rows", "Staging rows of all parts that can be had."),
    ("writer_armed", "gauge", "armed", "1 while this writer captures."),
    ("writer_alive", "gauge", "alive", "1 while the writer's process lives."),
)


def labels(writer: Mapping[str, Any]) -> tuple[str, ...]:
    """The values of LABELS for a writer of a status document."""
    return (
        str(writer["writer"]),
        str(writer["engine"].get("dp_rank", "")),
        str(writer["lake_id"] or ""),
    )
