"""Growth, forecast, limit and report, over a manifest with known bytes."""

import builtins
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import hslake
from hslake.audit import audit, lines
from hslake.errors import InvalidInput, Missing
from hslake.lake import Lake
from hslake.plan import plan_files
from hslake.schemas import arrow_schema
from hslake.tables import catalog
from hslake.units import format_bytes, parse_bytes, parse_count

PER_TOKEN = 2 * 8 * 2


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = hslake.create(
        tmp_path / "lake",
        hidden_size=8,
        num_layers=12,
        capture="2,final",
        estimate_tokens=1000,
        estimate_bytes=100_000,
    )
    rows = "".join(f'{{"input_ids": {[i] * 100}, "source": "A1"}}\n' for i in range(10))
    (tmp_path / "plan.jsonl").write_text(rows)
    plan_files(made.url, [tmp_path / "plan.jsonl"])
    return made.refresh()


def commit(lake: Lake, segment: str, n: int, stored: int) -> None:
    """A segment of the first `n` planned samples that are missing."""
    found = lake.refresh().sql(
        "select p.* from plan p anti join samples s on s.sample_id = p.sample_id "
        "order by p.sample_id"
    )
    rows: list[dict[str, Any]] = [
        {
            **{k: r[k] for k in ("sample_id", "source", "split", "length", "token_hash")},
            "op": "add",
            "segment_id": segment,
            "token_start": 256 * i,
            "segment_raw_bytes": n * 100 * PER_TOKEN,
            "segment_stored_bytes": stored,
        }
        for i, r in enumerate(found.to_arrow_table().to_pylist()[:n])
    ]
    skip = ("commit_version", "committed_at")
    schema = pa.schema([f for f in arrow_schema("manifest") if f.name not in skip])
    table = pa.Table.from_pylist(rows, schema=schema)
    catalog.commit(lake.store, "manifest", lambda state: table, segment)


def test_before_the_first_commit(lake: Lake) -> None:
    found = audit(lake.url)
    assert (found.planned_tokens, found.committed_tokens, found.missing_tokens) == (1000, 0, 1000)
    assert (found.ratio, found.ratio_basis, found.growth) == (0.689, "typical", [])
    assert found.forecast_stored_bytes == round(1000 * PER_TOKEN * 0.689)
    assert found.passed and found.of_estimate == pytest.approx(0.22048)


def test_growth_and_forecast(lake: Lake) -> None:
    commit(lake, "seg-a", 4, 6400)
    commit(lake, "seg-b", 2, 3200)
    found = audit(lake.url, fail_over=16_000)
    assert [(p.version, p.samples, p.tokens, p.stored_bytes) for p in found.growth] == [
        (1, 4, 400, 6400),
        (2, 6, 600, 9600),
    ]
    assert (found.version, found.stored_bytes, found.raw_bytes) == (2, 9600, 600 * PER_TOKEN)
    assert (found.ratio, found.ratio_basis) == (0.5, "measured")
    assert found.forecast_stored_bytes == 9600 + 400 * PER_TOKEN // 2 == 16_000
    assert found.passed
    assert not audit(lake.url, fail_over=15_999).passed
    assert ("limit", "16.00 kB: passed") in lines(found)


def test_report(lake: Lake, tmp_path: Path) -> None:
    commit(lake, "seg-a", 4, 6400)
    for name in ("a.html", "b.html"):
        audit(lake.url, tmp_path / name, 10**6)
    page = (tmp_path / "a.html").read_text()
    assert "<svg" in page and "16.00 kB" in page and "100.00 kB" in page
    assert "http" not in page.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "").replace("https://matplotlib.org", "")
    ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


def test_refusals(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Missing, match="no lake"):
        audit(str(tmp_path / "none"))
    with pytest.raises(InvalidInput, match=r"directory .* does not exist"):
        audit(lake.url, tmp_path / "none" / "a.html")
    with pytest.raises(InvalidInput, match="fail-over"):
        audit(lake.url, fail_over=0)
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("no matplotlib")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidInput, match=r"pip install 'hslake\[report\]'"):
        audit(lake.url, tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [("3.5TB", 3.5e12), ("512 GiB", 512 * 2**30), ("1000", 1000), ("1_000 B", 1000), ("2k", 2000)],
)
def test_sizes(text: str, value: float) -> None:
    assert parse_bytes(text, "x") == value


def test_counts_and_bad_sizes() -> None:
    assert parse_count("87.8M", "x") == 87_800_000
    assert format_bytes(3.5e12) == "3.50 TB" and format_bytes(999) == "999 B"
    for text in ("", "TB", "-1GB", "1XB", "nan", "1e9999TB"):
        with pytest.raises(InvalidInput, match="x: found"):
            parse_bytes(text, "x")
    with pytest.raises(InvalidInput, match="x: found"):
        parse_count("3GiB", "x")
