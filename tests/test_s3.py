"""Lakes on S3, against a moto server over a socket: commands, reading, loader, races, trouble."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import s3fs
from typer.testing import CliRunner, Result

import hslake
from hslake import catalog
from hslake.cli import app
from hslake.errors import CheckFailed, Conflict, Corrupt, InvalidInput, Missing, Unavailable
from hslake.segment.write import SegmentSample, new_segment_id, write_segment
from hslake.store import open_store
from tests.lakes import damage_sample, make_lake

SECRET = "sekrit/dummy+key"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Endpoint of a moto server in a process of its own."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert process.poll() is None, "moto's server ended at once"
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        else:
            raise AssertionError("moto's server does not answer")
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """URL of a fresh bucket; the environment says where it is and who asks."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIADUMMY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()  # one of another test has another endpoint
    name = request.node.name.replace("_", "-").lower()[:60]
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"


def call(*args: object) -> Result:
    found = CliRunner().invoke(app, [str(a) for a in args])
    assert SECRET not in found.output
    return found


def ok(*args: object) -> dict:
    """What a command that must succeed says with --json."""
    found = call(*args, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_every_command(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/a/lake"
    model = ("--hidden-size", 8, "--num-layers", 8, "--dtype", "bfloat16")
    made_by_cli = ok("create", f"{bucket}/other", *model, "--capture", "2,final")
    assert made_by_cli["lake"] == f"{bucket}/other"
    assert call("create", f"{bucket}/other", *model, "--capture", "2,final").exit_code == 2

    made = make_lake(tmp_path, lengths=[300], url=url)
    assert made.lake.url == url
    # As `make_lake` did it, with the commands.
    names = made.plan([20, 700, 256])
    rows = tmp_path / "plan-4.parquet"
    assert ok("plan", url, rows)["added"] == 0  # the same rows again
    made.stage(names)
    assert ok("compact", url, "--staging", made.staging)["samples"] == 3
    assert ok("query", url, "select count(*) as n from samples") == [{"n": 4}]
    assert {r["percent"] for r in ok("query", url, "coverage")} == {100.0}
    for level in ("manifest", "checksum", "full"):
        assert ok("verify", url, "--level", level)["samples"] == 4
    assert ok("audit", url)["committed_tokens"] == 1276
    assert ok("status", url)
    assert ok("pin", url, "first", "--version", 1)["version"] == 1
    assert [r["added"] for r in ok("log", url)] == [3, 1]
    assert ok("pin", url, "--list")[0]["name"] == "first"
    assert call("pin", url, "first").exit_code == 2
    assert ok("vacuum", url, "--retain", "0s")["segments"] == []

    objects = s3fs.S3FileSystem().find(url)
    assert not any(SECRET.encode() in s3fs.S3FileSystem().cat_file(o) for o in objects)


def test_reading(bucket: str, tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[300, 20, 700, 256], url=f"{bucket}/lake")
    lake = made.lake
    for name, truth in made.samples.items():
        sample = lake.read(name)
        assert np.array_equal(sample.hidden_states, truth.states)
        assert sample.input_ids.tolist() == truth.input_ids
        assert sample.loss_mask.tolist() == truth.loss_mask
    part = lake.read("B4-000002", streams=["final"], rows=slice(200, 600))
    assert np.array_equal(part.hidden_states, made.samples["B4-000002"].states[[3], 200:600])
    made.add([100])
    before = hslake.open(lake.url, version=1)
    assert len(before.sql("select * from samples").fetchall()) == 4
    assert len(made.lake.sql("select * from samples").fetchall()) == 5
    with pytest.raises(Missing, match="version 7"):
        hslake.open(lake.url, version=7)


def test_loader(bucket: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from hslake.torch import HiddenStateDataset, HiddenStateLoader

    made = make_lake(tmp_path, lengths=[300, 20, 700, 256, 90], url=f"{bucket}/lake")
    damage_sample(made.lake, "A1-000003")
    loader = HiddenStateLoader(
        HiddenStateDataset(made.url), tokens_per_batch=1024, threads=4, on_error="skip"
    )
    seen: dict[str, torch.Tensor] = {}
    for batch in loader:
        for i, (name, length) in enumerate(
            zip(batch["sample_ids"], batch["lengths"].tolist(), strict=True)
        ):
            seen[name] = batch["target"][i, :length].view(torch.int16)
    assert [d.sample_id for d in loader.damaged] == ["A1-000003"]
    assert seen.keys() == made.samples.keys() - {"A1-000003"}
    for name, target in seen.items():
        assert np.array_equal(target.numpy().view(np.uint16), made.samples[name].states[-1])


def test_damage_is_found_and_hidden(bucket: str, tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[300, 20, 700], url=f"{bucket}/lake")
    damage_sample(made.lake, "B3-000001")
    with pytest.raises(Corrupt, match="crc32c"):
        made.lake.read("B3-000001")
    found = call("verify", made.url, "--quarantine")
    assert found.exit_code == 1 and "B3-000001" in found.stdout
    assert len(made.lake.sql("select * from samples").fetchall()) == 2
    assert ok("verify", made.url)["samples"] == 2
    made.stage(["B3-000001"])
    assert ok("compact", made.url, "--staging", made.staging)["samples"] == 1
    truth = made.samples["B3-000001"].states
    assert np.array_equal(made.lake.read("B3-000001").hidden_states, truth)


def test_an_outage_is_no_damage(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_lake(tmp_path, lengths=[300, 20], url=f"{bucket}/lake")
    fs = made.lake.store.fs  # fsspec hands out the same one again
    for name in ("cat_file", "info"):  # while it reads chunks; while it looks at sizes
        real = getattr(fs, name)

        def fails(path: str, *args: object, _real: Any = real, **more: object) -> object:
            if "/segments/" in path:
                raise PermissionError("Access Denied")
            return _real(path, *args, **more)

        with monkeypatch.context() as m:
            m.setattr(fs, name, fails)
            found = call("verify", made.url, "--quarantine")
        assert found.exit_code == 2 and "refuses (PermissionError" in found.output, name
    assert ok("verify", made.url)["samples"] == 2


def test_orphans_are_vacuumed(bucket: str, tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[300], url=f"{bucket}/lake")
    lake, orphan = made.lake, new_segment_id()
    rows = [np.zeros((5, 8), np.uint16)] * 4
    sample = SegmentSample("x", rows, [1] * 5, [1] * 5, [0] * 4)
    write_segment(lake.store, lake.spec, orphan, [sample])
    assert ok("vacuum", made.url)["segments"] == []  # too young
    dry = ok("vacuum", made.url, "--retain", "0s", "--dry-run")
    assert (
        dry["segments"] == [orphan] and dry["bytes"] > 0 and lake.store.list(f"segments/{orphan}")
    )
    assert ok("vacuum", made.url, "--retain", "0s")["segments"] == [orphan]
    assert not lake.store.list(f"segments/{orphan}")
    assert np.array_equal(
        made.lake.read("A1-000000").hidden_states, made.samples["A1-000000"].states
    )


def test_of_racing_writers_each_sample_is_added_once(bucket: str) -> None:
    store = open_store(f"{bucket}/lake")
    catalog.create_table(store, "manifest")
    added: list[str] = []

    def work(k: int) -> None:
        for i in range(3):
            name = f"s{i}"

            def build(state: catalog.TableState, name: str = name) -> pa.Table | None:
                if name in state.arrow(["sample_id"])["sample_id"].to_pylist():
                    return None
                return pa.table({"op": ["add"], "sample_id": [name], "segment_id": [f"{k}"]})

            catalog.commit(store, "manifest", build, f"{k}-{name}")
            added.append(name)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    state = catalog.open_table(store, "manifest")
    rows = state.arrow(["sample_id", "commit_version"]).to_pylist()
    assert len(added) == 12
    assert sorted(r["sample_id"] for r in rows) == ["s0", "s1", "s2"]
    assert sorted(r["commit_version"] for r in rows) == [1, 2, 3] and state.version == 3
    # A file whose commit lost is named by no log entry, and gone.
    assert len([p for p in store.list("manifest") if p.endswith(".parquet")]) == 3


def test_store(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"{bucket}/lake")
    store.put("a/b", b"0123456789")
    assert store.read_range("a/b", 2, 5) == b"234" and store.read_range("a/b", suffix=3) == b"789"
    assert store.size("a/b") == 10 and store.exists("a/b") and not store.exists("a")
    with pytest.raises(Conflict):
        store.put_new("a/b", b"2")
    assert store.list() == ["a/b"]
    store.delete("a/b")
    store.delete("a/b")
    for call_it in (store.read, store.size, store.read_range):
        with pytest.raises(Missing, match="a/b is not there"):
            call_it("a/b")
    # A store without conditional put is refused.
    real = store.fs.pipe_file
    monkeypatch.setattr(store.fs, "pipe_file", lambda key, data, mode=None: real(key, data))
    with pytest.raises(CheckFailed, match="If-None-Match"):
        store.check_put_new()
    assert store.list() == []


def test_trouble_is_named_without_secrets(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = ("--hidden-size", 8, "--num-layers", 8, "--capture", "1")
    with pytest.raises(Missing, match="hslake create"):
        hslake.open(f"{bucket}/nothing")
    found = call("create", "s3://there-is-no-such-bucket/lake", *make)
    assert found.exit_code == 2 and "bucket does not exist" in found.output
    found = call("status", "s3://nobody-made-this/lake")
    assert found.exit_code == 2 and "bucket does not exist" in found.output
    assert "hslake create" not in found.output
    found = call("status", f"{bucket}/nothing-here")
    assert found.exit_code == 2 and "hslake create" in found.output
    with pytest.raises(InvalidInput, match=r"s3://\*\*\*@b/lake: the URL holds"):
        open_store(f"s3://AKIADUMMY:{SECRET.replace('/', '')}@b/lake")

    lake = hslake.create(f"{bucket}/lake", hidden_size=8, num_layers=8, capture="1")
    with monkeypatch.context() as m:
        m.setattr(lake.store.fs, "cat_file", _raise(PermissionError(f"denied to {SECRET}")))
        with pytest.raises(Unavailable, match=r"refuses.*denied") as e:
            lake.store.read("hslake.json")
        assert SECRET not in str(e.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    found = call("log", lake.url)
    assert found.exit_code == 2 and "cannot be reached" in found.output


def _raise(error: Exception):
    def raises(*args: object, **kwargs: object) -> None:
        raise error

    return raises
