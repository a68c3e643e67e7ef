"""The installed SGLang against what the hook relies on; no server is started."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from examples.sglang_cpu import cpu_server
from tests.patch import attach_points

# The endpoint on an app that is protected as SGLang protects its own.
APP = """
import json, sys
from pathlib import Path
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware
from hslake_sglang import endpoint

def codes(**keys):
    app = FastAPI()
    app.add_api_route("/generate", lambda: "generated", methods=["GET"])
    endpoint.mount(app, Path(sys.argv[1]), "run")
    if keys:
        add_api_key_middleware(app, **{"api_key": None, "admin_api_key": None, **keys})
    client = TestClient(app)
    heads = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer key"}]
    paths = ("/generate", endpoint.PATH, endpoint.METRICS_PATH)
    return {p: [client.get(p, headers=h).status_code for h in heads] for p in paths}

print(json.dumps([codes(), codes(api_key="key"), codes(admin_api_key="key")]))
"""


@pytest.fixture(scope="module")
def packages(sglang_python: Path) -> Path:
    """The site-packages of the SGLang that the other tests run."""
    code = "import importlib.util as u; print(u.find_spec('sglang').origin)"
    out = subprocess.run([sglang_python, "-c", code], capture_output=True, text=True, check=True)
    return Path(out.stdout.strip()).parents[1]


def test_the_installed_sglang_has_every_attach_point(packages: Path) -> None:
    checks = attach_points.check(packages)
    assert [f"{c.what}: {c.found}" for c in checks if c.ok is False] == []
    assert len(checks) > 25


def test_the_routes_are_as_protected_as_sglangs_own(sglang_python: Path, tmp_path: Path) -> None:
    run = [str(sglang_python), "-c", APP, str(tmp_path)]
    env = {**os.environ, **cpu_server.env(1)}
    out = subprocess.run(run, env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    for answers in json.loads(out.stdout.strip().splitlines()[-1]):
        own = answers.pop("/generate")
        assert answers == {"/hslake/status": own, "/hslake/metrics": own}
        assert own[2] == 200
