"""`compact --watch`: segments close by bytes and by age, a server never waits, troubles mend.

No test waits for a clock: ages come from a clock of the test's own, and looks are counted.
"""

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hslake.compact.line
import hslake.compact.sources
import hslake.compact.trouble
import hslake.compact.watch
import hslake.staging.rows
from hslake.compact import compact
from hslake.compact.line import commit
from hslake.compact.watch import GRACE_S
from hslake.compactreport import CompactReport
from hslake.errors import Conflict, Corrupt, InvalidInput, Missing, NoSpace, Unavailable
from hslake.ids import RequestId, new_attempt
from hslake.progress import NoteLines
from hslake.spec import read_spec
from hslake.staging import StagingWriter, read_part, scan
from hslake.staging.locks import is_locked, try_lock
from hslake.store import Store
from tests.lakes import MadeLake, make_lake
from tests.test_compact import check

HOUR = 3600.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Troubles are tried again at once."""
    monkeypatch.setattr(hslake.compact.trouble, "FIRST_S", 0.01)
    monkeypatch.setattr(hslake.compact.trouble, "LONGEST_S", 0.02)


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    return make_lake(tmp_path, lengths=[5])


class Clock:
    """Seconds, which the test moves on. Starts after everything that was staged."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        import time

        return time.time() + self.ahead


class Noted(NoteLines):
    """Keeps the lines of a compactor without a terminal."""

    def __init__(self) -> None:
        super().__init__(None, "compact")
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def writer_of(made: MadeLake, tokens: int, parts: int, **more: Any) -> StagingWriter:
    spec = made.lake.spec
    return StagingWriter(
        made.staging,
        spec,
        part_tokens=tokens,
        max_parts=parts,
        fingerprint=spec.model.fingerprint,
        engine={},
        idle_s=HOUR,
        **more,
    )


def looks(
    made: MadeLake,
    count: int = 3,
    roots: list[Path] | None = None,
    until: Callable[[CompactReport], bool] = lambda report: True,
    **more: Any,
) -> CompactReport:
    """Watch for so many looks at least, and until `until`; every default would wait for an hour."""
    report = CompactReport()
    settings = {"max_age_s": HOUR, "interval_s": 0.0, **more}
    end = threading.Event()
    threading.Timer(600, end.set).start()
    compact(
        made.url,
        roots or [made.staging],
        watch=True,
        report=report,
        stop=lambda: end.is_set() or (report.looks >= count and until(report)),
        **settings,
    )
    assert not end.is_set(), report
    return report


def segments(made: MadeLake) -> set[str]:
    return {p.name for p in (Path(made.url) / "segments").iterdir()}


# -- by bytes, by age, for room -----------------------------------------------------------------


def test_a_trickle_waits_for_its_age_and_no_longer(made: MadeLake) -> None:
    writer = writer_of(made, 1000, 4)
    for name in made.plan([10, 20]):
        made.put(writer, name)
    clock = Clock()
    report = looks(made, clock=clock)
    assert (report.samples, report.backlog_samples, report.backlog_rows) == (0, 2, 30)
    clock.ahead = HOUR - 60
    assert looks(made, clock=clock).samples == 0
    clock.ahead = HOUR + 1
    bar = Noted()
    report = looks(made, clock=clock, progress=bar)  # from a part that is still open
    assert (report.samples, report.segments) == (2, 1)
    assert "committed 2 samples, 30 tokens" in bar.notes[0]
    assert bar.notes[0].endswith("backlog 0 samples, 0 tokens")  # less what it has just told of
    assert not read_part(writer.folder / "part-000001").sealed
    made.put(writer, made.plan([30])[0])
    assert looks(made, clock=Clock()).samples == 0  # what is in the lake makes nothing due
    clock.ahead = 3 * HOUR
    assert looks(made, clock=clock).samples == 1
    check(made)
    writer.close()
    report = looks(made)
    assert (report.samples, report.duplicates) == (0, 0) and list(made.staging.iterdir()) == []


def test_one_old_sample_takes_the_others_along(made: MadeLake) -> None:
    writer = writer_of(made, 1000, 4)
    made.put(writer, made.plan([10])[0])
    clock = Clock()
    looks(made, clock=clock)
    clock.ahead = HOUR + 1
    made.put(writer, made.plan([20])[0])
    report = looks(made, clock=clock)
    assert (report.samples, report.segments) == (2, 1)
    writer.close()


def test_fast_writers_make_full_segments(made: MadeLake) -> None:
    writer = writer_of(made, 100, 10)
    names = made.plan([50] * 9)
    for name in names[:7]:  # three parts are full, a fourth is begun
        made.put(writer, name)
    writer.tick()
    assert looks(made, segment_tokens=400).segments == 0
    report = looks(made, segment_tokens=200)
    assert (report.segments, report.tokens) == (1, 200)  # the rest waits for more
    writer.tick()
    assert writer.free_rows() == 1000 - 150
    made.put(writer, names[7]), made.put(writer, names[8])
    writer.tick()
    report = looks(made, segment_tokens=200)
    assert (report.segments, report.tokens) == (1, 200)
    writer.close()
    assert looks(made).samples == 1  # its end is the end of waiting: the ninth
    check(made)


def test_a_writer_that_runs_short_of_rows_waits_for_no_full_segment(made: MadeLake) -> None:
    writer = writer_of(made, 100, 4)
    names = made.plan([100] * 4)
    made.put(writer, names[0])
    writer.tick()
    writer.begin(RequestId(made.lake.spec.lake8, new_attempt(), 90, "A1", names[3]))  # seals one
    writer.tick()
    assert writer.free_rows() == 210 and looks(made).samples == 0  # more than half
    made.put(writer, names[1])
    made.put(writer, names[2])
    writer.tick()
    report = looks(made)
    assert report.samples >= 1 and not report.troubles
    writer.close()


def test_a_writer_that_falls_silent_waits_for_no_full_segment(made: MadeLake) -> None:
    clock = Clock()
    writer = writer_of(made, 100, 10, clock=clock)
    made.put(writer, made.plan([60])[0])
    assert looks(made).samples == 0 and not read_part(writer.folder / "part-000001").sealed
    clock.ahead = HOUR + 1
    writer.tick()  # nothing came for so long: it seals what it has
    assert read_part(writer.folder / "part-000001").sealed and looks(made).samples == 1
    writer.close()


def test_a_quota_of_two_parts_never_comes_to_rest(made: MadeLake) -> None:
    writer = writer_of(made, 100, 2)
    names = made.plan([100, 60, 60, 100, 1, 100])
    for name in names:
        for _ in range(3):
            try:
                made.put(writer, name)
                break
            except NoSpace:
                writer.tick()
                looks(made)
                writer.tick()
        else:
            raise AssertionError(f"no room for {name}")
    writer.close()
    looks(made)
    check(made)


def test_a_part_of_probes_is_freed_at_once(made: MadeLake) -> None:
    from hslake.ids import PROBE_PREFIX

    writer = writer_of(made, 8, 4)
    spec = made.lake.spec
    row = np.zeros((4, 8, 8), np.uint16)
    for _ in range(2):
        rid = RequestId(spec.lake8, new_attempt(), 8, "probe", f"{PROBE_PREFIX}{new_attempt()}")
        place = writer.begin(rid)
        place.rows(0, 8).hidden[0][...] = row[0]
        from hslake.checksum import RowStats

        writer.wrote(place, 0, 8, [0] * 4, [RowStats()] * 4)
    writer.tick()
    assert writer.free_rows() == 16
    report = looks(made)
    assert report.samples == 0 and report.abandoned == {}
    writer.tick()
    assert writer.free_rows() == 24
    writer.close()


def test_the_next_segment_is_encoded_while_the_last_is_committed(
    made: MadeLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hslake.compact.line import fill

    made.stage(made.plan([100] * 3))
    filled, waited = threading.Semaphore(0), []

    def counted(*args: Any) -> Any:
        found = fill(*args)
        filled.release()
        return found

    def late(*args: Any) -> Any:
        if not waited:
            waited.append(filled.acquire(timeout=20) and filled.acquire(timeout=20))
        return commit(*args)

    monkeypatch.setattr("hslake.compact.line.fill", counted)
    monkeypatch.setattr("hslake.compact.line.commit", late)
    report = compact(made.url, [made.staging], segment_tokens=200)
    assert report.segments == 2 and waited[0]  # both were filled before the first was committed
    check(made)


# -- troubles -----------------------------------------------------------------------------------


def failing(
    monkeypatch: pytest.MonkeyPatch, target: str, error: Exception, times: int, only: str = ""
) -> list[str]:
    """Let `target` (a dotted name) raise for so many calls whose arguments name `only`."""
    module, _, name = target.rpartition(".")
    owner: Any = hslake
    for part in module.split(".")[1:]:
        owner = getattr(owner, part)
    whole, met = getattr(owner, name), []

    def sometimes(*args: Any, **more: Any) -> Any:
        if only in " ".join(map(str, args)) and len(met) < times:
            met.append(str(args))
            raise error
        return whole(*args, **more)

    monkeypatch.setattr(owner, name, sometimes)
    return met


STORE_ERRORS = {
    "put": [
        Unavailable("503 slow down"),
        NoSpace("the disk is full"),
        OSError(errno.EIO, "Input/output error"),
        MemoryError(),
    ],
    "commit": [Conflict("others were faster"), Unavailable("timeout")],
    "open": [Missing("the mount is gone"), RuntimeError("can't start new thread")],
}


@pytest.mark.parametrize(
    ("where", "error"), [(where, e) for where, errors in STORE_ERRORS.items() for e in errors]
)
def test_watch_outlives_the_store(
    made: MadeLake,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    where: str,
) -> None:
    made.stage(made.plan([10, 20]))
    targets = {
        "put": "hslake.store.Store.put",
        "commit": "hslake.compact.line.commit",
        "open": "hslake.compact.watch.open_lake",
    }
    if where == "open":  # once it has begun: at the start it is an error
        begun: list[int] = []
        whole = hslake.compact.watch.open_lake

        def later(url: str) -> Any:
            begun.append(1)
            if 1 < len(begun) < 5:
                raise error
            return whole(url)

        monkeypatch.setattr(hslake.compact.watch, "open_lake", later)
    else:
        failing(monkeypatch, targets[where], error, 3)
    freed: list[int] = []
    whole_touch = Path.touch

    def touch(path: Path, *args: Any, **more: Any) -> None:
        if path.name == "DONE":
            freed.append(len(made.lake.sql("select sample_id from samples").fetchall()))
        whole_touch(path, *args, **more)

    monkeypatch.setattr(Path, "touch", touch)
    with caplog.at_level(logging.WARNING, "hslake.compact"):
        report = looks(made, until=lambda report: report.samples == 2 and not report.troubles)
    assert freed == [3]  # not before they were committed
    assert report.tries >= 1 and report.last_error and not report.troubles
    told = [r.getMessage() for r in caplog.records if "tried again until" in r.getMessage()]
    assert len(told) == 1 and any("works again" in r.getMessage() for r in caplog.records)
    check(made)


def test_what_a_failed_segment_stored_is_removed(
    made: MadeLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = segments(made)
    made.stage(made.plan([10, 20]))
    failing(
        monkeypatch, "hslake.store.Store.put", Unavailable("503"), 1, only="loss_mask/zarr.json"
    )
    with pytest.raises(Unavailable):
        compact(made.url, [made.staging])
    assert segments(made) == before
    assert compact(made.url, [made.staging]).samples == 2
    check(made)


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("try_lock", errno.EACCES),
        ("try_lock", errno.EMFILE),
        ("read_part", errno.ENOMEM),
        ("part_attributes", 0),
    ],
)
def test_a_part_that_cannot_be_looked_into_stops_no_other(
    made: MadeLake, monkeypatch: pytest.MonkeyPatch, what: str, code: int, watch: bool
) -> None:
    names = made.plan([10, 20])
    for name in names:
        made.stage([name])
    first, second = sorted(w.path for w in scan(made.staging))

    error: Exception = OSError(code, "not now")
    if what == "part_attributes":
        error = Unavailable("not now")
    with monkeypatch.context() as patch:
        place = f"{first}/part-000001" + ("/read.lock" if what == "try_lock" else "")
        failing(patch, f"hslake.compact.sources.{what}", error, 10**6, only=place)
        if watch:
            report = looks(made, 5, until=lambda report: report.samples == 1)
        else:
            report = compact(made.url, [made.staging])
    assert report.samples == 1 and not second.exists()
    assert report.damage == [] and report.refused == [] and len(report.troubles) == 1
    assert "not now" in report.troubles[0] and not report.passed
    assert looks(made).samples == 1
    check(made)


def test_a_root_that_is_not_there_stops_no_other(made: MadeLake, tmp_path: Path) -> None:
    made.stage(made.plan([10]))
    later = tmp_path / "later"
    report = looks(made, roots=[later, made.staging], until=lambda report: report.samples == 1)
    assert report.samples == 1 and str(later) in report.troubles[0]
    made.stage(made.plan([20]))
    with pytest.raises(Missing, match="later"):  # once: before anything is touched
        compact(made.url, [made.staging, later])
    assert len(scan(made.staging)) == 1
    made.staging.rename(later)
    report = looks(made, roots=[later, made.staging], until=lambda report: report.samples == 1)
    assert report.samples == 1
    check(made)


def test_rows_that_cannot_be_read_now_wait(
    made: MadeLake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in made.plan([300, 400]):
        made.stage([name])
    first = sorted(w.path for w in scan(made.staging))[0]

    def unreadable(rows: Any, at: int, out: np.ndarray) -> None:
        if first in rows.file.parents and "hidden_states" in str(rows.file):
            raise hslake.staging.rows.PartUnavailable(rows.part, f"{rows.file}: EIO")
        whole(rows, at, out)

    whole = hslake.staging.rows.StagedRows.read_into
    with monkeypatch.context() as patch:
        patch.setattr(hslake.staging.rows.StagedRows, "read_into", unreadable)
        with caplog.at_level(logging.WARNING, "hslake.compact"):
            report = looks(made, 20, until=lambda report: report.samples == 1)
    assert report.samples == 1 and report.abandoned == {} and "EIO" in report.troubles[0]
    assert len([r for r in caplog.records if "EIO; tried again" in r.getMessage()]) == 1
    assert looks(made).samples == 1
    check(made)


def test_another_lake_at_the_same_place_ends_it(made: MadeLake, tmp_path: Path) -> None:
    other = make_lake(tmp_path / "other", 1)
    made.stage(made.plan([10]))
    spec = read_spec(made.url)

    def stop() -> bool:
        Store(made.url).put("hslake.json", Store(other.url).read("hslake.json"))
        return False

    with pytest.raises(InvalidInput, match="another lake was put here"):
        compact(made.url, [made.staging], watch=True, stop=stop)
    assert scan(made.staging) and read_spec(made.url) != spec


def test_a_damaged_plan_ends_it(made: MadeLake) -> None:
    made.stage(made.plan([10]))
    path = Path(made.lake.plan_table().files()[-1])
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)
    with pytest.raises(Corrupt):
        compact(made.url, [made.staging], watch=True)
    assert scan(made.staging)


def test_a_damaged_sample_in_a_live_part_is_told_once(
    made: MadeLake, caplog: pytest.LogCaptureFixture
) -> None:
    writer = writer_of(made, 100, 2)
    for name in made.plan([10, 20]):
        made.put(writer, name)
    states = np.memmap(writer.folder / "part-000001/hidden_states/c/0/0/0", np.uint16, "r+")
    states[3] ^= 8
    report = looks(made, 6, max_age_s=0.0, until=lambda report: report.samples == 1)
    assert (report.samples, report.segments, len(report.damage)) == (1, 1, 1)
    writer.close()
    report = looks(made)
    assert report.abandoned == {"checksum differs from the writer's": 1} and not report.samples


# -- the end ------------------------------------------------------------------------------------


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(storing has begun, it may go on): stores wait in between."""
    begun, go_on = threading.Event(), threading.Event()
    whole = Store.put

    def put(store: Store, path: str, data: Any) -> Any:
        if path.startswith("segments/"):
            begun.set()
            go_on.wait(30)
        return whole(store, path, data)

    monkeypatch.setattr(Store, "put", put)
    yield begun, go_on
    go_on.set()


@pytest.mark.parametrize("grace", [0.0, GRACE_S])
def test_stopped_in_a_segment_it_is_finished_or_leaves_nothing(
    made: MadeLake, held_up: tuple[threading.Event, threading.Event], grace: float
) -> None:
    begun, go_on = held_up
    before = segments(made)
    made.stage(made.plan([100] * 4))
    stop = threading.Event()
    report = CompactReport()
    work = threading.Thread(
        target=compact,
        args=(made.url, [made.staging]),
        kwargs={
            "watch": True, "stop": stop.is_set, "grace_s": grace, "report": report,
            "segment_tokens": 100,
        },
    )  # fmt: skip
    work.start()
    assert begun.wait(30)
    stop.set()
    threading.Timer(0.5, go_on.set).start()
    work.join(30)
    assert not work.is_alive() and report.stopped
    if grace:
        assert 1 <= report.segments < 4
    live = {r[0] for r in made.lake.sql("select segment_id from samples").fetchall()}
    assert segments(made) == live >= before
    (writer,) = scan(made.staging)
    assert not is_locked(writer.path / "compact.lock")
    lock = try_lock(writer.path / "part-000001" / "read.lock")
    assert lock is not None
    lock.release()
    assert compact(made.url, [made.staging]).samples == 4 - report.samples
    check(made)
