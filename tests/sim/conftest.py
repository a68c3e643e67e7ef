"""A lake with a plan, and simulated servers for it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hslake_sglang.process import ServerProcess, free_port

import hslake
from hslake.plan import plan_files
from tests.sim.fleet import environment, sim_server
from tests.sim.samples import lengths_of, write_plan

Start = Callable[..., ServerProcess]


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """Forty samples of up to 600 tokens are planned."""
    url = str(tmp_path / "lake")
    hslake.create(url, streams=[3, "final"], hidden_size=8, num_layers=4, name="sim")
    lengths = lengths_of(40, mean=150, longest=600, seed=1)
    plan_files(url, write_plan(tmp_path / "plan", lengths, seed=1))
    return url


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


@pytest.fixture
def start(lake: str, staging: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a server with these options; all end with the test."""
    servers: list[ServerProcess] = []

    def begin(*args: object) -> ServerProcess:
        port = free_port()
        argv = sim_server(
            lake, "--staging", staging, "--port", port, "--seed", 7,
            "--part-tokens", 2048, "--max-parts", 8, "--chunk", 256, "--kv", 4096, *args,
        )  # fmt: skip
        servers.append(ServerProcess(argv, environment(), tmp_path / f"{port}.log", port))
        return servers[-1].start().wait_ready()

    yield begin
    for server in servers:
        server.stop()
