"""A model that is named by its id on the Hugging Face hub: the local folder that SGLang loads."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hslake.errors import HslakeError, Missing
from hslake.fingerprint import weight_files

_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_SHARD = re.compile(r"-of-[0-9]+\.safetensors$")
_PATIENCE_S = 120
_CODE = """
import json, sys
try:
    from huggingface_hub import snapshot_download
    found = snapshot_download(sys.argv[1], revision=sys.argv[2] or None, local_files_only=True)
except Exception:
    found = None
print(json.dumps(found))
"""


def is_id(model: str) -> bool:
    """Whether SGLang takes `model` for an id on a hub: it is nothing that is here."""
    return _ID.fullmatch(model) is not None and not Path(model).exists()


def problem(model: str, download_dir: str | None, env: Mapping[str, str]) -> str | None:
    """Why the files that SGLang will load for `model` cannot be found; None when they can."""
    if not is_id(model):
        return None
    fix = "download the model and give its folder to --model-path"
    if env.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true", "yes", "y", "on"):
        return f"SGLANG_USE_MODELSCOPE: {model} cannot be checked against the lake; {fix}"
    if download_dir:
        return f"--download-dir parts the config of {model} from its weights; {fix}"
    return None


def folder(model: str, revision: str | None) -> Path:
    """The folder of `model`, of which SGLang has the files by now. Raises Missing."""
    if not is_id(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision or None, local_files_only=True))
    except Exception as error:  # of several libraries below it
        raise Missing(
            f"the files of the model {model} are not in the local Hugging Face cache "
            f"({type(error).__name__}: {error}): give the model's folder to --model-path"
        ) from error


def ask_folder(
    python: str, env: Mapping[str, str], model: str, revision: str | None
) -> Path | None:
    """The folder of `model` as interpreter `python` finds it in `env`, which name the cache; None
    when it is not there yet, or cannot be told. Downloads nothing."""
    if not is_id(model):
        return Path(model)
    argv = [python, "-c", _CODE, model, revision or ""]
    try:
        out = subprocess.run(
            argv, env=dict(env), capture_output=True, text=True, timeout=_PATIENCE_S
        )
        found = json.loads(out.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return None
    return Path(found) if isinstance(found, str) else None


def is_whole(snapshot: Path, *, weights: bool) -> bool:
    """Whether a snapshot has the config and, where `weights` are looked at, all of them: an
    interrupted download leaves some files."""
    if not (snapshot / "config.json").is_file():
        return False
    try:
        files = weight_files(snapshot)
    except HslakeError:
        return False
    shards = any(_SHARD.search(file.name) for file in files)
    if shards and not (snapshot / "model.safetensors.index.json").is_file():
        return False
    return bool(files) or not weights
