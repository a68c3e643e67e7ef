"""What a call of `compact` reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class CompactReport:
    """What one call did.

    `replaced` of the samples took the place of ones of a former generation of the plan. `waiting`:
    samples still arriving in the parts read last. `duplicates`: samples captured once
    more although the lake has them. `abandoned`: reason -> samples given up, without the probes of
    preflight, which nobody wants; `damage`: journals and rows that do not read; extract asks for
    both again. `refused`: for each writer of another lake or model what is wrong with its parts; it
    is left alone. `skipped`: writers that
    another process compacted at the last look; nothing here counts what they hold. `troubles`: what
    could not be done now and may mend by itself; nothing is lost by it, the samples are in staging.
    `tries`: how often something went wrong so far, `last_error` the newest of it. `backlog_*`: what
    was complete in staging and not in the lake, at the last look. `tokens_per_s`: committed over
    the last two minutes, at the last commit. `stopped`: ended by `stop`, so
    what was not committed is still in staging.
    """

    samples: int = 0
    tokens: int = 0
    segments: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    replaced: int = 0
    duplicates: int = 0
    abandoned: dict[str, int] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    waiting: int = 0
    backlog_samples: int = 0
    backlog_rows: int = 0
    committed_at: float | None = None
    tokens_per_s: float = 0.0
    looks: int = 0
    tries: int = 0
    last_error: str | None = None
    version: int | None = None
    stopped: bool = False

    @property
    def passed(self) -> bool:
        """Nothing was damaged, nothing refused, and nothing is in trouble at the end."""
        return not self.damage and not self.refused and not self.troubles

    def count(self, given_up: Mapping[str, int], duplicates: int) -> None:
        """A part has gone: these samples of it are not in the lake through it."""
        for reason, n in given_up.items():
            self.abandoned[reason] = self.abandoned.get(reason, 0) + n
        self.duplicates += duplicates

    def messages(self) -> list[str]:
        """What a person should know at once."""
        skipped = [
            f"writer {w} is being compacted by another process: skipped" for w in self.skipped
        ]
        return [*self.refused, *self.damage, *skipped]


def tell(messages: list[str], message: str) -> None:
    """Add `message` once: a watching compactor comes by every second."""
    if message not in messages:
        messages.append(message)
