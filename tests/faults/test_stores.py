"""Stores that fail, in little: the campaigns of `stores` and `stores_local`, and single cases."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hslake
from hslake.compact import compact
from hslake.errors import CheckFailed, Conflict, Unavailable
from hslake.store import Store, local, open_store
from hslake.tables import catalog
from hslake.verify import verify
from tests.faults import stores, stores_local
from tests.faults.proxy import Proxy, Request, first, proxied
from tests.lakes import make_lake
from tests.s3server import Server, moto

# Those that a rule for single requests below does not cover.
FAULTS = ("lost-answer", "stale-list", "no-condition")  # all: python -m tests.faults.stores
CALLS = ("write ENOSPC", "fsync EIO", "create EMFILE", "pread EIO")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with moto() as found:
        yield found


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """In front of moto; the environment leads to it."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with proxied(server.url) as found:
        for name, value in {**server.environment(), "AWS_ENDPOINT_URL": found.url}.items():
            monkeypatch.setenv(name, value)
        server.client().create_bucket(Bucket="proxied")
        yield found


def writes(request: Request) -> bool:
    return request.method in ("PUT", "POST")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lake_on_a_store_that_fails(server: Server, tmp_path: Path, fault: str) -> None:
    pytest.importorskip("torch")
    counts = stores.Counts()
    stores.one_lake(server, fault, 1, tmp_path / "x", counts)
    assert not counts.wrong and not counts.lost and not counts.duplicated and not counts.torn
    assert counts.injected[fault] > 0
    assert counts.refused_stores == (fault == "no-condition")


@pytest.mark.parametrize("fault", ["500", "503", "reset-request", "reset-response", "lost-answer"])
def test_a_request_is_repeated(proxy: Proxy, fault: str) -> None:
    store = open_store("s3://proxied/again")
    for call in (
        lambda: store.put("a", b"1"),
        lambda: store.put_new(f"new-{fault}", b"2"),
        lambda: store.put("big", [os.urandom(3_000_000)] * 6),  # POST, PUT, PUT, POST
        lambda: store.confirm("a", store.put("a", b"1")),
        lambda: store.read("a") == b"1",
        lambda: store.read_range("a", 0, 1) == b"1",
        lambda: store.read_range("a", suffix=1) == b"1",
        lambda: store.size("a"),
        lambda: store.list(),
        lambda: store.delete("a"),
    ):
        store.put("a", b"1")
        proxy.done.clear()
        proxy.rule = first(2, fault)
        assert call() is not False
        proxy.rule = None
        # A response without a body may have come whole before its reset.
        assert proxy.done[fault] == 2 or (proxy.done[fault] == 1 and fault == "reset-response")
    assert store.read(f"new-{fault}") == b"2"


@pytest.mark.parametrize("fault", ["lost-answer", "412-done", "reset-response"])
def test_our_own_write_is_no_conflict(proxy: Proxy, fault: str) -> None:
    store = open_store(f"s3://proxied/own-{fault}")
    proxy.rule = first(1, fault, lambda r: r.conditional)
    store.put_new("a", b"ours")
    assert proxy.done[fault] == 1
    # The same bytes by another call are not ours.
    proxy.rule = first(1, fault, lambda r: r.conditional)
    with pytest.raises(Conflict):
        store.put_new("a", b"ours")
    store.check_put_new()


def test_an_upload_whose_end_got_lost(proxy: Proxy) -> None:
    """Its repetition finds no upload any more: the object is there."""
    store, data = open_store("s3://proxied/end"), os.urandom(20_000_000)
    ends = [0]

    def rule(request: Request) -> str | None:
        if request.method == "POST" and "uploadId" in request.path:
            ends[0] += 1
            return "lost-answer" if ends[0] == 1 else None
        return None

    proxy.rule = rule
    store.confirm("big", store.put("big", data))
    assert ends[0] > 1 and store.read("big") == data


def test_a_store_without_conditions(proxy: Proxy) -> None:
    store = open_store("s3://proxied/none")
    proxy.rule = lambda _: "no-condition"
    with pytest.raises(CheckFailed, match="If-None-Match"):
        store.check_put_new()
    proxy.rule = None
    assert store.list() == []
    store.check_put_new()


def test_a_listing_that_stays_old(proxy: Proxy, tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[20], url="s3://proxied/old")
    names = made.plan([30])
    made.stage(names)
    proxy.rule = lambda r: "stale-list" if "_delta_log" in r.path else None
    with pytest.raises(Unavailable, match="listing lacks entries"):
        hslake.open(made.url)
    with pytest.raises(Unavailable, match="listing lacks entries"):
        compact(made.url, [made.staging])  # or it would give up what it finds in no plan
    proxy.rule = None
    assert compact(made.url, [made.staging]).samples == 1


def test_a_target_that_hangs(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_lake(tmp_path, lengths=[20], url="s3://proxied/hangs")
    made.stage(made.plan([300, 30]))
    monkeypatch.setenv("HSLAKE_S3_TIMEOUT", "0.5")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    for where in ("hidden_states", "_delta_log"):
        proxy.rule = lambda r, where=where: "hang" if where in r.path and writes(r) else None
        with pytest.raises(Unavailable):
            compact(made.url, [made.staging])
        assert proxy.done["hang"] and list(made.staging.glob("*/part-*"))
        proxy.done.clear()
    proxy.rule = None
    monkeypatch.setenv("HSLAKE_S3_TIMEOUT", "60")
    assert compact(made.url, [made.staging]).samples == 2
    assert not verify(made.url, "full").damage
    for name, truth in made.samples.items():
        assert np.array_equal(made.lake.read(name).hidden_states, truth.states)


def test_a_watching_compactor_outlives_an_s3_store(proxy: Proxy, tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[20], url="s3://proxied/watch")
    made.stage(made.plan([300, 30]))
    command = [sys.executable, "-c", "from hslake.cli import main; main()", "compact", made.url]
    command += ["--staging", str(made.staging), "--watch"]
    env = {**os.environ, "AWS_MAX_ATTEMPTS": "2", "HSLAKE_S3_RETRY": "2"}
    proxy.rule = lambda r: "503" if "/segments/" in r.path and writes(r) else None
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=env) as ours:
        try:
            wait(lambda: "again" in log.read_text(), ours, log)
            assert proxy.done["503"] and list(made.staging.glob("*/part-*"))
            assert len(made.lake.sql("select * from samples").fetchall()) == 1
            proxy.rule = None
            count = "select count(*) from samples"
            wait(lambda: made.lake.refresh().sql(count).fetchall() == [(3,)], ours, log)
        finally:
            ours.terminate()
        assert ours.wait(60) == 0, log.read_text()
    assert not verify(made.url, "full").damage
    for name, truth in made.samples.items():
        assert np.array_equal(made.lake.refresh().read(name).hidden_states, truth.states)


def wait(until: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Until something is so, as long as the process lives."""
    end = time.monotonic() + 120
    while not until():
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.2)


@pytest.mark.parametrize("kind", [*CALLS, *stores_local.LIMITS])
def test_a_local_target_that_refuses(tmp_path: Path, kind: str) -> None:
    if kind in CALLS and not stores_local.can_refuse():
        pytest.skip("this machine does not let a process filter its system calls")
    counts = stores_local.Counts()
    stores_local.one(kind, 1, tmp_path, counts)
    assert not counts.wrong and not counts.lost and not counts.duplicated and not counts.torn
    assert sum(counts.errors.values()) == 1  # it was met


@pytest.mark.parametrize("what", [stores_local.full, stores_local.read_only])
def test_a_small_or_read_only_filesystem(tmp_path: Path, what: Any) -> None:
    counts = stores_local.Counts()
    what(tmp_path, counts)
    if counts.skipped:
        pytest.skip(f"{counts.skipped[0]}: run as root, or `unshare -Urm`")
    assert not counts.wrong and not counts.lost and not counts.torn and counts.errors


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(call, path) of what makes local writes durable and visible, in order."""
    found: list[tuple[str, str]] = []
    real = {n: getattr(os, n) for n in ("fsync", "link", "replace", "mkdir")}

    def fsync(fd: int) -> None:
        real["fsync"](fd)
        found.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))  # noqa: PTH115

    def named(name: str) -> Any:
        def call(*args: Any, **more: Any) -> None:
            real[name](*args, **more)
            found.append((name, os.fspath(args[-1] if name != "mkdir" else args[0])))

        return call

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("link", "replace", "mkdir"):
        monkeypatch.setattr(os, name, named(name))
    return found


def test_the_order_of_one_write(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    store, root = open_store(tmp_path), str(tmp_path)
    store.put("a/b/c", b"1")
    store.put_new("a/b/d", b"1")
    temps = [p for _, p in calls if p.endswith(".tmp")]
    assert calls == [
        ("mkdir", f"{root}/a"),
        ("fsync", root),
        ("mkdir", f"{root}/a/b"),
        ("fsync", f"{root}/a"),
        ("fsync", temps[0]),  # the content, before it has its name
        ("replace", f"{root}/a/b/c"),
        ("fsync", f"{root}/a/b"),  # and then the name
        ("fsync", temps[1]),
        ("link", f"{root}/a/b/d"),
        ("fsync", f"{root}/a/b"),
    ]
    assert all(Path(t).parent == tmp_path / "a" / "b" for t in temps)  # so never across filesystems


def test_the_order_of_a_compaction(
    tmp_path: Path, calls: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_lake(tmp_path, lengths=[20])
    made.stage(made.plan([300, 30]))
    real, touch = catalog._append, Path.touch

    def append(*args: Any) -> None:
        calls.append(("append", ""))
        real(*args)

    def touched(path: Path, *args: Any, **more: Any) -> None:
        calls.append(("touch", path.name))
        touch(path, *args, **more)

    monkeypatch.setattr(catalog, "_append", append)
    monkeypatch.setattr(Path, "touch", touched)
    calls.clear()
    compact(made.url, [made.staging])
    (commit,) = [i for i, (what, _) in enumerate(calls) if what == "append"]
    (done,) = [i for i, call in enumerate(calls) if call == ("touch", "DONE")]
    before, after = calls[:commit], calls[commit:done]
    stored = {p for what, p in calls if what == "replace" and "/segments/" in p}
    lake = Path(made.url)
    on_disk = {str(p) for p in lake.glob("segments/*/**/*") if p.is_file()}
    assert stored and stored <= on_disk
    # Everything the commit names is durable before it: each name was synced after it was made.
    for path in (p for what, p in calls if what in ("replace", "mkdir") and str(lake) in p):
        at = next(
            i for i, (what, p) in enumerate(before) if what in ("replace", "mkdir") and p == path
        )
        assert ("fsync", str(Path(path).parent)) in before[at:], path
    inventory = next(i for i, (_, p) in enumerate(before) if p.endswith("/inventory.json"))
    assert max(i for i, (w, p) in enumerate(before) if w == "replace" and p in stored) == inventory
    # The entry and its name are durable before staging goes.
    log = lake / "manifest" / "_delta_log"
    assert ("fsync", str(log / f"{2:020d}.json")) in after and ("fsync", str(log)) in after


def test_a_write_that_is_not_synced_is_seen(
    tmp_path: Path, calls: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder above can fail."""
    monkeypatch.setattr(local, "sync_dir", lambda folder: None)
    Store(str(tmp_path)).put("a", b"1")
    assert ("fsync", str(tmp_path)) not in calls
