"""What the interpreter that will run SGLang has, asked without importing SGLang."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hslake.errors import InvalidInput, Missing

_PATIENCE_S = 120
_GROUP = "sglang.srt.plugins"
_CODE = f"""
import importlib.metadata as m, importlib.util as u, json, sys
def version():
    try: return m.version("sglang")
    except m.PackageNotFoundError: return ""
def config(path):
    try:
        import yaml
        with open(path) as f: return yaml.safe_load(f) or {{}}
    except Exception: return None
spec = u.find_spec("sglang")
places = list(spec.submodule_search_locations or []) if spec else []
plugins = sorted(e.name for e in m.entry_points(group={_GROUP!r}))
print(json.dumps({{
    "version": version(), "root": places[0] if places else None, "plugins": plugins,
    "config": config(sys.argv[1]) if len(sys.argv) > 1 else {{}},
}}, default=str))
"""


@dataclass(frozen=True)
class Found:
    """SGLang's version ("" for none) and package folder, whether hslake's hook is installed beside
    it, whether other plugins are, and the content of the `--config` file ({} without one, None
    when it does not read)."""

    version: str
    root: Path | None
    hook: bool
    others: bool
    config: dict[str, Any] | None


def ask(python: str, env: Mapping[str, str], config: str | None) -> Found:
    """Ask interpreter `python`, started in environment `env`. Raises Missing or InvalidInput."""
    argv = [python, "-c", _CODE, *([config] if config else [])]
    try:
        out = subprocess.run(
            argv, env=dict(env), capture_output=True, text=True, timeout=_PATIENCE_S
        )
    except OSError as error:
        raise Missing(
            f"cannot run the interpreter {python!r}: {error}; name the one that has SGLang with "
            "--python"
        ) from error
    except subprocess.TimeoutExpired:
        raise InvalidInput(
            f"{python} did not say within {_PATIENCE_S} s which SGLang it has: does "
            f"`{python} -c pass` end?"
        ) from None
    try:
        answer = json.loads(out.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise InvalidInput(
            f"{python} could not say which SGLang it has (is it a Python?): "
            f"{out.stderr.strip()[-500:]}"
        ) from None
    plugins, settings = answer["plugins"], answer["config"]
    return Found(
        version=answer["version"],
        root=Path(answer["root"]) if answer["root"] else None,
        hook="hslake" in plugins,
        others=any(name != "hslake" for name in plugins),
        config=settings if isinstance(settings, dict) else None,
    )
