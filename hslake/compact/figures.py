"""What a compactor says of itself with --listen: as a document, and for Prometheus."""

from collections.abc import Iterable, Mapping
from typing import Any

import hslake
from hslake.compactreport import CompactReport
from hslake.staging.metrics import LABELS, WRITERS, labels

# (name, kind, key of `figures`, help)
_FIGURES = (
    ("samples", "counter", "samples", "Samples committed."),
    ("tokens", "counter", "tokens", "Tokens of these samples."),
    ("raw_bytes", "counter", "raw_bytes", "Bytes of their states before the codec."),
    ("stored_bytes", "counter", "stored_bytes", "Bytes stored for them."),
    ("segments", "counter", "segments", "Segments committed."),
    ("duplicates", "counter", "duplicates", "Samples captured once more."),
    ("looks", "counter", "looks", "Looks at staging."),
    ("failures", "counter", "tries", "Times something went wrong and is tried again."),
    (
        "backlog_samples",
        "gauge",
        "backlog_samples",
        "Samples complete in staging, not in the lake.",
    ),
    ("backlog_rows", "gauge", "backlog_rows", "Rows of these samples."),
    (
        "tokens_per_second",
        "gauge",
        "tokens_per_s",
        "Tokens committed a second, at the last commit.",
    ),
    ("troubles", "gauge", "trouble_count", "Troubles there are now."),
    ("damage", "gauge", "damage_count", "Damage that was found in staging."),
    ("refused", "gauge", "refused_count", "Writers of another lake, model or user."),
    ("last_commit_timestamp_seconds", "gauge", "committed_at", "Unix time of the last commit."),
)


def figures(report: CompactReport, lake_id: str, started_at: float) -> dict[str, Any]:
    """The compactor's own figures since it started; may be called while it works."""
    return {
        "version": hslake.__version__,
        "lake_id": lake_id,
        "started_at": started_at,
        "looks": report.looks,
        "samples": report.samples,
        "tokens": report.tokens,
        "segments": report.segments,
        "raw_bytes": report.raw_bytes,
        "stored_bytes": report.stored_bytes,
        "duplicates": report.duplicates,
        "abandoned": dict(report.abandoned),
        "tokens_per_s": report.tokens_per_s,
        "backlog_samples": report.backlog_samples,
        "backlog_rows": report.backlog_rows,
        "manifest_version": report.version,
        "committed_at": report.committed_at,
        "troubles": list(report.troubles),
        "tries": report.tries,
        "last_error": report.last_error,
        "damage": list(report.damage[-100:]),
        "refused": list(report.refused[-100:]),
        "trouble_count": len(report.troubles),
        "damage_count": len(report.damage),
        "refused_count": len(report.refused),
    }


def prometheus(document: Mapping[str, Any]) -> str:
    """A status document with `compactor` in Prometheus' text format. The writers' metrics have the
    names and labels of the servers' own."""
    own = document["compactor"]
    lines = _family(
        "hslake_compactor_info", "gauge", "Version.", [({"version": own["version"]}, 1)]
    )
    lake = {"lake": own["lake_id"]}
    for name, kind, key, text in _FIGURES:
        lines += _family(f"hslake_compactor_{name}", kind, text, [(lake, own[key] or 0)])
    given_up = [({**lake, "reason": why}, n) for why, n in own["abandoned"].items()]
    lines += _family("hslake_compactor_abandoned", "counter", "Samples given up.", given_up)
    writers = [(dict(zip(LABELS, labels(w), strict=True)), w) for w in document["writers"]]
    for name, kind, key, text in WRITERS:
        values = [(of, w[key]) for of, w in writers]
        lines += _family(f"hslake_{name}", kind, text, values)
    return "\n".join(lines) + "\n"


def _family(
    name: str, kind: str, text: str, values: Iterable[tuple[Mapping[str, str], float]]
) -> list[str]:
    full = f"{name}_total" if kind == "counter" else name
    lines = [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
    for of, value in values:
        told = ",".join(f'{k}="{_escaped(v)}"' for k, v in of.items())
        lines.append(f"{full}{{{told}}} {float(value):.17g}")
    return lines


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
