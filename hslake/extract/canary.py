"""Canaries: requests that also ask what the server itself makes of the prompt's last tokens.

Their log-probs go into the run log. `hslake verify --level canary` makes them again from the stored
`final` rows: the check that what is stored is what the model said.

Which requests are canaries is counted, not drawn: of each server the first of a run, then one in
1 / share, evenly over the hours, so that a server that goes bad in the middle is seen. A canary is
of one attempt, so a sample that is asked for twice may be one twice, and only the one whose attempt
is live is compared. One at a time is on its way to a server: log-probs cost it a few logits more.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hslake.errors import InvalidInput

if TYPE_CHECKING:
    from hslake.extract.items import Item  # hslake.extract needs this module

log = logging.getLogger("hslake.extract")

SHARE = 0.01
POSITIONS = 64  # of the prompt's end: SGLang computes log-probs from a position to the end
_UNHEARD = 3  # canaries in a row that came to nothing before there are no more of a server


class Recorder(Protocol):
    """What canaries are told to: the run log."""

    def canary(
        self,
        sample_id: str,
        token_hash: str,
        attempt: str,
        server: str,
        first_position: int,
        log_probs: Sequence[float],
    ) -> None:
        """`server` gave these log-probs of the prompt's own tokens from `first_position` on."""


@dataclass(slots=True)
class _Of:
    """Canaries of one server."""

    credit: float  # one is due at 1
    attempt: str = ""  # of the one on its way
    unheard: int = 0
    off: bool = False


class Canaries:
    """Makes a share (0 to 1) of a run's requests canaries: see `hslake.extract.drive.Extras`.

    Whatever a server does about log-probs, the sample itself is asked for as ever: refusals and
    missing answers only end the canaries of that server, with one warning.
    """

    def __init__(self, share: float, recorder: Recorder) -> None:
        self.share = check_share(share)
        self.recorded = 0
        self._recorder = recorder
        self._of: dict[str, _Of] = {}  # by the server's address
        self._spent: set[str] = set()  # samples whose canary came to nothing: plainly from now on

    def fields(self, server: str, item: "Item", attempt: str) -> Mapping[str, Any]:
        """What a canary asks for besides; empty for all other requests."""
        of = self._of.setdefault(server, _Of(1.0 - self.share))
        if of.off or not self.share:
            return {}
        of.credit = min(of.credit + self.share, 2.0)  # what one on its way holds up comes after it
        # Sums of a hundredth are a hair off.
        if of.attempt or of.credit < 1.0 - 1e-9 or item.length < 2 or item.sample_id in self._spent:
            return {}
        of.credit -= 1.0
        of.attempt = attempt
        return {"return_logprob": True, "logprob_start_len": first_position(item.length) - 1}

    def answered(self, server: str, item: "Item", attempt: str, answer: Any) -> None:
        """The canary has ended: with `answer`, or None when it failed or was refused."""
        of = self._of[server]
        if of.attempt == attempt:
            of.attempt = ""
        if answer is None:
            self._spent.add(item.sample_id)
            of.unheard += 1
            if of.unheard >= _UNHEARD:
                self._end(server, of, f"{of.unheard} in a row were refused or failed")
            return
        of.unheard = 0
        first = first_position(item.length)
        told = _told(answer, item.length - first + 1)
        if told is None:
            self._end(server, of, "its answer has no log-probs of the prompt")
            return
        self.recorded += 1
        with np.errstate(over="ignore"):
            values = _values(told).astype(np.float32).tolist()
        name, digest = item.sample_id, item.token_hash
        self._recorder.canary(name, digest, attempt, server, first, values)

    def _end(self, url: str, of: _Of, why: str) -> None:
        if not of.off:
            of.off = True
            log.warning("%s: no more canaries of this server in this run: %s", url, why)


def check_share(share: float) -> float:
    """`share` if it is one. Raises InvalidInput."""
    if not 0.0 <= share <= 1.0:
        raise InvalidInput(f"--canary-share: found {share}, expected 0 (none) to 1 (every sample)")
    return share


def first_position(length: int) -> int:
    """The first position of a prompt of `length` tokens whose log-prob a canary asks for. The
    first token of a prompt has none."""
    return max(1, length - POSITIONS)


def prompt_log_probs(answer: Any, ids: Sequence[int]) -> np.ndarray | None:
    """The server's log-prob of ids[1], ids[2], … given what precedes each, float64 [n - 1].

    `ids`: the prompt from `logprob_start_len` on. NaN where the server has a value that JSON cannot
    hold, which it tells as null. None when the answer does not tell all of them, of these tokens.
    """
    told = _told(answer, len(ids))
    # SGLang tells the vocabulary's last token, and whatever lies beyond, as token 0.
    if told is None or any(t[1] not in (own, 0) for t, own in zip(told, ids, strict=True)):
        return None
    return _values(told)


def _told(answer: Any, count: int) -> list[Any] | None:
    """The [log-prob, token, text] of `count` tokens of the prompt, or None; the first has no
    log-prob."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    told = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(told, list) or len(told) != count:
        return None
    return told if all(map(_is_sound, told)) else None


def _is_sound(one: Any) -> bool:
    if not isinstance(one, list) or len(one) < 2:
        return False
    value = one[0]
    # An integer may have a thousand digits.
    return isinstance(value, float | None) or (isinstance(value, int) and abs(value) < 2**63)


def _values(told: list[Any]) -> np.ndarray:
    return np.array([float("nan" if t[0] is None else t[0]) for t in told[1:]], np.float64)
