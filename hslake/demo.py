"""`hslake demo`: the whole pipeline on this machine, each step through the command's own function.

    create, plan, serve + preflight + extract (or capture-hf), compact, verify, query, audit, train

The corpus and the draft head are the repository's examples; this module only strings them together.
"""

import importlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import hslake
from hslake.errors import CheckFailed, HslakeError, InvalidInput, Missing

ENGINES = ("sglang", "hf")
CHUNK = 256  # prefill chunk of the server: long samples arrive in several forwards
CONCURRENCY = 4
TRAIN_SECONDS = 110.0
PART_TOKENS = 32_768
MAX_PARTS = 4
MAX_TOTAL_TOKENS = 8192


@dataclass(frozen=True)
class Source:
    """Coverage of one source."""

    source: str
    planned: int
    committed: int
    tokens: int


@dataclass(frozen=True)
class DemoReport:
    """The closing summary. Losses are nats a token, agreements shares of the target's choices."""

    engine: str
    lake: str
    folder: str
    samples: int
    tokens: int
    raw_bytes: int
    stored_bytes: int
    ratio: float
    coverage: list[Source]
    checks_passed: int
    checks_failed: int
    train_loss_before: float
    train_loss_after: float
    validation_loss_before: float
    validation_loss_after: float
    agreement_before: list[float]
    agreement_after: list[float]
    updates: int
    epochs: float
    seconds: float
    phases: dict[str, float]


class _Show:
    """Titles, times and notes of the phases, for a person."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, what: str) -> Iterator[None]:
        self.console.print(f"[bold cyan]{len(self.phases) + 1:2}. {name}[/]  [dim]{what}[/]")
        start = time.monotonic()
        yield
        self.phases[name] = time.monotonic() - start
        self.console.print(f"    [green]done[/] [dim]in {self.phases[name]:.1f} s[/]")

    def note(self, text: str) -> None:
        self.console.print(f"    {text}", highlight=False)


def run_demo(
    directory: str | Path = ".demo",
    *,
    engine: str = "sglang",
    model: str | Path | None = None,
    server_python: str | Path | None = None,
    train_seconds: float = TRAIN_SECONDS,
    seed: int = 0,
    console: Console | None = None,
) -> DemoReport:
    """Run the pipeline in a fresh folder `directory`/run-NNN; nothing that exists is touched.

    `model` is the Hugging Face folder (default: `directory`/model), `server_python` the interpreter
    of the environment with SGLang (engine "sglang" only). Raises CheckFailed when a step's own check
    says no, Missing when examples, model or server are not there.
    """
    start = time.monotonic()
    if engine not in ENGINES:
        raise InvalidInput(f"engine: found {engine!r}, expected one of {', '.join(ENGINES)}")
    base = Path(directory)
    model_dir = _model_dir(base, model)
    examples = _examples()
    if engine == "sglang" and not (server_python and Path(server_python).exists()):
        raise Missing(
            f"engine sglang needs the interpreter of an environment with SGLang, found "
            f"{str(server_python)!r}: run `make demo`, or pass --server-python, or --engine hf"
        )
    show = _Show(console or Console())
    run = _fresh_folder(base)
    lake_url = str(run / "lake")
    corpus_file = run / "corpus.jsonl"
    dtype = "bfloat16"

    with show.phase("create", f"a lake for {model_dir.name}: EAGLE-3 boundaries and final, {dtype}"):
        raise NotImplementedError
