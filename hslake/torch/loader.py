"""Stream one epoch of batches: exact order, exact resume, decode in threads into the batch.

    loader = HiddenStateLoader(ds, tokens_per_batch=16384, rank=rank, world_size=world_size)
    for epoch in range(loader.epoch, epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            train(batch)
            save(loader.state_dict())       # counts `batch` as done

Iterating goes on where the state says: after a `break`, and after `load_state_dict`. Every rank
gets the same number of batches; see hslake.torch.order for the plan and hslake.torch.collate for
what is in a batch.
"""

import logging
import os
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from hslake.errors import Conflict, Corrupt, HslakeError, InvalidInput, Missing
from hslake.schemas import validate
from hslake.torch.collate import (
    Batch,
    Shape,
    allocate,
    assemble,
    batch_bytes,
    items,
    slots,
)
from hslake.torch.dataset import HiddenStateDataset
from hslake.torch.order import (
    EpochPlan,
    check_batch_settings,
    check_choice,
    check_least,
    epoch_plan,
    rank_batches,
    steps,
)

ON_ERROR = ("raise", "skip", "substitute")
OVERSIZE = ("raise", "own_batch")
SUBSTITUTES_TRIED = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Damage:
    """A sample that did not read back."""

    sample_id: str
    segment_id: str
    error: str


@dataclass
class _Pending:
    """A batch being decoded: its buffers, one future per sample, and what comes after it."""

    batch: Batch
    indices: np.ndarray
    futures: list[Future[None]]
    size: int
    after: int


class HiddenStateLoader:
    """Batches of one rank, an epoch at a time.

    `tokens_per_batch`: token slots of a micro-batch (padding counts). `pad_multiple` rounds the
    token axis up. `threads` decode samples; at most `prefetch_bytes` of batches are decoded ahead
    (always at least one batch). `pin_memory` allocates page-locked batches.
    `oversize`: "raise" refuses a selection with a sample longer than `tokens_per_batch`,
    "own_batch" gives it a batch of its own above the limit.
    `on_error`: for a sample that is damaged or gone, "raise" stops, "skip" leaves it out of its
    batch (a batch with nothing left becomes a padding batch, so ranks stay in step), "substitute"
    puts the intact sample of the selection nearest in length, not longer, in its place. The batch's
    `sample_ids` say what it really holds. More than `error_budget` different damaged samples in an
    epoch on this rank raise Corrupt in any mode; `damaged` lists them.

    Ranks must open the same version: compare `plan_digest`.
    """

    def __init__(
        self,
        dataset: HiddenStateDataset,
        *,
        tokens_per_batch: int = 16384,
        layout: str = "padded",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        threads: int | None = None,
        prefetch_bytes: int = 2 << 30,
        on_error: str = "raise",
        error_budget: int = 16,
        oversize: str = "raise",
        pad_multiple: int = 1,
        pin_memory: bool = False,
    ) -> None:
        if not isinstance(dataset, HiddenStateDataset):
            raise InvalidInput(f"dataset: found {dataset!r}, expected a HiddenStateDataset")
        check_batch_settings(tokens_per_batch, layout, pad_multiple)
        check_choice("on_error", on_error, ON_ERROR)
        check_choice("oversize", oversize, OVERSIZE)
        check_least("threads", 1 if threads is None else threads, 1)
        check_least("prefetch_bytes", prefetch_bytes, 0)
        check_least("error_budget", error_budget, 0)
        if world_size < 1 or not 0 <= rank < world_size:
            raise InvalidInput(
                f"found rank={rank} and world_size={world_size}, expected 0 <= rank < world_size"
            )
        if world_size > 1 and dataset.follows_latest:
            log.info("pass set_epoch(epoch, version=...) so that all ranks read the same version")
        self.dataset = dataset
        self.tokens_per_batch = tokens_per_batch
        self.layout = layout
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.threads = threads or min(8, os.cpu_count() or 1)
        self.prefetch_bytes = prefetch_bytes
        self.on_error = on_error
        self.error_budget = error_budget
        self.oversize = oversize
        self.epoch = 0
        self.consumed = 0
        self._shape: Shape = dataset.shape(layout, pad_multiple, pin_memory)
        self._damaged: dict[str, Damage] = {}
        self._plan: EpochPlan | None = None
        self._finished = False
        # Weak: an iteration left by `break` ends, and its threads with it, when the caller lets go.
        self._running: weakref.ref[Generator[Batch, None, None]] | None = None

    # --- position -----------------------------------------------------------------------------

    @property
    def plan(self) -> EpochPlan:
        """The micro-batches of this epoch, for all ranks."""
        if self._plan is None:
            self._plan = self._make_plan(self.epoch)
        return self._plan

    @property
    def plan_digest(self) -> str:
        """Hex SHA-256 of the plan: equal on all ranks, or they would read different things."""
        return self.plan.digest

    @property
    def damaged(self) -> list[Damage]:
        """The damaged samples met in this epoch, each once."""
        return list(self._damaged.values())

    def __len__(self) -> int:
        """Batches of a whole epoch on each rank (see `consumed` for the position)."""
        return steps(len(self.plan), 0, self.world_size)

    def set_epoch(self, epoch: int, version: int | None = None) -> None:
        """Go to the start of `epoch`.

        For the epoch that a loaded state is in, its position is kept. A dataset that follows the
        latest version moves to it (or to `version`, which several ranks need to agree on).
        """
        if epoch == self.epoch and not self._finished and version in (None, self.dataset.version):
            return
        if version is not None and not self.dataset.follows_latest:
            raise InvalidInput(
                "set_epoch(version=...) needs a dataset made with version='latest-per-epoch'; this "
                f"one is pinned to version {self.dataset.version}"
            )
        self._stop()
        if self.dataset.follows_latest:
            if version is None and self.world_size > 1:
                raise InvalidInput(
                    "with version='latest-per-epoch' and several ranks, each would find another "
                    "latest version: let rank 0 choose one and call set_epoch(epoch, version=...)"
                )
            self.dataset.refresh(version)
        self._plan, self.epoch, self.consumed, self._finished = None, epoch, 0, False
        self._damaged.clear()
        self._plan = self._make_plan(epoch)

    def reset(self) -> None:
        """Back to the start of this epoch."""
        self._stop()
        self.consumed, self._finished = 0, False
        self._damaged.clear()

    def state_dict(self) -> dict[str, Any]:
        """Where the run is: the batches handed out so far count as done, on every rank.

        The same on all ranks after the same number of batches, so one copy is enough, and it may
        be loaded with another rank count.
        """
        return {
            "version": self.dataset.version,
            "plan_digest": self.plan_digest,
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self.consumed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Nothing changes when it does not fit.

        InvalidInput: not a state, or of another seed. Conflict: of another version or plan, so that
        going on would replay or skip samples.
        """
        try:
            validate(state, "loader_state", "loader state")
        except InvalidInput as error:
            raise InvalidInput(f"{error}: pass what state_dict() returned") from None
        if state["seed"] != self.seed:
            raise InvalidInput(
                f"loader state: seed {state['seed']}, but this loader has seed {self.seed}: make "
                f"it with seed={state['seed']}"
            )
        before = self.dataset.version
        if state["version"] != before:
            if not self.dataset.follows_latest:
                raise Conflict(
                    f"loader state: lake version {state['version']}, but the dataset reads version "
                    f"{before}: open it with version={state['version']}"
                )
            self.dataset.refresh(state["version"])
        try:
            plan = self._make_plan(state["epoch"])
            if plan.digest != state["plan_digest"] or not 0 <= state["consumed"] <= len(plan):
                raise Conflict(
                    f"loader state: plan {state['plan_digest'][:12]} at batch {state['consumed']}, "
                    f"but here epoch {state['epoch']} is plan {plan.digest[:12]} of {len(plan)} "
                    "batches. The lake, where, split, tokens_per_batch, layout and pad_multiple "
                    "must be those of the saved run"
                )
        except HslakeError:
            if self.dataset.version != before:
                self.dataset.refresh(before)
            raise
        self._stop()
        self._plan, self.epoch, self.consumed = plan, state["epoch"], state["consumed"]
        self._finished = False
        self._damaged.clear()

    # --- batches ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """The rest of this epoch; once that was handed out, the next epoch."""
        self._stop()
        if self._finished:
            self.set_epoch(self.epoch + 1)
        batches = self._batches()
        self._running = weakref.ref(batches)
        return batches

    def close(self) -> None:
        """End the threads of an iteration that was left early."""
        self._stop()

    def _stop(self) -> None:
        running = self._running() if self._running is not None else None
        if running is not None:
            running.close()
        self._running = None

    def _make_plan(self, epoch: int) -> EpochPlan:
        if not len(self.dataset):
            raise InvalidInput(
                f"{self.dataset.describe()} selects no sample: check where and split, or extract "
                "and compact first"
            )
        plan = epoch_plan(
            self.dataset.refs,
            seed=self.seed,
            epoch=epoch,
            tokens_per_batch=self.tokens_per_batch,
            layout=self.layout,
            multiple=self._shape.multiple,
            oversize=self.oversize,
        )
        if plan.oversized:
            log.warning(
                "%d samples are longer than tokens_per_batch=%d and get batches of their own",
                plan.oversized,
                self.tokens_per_batch,
            )
        return plan

    def _batches(self) -> Generator[Batch, None, None]:
        plan = self.plan
        todo = rank_batches(len(plan), self.consumed, self.rank, self.world_size)
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="hslake-loader")
        pending: deque[_Pending] = deque()
        upcoming = next(todo, None)

        def fill() -> None:
            """Submit batches while they fit into the prefetch budget; always at least one."""
            nonlocal upcoming
            held = sum(p.size for p in pending)
            while upcoming is not None:
                number, after = upcoming
                indices = plan.samples[:0] if number is None else plan.batch(number)
                size = batch_bytes(self._shape, self.dataset.lengths[indices].tolist())
                if pending and held + size > self.prefetch_bytes:
                    return
                pending.append(self._submit(pool, indices, size, after))
                held += size
                upcoming = next(todo, None)

        try:
            fill()
            while pending:
                done = self._finish(pending[0])
                self.consumed = pending.popleft().after
                self._finished = self.consumed == len(plan)
                fill()  # before handing out: decoding goes on while the caller trains
                yield done
                del done  # the caller's alone from here on
            self._finished = True
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(
        self, pool: ThreadPoolExecutor, indices: np.ndarray, size: int, after: int
    ) -> _Pending:
        lengths = self.dataset.lengths[indices].tolist()
        ids = [self.dataset.sample_id(i) for i in indices]
        batch = allocate(self._shape, ids, lengths)
        futures = [
            pool.submit(self.dataset.read_into, int(i), batch, slot)
            for i, slot in zip(indices, slots(self._shape, lengths), strict=True)
        ]
        return _Pending(batch, indices, futures, size, after)

    def _finish(self, pending: _Pending) -> Batch:
        """Wait for the batch; deal with its damaged samples."""
        bad: dict[int, Exception] = {}
        for i, future in enumerate(pending.futures):
            try:
                future.result()
            except (Corrupt, Missing) as error:
                bad[i] = error
        if not bad:
            return pending.batch
        for i, damage in bad.items():
            self._record(int(pending.indices[i]), damage)
        whole = items(pending.batch, self._shape)
        kept = []
        for i, item in enumerate(whole):
            if i not in bad:
                kept.append(item)
            elif self.on_error == "substitute":
                kept += self._substitute(int(pending.indices[i]), pending.indices)
        return assemble(kept, self._shape)

    def _record(self, index: int, error: Exception) -> None:
        """Count and name a damaged sample; raise when that is the mode or the budget is spent."""
        damage = Damage(self.dataset.sample_id(index), self.dataset.segment_id(index), str(error))
        if damage.sample_id not in self._damaged:
            log.warning("damaged sample %s (%s): %s", *_fields(damage))
        self._damaged[damage.sample_id] = damage
        if self.on_error == "raise":
            raise Corrupt(
                f"sample {damage.sample_id!r} in segment {damage.segment_id} does not read back: "
                f"{error}. Hide it with `hslake verify --quarantine` and fetch it again, or go on "
                'without it with on_error="skip"'
            ) from error
        if len(self._damaged) > self.error_budget:
            raise Corrupt(
                f"{len(self._damaged)} damaged samples in epoch {self.epoch}, more than "
                f"error_budget={self.error_budget}: {', '.join(sorted(self._damaged))}. "
                "Run `hslake verify --quarantine`"
            ) from error

    def _substitute(self, index: int, batch: np.ndarray) -> list[dict[str, Any]]:
        """The intact sample nearest in length that fits in the damaged one's place, or nothing.

        Depends on the plan and on which samples are damaged, never on timing.
        """
        lengths = self.dataset.lengths[self.plan.samples]
        fits = self.plan.samples[lengths <= self.dataset.lengths[index]]
        fits = fits[~np.isin(fits, batch)]
        nearest = fits[np.argsort(-self.dataset.lengths[fits], kind="stable")]
        for candidate in nearest[:SUBSTITUTES_TRIED].tolist():
            try:
                return [self.dataset[candidate]]
            except (Corrupt, Missing) as error:
                self._record(candidate, error)
        return []


def _fields(damage: Damage) -> tuple[str, str, str]:
    return damage.sample_id, damage.segment_id, damage.error
