"""`hslake tune`: measures which concurrency and which chunk size a run should have.

Servers are measured with the plan's own samples, which are captured for good, so no burst is work
for nothing; a plan that is covered is measured with probes, which the compactor gives up. Servers
of one chunk size are measured together, as a run has them; groups of other sizes one after another.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hslake
from hslake.errors import CheckFailed, InvalidInput, Missing, without_secrets
from hslake.extract.slot import unfit
from hslake.extract.tokenfile import TokenFile
from hslake.extract.worklist import (
    Item,
    captured_attempts,
    of_lake,
    read_ids,
    waiting_samples,
    worklist,
)
from hslake.lake import Lake
from hslake.preflight.burst import compactor_seen, probes
from hslake.preflight.probe import SOURCE
from hslake.progress import ProgressMaker, Silent
from hslake.server import Server, ServerDown, ServerStatus, new_session, whole_status
from hslake.server.listeners import server_at
from hslake.staging.check import check_roots
from hslake.status import local_statuses
from hslake.tune.advice import commands, group_of, warnings
from hslake.tune.bursts import Bursts
from hslake.tune.report import Group, Trial, TuneReport
from hslake.tune.search import FIRST, MOST, search

_ITEMS = 16_384  # planned samples, at most, that a tune may capture
_FEW = 64  # with fewer left to capture, probes are used
_PROMPTS = 256
_CHUNK = "--chunked-prefill-size"


@dataclass(frozen=True)
class TuneOptions:
    """`seconds` of a burst, `repeats` of every candidate, `first` and `most` concurrency tried.

    `chunks`: chunk sizes to start servers with, one after the other, from `sglang_args` (as behind
    `hslake serve … --`) with `python`; `probes`: capture none of the plan's samples.
    """

    seconds: float = 8.0
    repeats: int = 3
    first: int = FIRST
    most: int = MOST
    chunks: tuple[int, ...] = ()
    sglang_args: tuple[str, ...] = ()
    python: Path | None = None
    probes: bool = False

    def __post_init__(self) -> None:
        if not 0.2 <= self.seconds <= 3600:
            raise InvalidInput(f"--seconds: found {self.seconds:g}, expected 0.2 to 3600")
        for what, value in (("repeats", self.repeats), ("first", self.first)):
            if value < 1:
                raise InvalidInput(f"--{what}: found {value}, expected at least 1")
        if self.most < self.first:
            raise InvalidInput(f"--most: found {self.most}, expected at least --first {self.first}")
        if any(chunk < 1 for chunk in self.chunks):
            raise InvalidInput("--chunk: expected token counts such as 4096,8192,16384")
        if self.chunks and any(arg.split("=")[0] == _CHUNK for arg in self.sglang_args):
            raise InvalidInput(f"{_CHUNK} behind -- and --chunk are both given: leave one out")


def tune(
    lake_url: str,
    servers: Sequence[str] = (),
    options: TuneOptions = TuneOptions(),
    *,
    staging: Sequence[str | Path] = (),
    progress: ProgressMaker = Silent,
) -> TuneReport:
    """Measure the running `servers`, or servers started for it with `options.chunks`.

    `staging`: the servers' folders on this machine; with `chunks`, the one to start servers with.
    Raises InvalidInput (no server named and none to start), Missing (no lake, no plan, nobody
    answers), CheckFailed (no server captures, one does not start).
    """
    lake = hslake.open(lake_url)
    roots = [Path(s) for s in staging]
    check_roots(roots, lake.spec)
    if bool(servers) == bool(options.sglang_args):
        raise InvalidInput(
            "name running servers with --server, or give --staging DIR --chunk N,N,… and behind -- "
            "the arguments of `hslake serve` to start them with; not both"
        )
    groups: list[Group] = []
    captured = probing = 0
    told: list[str] = []
    if servers:
        tuner = _Tuner(lake, options, roots, progress)
        groups = asyncio.run(tuner.running(list(dict.fromkeys(servers))))
        captured, probing, told = tuner.captured, tuner.probing, tuner.notes
    else:
        if len(roots) != 1:
            raise InvalidInput("--staging: name the one folder that servers are started with")
        for chunk in options.chunks or (0,):
            tuner = _Tuner(hslake.open(lake_url), options, roots, progress)
            groups += tuner.started(chunk)
            captured, probing = captured + tuner.captured, probing or tuner.probing
            told += tuner.notes
    measured = [g for g in groups if g.best is not None]
    best = max(measured, key=_rate_each, default=None)
    if best is not None:
        # Less memory for the same rate is better.
        near = [g for g in measured if _rate_each(g) >= 0.98 * _rate_each(best)]
        best = min(near, key=lambda g: g.chunk or 0)
    shown = [without_secrets(u) for u in servers]
    return TuneReport(
        without_secrets(lake_url),
        bool(probing),
        captured,
        groups,
        best,
        list(dict.fromkeys([*told, *warnings(groups, compactor_seen(roots) if roots else None)])),
        commands(without_secrets(lake_url), shown, roots, options.sglang_args, best),
    )


def _rate_each(group: Group) -> float:
    """Tokens a second of one server of the group."""
    return group.best.rate / len(group.servers) if group.best else 0.0


class _Tuner:
    def __init__(
        self, lake: Lake, options: TuneOptions, roots: Sequence[Path], progress: ProgressMaker
    ) -> None:
        self.lake, self.options, self.roots, self.progress = lake, options, roots, progress
        self.captured = self.probing = 0
        self.notes: list[str] = []

    def started(self, chunk: int) -> list[Group]:
        """Start a server with this chunk size (0: its own choice), measure it and end it."""
        from hslake_sglang.process import ServerProcess

        args = list(self.options.sglang_args)
        if chunk:
            args += [_CHUNK, str(chunk)]
        with tempfile.TemporaryDirectory(prefix="hslake-tune-") as folder:
            with self.progress(None, f"a server with {_CHUNK} {chunk or 'as it is'}"):
                server = ServerProcess.for_lake(
                    self.lake.url,
                    self.roots[0],
                    args,
                    log=Path(folder) / "server.log",
                    python=self.options.python,
                )
                server.start()
            try:
                server.wait_ready(timeout=3600.0)
                return asyncio.run(self.running([server.url]))
            finally:
                server.stop()

    async def running(self, urls: Sequence[str]) -> list[Group]:
        """Measure running servers, those of one chunk size together."""
        async with new_session() as session:
            clients = [server_at(url, session, request_timeout=900.0) for url in urls]
            found = await asyncio.gather(*(whole_status(c) for c in clients))
            ready = self._ready(clients, found)
            by_chunk: dict[int | None, list[Server]] = {}
            for client, status in ready:
                by_chunk.setdefault(await _chunk(client, status), []).append(client)
            groups = []
            for chunk, members in by_chunk.items():
                trials = await self._measure(members, clients, chunk)
                groups.append(group_of(self.lake.spec, chunk, [m.url for m in members], trials))
            return groups

    def _ready(
        self, clients: Sequence[Server], found: Sequence[ServerStatus | ServerDown]
    ) -> list[tuple[Server, ServerStatus]]:
        ready, problems = [], []
        for client, status in zip(clients, found, strict=True):
            if isinstance(status, ServerDown):
                problems.append(str(status))
            elif problem := unfit(status, self.lake.spec.lake_id):
                problems.append(f"{client.url}: {problem}")
            else:
                ready.append((client, status))
        if not ready:
            raise CheckFailed("no server is ready to capture: " + "; ".join(problems))
        self.notes += [f"left out: {problem}" for problem in problems]
        return ready

    async def _measure(
        self, servers: Sequence[Server], all_of_them: Sequence[Server], chunk: int | None
    ) -> list[Trial]:
        options = self.options
        # Anew for each group: what the group before captured may wait in staging.
        found = await asyncio.gather(*(whole_status(server) for server in all_of_them))
        statuses = [s for s in found if isinstance(s, ServerStatus)]
        name = f"tune at chunk size {chunk}" if chunk else "tune"
        items, read, close = await asyncio.to_thread(self._samples, statuses)
        try:
            with self.progress(None, f"{name} (bursts)") as bar:
                spec = self.lake.spec
                async with Bursts(spec, servers, items, read, options.seconds, bar.note) as bursts:

                    async def measure(requests: int) -> Trial | None:
                        trial = await bursts.measure(requests)
                        if trial is not None:
                            bar.advance()
                        return trial

                    trials = await search(
                        measure, first=options.first, most=options.most, repeats=options.repeats
                    )
        finally:
            close()
        driver = bursts.driver
        if not self.probing:
            self.captured += driver.captured
        for why in dict.fromkeys([*driver.failed.values(), *driver.refused.values()]):
            self.notes.append(f"a sample failed: {why}")
        if driver.stopped and driver.stopped != "the time is over":
            self.notes.append(f"the bursts ended early: {driver.stopped}")
        elif not driver.left:
            self.notes.append("the samples were used up before the search was over")
        return trials

    def _samples(self, statuses: Sequence[ServerStatus]) -> tuple[Sequence[Item], Any, Any]:
        """(samples to ask for, what reads their tokens, what to call in the end)."""
        told = [*statuses, *(s for root in self.roots for s in local_statuses(root))]
        # Staging first: what is committed in between is then seen twice, not never.
        self.lake = self.lake.refresh()
        listing = worklist(self.lake)
        if not listing.planned:
            raise Missing(
                f"nothing is planned in {self.lake.url}: register samples with `hslake plan`"
            )
        held = captured_attempts(of_lake(told, self.lake.spec.lake_id))
        known = {*waiting_samples(self.lake, held), *listing.refused}
        missing = listing.missing.without(known)[:_ITEMS]
        if len(missing) >= _FEW and not self.options.probes:
            tokens = TokenFile(self.lake, missing)
            return missing, tokens.read, lambda: tokens.__exit__(None, None, None)
        self.probing = 1
        made = probes(self._prompts(), None)
        items = [Item(name, SOURCE, len(ids)) for name, ids in made.items()]

        def read(some: Sequence[Item]) -> Mapping[str, Any]:
            return {i.sample_id: np.asarray(made[i.sample_id], np.int32) for i in some}

        return items, read, lambda: None

    def _prompts(self) -> list[list[int]]:
        """Tokens of planned samples, captured or not, in the order of extraction."""
        rows = self.lake.sql(
            f"select sample_id, source, length from plan order by md5(sample_id) limit {_PROMPTS}"
        ).fetchall()
        ids = read_ids(self.lake, [Item(*row) for row in rows])
        return [ids[row[0]].tolist() for row in rows]


async def _chunk(client: Server, status: ServerStatus) -> int | None:
    """The chunk size that a server runs with; None when it does not say."""
    told = status.engine.get("chunk_size")
    if not told:
        try:
            told = (await client.info()).get("chunked_prefill_size")
        except ServerDown:
            told = None
    try:
        return int(told) if told and int(told) > 0 else None
    except (TypeError, ValueError):
        return None
