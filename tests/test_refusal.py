"""What the machine refuses is Unavailable or NoSpace: never a bug, never damage."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hslake
from hslake import pins, plan
from hslake.errors import HslakeError, NoSpace, Unavailable
from hslake.store import open_store
from hslake.tables import catalog
from hslake.verify import verify
from tests.lakes import MadeLake, make_lake


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeLake:
    return make_lake(tmp_path_factory.mktemp("refusal"), 2, lengths=[20, 300])


def fails(code: int, when: Callable[[str], bool], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *args: Any, **more: Any) -> Any:
        if when(os.fspath(path)):
            raise OSError(code, os.strerror(code), os.fspath(path))
        return real(path, *args, **more)

    return call


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, NoSpace),
        (errno.EDQUOT, NoSpace),
        (errno.EACCES, Unavailable),
        (errno.EROFS, Unavailable),
        (errno.EMFILE, Unavailable),
        (errno.EIO, Unavailable),
    ],
)
def test_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[HslakeError]
) -> None:
    store = open_store(tmp_path)
    store.put("a/b", b"1")

    def refuse(*args: Any, **more: Any) -> Any:
        raise OSError(code, os.strerror(code))

    for name in ("open", "unlink", "read_bytes", "stat"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    calls: list[Callable[[], Any]] = [
        lambda: store.put("a/c", b"1"),
        lambda: store.put_new("a/c", b"1"),
        lambda: store.read("a/b"),
        lambda: store.read_range("a/b"),
        lambda: store.size("a/b"),
        lambda: store.exists("a/b"),
        lambda: store.list("a"),
        lambda: store.delete("a/b"),
        store.check_put_new,
    ]
    for call in calls:
        with pytest.raises(kind, match=str(tmp_path)):
            call()


def test_create_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **more: Any) -> Any:
        raise catalog.DeltaError(
            "\x1b[31mGeneric error\x1b[0m: No space left on device (os error 28)"
        )

    settings: dict[str, Any] = {"hidden_size": 8, "num_layers": 4, "capture": "1"}
    with monkeypatch.context() as m:
        m.setattr(catalog.DeltaTable, "create", full)
        with pytest.raises(NoSpace, match="manifest: No space left"):
            hslake.create(tmp_path / "l", **settings)
        m.setattr(catalog.DeltaTable, "create", fails(errno.EROFS, lambda _: True, full))
        with pytest.raises(Unavailable, match="manifest: Read-only"):
            hslake.create(tmp_path / "l", **settings)
    hslake.create(tmp_path / "l", **settings)
    monkeypatch.setattr(catalog, "_append", full)
    monkeypatch.setattr(catalog.time, "sleep", lambda _: None)
    (tmp_path / "p.jsonl").write_text('{"sample_id": "a", "source": "s", "input_ids": [1]}\n')
    with pytest.raises(NoSpace, match="nothing was committed: No space left"):
        plan.plan_files(str(tmp_path / "l"), [tmp_path / "p.jsonl"])


def test_an_unreadable_lake(made: MadeLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is hidden for what merely cannot be read now."""
    for part in ("segments/", "manifest/part", "plan/part", "hslake.json", "inventory.json"):
        with monkeypatch.context() as m:
            for where, name in ((Path, "read_bytes"), (Path, "stat"), (os, "open")):
                real = getattr(where, name)
                m.setattr(where, name, fails(errno.EACCES, lambda p, x=part: x in p, real))  # type: ignore[misc]
            for level in ("manifest", "full"):
                with pytest.raises(Unavailable, match="Permission denied"):
                    verify(made.url, level, quarantine=True)
    assert verify(made.url).samples == 2
    assert hslake.open(made.url).version == 1


def test_an_unreadable_log_and_folder(made: MadeLake, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **more: Any) -> Any:
        raise catalog.DeltaError("Permission denied (os error 13)")

    with monkeypatch.context() as m:
        m.setattr(catalog, "DeltaTable", denied)
        with pytest.raises(Unavailable, match="manifest: Permission denied"):
            hslake.open(made.url)
    # A folder of pins that cannot be listed holds pins all the same.
    pins.pin(made.url, "kept")
    lake = hslake.open(made.url)
    monkeypatch.setattr(os, "scandir", fails(errno.EACCES, lambda p: "pins" in p, os.scandir))
    with pytest.raises(Unavailable, match="pins"):
        pins.pins(lake)
