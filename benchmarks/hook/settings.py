"""What one call of the benchmark measures, and where its things lie."""

import argparse
from dataclasses import dataclass
from pathlib import Path

NONE, HSLAKE, TORCH_SAVE, HTTP = "none", "hslake", "torch_save", "http"
PLAIN = "plain"  # requests of nobody's lake to the servers of hslake
PREFIX = "bench-"  # of the request ids that torch_save saves
DEFAULT_MODES = (NONE, HSLAKE, TORCH_SAVE, HTTP)
MODES = (NONE, HSLAKE, PLAIN, TORCH_SAVE, HTTP)
# Tokens a second that nobody should be below: how long a run may take before it was measured once.
SLOWEST = {NONE: 9000.0, HSLAKE: 8000.0, PLAIN: 9000.0, TORCH_SAVE: 4500.0, HTTP: 400.0}


@dataclass(frozen=True)
class Settings:
    """Sizes are tokens, times seconds. `modes` have servers, `cells` of them are measured. `tokens`
    is what each run of a cell sends after its warm-up; `repeats` counts the runs of `none`,
    `hslake` and `plain` in a cell, `other_repeats` of `torch_save` (`http` has one). `instances`:
    servers of `none` and of `hslake`, which take turns: two servers that do the very same work
    differ by up to 18 % where the CPU is the bound, each for as long as it lives. There `plain`
    tells more: it is the same server, between its hslake runs. `jitter`: a closed loop of a few
    requests falls into one of several patterns of batches, at rates up to 8 % apart, and mostly
    stays there for a run; random pauses before requests, the same in every mode, mix them."""

    model: Path
    modes: tuple[str, ...]
    cells: tuple[str, ...]
    prompts: tuple[int, ...]
    concurrency: tuple[int, ...]
    tokens: int
    other_tokens: int
    http_tokens: int
    warmup: int
    repeats: int
    other_repeats: int
    instances: int
    tp: int
    dp: int
    capture: str
    codec: str
    attention_backend: str
    chunk: int
    kv_tokens: int
    sglang_python: Path
    server_args: tuple[str, ...]
    part_tokens: int
    staging_bytes: int
    lake_dir: str
    port: int
    jitter: float
    ready: float
    smoke: bool

    @property
    def config(self) -> str:
        """Name of the server's shape, which cells of several machines are told apart by."""
        if self.dp > 1:
            return f"dp{self.dp}"
        return f"tp{self.tp}" if self.tp > 1 else "1gpu" if not self.smoke else "cpu"

    def runs_of(self, mode: str) -> int:
        """How often a cell of `mode` is measured."""
        others = {TORCH_SAVE: self.other_repeats, HTTP: 1}
        return others.get(mode, self.repeats)

    def instances_of(self, mode: str) -> int:
        """How many servers of `mode` take turns."""
        return self.instances if mode in (NONE, HSLAKE) else 1

    def run_tokens(self, mode: str, prompt: int) -> int:
        """Tokens of one run: whole prompts, at least one."""
        wanted = {HTTP: self.http_tokens, TORCH_SAVE: self.other_tokens}.get(mode, self.tokens)
        return max(1, -(-wanted // prompt)) * prompt

    def in_flight(self, mode: str, concurrency: int, prompt: int) -> int:
        """Requests at once. HTTP answers of thousands of tokens are gigabytes of Python lists in
        three processes, so that mode gets no more at once than its run sends."""
        if mode == HTTP:
            return max(1, min(concurrency, self.http_tokens // prompt))
        return concurrency


def numbers(text: str) -> tuple[int, ...]:
    """`1024,8192` -> (1024, 8192)."""
    return tuple(int(n) for n in text.split(",") if n)


def modes(text: str) -> tuple[str, ...]:
    """`none,hslake` -> ("none", "hslake"); refuses unknown ones."""
    found = tuple(m for m in text.split(",") if m)
    unknown = [m for m in found if m not in MODES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown mode {unknown[0]}: choose from {MODES}")
    return found
