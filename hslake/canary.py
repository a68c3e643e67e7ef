"""Canaries: requests that also ask what the server itself makes of the prompt's last tokens.

Their log-probs go into the run log. `hslake verify --level canary` makes them again from the stored
`final` rows: the check that what is stored is what the model said.

Which requests are canaries is counted, not drawn: of each server the first of a run, then one in
1 / share, evenly over the hours, so that a server that goes bad in the middle is seen. A canary is
of one attempt, so a sample that is asked for twice may be one twice, and only the one whose attempt
is live is compared. One at a time is on its way to a server: log-probs cost it a few logits more.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hslake.errors import InvalidInput
from hslake.ids import RequestId, token_hash
from hslake.server import RequestRefused, Server

log = logging.getLogger("hslake.extract")

SHARE = 0.01
POSITIONS = 64  # of the prompt's end: SGLang computes log-probs from a position to the end
_UNHEARD = 3  # canaries in a row without an answer before there are no more of a server


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
    asking: bool = False
    unheard: int = 0
    off: bool = False


class Canaries:
    """Sends the requests of one run, a share of them as canaries. `share`: 0 to 1; 0: none.

    Whatever a server does about log-probs, the sample itself is asked for as ever: a refusal or a
    missing answer only ends the canaries of that server, with one warning.
    """

    def __init__(self, share: float, recorder: Recorder) -> None:
        self.share = check_share(share)
        self.recorded = 0
        self._recorder = recorder
        self._of: dict[str, _Of] = {}  # by the server's address
        self._spent: set[str] = set()  # samples whose canary came to nothing: plainly from now on

    async def generate(self, server: Server, rid: RequestId, ids: Any) -> Any:
        """As `Server.generate`: sends `ids` under `rid`, and returns and raises the same."""
        of = self._of.setdefault(server.url, _Of(1.0 - self.share))
        if not self._due(of, rid):
            return await server.generate(rid, ids)
        hashed, first = token_hash(ids), first_position(rid.length)
        tail = np.asarray(ids[first - 1 :]).tolist()  # the driver lets go of `ids` when it likes
        more = {"return_logprob": True, "logprob_start_len": first - 1}
        of.asking, heard = True, False
        try:
            answer = await server.generate(rid, ids, **more)
            heard = True
        except RequestRefused as error:
            heard = True
            # Of the sample or of its log-probs? Asked for plainly, the server tells.
            answer = await server.generate(rid, ids)
            self._end(server.url, of, f"it refuses log-probs: {error}")
            return answer
        finally:
            of.asking, of.unheard = False, 0 if heard else of.unheard + 1
            if not heard:
                self._spent.add(rid.sample_id)
                if of.unheard >= _UNHEARD:
                    self._end(server.url, of, f"{of.unheard} in a row came to nothing")
        told = prompt_log_probs(answer, tail)
        if told is None:
            self._end(server.url, of, "its answer has no log-probs of the prompt")
            return answer
        self.recorded += 1
        values = told.astype(np.float32).tolist()
        self._recorder.canary(rid.sample_id, hashed, rid.attempt, server.url, first, values)
        return answer

    def _due(self, of: _Of, rid: RequestId) -> bool:
        if of.off or not self.share:
            return False
        of.credit = min(of.credit + self.share, 2.0)  # what one on its way holds up comes after it
        if of.asking or of.credit < 1.0 - 1e-9 or rid.length < 2 or rid.sample_id in self._spent:
            return False
        of.credit -= 1.0
        return True

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
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    told = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(told, list) or len(told) != len(ids):
        return None
    try:  # [log-prob, token, text] each; the first has no log-prob
        # SGLang tells the vocabulary's last token, and whatever lies beyond, as token 0.
        if any(t[1] not in (own, 0) for t, own in zip(told, ids, strict=True)):
            return None
        return np.array([float("nan" if t[0] is None else t[0]) for t in told[1:]], np.float64)
    except (TypeError, ValueError, IndexError, KeyError):
        return None
