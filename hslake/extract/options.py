"""What a call of `extract` is asked to do."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hslake.errors import InvalidInput
from hslake.extract.canary import SHARE, check_share
from hslake.extract.drive import Limits


@dataclass(frozen=True)
class ExtractOptions:
    """What to ask for, and how.

    `where`, `order`: SQL over the plan's columns (default order: md5 of the sample id, which mixes
    lengths); `shard`: "i/n", the i-th (from 1) of n shares by md5 of the sample id; `limit`:
    samples to ask for in this call; `staging`: staging folders on this machine that also tell what
    is captured (of servers that have ended); `until_complete`: stay until all is committed;
    `retry_refused`: ask again for what earlier runs recorded as refused; `canary_share`: of the
    requests, which also ask for log-probs (`hslake.extract.canary`); `limits`: bounds and times.
    """

    where: str | None = None
    order: str | None = None
    limit: int | None = None
    staging: tuple[str | Path, ...] = ()
    limits: Limits = field(default_factory=Limits)
    shard: str | None = None
    until_complete: bool = False
    retry_refused: bool = False
    canary_share: float = SHARE

    def __post_init__(self) -> None:
        for what, value in (("concurrency", self.limits.requests), ("limit", self.limit)):
            if value is not None and value < 1:
                raise InvalidInput(f"--{what}: found {value}, expected at least 1")
        check_share(self.canary_share)
        if self.shard is not None:
            parse_shard(self.shard)

    def told(self) -> Mapping[str, Any]:
        """What the run log keeps of them."""
        limits = vars(self.limits)
        return {**vars(self), "staging": [str(s) for s in self.staging], "limits": limits}


def parse_shard(text: str) -> tuple[int, int]:
    """`i/n` with i from 1 to n. Raises InvalidInput."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InvalidInput(f"--shard: found {text!r}, expected i/n with i from 1 to n, such as 2/4")
    return int(match[1]), int(match[2])
