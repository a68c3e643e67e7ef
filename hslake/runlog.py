"""The run log: what runs of `extract` did, in the lake's table `runs`.

Rows are told one by one and committed together, so a long run makes few commits. Nothing depends on
them but reports, refusals and canaries: a driver that is killed loses what was not flushed yet, and
no sample with it.
"""

import json
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from hslake.errors import Missing
from hslake.schemas import arrow_schema
from hslake.store import Store
from hslake.tables import catalog

TABLE = "runs"
COMPLETE, INCOMPLETE, INTERRUPTED, FAILED = "complete", "incomplete", "interrupted", "failed"


@dataclass(frozen=True)
class Figures:
    """Where a run stands. Samples and tokens; `None` where it is not known."""

    planned: int | None = None
    committed: int | None = None
    missing: int | None = None
    captured: int = 0
    captured_tokens: int = 0
    retried: int = 0
    dropped: int = 0
    refused: int = 0


class RunLog:
    """Rows of one run. Telling only keeps them; `flush` commits what was kept, and may be called
    from another thread."""

    def __init__(self, store: Store, command: str = "extract", run_id: str | None = None) -> None:
        self.store, self.command = store, command
        self.run_id = run_id or uuid.uuid4().hex
        self._begun = time.monotonic()
        self._seq = 0
        self._kept: list[dict[str, Any]] = []
        # What is being committed, under one id: a commit whose answer was lost is not made twice.
        self._sent: tuple[str, list[dict[str, Any]]] | None = None
        self._lock = threading.Lock()  # of what is kept
        self._flushing = threading.Lock()

    def start(self, options: Mapping[str, Any], figures: Figures = Figures()) -> None:
        """The run begins, with these options (no secrets among them)."""
        host = socket.gethostname()
        self._tell("start", figures, host=host, details=_json(options))

    def progress(self, figures: Figures, servers: Sequence[Mapping[str, Any]] = ()) -> None:
        """The run goes on; `servers`: figures of each."""
        self._tell("progress", figures, details=_json(servers))

    def end(
        self,
        outcome: str,
        reason: str,
        figures: Figures,
        servers: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """The run is over."""
        self._tell("end", figures, outcome=outcome, reason=reason, details=_json(servers))

    def refuse(self, sample_id: str, token_hash: str, reason: str, server: str | None) -> None:
        """The sample is not to be asked for again."""
        sample = {"sample_id": sample_id, "token_hash": token_hash}
        self._tell("refuse", None, **sample, reason=reason, server=server)

    def allow(self, sample_id: str, token_hash: str) -> None:
        """A refused sample may be asked for again."""
        self._tell("allow", None, sample_id=sample_id, token_hash=token_hash)

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
        self._tell(
            "canary",
            None,
            sample_id=sample_id,
            token_hash=token_hash,
            attempt=attempt,
            server=server,
            first_position=first_position,
            log_probs=list(log_probs),
        )

    @property
    def kept(self) -> int:
        """Rows that are not committed yet."""
        with self._lock:
            return len(self._kept) + (len(self._sent[1]) if self._sent else 0)

    def flush(self) -> None:
        """Commit what was told so far. Raises what `catalog.commit` does; nothing is lost then, the
        next flush tries again."""
        with self._flushing:
            while self._send():
                pass

    def _send(self) -> bool:
        with self._lock:
            if self._sent is None and self._kept:
                self._sent = f"{TABLE}-{uuid.uuid4().hex}", self._kept
                self._kept = []
            sent = self._sent
        if sent is None:
            return False
        txn_id, records = sent
        fields = [f for f in arrow_schema(TABLE) if f.name != "commit_version"]
        rows = pa.Table.from_pylist(records, schema=pa.schema(fields))
        if open_runs(self.store) is None:
            catalog.ensure_table(self.store, TABLE)
        catalog.commit(self.store, TABLE, lambda _: rows, txn_id)
        with self._lock:
            self._sent = None
        return True

    def _tell(self, op: str, figures: Figures | None, **columns: Any) -> None:
        with self._lock:
            self._seq += 1
            row = {
                "op": op,
                "run_id": self.run_id,
                "seq": self._seq,
                "told_at": datetime.now(UTC),
                "command": self.command,
                "elapsed_ms": round(1000 * (time.monotonic() - self._begun)),
                **columns,
            }
            self._kept.append(row | vars(figures) if figures else row)


def open_runs(store: Store) -> catalog.TableState | None:
    """The lake's run log; None before the first run has written to it."""
    try:
        return catalog.open_table(store, TABLE)
    except Missing:
        if not catalog.has_table(store, TABLE):
            return None
    return catalog.open_table(store, TABLE)  # made between the two looks, or damaged


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)
