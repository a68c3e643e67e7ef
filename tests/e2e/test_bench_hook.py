"""The benchmark of the hook at a small size, on the CPU server: everything sent is verified."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import CHUNK

ROOT = Path(__file__).resolve().parents[2]


def test_smoke(tmp_path: Path, sglang_python: Path, model_dir: Path) -> None:
    """All four modes side by side; no word about their speed."""
    out = tmp_path / "hook.json"
    argv = [sys.executable, str(ROOT / "benchmarks/hook_h200.py"), "--smoke"]
    argv += ["--model", str(model_dir), "--sglang-python", str(sglang_python)]
    argv += ["--repeats", "1", "--chunk", str(4 * CHUNK), "--out", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["missing"] == []
    assert {(c["mode"], c["prompt"]) for c in found["cells"]} == {
        (mode, prompt) for mode in ("none", "hslake", "torch_save", "http") for prompt in (48, 200)
    }
    runs = [r for r in found["runs"] if r["mode"] == "hslake"]
    assert all(r["found"]["verified_samples"] == r["requests"] + 1 for r in runs)  # and its warm-up
    total = found["summary"]
    assert total["verified_tokens"] == total["tokens"] == sum(r["found"]["tokens"] for r in runs)
    assert total["tokens"] > 800
    assert (total["lost"], total["duplicated"], total["damage"], total["failed_runs"]) == (0,) * 4
    saved = [r for r in found["runs"] if r["mode"] == "torch_save"]
    assert all(r["files"] >= r["requests"] and r["file_bytes"] > 0 for r in saved)
    # 128-token chunks: of a 200-token prompt HTTP gives back the last chunk only.
    rows = {r["prompt"]: (r["rows"], r["tokens"]) for r in found["runs"] if r["mode"] == "http"}
    assert rows[48][0] == rows[48][1] and 0 < rows[200][0] < rows[200][1]
