"""A lake, its staging and simulated servers, to extract in."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import hslake
from hslake.compact import compact
from hslake.extract import ExtractOptions, extract
from hslake.extract.drive import Limits
from hslake.extract.report import ExtractReport
from hslake.ids import RequestId
from tests.fakeserver import FakeServer, states_of
from tests.lakes import MadeLake, random_states

FAST = Limits(
    requests=8,
    patience=20,
    request_timeout=20,
    ack_timeout=0.5,
    backoff=0.02,
    backoff_max=0.2,
    poll_min=0.005,
    poll_max=0.05,
    strikes=2,
)


@dataclass
class World:
    """A lake with a plan, its staging, and whatever runs on it."""

    made: MadeLake
    names: list[str]

    @property
    def url(self) -> str:
        return self.made.url

    @property
    def staging(self) -> Path:
        return self.made.staging

    def serve(self, **options: object) -> FakeServer:
        return FakeServer(self.url, self.staging, **options)  # type: ignore[arg-type]

    def extract(self, *servers: FakeServer, **options: object) -> ExtractReport:
        given = ExtractOptions(**{"limits": FAST, **options})  # type: ignore[arg-type]
        return extract(self.url, [s.url for s in servers], given)

    def check_lake(self) -> None:
        """Everything planned is in the lake, once, and is what the server computed."""
        compact(self.url, [self.staging])
        lake = hslake.open(self.url)
        rows = lake.sql("select sample_id from samples").fetchall()
        assert sorted(r[0] for r in rows) == sorted(self.names)
        for name in self.names:
            sample, ids = lake.read(name), self.made.samples[name].input_ids
            np.testing.assert_array_equal(sample.input_ids, ids)
            np.testing.assert_array_equal(sample.hidden_states, states_of(lake.spec, ids))


def make_world(folder: Path, lengths: list[int]) -> World:
    lake = hslake.create(
        folder / "lake", streams=[2, 4, 6, "final"], hidden_size=8, num_layers=8, name="test"
    )
    made = MadeLake(lake.url, folder / "staging", random_states(4, 8, "bfloat16"))
    made.staging.mkdir()
    return World(made, made.plan(lengths) if lengths else [])


def once(**actions: int) -> Callable[[RequestId, int], str]:
    """A script: shares of the samples (in percent) that meet each action at their first attempt."""
    rng = random.Random(5)

    def script(rid: RequestId, nth: int) -> str:
        at = rng.randrange(100)
        for action, share in actions.items():
            if nth == 0 and at < share:
                return action.replace("_", "-")
            at -= share
        return "ok"

    return script


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
