"""What `hslake demo` shows: titles and times while it runs, and the closing summary."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from hslake.units import format_bytes, format_count


@dataclass(frozen=True)
class Check:
    """How often one kind of check passed."""

    name: str
    passed: int
    total: int


@dataclass(frozen=True)
class DemoReport:
    """The closing summary.

    `coverage`: rows of the named query of that name, the total last. Losses are nats a token on
    the first prediction; agreements are shares of the target's own choices, one per draft step,
    on the validation split. `phases`: seconds by name.
    """

    engine: str
    lake: str
    samples: int
    tokens: int
    raw_bytes: int
    stored_bytes: int
    ratio: float
    coverage: list[dict[str, Any]]
    checks: list[Check]
    train_loss_before: float
    train_loss_after: float
    validation_loss_before: float
    validation_loss_after: float
    agreement_before: list[float]
    agreement_after: list[float]
    updates: int
    epochs: float
    draft: str
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)


class Show:
    """Titles, notes and times of the phases, and the closing summary."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, what: str) -> Iterator[None]:
        """Print a title, time what happens inside."""
        self.console.print(f"[bold cyan]{name:>10}[/]  {what}", highlight=False, soft_wrap=True)
        start = time.monotonic()
        yield
        self.phases[name] = time.monotonic() - start
        self.note(f"[dim]{self.phases[name]:.1f} s[/]")

    def note(self, text: str) -> None:
        """One line under the current title."""
        self.console.print(f"{'':>12}{text}", highlight=False, soft_wrap=True)

    def summary(self, r: DemoReport) -> None:
        """The closing summary, with two commands to go on."""
        engine = {"sglang": "SGLang server with the dump hook", "hf": "Hugging Face transformers"}
        passed = ", ".join(f"{c.name} {c.passed} of {c.total}" for c in r.checks)
        sources: dict[str, list[int]] = {}
        for row in r.coverage[:-1]:
            counts = sources.setdefault(row["source"], [0, 0])
            counts[0] += row["committed"]
            counts[1] += row["planned"]
        covered = ", ".join(f"{s} {done} of {all_}" for s, (done, all_) in sources.items())
        shares = [
            " ".join(f"{a:.1%}" for a in part) for part in (r.agreement_before, r.agreement_after)
        ]
        rows = [
            ("engine", engine[r.engine]),
            ("samples", f"{format_count(r.samples)}, {format_count(r.tokens)} tokens"),
            (
                "bytes",
                f"{format_bytes(r.raw_bytes)} raw, {format_bytes(r.stored_bytes)} stored, "
                f"ratio {r.ratio:.3f}",
            ),
            ("coverage", covered),
            ("checks", passed),
            ("training loss", f"{r.train_loss_before:.2f} -> {r.train_loss_after:.2f} nats"),
            (
                "validation loss",
                f"{r.validation_loss_before:.2f} -> {r.validation_loss_after:.2f} nats",
            ),
            ("agreement", f"{shares[0]} -> {shares[1]} (draft steps 1, 2, 3)"),
            ("draft head", r.draft),
            ("lake", r.lake),
            ("time", f"{r.seconds:.0f} s"),
        ]
        self.console.print()
        for name, text in rows:
            self.console.print(f"[bold]{name:>16}[/]  {text}", highlight=False, soft_wrap=True)
        command = sys.argv[0] if Path(sys.argv[0]).name == "hslake" else "hslake"
        self.console.print("\n  Try:")
        for tail in (
            f"query {r.lake} coverage",
            f'query {r.lake} "select source, split, count(*) samples, sum(length) tokens '
            'from samples group by all order by all"',
        ):
            self.console.print(f"    {command} {tail}", highlight=False, soft_wrap=True)
