"""Lakes on S3, against real servers over a socket: commands, reading, loader, races, trouble."""

import json
import os
import pickle
import re
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

import hslake
from hslake.cli import app
from hslake.errors import Conflict, Corrupt, InvalidInput, Missing, Unavailable
from hslake.pins import pin, pins, unpin
from hslake.query import run
from hslake.segment.write import SegmentSample, new_segment_id, write_segment
from hslake.store import Written, open_store
from hslake.tables import catalog
from hslake.verify import hide, verify
from hslake.versions import delete, log, repair, vacuum
from tests.faults.proxy import proxied
from tests.lakes import damage_sample, make_lake
from tests.s3server import Server, ceph, ceph_missing, moto

SECRET = Server("").secret
MOTO_KEY = Server("").key


@pytest.fixture(scope="module", params=["moto", "ceph"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Two servers whose answers differ: moto always, Ceph where it is installed."""
    if request.param == "moto":
        with moto() as found:
            yield found
    elif missing := ceph_missing():
        pytest.skip(f"Ceph is not installed: {', '.join(missing)} (see tests/ceph.sh)")
    else:
        with ceph(tmp_path_factory.mktemp("ceph")) as found:
            yield found


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """URL of a fresh bucket; the environment says where it is and who asks."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:60]
    server.client().create_bucket(Bucket=name)
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


def test_every_command(server: Server, bucket: str, tmp_path: Path) -> None:
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

    store = open_store(bucket)
    assert len(store.list()) > 20
    assert not any(server.secret.encode() in store.read(o) for o in store.list())


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


@pytest.mark.parametrize("fault", ["500", "hang", "short"])
def test_an_outage_is_no_damage(
    server: Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault != "500" and server.key != MOTO_KEY:
        pytest.skip("here the proxy answers, whatever is behind it")
    made = make_lake(tmp_path, lengths=[300, 20], url=f"{bucket}/lake")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("HSLAKE_S3_TIMEOUT", "1" if fault == "hang" else "60")
    with proxied(server.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        # While it reads inventories, chunks, and the table's files.
        places = ["inventory.json", "/hidden_states/c/", "/manifest/part-"]
        if fault == "short":  # DuckDB would call its file damaged
            places.pop()
        for what in places:
            proxy.rule = lambda r, what=what: fault if what in r.path else None
            found = call("verify", made.url, "--level", "full", "--quarantine")
            assert found.exit_code == 2 and "the store " in found.output, (what, found.output)
        assert proxy.done[fault] > 2
        proxy.rule = None
        assert ok("verify", made.url, "--level", "full")["samples"] == 2


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


def test_uploads_that_nobody_ended(
    server: Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_lake(tmp_path, lengths=[20], url=f"{bucket}/lake")
    client, name = server.client(), bucket.removeprefix("s3://")
    for key in ("lake/segments/x/hidden_states/c/0/0/0", "lake2/x"):
        begun = client.create_multipart_upload(Bucket=name, Key=key)["UploadId"]
        client.upload_part(Bucket=name, Key=key, UploadId=begun, PartNumber=1, Body=b"1" * 1000)
    if server.key != MOTO_KEY:  # moto says of all that they began in 2010
        assert ok("vacuum", made.url, "--retain", "0s")["uploads"] == []  # somebody may be at work
    ours = ["lake/segments/x/hidden_states/c/0/0/0"]
    retain = ("--retain", "0s")
    monkeypatch.setattr("hslake.versions.vacuuming.datetime", _Later)
    assert ok("vacuum", made.url, *retain, "--dry-run")["uploads"] == ours
    assert ok("vacuum", made.url, *retain)["uploads"] == ours
    assert ok("vacuum", made.url, *retain)["uploads"] == []
    left = client.list_multipart_uploads(Bucket=name)["Uploads"]
    assert [u["Key"] for u in left] == ["lake2/x"]  # of another lake


class _Later(datetime):
    """A clock that is an hour ahead."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "_Later":
        return super().now(tz) + timedelta(hours=1)


def test_paranoid(server: Server, bucket: str, tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[300, 20, 700], url=f"{bucket}/lake")
    for flags in ((), ("--paranoid",)):
        made.stage(made.plan([3000]))
        with proxied(server.url) as proxy, pytest.MonkeyPatch.context() as m:
            m.setenv("AWS_ENDPOINT_URL", proxy.url)
            assert ok("compact", made.url, "--staging", made.staging, *flags)["samples"] == 1
            heads = {r.path for r in proxy.seen if r.method == "HEAD" and "/segments/" in r.path}
            puts = {r.path for r in proxy.seen if r.method == "PUT" and "/segments/" in r.path}
            assert puts and heads == puts  # size and checksum of every object
            gets = [r for r in proxy.seen if r.method == "GET" and "/segments/" in r.path]
            assert {r.path for r in gets} == puts
    assert ok("verify", made.url, "--level", "full")["samples"] == 5


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


def test_store(bucket: str) -> None:
    store = open_store(f"{bucket}/lake")
    store.put("a/b", b"0123456789")
    assert store.read_range("a/b", 2, 5) == b"234" and store.read_range("a/b", suffix=3) == b"789"
    assert store.read_range("a/b", 8, 50) == b"89" and store.read_range("a/b", 7) == b"789"
    assert (
        store.read_range("a/b", 50, 60) == b"" and store.read_range("a/b", suffix=50)[:2] == b"01"
    )
    assert store.size("a/b") == 10 and store.exists("a/b") and not store.exists("a")
    with pytest.raises(Conflict):
        store.put_new("a/b", b"2")
    store.put("e", b"")
    assert store.read("e") == store.read_range("e", suffix=3) == b""
    odd = "x y/#c%20é@z"
    store.put(odd, b"odd")
    assert store.read(odd) == b"odd" and store.list() == ["a/b", "e", odd]
    store.delete(odd)
    store.delete("e")
    assert store.list() == ["a/b"] and store.list("a/") == ["a/b"] and not store.list("nothing")
    store.delete("a/b")
    store.delete("a/b")
    for call_it in (store.read, store.size, store.read_range):
        with pytest.raises(Missing, match="a/b is not there"):
            call_it("a/b")


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
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    found = call("log", lake.url)
    assert found.exit_code == 2 and "cannot be reached" in found.output


def test_wrong_keys(server: Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if server.key == MOTO_KEY:
        pytest.skip("moto takes any key")
    lake = hslake.create(f"{bucket}/lake", hidden_size=8, num_layers=8, capture="1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-sekrit-key")
    with pytest.raises(Unavailable, match=r"refuses.*SignatureDoesNotMatch") as e:
        open_store(lake.url).read("hslake.json")
    assert "sekrit" not in str(e.value)
    found = call("status", lake.url)
    assert found.exit_code == 2 and "refuses" in found.output and "sekrit" not in found.output


def test_a_profile_alone(
    server: Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in server.environment():
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(
        "[profile lake]\nregion = eu-central-1\nservices = here\n"
        f"[services here]\ns3 =\n  endpoint_url = {server.url}\n"
    )
    keys = f"aws_access_key_id = {server.key}\naws_secret_access_key = {server.secret}\n"
    (tmp_path / "credentials").write_text(f"[lake]\n{keys}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    found = call("status", f"{bucket}/lake")
    assert found.exit_code == 2 and "NoCredentials" in found.output
    monkeypatch.setenv("AWS_PROFILE", "lake")
    made = make_lake(tmp_path / "l", lengths=[20], url=f"{bucket}/lake")
    assert ok("verify", made.url)["samples"] == 1
    store = made.lake.store
    assert store._remote.settings.region == "eu-central-1"
    assert server.secret not in repr(vars(store._remote)) + repr(store._remote.settings.keys())
    assert server.secret not in repr(pickle.dumps(store))
    spec = store.read("hslake.json").decode()
    assert server.secret not in spec and server.key not in spec
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    found = call("status", made.url)
    assert found.exit_code == 2 and "(nobody)" in found.output


def test_large_objects_go_in_parts(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"{bucket}/lake")
    part = 16 << 20
    rng = np.random.default_rng(0)
    for size in (part, part + 1, 2 * part, 2 * part + 5):
        data = rng.bytes(size)
        pieces = [data[i : i + 3_700_000] for i in range(0, size, 3_700_000)]
        written = store.put("big", pieces)
        assert written.size == size
        assert (written.tag or "").endswith("-2" if size <= 2 * part else "-3") == (size > part)
        store.confirm("big", written)  # the tag that we computed is the store's
        assert store.read("big") == data
    # Other bytes of the same size, and a store whose tags say nothing.
    store.put("big", [data[:-1], b"?" if data[-1:] != b"?" else b"!"])
    with pytest.raises(Corrupt, match="the store holds"):
        store.confirm("big", written)
    store.put("big", data)
    real = type(store._remote).stat
    monkeypatch.setattr(
        type(store._remote), "stat", lambda self, path: Written(real(self, path).size, "0" * 32)
    )
    store.confirm("big", written)
    with pytest.raises(Corrupt, match="the store holds"):
        store.confirm("big", Written(size, "1" * 32))


def test_versions_on_s3(bucket: str, tmp_path: Path) -> None:
    """Pins, vacuum and delete where nothing can be renamed or linked."""
    made = make_lake(tmp_path, lengths=[30, 40], streams=2, url=f"{bucket}/lake")
    made.add([50])
    pin(made.url, "run", 1)
    with pytest.raises(InvalidInput, match="names version 1 already"):
        pin(made.url, "run", 2)
    assert hslake.open(made.url, version="run").version == 1
    at = made.lake.location("B4-000002").segment_id
    hide(made.lake, {(at, "B4-000002"): "test"})
    orphan = "01900000-0000-7000-8000-000000000000"
    made.lake.store.put(f"segments/{orphan}/zarr.json", b"{}")
    assert vacuum(made.url, timedelta(days=1)).segments == (orphan,)
    assert vacuum(made.url, timedelta(0)).segments == (at,)
    with pytest.raises(Missing, match="not whole any more"):
        hslake.open(made.url, version=2).read("B4-000002")
    unpin(made.url, "run")
    done = delete(made.url, "sample_id = 'A1-000000'", reason="request")
    assert len(done.removed) == 1
    lake = made.lake
    assert run(lake, "select sample_id from samples")["sample_id"].to_pylist() == ["B3-000001"]
    assert np.array_equal(lake.read("B3-000001").hidden_states, made.samples["B3-000001"].states)
    assert verify(made.url).damage == [] and pins(lake) == []
    assert len({p.split("/")[1] for p in lake.store.list("segments")}) == 1
    assert repair(made.url).findings == []
    assert log(made.url, 2)[0]["action"] == "delete"
