"""Every module is imported by itself: no circle of imports hides behind the order of another."""

import subprocess
import sys
from pathlib import Path

CODE = """
import importlib, sys
for name in sys.argv[1:]:
    for loaded in [m for m in sys.modules if m.partition(".")[0] == "hslake"]:
        del sys.modules[loaded]
    importlib.import_module(name)
"""


def test_every_module_is_imported_by_itself() -> None:
    root = Path(__file__).parent.parent
    paths = [p.relative_to(root).with_suffix("") for p in (root / "hslake").rglob("*.py")]
    names = [".".join(p.parts).removesuffix(".__init__") for p in paths]
    ours = sorted(n for n in names if "torch" not in n and n != "hslake.zarr_dtype")
    assert "hslake.extract.canary" in ours
    subprocess.run([sys.executable, "-c", CODE, *ours], check=True)
