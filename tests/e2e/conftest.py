"""One real SGLang server at a time, on the CPU.

HSLAKE_SGLANG_PYTHON names the interpreter that has SGLang and hslake, HSLAKE_TEST_MODEL the model
folder; `make e2e` makes both. Without them these tests fail: they are never skipped.
"""

import json
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hslake_sglang.process import ServerProcess, free_port

import hslake
from examples.sglang_cpu import cpu_server, tiny_deepseek
from hslake.extract import ExtractOptions, extract
from hslake.extract.canary import SHARE
from hslake.extract.drive import Limits
from hslake.extract.report import ExtractReport
from hslake.plan import plan_files

CHUNK = 32
THREADS = 2
SOURCES = ("A1", "B3", "B4")
# Around the chunk's edge, one token, and long ones; together few enough for two cores.
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 96, 120, 180, 7)
SINK = 462


def pytest_configure(config: pytest.Config) -> None:
    """A terminated run stops its servers as an interrupted one does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def needed(name: str, what: str) -> Path:
    """The path in environment variable `name`, or a failed test that says how to get it."""
    value = os.environ.get(name, "")
    if not value or not Path(value).exists():
        pytest.fail(
            f"{name}={value!r}: expected {what}; run `make e2e`, which makes it "
            "(examples/sglang_cpu/README.md does it by hand)",
            pytrace=False,
        )
    return Path(value)


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    return needed("HSLAKE_SGLANG_PYTHON", "an interpreter with SGLang and hslake")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return needed("HSLAKE_TEST_MODEL", "the folder of SmolLM2-135M")


@pytest.fixture(scope="session")
def num_layers(model_dir: Path) -> int:
    return int(json.loads((model_dir / "config.json").read_text())["num_hidden_layers"])


@pytest.fixture(scope="session")
def prompts() -> dict[str, list[int]]:
    """Token ids by sample id. Random ids: real text would make rows more alike.

    The first token is one that SmolLM2 takes as an attention sink. Without one, some later token
    half becomes the sink and its row is ill-conditioned: Hugging Face's own float32 is then up to
    7e-4 off its float64 (this seed: 5e-6 at most, however the prompt is cut into chunks).
    """
    rng = np.random.default_rng(15)
    return {
        f"{SOURCES[i % 3]}-{i:03d}": [SINK, *rng.integers(20, 45_000, n).tolist()[1:]]
        for i, n in enumerate(LENGTHS)
    }


@pytest.fixture(scope="session")
def talk(prompts: dict[str, list[int]]) -> list[list[int]]:
    """Prompts of ordinary traffic, whose answers must not change with the hook."""
    rng = np.random.default_rng(5)
    return [rng.integers(20, 45_000, n).tolist() for n in (3, 32, 70)]


@dataclass
class Stage:
    """A lake with a plan, its staging, and a server to fill it."""

    lake: str
    staging: Path
    server: ServerProcess
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.server.url


def set_stage(
    folder: Path,
    python: Path,
    model: Path,
    prompts: dict[str, list[int]],
    *,
    capture: str,
    dtype: str,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    chunk: int = CHUNK,
    max_total_tokens: int = 4096,
    part_tokens: int = 1024,
    max_parts: int = 3,
    staging: Path | None = None,
) -> Stage:
    """Make lake, plan and staging, and a server that is not started yet.

    `args` and `env` are added to the server's own; `staging` is an empty folder if not `folder`'s.
    """
    folder.mkdir(exist_ok=True)
    lake = str(folder / "lake")
    hslake.create(lake, model_config=model / "config.json", capture=capture, dtype=dtype)
    rows = [
        {"sample_id": k, "input_ids": v, "source": k[:2], "loss_mask": [1] * len(v)}
        for k, v in prompts.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "plan.parquet")
    plan_files(lake, [folder / "plan.parquet"])
    if staging is None:
        staging = folder / "staging"
        staging.mkdir()
    server = ServerProcess.for_lake(
        lake,
        staging,
        [*cpu_server.args(model, chunk=chunk, max_total_tokens=max_total_tokens), *args],
        log=folder / "server.log",
        python=python,
        env=env or cpu_server.env(THREADS),
        part_tokens=part_tokens,
        max_parts=max_parts,
    )
    return Stage(lake, staging, server)


def capture_all(
    stage: Stage, *, where: str | None = None, canaries: float = SHARE, **limits: Any
) -> ExtractReport:
    """`hslake extract` on the stage's server. What interrupts it interrupts the tests too."""
    try:
        options = ExtractOptions(where=where, limits=Limits(**limits), canary_share=canaries)
        report = extract(stage.lake, [stage.url], options)
    finally:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # extract has had its own
    if report.interrupted:
        raise KeyboardInterrupt
    return report


def plain_server(folder: Path, python: Path, model: Path, dtype: str) -> ServerProcess:
    """SGLang as it is, with the flags that serve would have added, and no hook at work."""
    port = free_port()
    argv = [
        *(str(python), "-m", "sglang.launch_server"),
        *cpu_server.args(model, chunk=CHUNK, max_total_tokens=4096),
        *("--dtype", dtype, "--disable-radix-cache"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith("HSLAKE_")}
    env |= cpu_server.env(THREADS)
    return ServerProcess(argv, env, folder / "plain.log", port)


@pytest.fixture(scope="session")
def ram() -> Iterator[Path]:
    """A folder on /dev/shm where there is one, as in real use."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="hslake-e2e-", dir=base) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def deepseek(ram: Path) -> Path:
    """The folder of a small DeepSeek-V3 shaped model; its servers need cpu_server.env(deepseek)."""
    return tiny_deepseek.make(ram / "deepseek")
