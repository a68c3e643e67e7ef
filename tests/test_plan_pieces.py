"""Over-long samples, duplicates and splits: what is cut stays whole, and no prompt straddles."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hslake import query
from hslake.errors import CheckFailed, InvalidInput
from hslake.ids import check_sample_id, token_hash
from hslake.plan import plan_files
from hslake.plan.pieces import Limits, OverLong, piece_id
from hslake.plan.spill import mask_hash, prompt_hash
from hslake.versions import delete
from tests.planlakes import new_lake, planned, write

SLOW = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return new_lake(tmp_path)


@given(st.integers(1, 500), st.integers(1, 60), st.sampled_from(list(OverLong)))
def test_pieces_are_the_sample(length: int, size: int, how: OverLong) -> None:
    found = list(Limits(size, how).pieces(length)) if length > size else [(0, length)]
    assert all(0 < end - start <= max(size, 1) for start, end in found if length > size)
    tokens = [t for start, end in found for t in range(start, end)]
    if how is OverLong.SPLIT or length <= size:
        assert tokens == list(range(length))
    else:
        assert tokens == ([] if how is OverLong.REJECT else list(range(size)))


@given(st.text(min_size=1, max_size=120), st.integers(0, 10**6), st.integers(1, 10**6))
def test_ids_of_pieces(name: str, start: int, size: int) -> None:
    try:
        check_sample_id(name)
    except InvalidInput:
        return
    found = piece_id(name, start, start + size)
    assert check_sample_id(found) == found == piece_id(name, start, start + size)
    assert found != piece_id(name, start, start + size + 1)
    assert found != piece_id(name + "x", start, start + size)
    long = piece_id("é" * 100, start, start + size)  # of 200 bytes
    assert len(check_sample_id(long).encode()) <= 200
    assert long != piece_id("é" * 99 + "è", start, start + size)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=12))
def test_the_prompt_is_what_precedes_the_first_supervised_token(
    tokens: list[tuple[int, int]],
) -> None:
    ids, mask = (np.array(v, np.int32) for v in zip(*tokens, strict=True))
    first = next((i for i, (_, m) in enumerate(tokens) if m), 0)
    assert prompt_hash(ids, mask.astype(np.uint8)) == token_hash(ids[:first] if first else ids)
    assert mask_hash(mask) == mask_hash(mask.astype(np.uint8))


def rows_of(rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Samples of few prompts, some too long, some with equal tokens."""
    found = []
    for i in range(count):
        prompt = [int(rng.integers(1, 6))] * int(rng.integers(1, 3))
        said = rng.integers(10, 14, int(rng.integers(1, 12))).tolist()
        mask = [0] * len(prompt) + [1] + rng.integers(0, 2, len(said) - 1).tolist()
        found.append({"sample_id": f"s{i}", "input_ids": prompt + said, "loss_mask": mask,
                      "source": "A1"})  # fmt: skip
    return found


@SLOW
@given(st.integers(0, 10**6), st.sampled_from(list(OverLong)), st.booleans(), st.integers(0, 3))
def test_no_prompt_straddles_and_all_is_counted(
    tmp_path: Path, seed: int, how: OverLong, dedup: bool, least: int
) -> None:
    rng = np.random.default_rng(seed)
    folder = tmp_path / f"{seed}{how}{dedup}{least}"
    if folder.exists():
        return
    folder.mkdir()
    url, rows = new_lake(folder), rows_of(rng, 40)
    limits: dict[str, Any] = {"max_length": 7, "over_long": how, "min_supervised": least}
    halves = [write(folder / "a.jsonl", *rows[:20]), write(folder / "b.jsonl", *rows[15:])]
    reports = [
        plan_files(url, [file], split_validation=share, dedup_tokens=dedup, **limits)
        for file, share in zip(halves, (0.5, 0.2), strict=True)
    ]
    found = planned(url)
    assert all(r["length"] <= 7 and r["supervised_tokens"] >= least for r in found.values())
    # Whatever the share of the second call, and whatever piece of it: a prompt is in one split.
    sides: dict[str, set[str]] = {}
    for r in found.values():
        sides.setdefault(r["prompt_hash"], set()).add(r["split"])
    assert all(len(s) == 1 for s in sides.values())
    origins: dict[str, set[str]] = {}
    for r in found.values():
        origins.setdefault(r["origin"] or r["sample_id"], set()).add(r["split"])
    assert all(len(s) == 1 for s in origins.values())
    hashes = Counter(r["token_hash"] for r in found.values())
    assert not dedup or max(hashes.values()) == 1
    for report, given_rows in zip(reports, (rows[:20], rows[15:]), strict=True):
        long = sum(len(r["input_ids"]) > 7 for r in given_rows)
        cut = report.cut
        assert cut == (0 if how is OverLong.REJECT else long)
        assert report.rejected.get("too long", 0) == long - cut
        left = report.added + report.unchanged + report.rejected.get("duplicate tokens", 0)
        poor = report.rejected.get("too few supervised tokens", 0)
        assert left == len(given_rows) - long + report.pieces - (
            poor if how is OverLong.REJECT else _poor(given_rows, least)
        )
    for file in halves:
        again = plan_files(url, [file], split_validation=0.9, dedup_tokens=dedup, **limits)
        assert again.added == 0 and planned(url) == found


def _poor(rows: list[dict[str, Any]], least: int) -> int:
    """Whole samples with too few supervised tokens."""
    return sum(len(r["input_ids"]) <= 7 and sum(r["loss_mask"]) < least for r in rows)


def test_defaults(url: str, tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"sample_id": "long", "input_ids": [1] * 9, "loss_mask": [0] * 8 + [1]},
        {"sample_id": "short", "input_ids": [2], "loss_mask": [0]},
    )
    cut = plan_files(url, [file], "A1", max_length=8, over_long="truncate", dry_run=True)
    # Nothing to learn is left of what was cut; the whole one is as it came.
    assert (cut.added, cut.unsupervised) == (1, 1)
    assert cut.rejected == {"too few supervised tokens": 1}
    (example,) = cut.examples
    assert example["sample_id"] == "long@0-8" and example["row"].endswith("row 1")
    none = plan_files(url, [file], "A1", min_supervised=1, dry_run=True)
    assert (none.added, none.rejected) == (1, {"too few supervised tokens": 1})
    report = tmp_path / "r.jsonl"
    some = plan_files(url, [file], "A1", max_length=8, report_file=report)
    assert some.rejected == {"too long": 1} and list(planned(url)) == ["short"]
    assert [json.loads(x)["kind"] for x in report.read_text().splitlines()] == ["too long"]
    with pytest.raises(InvalidInput, match="--max-length: found 0"):
        plan_files(url, [file], "A1", max_length=0)


def test_duplicates_of_what_is_planned(url: str, tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", {"sample_id": "a", "input_ids": [1, 2]})
    other = write(tmp_path / "b.jsonl", {"sample_id": "b", "input_ids": [1, 2]},
                  {"sample_id": "a", "input_ids": [1, 2]}, {"sample_id": "c", "input_ids": [3]},
                  {"sample_id": "d", "input_ids": [3], "loss_mask": [0]})  # fmt: skip
    plan_files(url, [first], "A1")
    report = plan_files(url, [other], "A1", dedup_tokens=True)
    assert (report.added, report.unchanged, report.rejected) == (1, 1, {"duplicate tokens": 2})
    assert set(planned(url)) == {"a", "c"}
    assert [e["sample_id"] for e in report.examples] == ["b", "d"]


def test_pieces_that_meet_another_sample(url: str, tmp_path: Path) -> None:
    clash = write(tmp_path / "a.jsonl", {"sample_id": "x", "input_ids": [1, 2, 3]},
                  {"sample_id": "x@0-2", "input_ids": [4]})  # fmt: skip
    with pytest.raises(InvalidInput, match=r"row 2: sample_id: 'x@0-2' is a duplicate of .*row 1"):
        plan_files(url, [clash], "A1", max_length=2, over_long="split")
    plan_files(url, [write(tmp_path / "b.jsonl", {"sample_id": "x@0-2", "input_ids": [4]})], "A1")
    one = write(tmp_path / "c.jsonl", {"sample_id": "x", "input_ids": [1, 2, 3]})
    with pytest.raises(InvalidInput, match="'x@0-2' has other tokens"):
        plan_files(url, [one], "A1", max_length=2, over_long="split")


def test_given_splits_that_straddle(url: str, tmp_path: Path) -> None:
    def row(name: str, split: str | None, said: int) -> dict[str, Any]:
        return {"sample_id": name, "input_ids": [1, 2, said], "loss_mask": [0, 0, 1],
                "split": split, "source": "A1"}  # fmt: skip

    file = write(tmp_path / "a.jsonl", row("a", "train", 3), row("b", "validation", 4))
    with pytest.raises(CheckFailed, match=r"1 prompts .* 'a' \(train\) and 'b' \(validation\)"):
        plan_files(url, [file], check_splits=True)
    assert planned(url) == {}
    assert plan_files(url, [file]).straddling == 1
    # A row that says nothing goes where its prompt is said to be.
    other = new_lake(tmp_path / "other")
    file = write(tmp_path / "b.jsonl", row("c", None, 5), row("d", "validation", 6))
    report = plan_files(other, [file], check_splits=True)
    assert (report.straddling, report.followed) == (0, 1)
    assert {r["split"] for r in planned(other).values()} == {"validation"}
    late = plan_files(other, [write(tmp_path / "e.jsonl", row("e", None, 7))], split_validation=0.0)
    assert late.followed == 1 and planned(other)["e"]["split"] == "validation"


def test_bad_rows_are_left_out_when_told_so(url: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"input_ids": [1]}, {"input_ids": []}, {"text": "x"},
                 {"sample_id": "a/b", "input_ids": [2]})  # fmt: skip
    report = plan_files(url, [file], "A1", bad_rows="reject")
    assert (report.rows, report.added, report.rejected) == (4, 1, {"bad row": 3})
    # The row is named once: `row` has it.
    assert report.examples[0]["row"].endswith("a.jsonl: row 2")
    assert report.examples[0]["detail"] == "input_ids: is empty, expected at least one token"


def test_over_long_needs_a_length(url: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"input_ids": [1]})
    for choice in ("split", "truncate"):
        with pytest.raises(InvalidInput, match=f"--over-long {choice}.*give --max-length"):
            plan_files(url, [file], "A1", over_long=choice)


def test_a_large_commit_is_several_files(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hslake.plan import decide, spill
    from hslake.verify import verify
    from tests.planlakes import entry_files

    for module in (decide, spill):
        monkeypatch.setattr(module, "FILE_TOKENS", 40)
    rows = [{"sample_id": f"s{i}", "input_ids": [i] * 7} for i in range(50)]
    plan_files(url, [write(tmp_path / "a.jsonl", *rows)], "A1")
    assert len(entry_files(url, 1)) > 5
    found = planned(url)
    assert {n: r["input_ids"] for n, r in found.items()} == {
        r["sample_id"]: r["input_ids"] for r in rows
    }
    more = [{"sample_id": f"s{i}", "input_ids": [i] * 7} for i in range(0, 100, 3)]
    assert plan_files(url, [write(tmp_path / "b.jsonl", *more)], "A1").added == 17
    assert verify(url).ok  # the log, file by file, too
    assert query.run(url, "select count(*) n from plan").to_pylist() == [{"n": 67}]


@pytest.mark.parametrize("size", [None, 10])
def test_what_was_deleted_stays_away_under_any_bounds(
    url: str, tmp_path: Path, size: int | None
) -> None:
    other = {"sample_id": "y", "input_ids": [7]}
    file = write(tmp_path / "a.jsonl", {"sample_id": "x", "input_ids": list(range(1, 31))}, other)

    def bounds(size: int | None) -> dict[str, Any]:
        return {"max_length": size, "over_long": "split"} if size else {}

    plan_files(url, [file], "A1", **bounds(size))
    delete(url, "sample_id <> 'y'")
    for again in (None, 10, 7):
        done = plan_files(url, [file], "A1", **bounds(again))
        assert done.added == 0 and done.deleted and set(planned(url)) == {"y"}
    assert plan_files(url, [file], "A1", max_length=7, over_long="split", again=True).added == 5
