"""Several users on one staging folder: what is closed to one of them blinds nobody to the rest."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hslake_sglang import endpoint, report

import hslake
from hslake.compact import compact
from hslake.staging import StatusReader, read_status, scan
from hslake.status import status
from tests.lakes import MadeLake, random_states
from tests.staging.test_writer import put, spec, writer

_NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user may look into, unlike tmp_path."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@contextmanager
def another_user() -> Iterator[None]:
    """Root, whom nothing is closed to, becomes nobody; anybody else finds files without his own
    rights closed anyhow."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def theirs(folder: Path) -> Iterator[Path]:
    """The folder of a living writer in another process, whose files others may only read."""
    code = (
        "import sys, time; from pathlib import Path;"
        "from tests.staging.test_writer import writer, spec, put;"
        "w = writer(Path(sys.argv[1]), spec()); put(w, 'theirs', 5, 1); w.tick();"
        "print(w.folder, flush=True); time.sleep(60)"
    )
    root = folder / "staging"
    p = subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert p.stdout
    path = Path(p.stdout.readline().strip())
    root.chmod(0o777)
    for name in ("lock", "compact.lock"):
        (path / name).chmod(0o444)
    yield path
    p.kill()
    p.wait()


def test_a_writer_of_another_user_is_seen_and_one_that_is_closed_hides_only_itself(
    theirs: Path,
) -> None:
    root = theirs.parent
    with another_user():
        mine = writer(root, spec())
        mine.set_health(True, None)
        report.tell_writer(root, "run", mine.writer_id)
        put(mine, "mine", 5, 1)
        mine.tick()
        found = {w.writer_id: w for w in scan(root)}
        assert found[theirs.name].alive and found[theirs.name].closed is None
        assert {w["writer"] for w in read_status(root)["writers"]} == {mine.writer_id, theirs.name}
    (theirs / "lock").chmod(0)
    with another_user():
        found = {w.writer_id: w for w in scan(root)}
        assert str(theirs / "lock") in str(found[theirs.name].closed)
        assert found[mine.writer_id].alive and found[mine.writer_id].parts
        assert [w["writer"] for w in read_status(root)["writers"]] == [mine.writer_id]
        answer = endpoint.answer(StatusReader(root), "run", None)
        assert answer["armed"] is True and answer["error"] is None
        report.tell_writer(root, "run", theirs.name)  # our own, if it is closed, is an error
        answer = endpoint.answer(StatusReader(root), "run", None)
        assert answer["armed"] is False and str(theirs / "lock") in answer["error"]
        mine.close()


@pytest.mark.parametrize("name", ["status.json", "events"])
@pytest.mark.parametrize("how", ["closed", "a folder"])
def test_a_file_that_cannot_be_read_is_an_error_of_its_writer(
    folder: Path, name: str, how: str
) -> None:
    broken, sound = writer(folder, spec()), writer(folder, spec())
    for w in (broken, sound):
        w.set_health(True, None)
        put(w, "a", 5, 1)
        w.tick()
    path = broken.folder / name
    if how == "closed":
        path.chmod(0)
    else:
        path.rename(path.with_name("aside"))
        path.mkdir()
    with another_user():
        found = {w["writer"]: w for w in read_status(folder)["writers"]}
    assert str(path) in found[broken.writer_id]["error"]
    assert found[sound.writer_id]["error"] is None and found[sound.writer_id]["armed"]
    assert [e["sample_id"] for e in found[sound.writer_id]["events"]] == ["a"]
    sound.close()


@pytest.mark.parametrize("closed", ["compact.lock", "lock"])
def test_compact_tells_of_another_users_writer_and_goes_on(folder: Path, closed: str) -> None:
    lake = hslake.create(folder / "lake", streams=[2, 4, 6, "final"], hidden_size=8, num_layers=8)
    made = MadeLake(lake.url, folder / "staging", random_states(4, 8, "bfloat16"))
    made.staging.mkdir()
    made.add([5])  # also imports what nobody may not
    names = made.plan([10, 20])
    made.staging.chmod(0o777)
    for path in (folder / "lake", *(folder / "lake").rglob("*")):
        path.chmod(0o777)
    made.stage(names[:1])
    (their,) = scan(made.staging)
    (their.path / closed).chmod(0 if closed == "lock" else 0o444)
    with another_user():
        made.stage(names[1:])
        report = compact(made.url, [made.staging])
        assert report.samples == 1 and not report.passed
        (told,) = report.refused
        assert str(their.path) in told and "another user" in told
        assert status(made.url, staging=[made.staging]).committed == 2
        assert [w.writer_id for w in scan(made.staging)] == [their.writer_id]
