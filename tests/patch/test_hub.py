"""Models that are named by their id on a hub, in a cache of real files; nothing is downloaded."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("huggingface_hub")

import torch
from hslake_sglang import attach, hub
from safetensors.torch import save_file

from hslake.errors import InvalidInput, Missing
from hslake.fingerprint import model_fingerprint
from tests.patch.test_serve import model, prepare
from tests.patch.toy import make_spec

ID = "some/model"
ARGS = ("--model-path", ID)


def cached(home: Path, folder: Path, branch: str, commit: str) -> Path:
    """`folder` as a snapshot in the cache below HF_HOME `home`."""
    repo = home / "hub/models--some--model"
    snapshot = repo / "snapshots" / commit
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(folder, snapshot)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / branch).write_text(commit)
    return snapshot


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    home = tmp_path / "hf"
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # It reads its environment when it is imported, which another test may have done.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    return home


@pytest.fixture
def lakes_model(tmp_path: Path) -> Path:
    folder = model(tmp_path / "model", max_position_embeddings=64)
    save_file({"w": torch.arange(4.0)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def lake(tmp_path: Path, lakes_model: Path) -> str:
    folder = tmp_path / "lake"
    folder.mkdir()
    spec = make_spec(("2", "final"), "bfloat16", fingerprint=model_fingerprint(lakes_model))
    (folder / "hslake.json").write_text(spec.to_json())
    return str(folder)


def test_the_worker_finds_the_snapshot_of_a_revision(home: Path, lakes_model: Path) -> None:
    first = cached(home, lakes_model, "main", "a" * 40)
    second = cached(home, lakes_model, "v2", "b" * 40)
    assert hub.folder(ID, None) == first
    assert hub.folder(ID, "v2") == second == hub.folder(ID, "b" * 40)
    assert hub.folder(str(lakes_model), "v2") == lakes_model
    running = SimpleNamespace(model_path=ID, revision="v2", download_dir=None)
    assert attach.model_folder(running) == second
    running.download_dir = os.sep
    with pytest.raises(InvalidInput, match="--download-dir"):
        attach.model_folder(running)
    with pytest.raises(Missing, match=r"other/model are not.*--model-path"):
        hub.folder("other/model", None)


def test_a_local_snapshot_is_checked_before_the_load(
    home: Path, lakes_model: Path, lake: str, staging: Path, sglang: Path, tmp_path: Path
) -> None:
    told = " ".join(prepare(lake, staging, sglang, *ARGS).notes)
    assert "the worker checks" in told
    cached(home, lakes_model, "main", "a" * 40)
    assert "the worker checks" not in " ".join(prepare(lake, staging, sglang, *ARGS).notes)
    save_file({"w": torch.arange(4.0) + 1}, lakes_model / "model.safetensors")
    cached(home, lakes_model, "v2", "b" * 40)
    with pytest.raises(InvalidInput, match=r"some/model in the local.*not the model.*--revision"):
        prepare(lake, staging, sglang, *ARGS, "--revision", "v2")
    with pytest.raises(InvalidInput, match=r"--quantization: .*another model"):
        prepare(lake, staging, sglang, *ARGS, "--quantization", "fp8")


@pytest.mark.parametrize("name", [None, "model-00001-of-00002.safetensors"])
def test_an_interrupted_download_is_left_to_the_worker(
    home: Path, lakes_model: Path, lake: str, staging: Path, sglang: Path, name: str | None
) -> None:
    (lakes_model / "model.safetensors").unlink()
    if name:
        save_file({"w": torch.arange(2.0)}, lakes_model / name)
    cached(home, lakes_model, "main", "a" * 40)
    assert "the worker checks" in " ".join(prepare(lake, staging, sglang, *ARGS).notes)


def test_files_that_cannot_be_found_again_are_refused(
    home: Path, lakes_model: Path, lake: str, staging: Path, sglang: Path
) -> None:
    env = {"SGLANG_USE_MODELSCOPE": "true"}
    with pytest.raises(InvalidInput, match=r"MODELSCOPE.*give its folder"):
        prepare(lake, staging, sglang, *ARGS, env=env)
    with pytest.raises(InvalidInput, match=r"--download-dir.*give its folder"):
        prepare(lake, staging, sglang, *ARGS, "--download-dir", os.sep)
    here = ("--model-path", str(lakes_model), "--download-dir", os.sep)
    prepare(lake, staging, sglang, *here, env=env)
