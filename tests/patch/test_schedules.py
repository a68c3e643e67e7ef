"""Whatever the scheduler does, a sample reported captured has exactly its own rows, once."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hslake_sglang import capture as capture_module
from hslake_sglang.capture import Capture
from hslake_sglang.taps import Taps, find_logits_processors, logits_inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hslake.checksum import sample_checksum
from hslake.ids import RequestId
from hslake.staging import Reserved, StagingWriter, read_part, read_status, scan
from hslake.staging.part import DONE
from hslake.staging.reader import read_rows
from tests.patch.toy import VOCAB, Toy, make_batch, make_spec
from tests.sim.scheduler import Entry, Request, Scheduler

STREAMS = ("0", "2", "4", "final")
LAKE = "0123abcd"
LONGEST = 12


@dataclass(frozen=True)
class Stored:
    """A complete sample as a compactor finds it in staging."""

    row: Reserved
    hidden: list[np.ndarray]  # float32 [length, hidden] of each stream
    input_ids: list[int]


class Run:
    """The real capture and the real writer under a scheduler, and a compactor that only collects.

    `prompts` has, for each request id, the prompts that were sent with it.
    """

    def __init__(self, root: Path, *, chunk: int, mixed: bool, parts: int, part: int) -> None:
        self.root, self.spec, self.model = root, make_spec(STREAMS), Toy()
        self.writer = StagingWriter(
            root, self.spec, part_tokens=part, max_parts=parts, fingerprint={}, engine={}
        )
        self.capture = Capture(self.spec, Taps(self.model, self.spec), self.writer, upkeep=False)
        (processor,) = find_logits_processors(self.model)
        processor.register_forward_pre_hook(
            lambda m, args, kwargs: self.capture.before_logits(*logits_inputs(args, kwargs)),
            with_kwargs=True,
        )
        self.scheduler = Scheduler(self.forward, chunk=chunk, mixed=mixed)
        self.pad = 0
        self.sent: list[Request] = []
        self.stored: list[Stored] = []

    def forward(self, entries: list[Entry], mode: str) -> None:
        batch = make_batch(entries, mode)
        if mode == "DECODE":
            batch.extend_seq_lens_cpu = batch.extend_prefix_lens_cpu = None
        self.capture.before_forward(batch)
        self.model(batch.input_ids, self.pad)

    def submit(self, rid: str, prompt: list[int], new_tokens: int) -> None:
        request = Request(rid, prompt, new_tokens)
        if self.scheduler.submit(request):
            self.sent.append(request)

    def collect(self, *, everything: bool = False) -> None:
        """Take what is complete in sealed parts, as the compactor does, and mark them DONE."""
        for found in scan(self.root):
            for path in found.parts:
                info = read_part(path, dead=everything)
                if info.done or not (info.sealed or everything):
                    continue
                assert info.damage is None
                for row in info.reserved:
                    if row.state == "complete":
                        bits, ids = read_rows(info, row)
                        hidden = [np.array(b).view(np.float32) for b in bits]
                        self.stored.append(Stored(row, hidden, ids.tolist()))
                (path / DONE).touch()

    def drain(self) -> None:
        for _ in range(1000):
            if not self.scheduler.alive:
                return
            self.scheduler.step()
        raise AssertionError("the scheduler's model does not come to an end")

    def attempts(self) -> dict[str, list[Request]]:
        """This lake's requests by attempt: several when an id came again."""
        found: dict[str, list[Request]] = {}
        for request in self.sent:
            parts = request.rid.split(".")
            if parts[:2] == ["hslake", LAKE] and len(parts) == 6:
                found.setdefault(parts[2], []).append(request)
        return found

    def events(self) -> list[dict[str, Any]]:
        (writer,) = read_status(self.root)["writers"]
        return writer["events"]

    def check(self) -> None:
        """The promises, once the capture is closed and everything is collected."""
        attempts = self.attempts()
        events = self.events()
        assert {e["attempt"] for e in events} <= set(attempts), "something foreign was told of"
        captured = Counter(e["attempt"] for e in events if e["state"] == "captured")
        dropped = {e["attempt"] for e in events if e["state"] == "dropped"}
        assert captured == Counter(s.row.attempt for s in self.stored)
        assert not captured or max(captured.values()) == 1, "an attempt was stored twice"
        for stored in self.stored:
            requests = attempts[stored.row.attempt]
            assert stored.input_ids in [r.prompt for r in requests], "not the rows of one request"
            assert any(r.prefilled and r.prompt == stored.input_ids for r in requests)
            truth = self.model.truth(stored.input_ids)
            for i, stream in enumerate(STREAMS):
                expected = truth[stream].numpy()
                np.testing.assert_allclose(stored.hidden[i], expected, rtol=1e-6, atol=1e-6)
                bits = stored.hidden[i].view(np.uint32)
                assert sample_checksum(bits) == stored.row.checksum[i]
        for attempt, requests in attempts.items():
            if any(r.prefilled for r in requests):
                assert attempt in captured or attempt in dropped, "lost, and nobody was told"


@contextmanager
def running(**options: Any) -> Iterator[Run]:
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="hslake-test-", dir=base) as folder:
        run = Run(Path(folder), **options)
        try:
            yield run
        finally:
            run.capture.close()


def name(number: int, length: int, kind: str = "ours") -> str:
    """A request id. `foreign` is another lake's; strangers are named as SGLang does, or nearly as
    we do."""
    if kind == "stranger":
        return f"{number:032x}" if number % 2 else f"hslake.{LAKE}.stranger{number}"
    lake8 = LAKE if kind == "ours" else "ffffffff"
    return RequestId(lake8, f"att{number:05d}", length, "A1", f"sample-{number}").encode()


def prompt(number: int, length: int) -> list[int]:
    return np.random.default_rng(number).integers(0, VOCAB, length).tolist()


# One thing that happens to the server; the numbers choose which of what there is.
number = st.integers(0, 30)
request = st.tuples(
    st.sampled_from(["ours", "stranger", "ours", "foreign"]),
    st.integers(1, LONGEST),
    st.integers(0, 4),
)
happening = st.one_of(
    # Several at once: what comes alone is computed alone.
    st.tuples(st.just("submit"), st.lists(request, min_size=1, max_size=4)),
    st.tuples(st.just("submit"), st.lists(request, min_size=2, max_size=4)),
    st.tuples(st.just("step"), st.integers(0, 3)),
    st.tuples(st.just("retract"), number),
    st.tuples(st.just("abort"), number),
    st.tuples(st.just("again"), number, st.booleans()),
    st.tuples(st.just("collect")),
)


def happen(run: Run, what: tuple) -> None:
    kind, *more = what
    if kind == "submit":
        for whose, length, new_tokens in more[0]:
            i = len(run.sent)
            run.submit(name(i, length, whose), prompt(i, length), new_tokens)
    elif kind == "step":
        (run.pad,) = more
        run.scheduler.step()
    elif kind == "retract":
        run.scheduler.retract(*more)
    elif kind == "abort":
        run.scheduler.abort(*more)
    elif kind == "again" and run.scheduler.ended:
        old = run.scheduler.ended[more[0] % len(run.scheduler.ended)]
        # The same id again, perhaps with other tokens: rows of the two must never mix.
        tokens = [(t + 1) % VOCAB for t in old.prompt] if more[1] else old.prompt
        run.submit(old.rid, tokens, old.new_tokens)
    elif kind == "collect":
        run.collect()


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    happenings=st.lists(happening, min_size=5, max_size=60),
    chunk=st.integers(1, 16),
    mixed=st.booleans(),
    parts=st.integers(1, 3),
)
def test_whatever_the_schedule(
    happenings: list[tuple], chunk: int, mixed: bool, parts: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_module, "MAX_WAIT_S", 0.0)  # staging of few parts is often full
        with running(chunk=chunk, mixed=mixed, parts=parts, part=2 * LONGEST) as run:
            for what in happenings:
                happen(run, what)
            run.drain()
            assert run.capture.armed
            run.capture.close()
            run.collect(everything=True)
            run.check()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    happenings=st.lists(happening, min_size=5, max_size=60),
    chunk=st.integers(1, 16),
    mixed=st.booleans(),
)
def test_with_room_for_everything_nothing_is_dropped(
    happenings: list[tuple], chunk: int, mixed: bool
) -> None:
    """Every attempt computed to its prompt's end is captured, however often it was interrupted."""
    with running(chunk=chunk, mixed=mixed, parts=2, part=80 * LONGEST) as run:
        for what in happenings:
            happen(run, what)
        run.drain()
        run.capture.close()
        run.collect(everything=True)
        run.check()
        sent = run.attempts()
        complete = {a for a, requests in sent.items() if any(r.prefilled for r in requests)}
        assert {s.row.attempt for s in run.stored} == complete
