"""S3 that fails: every fault of the proxy at random under create, plan, compact, query, read, a
loader's epoch and verify.

    python -m tests.faults.stores [--count ROUNDS] [--seed S] [--fault NAME ...] [--out FILE.json]

Each step ends well, or with an error that says that a retry may mend it, and is then repeated. In
the end, without the proxy, the lake must hold every sample exactly once, bit for bit.
"""

import argparse
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import hslake
from hslake.compact import compact
from hslake.errors import CheckFailed, Conflict, HslakeError, InvalidInput, NoSpace, Unavailable
from hslake.plan import plan_files
from hslake.query import execute
from hslake.verify import verify
from tests.faults.proxy import FAULTS, Proxy, Request, proxied
from tests.faults.results import RESULTS, record
from tests.lakes import MadeLake, random_states
from tests.s3server import Server, moto

MENDABLE = (Unavailable, NoSpace, Conflict)
LENGTHS = (300, 20, 700, 90)
TRIES = 40
# Of the requests, how many meet the fault: those that hang cost a timeout each.
RATES = {"hang": 0.02, "hang-after": 0.02, "412-done": 1.0, "stale-list": 0.5}
RATE = 0.12
ENVIRONMENT = {
    "HSLAKE_S3_TIMEOUT": "20",
    "HSLAKE_S3_RETRY": "20",
    "AWS_MAX_ATTEMPTS": "4",
    "AWS_RETRY_MODE": "standard",
}


@dataclass
class Counts:
    """What happened. `wrong` and what follows must stay empty or 0."""

    lakes: int = 0
    steps: int = 0
    requests: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    clear_errors: Counter[str] = field(default_factory=Counter)
    refused_stores: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    duplicated: int = 0
    torn: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        total = sum(self.injected.values())
        return {**self.__dict__, "faults": total, "injected": dict(self.injected)} | {
            "clear_errors": dict(self.clear_errors)
        }


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """os.environ with these, and no other AWS_ variables, for a while."""
    before = dict(os.environ)
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def at_random(fault: str, seed: int) -> Callable[[Request], str | None]:
    """A rule: a share of all requests meets the fault."""
    rng = random.Random(f"{fault} {seed}")
    rate = RATES.get(fault, RATE)

    def rule(request: Request) -> str | None:
        # Delta and DuckDB cannot see that an answer which says it is whole is not: docs/stores.md.
        ours = "/segments/" in request.path or request.path.endswith("/hslake.json")
        return fault if (fault != "short" or ours) and rng.random() < rate else None

    return rule


def one_lake(server: Server, fault: str, seed: int, folder: Path, counts: Counts) -> None:
    """Make, fill and use one lake with the fault, then look at what is there."""
    bucket = f"stores-{fault.lower()}-{seed}"
    server.client().create_bucket(Bucket=bucket)
    url = f"s3://{bucket}/lake"
    settings = {**server.environment(), **ENVIRONMENT}
    if fault.startswith("hang"):
        settings["HSLAKE_S3_TIMEOUT"] = "1.5"
    folder.mkdir(parents=True)
    with proxied(server.url) as proxy, environment(settings | {"AWS_ENDPOINT_URL": proxy.url}):
        if fault == "no-condition":
            _refused(url, proxy, counts)
        else:
            made = _used(url, proxy, at_random(fault, seed), folder, f"{fault} {seed}", counts)
            proxy.rule = None
            counts.lakes += 1
            _compare(made, f"{fault} {seed}", counts)
        counts.injected.update(proxy.done)
        counts.requests += len(proxy.seen)


def _refused(url: str, proxy: Proxy, counts: Counts) -> None:
    """A store that ignores the condition takes no lake."""
    proxy.rule = lambda _: "no-condition"
    try:
        hslake.create(url, hidden_size=8, num_layers=8, capture="2,final")
        counts.wrong.append("no-condition: a lake was made")
    except CheckFailed:
        counts.refused_stores += 1


def _used(
    url: str,
    proxy: Proxy,
    rule: Callable[[Request], str | None],
    folder: Path,
    where: str,
    counts: Counts,
) -> MadeLake:
    made = MadeLake(url, folder / "staging", random_states(2, 8, "bfloat16"))
    made.staging.mkdir()

    def step(name: str, call: Callable[[], Any], fine: tuple[type[Exception], ...] = ()) -> Any:
        """Repeat a call until it ends well (or so that an earlier try must have)."""
        for tried in range(TRIES):
            counts.steps += 1
            proxy.rule = rule
            try:
                return call()
            except fine:
                if tried:
                    return None
                raise
            except MENDABLE as error:
                counts.clear_errors[f"{name}: {type(error).__name__}"] += 1
            except Exception as error:
                kind = "hslake's" if isinstance(error, HslakeError) else "foreign"
                counts.wrong.append(f"{where}: {name}: {kind} {type(error).__name__}: {error}")
                if isinstance(error, HslakeError) and server_secret(str(error)):
                    counts.wrong.append(f"{where}: {name}: a secret in a message")
            finally:
                proxy.rule = None
        counts.wrong.append(f"{where}: {name} failed {TRIES} times")
        return None

    model: dict[str, Any] = {"hidden_size": 8, "num_layers": 4, "dtype": "bfloat16"}
    # "there is a lake already": an earlier try made it, and its answer was lost.
    if where.startswith("stale-list"):  # deltalake waits for ever for the entry 0 that it wrote
        hslake.create(url, capture="2,final", **model)
    else:
        step("create", lambda: hslake.create(url, capture="2,final", **model), (InvalidInput,))

    def plan() -> None:
        if not made.samples:
            made.plan(LENGTHS)  # which makes them first
        else:
            plan_files(url, [folder / f"plan-{len(LENGTHS)}.parquet"])

    step("plan", plan)
    made.stage(list(made.samples))
    step("compact", lambda: compact(url, [made.staging]))
    step("again", lambda: compact(url, [made.staging]))

    def query() -> None:
        text = "select count(*) as n, sum(length) as tokens from samples"
        rows = execute(hslake.open(url).connect(), text).to_pylist()
        if rows != [{"n": len(LENGTHS), "tokens": sum(LENGTHS)}]:
            counts.wrong.append(f"{where}: the query found {rows}")

    def read() -> None:
        lake = hslake.open(url)
        for name, truth in made.samples.items():
            if not np.array_equal(lake.read(name).hidden_states, truth.states):
                counts.wrong.append(f"{where}: {name} reads differently")

    def check() -> None:
        report = verify(url, "full", quarantine=True)
        if report.damage:
            counts.wrong.append(f"{where}: verify calls it damaged: {report.damage}")

    for name, call in (("query", query), ("read", read), ("verify", check)):
        step(name, call)
    step("loader", lambda: _epoch(made, where, counts))
    return made


def server_secret(text: str) -> bool:
    """Whether the test server's secret stands in a text."""
    return Server("").secret in text


def _epoch(made: MadeLake, where: str, counts: Counts) -> None:
    from hslake.torch import HiddenStateDataset, HiddenStateLoader

    seen: Counter[str] = Counter()
    for batch in HiddenStateLoader(HiddenStateDataset(made.url), tokens_per_batch=1024, threads=2):
        for i, (name, n) in enumerate(
            zip(batch["sample_ids"], batch["lengths"].tolist(), strict=True)
        ):
            seen[name] += 1
            found = batch["target"][i, :n].view(dtype=_int16()).numpy().view(np.uint16)
            if not np.array_equal(found, made.samples[name].states[-1]):
                counts.wrong.append(f"{where}: the loader gave {name} differently")
    if seen != Counter(list(made.samples)):
        counts.wrong.append(f"{where}: the epoch had {dict(seen)}")


def _int16() -> Any:
    import torch

    return torch.int16


def _compare(made: MadeLake, where: str, counts: Counts) -> None:
    """Against the truth, with a sound store."""
    report = verify(made.url, "full")
    counts.torn += len(report.damage)
    lake = hslake.open(made.url)
    adds = Counter(
        r[0] for r in lake.sql("select sample_id from manifest where op = 'add'").fetchall()
    )
    live = Counter(r[0] for r in lake.sql("select sample_id from samples").fetchall())
    counts.lost += len(made.samples.keys() - live.keys())
    counts.duplicated += sum(n - 1 for n in adds.values())
    for name in live:
        if not np.array_equal(lake.read(name).hidden_states, made.samples[name].states):
            counts.wrong.append(f"{where}: {name} is stored differently")


def campaign(server: Server, faults: list[str], rounds: int, seed: int, folder: Path) -> Counts:
    """`rounds` lakes for each fault."""
    counts = Counts()
    for fault in faults:
        for k in range(rounds):
            one_lake(server, fault, seed + k, folder / f"{fault}-{seed + k}", counts)
        print(f"{fault}: {counts.as_dict()}", flush=True)
    return counts


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=5, help="lakes for each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", action="append", choices=list(FAULTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, moto() as server:
        faults = args.fault or list(FAULTS)
        counts = campaign(server, faults, args.count, args.seed, Path(folder))
    record(args.out, "stores", counts.as_dict())
    return 1 if counts.wrong or counts.lost or counts.duplicated or counts.torn else 0


if __name__ == "__main__":
    raise SystemExit(main())
