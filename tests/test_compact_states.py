"""States are checked on what was encoded, and room in staging is given back as commits go on."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hslake.compact import compact
from hslake.compact.line import commit
from hslake.picks import Pick
from hslake.segment.codec import encode_body
from hslake.segment.write import StatesDiffer
from hslake.staging import read_part, scan
from tests.lakes import MadeLake, make_lake
from tests.test_compact import check


def flip(part: Path, row: int, hidden: int = 8) -> None:
    """Change one bit of a row of stream 2."""
    states = np.memmap(part / "hidden_states/c/2/0/0", np.uint16, "r+").reshape(-1, hidden)
    states[row, 3] ^= 64
    states.flush()


def segments(made: MadeLake) -> set[str]:
    return {p.name for p in (Path(made.url) / "segments").iterdir()}


def test_what_changed_in_staging_leaves_no_trace_of_a_segment(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[5])
    names = made.plan([10, 20, 400, 30])
    made.stage(names)
    (part,) = scan(made.staging)[0].parts
    flip(part, 12), flip(part, 200)
    report = compact(made.url, [made.staging])
    assert report.abandoned == {"checksum differs from the writer's": 2}
    assert len(report.damage) == 2 and all(names[i] in report.damage[i - 1] for i in (1, 2))
    assert (report.samples, report.segments) == (2, 1) and scan(made.staging) == []
    live = {r[0] for r in made.lake.sql("select segment_id from samples").fetchall()}
    assert segments(made) == live
    made.stage([names[1], names[2]])
    assert compact(made.url, [made.staging]).passed
    check(made)


def test_shards_that_were_stored_already_are_removed(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[5])
    shard = made.lake.spec.geometry.shard_tokens
    names = made.plan([shard, shard, 10])
    made.stage(names, chunk=shard)
    flip(scan(made.staging)[0].parts[0], 2 * shard + 1)
    report = compact(made.url, [made.staging])
    assert report.samples == 2 and len(report.damage) == 1
    assert len(segments(made)) == 2
    made.stage(names[2:])
    compact(made.url, [made.staging])
    check(made)


def test_nothing_is_committed_when_all_of_a_batch_changed(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[5])
    version, before = made.lake.version, segments(made)
    names = made.plan([10])
    made.stage(names)
    flip(scan(made.staging)[0].parts[0], 0)
    report = compact(made.url, [made.staging])
    assert report.samples == 0 and not report.passed
    assert made.lake.version == version and segments(made) == before


@pytest.mark.parametrize("first", [True, False])
def test_of_two_attempts_the_sound_one_is_taken(tmp_path: Path, first: bool) -> None:
    made = make_lake(tmp_path, lengths=[5])
    names = made.plan([300])
    made.stage(names)
    made.stage(names)
    parts = [w.parts[0] for w in scan(made.staging)]
    parts.sort(key=lambda part: read_part(part).reserved[0].at)  # as they are taken
    flip(parts[0 if first else 1], 7)
    report = compact(made.url, [made.staging])
    assert report.samples == 1
    assert report.abandoned == ({"checksum differs from the writer's": 1} if first else {})
    check(made)


def test_a_codec_that_errs_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_lake(tmp_path, lengths=[5])
    made.stage(made.plan([300]))
    before = segments(made)

    def wrong(spec, rows):  # type: ignore[no-untyped-def]
        other = rows.copy()
        other[1, 1] ^= 1
        return encode_body(spec, other)

    with monkeypatch.context() as patch:
        patch.setattr("hslake.segment.chunks.encode_body", wrong)
        with pytest.raises(StatesDiffer, match="after encoding"):
            compact(made.url, [made.staging])
    assert segments(made) == before
    assert compact(made.url, [made.staging]).samples == 1  # it is all still there
    check(made)


def test_parts_are_freed_as_their_samples_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_lake(tmp_path, lengths=[5])
    names = made.plan([40, 40, 40, 40])
    writer = made.writer(80)
    writer._parts.limit = 2
    for name in names:
        made.put(writer, name)
    writer.set_health(False, "sealed")
    done: list[int] = []

    def looking(*args: Any) -> list[Pick]:
        done.append(len(list(writer.folder.glob("part-*/DONE"))))
        writer.tick()
        return commit(*args)

    monkeypatch.setattr("hslake.compact.line.commit", looking)
    report = compact(made.url, [made.staging], segment_tokens=40)
    # After the second of four commits the first part is free, and recycled at once.
    assert done == [0, 0, 1, 0] and report.samples == 4
    writer.close()
    check(made)


def test_samples_that_cross_shards_keep_their_order(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[5])
    shard = made.lake.spec.geometry.shard_tokens
    names = made.plan([shard - 300, 700, 1, shard + 1, 256])
    made.stage(names, chunk=shard)
    report = compact(made.url, [made.staging])
    assert report.segments == 1 and report.samples == 5
    rows = made.lake.sql("select sample_id from samples where length <> 5 order by token_start")
    assert [r[0] for r in rows.fetchall()] == names
    check(made)


def test_a_passing_want_of_descriptors_gives_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_lake(tmp_path, lengths=[5])
    made.stage(made.plan([40, 40]))

    def no_descriptor(*args: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("os.preadv", no_descriptor)
    report = compact(made.url, [made.staging])
    assert (report.samples, report.abandoned, report.damage) == (0, {}, [])
    assert not report.passed and "Too many open files" in report.troubles[0]
    monkeypatch.undo()
    assert compact(made.url, [made.staging]).samples == 2
    check(made)
