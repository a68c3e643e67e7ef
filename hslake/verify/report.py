"""What `verify` found."""

from dataclasses import dataclass, field

from hslake.verify.agreement import Agreement

LEVELS = ("manifest", "checksum", "full")  # of what is stored, each finding more
CANARY = "canary"  # of what was captured


@dataclass(frozen=True)
class Damage:
    """One thing found wrong.

    `segment_id`: "" of a pin or a file of the model; `object`: key below the segment (of a file
    outside segments: below the lake), "" when it is a row or states; `sample_ids`: the live samples
    it costs, at level manifest those that it may cost. `sure`: quarantine may hide them.
    """

    segment_id: str
    what: str
    sample_ids: tuple[str, ...]
    object: str = ""
    sure: bool = True


@dataclass
class VerifyReport:
    """What was looked at and what was found. `warnings` may be harmless; `agreement` is of level
    canary, at which `samples` are canaries and `tokens` their positions."""

    level: str
    samples: int = 0
    tokens: int = 0
    segments: int = 0
    objects: int = 0
    bytes: int = 0
    seconds: float = 0.0
    damage: list[Damage] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    anomalies: dict[str, int] = field(default_factory=dict)
    quarantined: int = 0
    agreement: Agreement | None = None

    @property
    def ok(self) -> bool:
        return not self.damage

    def by_sample(self) -> dict[str, list[str]]:
        """What is wrong with each damaged sample."""
        found: dict[str, list[str]] = {}
        for damage in self.damage:
            for name in damage.sample_ids:
                found.setdefault(name, []).append(damage.what)
        return found

    def by_segment(self) -> dict[str, dict[str, list[str]]]:
        """Objects and samples that are damaged, by segment; "" for what belongs to none."""
        found: dict[str, dict[str, list[str]]] = {}
        for damage in self.damage:
            of = found.setdefault(damage.segment_id, {"objects": [], "samples": []})
            if damage.object and damage.object not in of["objects"]:
                of["objects"].append(damage.object)
            of["samples"] += [s for s in damage.sample_ids if s not in of["samples"]]
        return found
