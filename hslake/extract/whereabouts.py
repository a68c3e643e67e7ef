"""Where captured samples are that no commit has taken in yet, as far as anybody here can tell.

A writer whose process has ended may have left its parts in staging, where the compactor takes them,
or may have gone with them (a reboot empties /dev/shm). Whoever shows all writers of its staging
folder tells which: a folder on this machine, a compactor that listens, or a server that was started
again on the same folder.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hslake.extract.items import Items
from hslake.extract.worklist import committed_attempts, held_attempts
from hslake.lake import Lake
from hslake.server import ServerStatus, WriterStatus


@dataclass(frozen=True)
class Places:
    """Samples that are captured and not committed. `waiting`: they lie in staging; `unconfirmed`:
    their writer is shown by nobody, and whether its parts are still there is not known; `lost`:
    they were captured, and are in staging no more."""

    waiting: frozenset[str]
    unconfirmed: frozenset[str]
    lost: frozenset[str]


@dataclass
class Whereabouts:
    """Remembers over a run which writer captured what, and where that writer was seen.

    `roots`: staging folders on this machine.
    """

    roots: tuple[Path, ...] = ()
    _writers: dict[str, str] = field(default_factory=dict)  # sample id -> its last writer
    _runs: dict[str, str] = field(default_factory=dict)  # writer -> the server process it is of
    _local: set[str] = field(default_factory=set)  # writers seen under `roots`
    _folders: dict[str, str] = field(default_factory=dict)  # writer -> its `WriterStatus.root`

    def captured(self, sample_id: str, writer: str) -> None:
        """`writer` has acknowledged the sample."""
        self._writers[sample_id] = writer
        if writer not in self._local and any((root / writer).is_dir() for root in self.roots):
            self._local.add(writer)

    def seen(self, writers: Iterable[WriterStatus]) -> None:
        """These writers were shown, by whomever."""
        self._folders |= {w.writer: w.root for w in writers if w.root}

    def look(
        self, lake: Lake, missing: Collection[str] | Items, statuses: Iterable[ServerStatus]
    ) -> Places:
        """Sort what was ever seen captured and is `missing` (not committed) in `lake`, which was
        opened after `statuses`, of all servers that answer and of `roots`, were read."""
        statuses = list(statuses)
        for status in statuses:
            self.seen(status.everyone)
        shown = {w.writer for status in statuses for w in status.everyone}
        whole = {root for status in statuses for root in status.roots}
        runs = _runs(statuses)
        self._runs |= runs
        going_on = set(runs.values())
        self._local |= {w for w in shown if any((root / w).is_dir() for root in self.roots)}
        held = held_attempts(statuses)
        among = _among(missing, {*self._writers, *(sample for sample, _ in held.values())})
        held = {a: at for a, at in held.items() if at[0] in among}
        self._writers = {s: w for s, w in self._writers.items() if s in among}
        done = committed_attempts(lake, held)  # and hidden since: to be asked for again
        waiting = {sample for attempt, (sample, _) in held.items() if attempt not in done}
        self._writers |= {sample: writer for sample, writer in held.values() if sample in waiting}
        unread = _unread(statuses)
        unconfirmed: set[str] = set()
        lost: set[str] = set()
        for sample, writer in self._writers.items():
            if sample in waiting:
                continue
            # Gone, if nobody shows it although its folder was on this machine, or its server
            # process goes on, or all of its staging folder is shown. It is not looked for now: what
            # a compactor has taken since the lake was opened is not lost.
            known = writer in shown or writer in self._local or self._runs.get(writer) in going_on
            known = known or self._folders.get(writer) in whole
            (lost if known and writer not in unread else unconfirmed).add(sample)
        return Places(frozenset(waiting), frozenset(unconfirmed), frozenset(lost))


def _among(missing: Collection[str] | Items, names: set[str]) -> set[str]:
    return missing.among(names) if isinstance(missing, Items) else names.intersection(missing)


def _unread(statuses: Iterable[ServerStatus]) -> set[str]:
    """Writers of which not all events came: the file is damaged, what it told of may be there."""
    newest: dict[str, tuple[int, int]] = {}
    for writer in (w for status in statuses for w in status.everyone):
        heard, told = newest.get(writer.writer, (0, 0))
        newest[writer.writer] = max(heard, writer.cursor), max(told, writer.last_seq)
    return {writer for writer, (heard, told) in newest.items() if heard < told}


def _runs(statuses: Iterable[ServerStatus]) -> dict[str, str]:
    """writer -> id of the server process that it is of."""
    documents = (w for status in statuses for w in status.raw["writers"])
    return {w["writer"]: run for w in documents if (run := w["engine"].get("run"))}
