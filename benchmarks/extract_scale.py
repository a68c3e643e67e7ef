"""A whole extraction of design size against simulated servers: wall time, the driver's memory, the
manifest, and an audit of everything that is in the lake afterwards.

    python benchmarks/extract_scale.py                     # 100,000 samples, 87.8 M tokens
    python benchmarks/extract_scale.py --samples 2000 --out /tmp/small.json

`hslake plan` registers log-normal lengths (mean 878, cut at 8,192) from Parquet files of seven
sources; `--servers` simulated servers (tests.sim.server: hidden size 8, four streams, real hook,
real staging, errors, drops, retractions, freezes and crashes) are driven by `hslake extract
--until-complete` and emptied by `hslake compact --watch`, each a process of its own. A server that
crashed is started again, as an operator or a service manager would. Then tests.sim.audit reads the
tables as they are, recomputes every checksum and compares every bit of some samples, and `hslake
verify --level full` decodes all of them.

`--driver FILE` (benchmarks/extract_driver.py) and `--kills FILE` (tests.faults.extraction) give
`requests_per_s` and the kills to `summary`. Writes benchmarks/results/extract_scale.json.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "patch")]

from hslake_sglang.process import free_port  # noqa: E402

import hslake  # noqa: E402
from hslake import query  # noqa: E402
from tests.sim.audit import audit  # noqa: E402
from tests.sim.fleet import Process, sim_server  # noqa: E402
from tests.sim.fleet import hslake as command  # noqa: E402
from tests.sim.samples import lengths_of, write_plan  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
STREAMS, HIDDEN, LAYERS = ["2", "30", "58", "final"], 8, 61
MEAN, LONGEST = 878, 8192
SEGMENT_TOKENS = 65_536  # as at hidden size 7168: the manifest gets as many rows and commits
TROUBLE = (
    "error=0.002,late_error=0.001,abort=0.001,broken=0.001,drop=0.002,late=0.002,"
    "silent=0.00005,retract=0.005,freeze=0.0005,crash=0.0003,freeze_s=3,late_s=0.5"
)
_LOOK_S = 1.0
_DRIVER_S = 3 * 3600.0

console = Console(stderr=True)


@dataclass
class Curve:
    """What was seen while it ran: one point a second or so."""

    points: list[dict[str, float]] = field(default_factory=list)

    def at(self, share: float, total: int) -> dict[str, float]:
        """The first point with `share` of `total` samples in the lake."""
        found = (p for p in self.points if p["committed"] >= share * total)
        return next(found, self.points[-1])

    def thinned(self, count: int = 60) -> list[dict[str, float]]:
        """About `count` of them, the last one among them."""
        step = max(1, len(self.points) // count)
        return [*self.points[:-1:step], self.points[-1]]


def run(command_line: list[str], log: Path, timeout: float = 3600.0) -> float:
    """Seconds of a command that must succeed."""
    began = time.monotonic()
    process = Process(log.stem, command_line, log).start()
    code = process.wait(timeout)
    if code != 0:
        process.kill()
        raise SystemExit(f"{log.stem} ended with {code}:\n{process.tail()}")
    return round(time.monotonic() - began, 2)


def extraction(options: argparse.Namespace, folder: Path, staging: Path) -> dict[str, Any]:
    """Plan, run, measure, audit."""
    lake = folder / "lake"
    hslake.create(
        str(lake), streams=STREAMS, hidden_size=HIDDEN, num_layers=LAYERS, name="design size"
    )
    lengths = lengths_of(options.samples, mean=MEAN, longest=LONGEST, seed=options.seed)
    files = write_plan(folder / "plan", lengths, seed=options.seed)
    planned_s = run(command("plan", lake, *files), folder / "plan.log")
    console.print(f"planned {len(lengths):,} samples in {planned_s} s")
    servers, compactor, driver = _processes(options, folder, staging, lake)
    curve = Curve()
    try:
        for process in (*servers, compactor):
            process.start()
        for server in servers:
            _wait_ready(server)
        wall_s = _follow(driver, servers, compactor, lake, curve, len(lengths))
    finally:
        driver.kill()
        for process in (*servers, compactor):
            process.send(signal.SIGTERM)
            if process.wait(60) is None:
                process.kill()
    codes = {p.name: p.codes for p in (driver, compactor, *servers)}
    console.print(f"driver: {driver.tail(1)}; ends: {codes}")
    left_s = run(command("compact", lake, "--staging", staging), folder / "last.log")
    early, late = curve.at(0.1, len(lengths)), curve.at(1.0, len(lengths))
    tokens = int(lengths.sum())
    console.print("audit")
    found = audit(lake, sample=options.compare, seed=options.seed)
    verified_s = run(command("verify", lake, "--level", "full"), folder / "verify.log", 7200)
    result = {
        "samples": len(lengths),
        "tokens": tokens,
        "longest": int(lengths.max()),
        "plan_s": planned_s,
        "wall_s": wall_s,
        "samples_per_s": round(len(lengths) / wall_s, 1),
        "tokens_per_s": round(tokens / wall_s),
        "driver_last_line": driver.tail(1),
        "driver_rss_mb": {"at_10_percent": early["driver_mb"], "at_100_percent": late["driver_mb"]},
        "driver_rss_growth_mb": round(late["driver_mb"] - early["driver_mb"], 1),
        "compactor_rss_mb": max(p["compactor_mb"] for p in curve.points),
        "ends": {name: [c for c in ends if c] for name, ends in codes.items()},
        "server_crashes": sum(c == -signal.SIGKILL for p in servers for c in p.codes),
        "manifest": _table(lake / "manifest"),
        "plan": _table(lake / "plan"),
        "runs": _table(lake / "runs"),
        "lake_bytes": sum(p.stat().st_size for p in lake.rglob("*") if p.is_file()),
        "compact_of_what_was_left_s": left_s,
        "coverage_query_s": _coverage_s(str(lake)),
        "status_s": run(command("status", lake, "--json"), folder / "status.log"),
        "audit": found.counts(),
        "verify_full_s": verified_s,
        "curve": curve.thinned(),
    }
    if not found.ok or driver.codes[-1:] != [0]:
        console.print(f"[red]NOT SOUND[/]: {found.counts()}, driver ended with {driver.codes}")
        result["sound"] = False
    return result


def _wait_ready(server: Process) -> None:
    """Until it answers: the driver ends at once when none does."""
    url = f"http://127.0.0.1:{server.argv[server.argv.index('--port') + 1]}/health"
    end = time.monotonic() + 120
    while time.monotonic() < end and server.alive:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise SystemExit(f"{server.name} does not answer:\n{server.tail()}")


def _processes(
    options: argparse.Namespace, folder: Path, staging: Path, lake: Path
) -> tuple[list[Process], Process, Process]:
    ports = [free_port() for _ in range(options.servers)]
    servers = [
        Process(
            f"server-{i}",
            sim_server(
                lake, "--staging", staging, "--port", port, "--part-tokens", 65_536,
                "--max-parts", 16, "--rate", options.rate, "--jitter", 0.3,
                "--traffic", 0.5, "--mixed", "--trouble", options.trouble,
            ),
            folder / f"server-{i}.log",
        )
        for i, port in enumerate(ports)
    ]  # fmt: skip
    watch = ("--watch", "--max-age", 20, "--segment-tokens", SEGMENT_TOKENS)
    compactor = Process(
        "compactor", command("compact", lake, "--staging", staging, *watch), folder / "compact.log"
    )
    urls = [x for port in ports for x in ("--server", f"http://127.0.0.1:{port}")]
    arguments = (lake, *urls, "--staging", staging, "--until-complete")
    driver = Process("driver", command("extract", *arguments), folder / "driver.log")
    return servers, compactor, driver


def _follow(
    driver: Process,
    servers: list[Process],
    compactor: Process,
    lake: Path,
    curve: Curve,
    total: int,
) -> float:
    """Until the driver has ended; the seconds it took."""
    began = time.monotonic()
    driver.start()
    committed, looked = 0, 0.0
    while driver.alive:
        for server in servers:
            if not server.alive:
                server.start()
        if not compactor.alive:
            raise SystemExit(f"the compactor ended with {compactor.codes}:\n{compactor.tail()}")
        now = time.monotonic() - began
        if now > _DRIVER_S:
            raise SystemExit(f"no end after {now:,.0f} s:\n{driver.tail()}")
        if now - looked > 10 * _LOOK_S or total < 20_000:
            committed, looked = _committed(str(lake)), now
            console.print(f"{now:6.0f} s  {committed:,} of {total:,} committed")
        rss = driver.rss()
        if rss is not None:
            curve.points.append(
                {
                    "s": round(now, 1),
                    "committed": committed,
                    "driver_mb": round(rss / 1e6, 1),
                    "compactor_mb": round((compactor.rss() or 0) / 1e6, 1),
                    "server_mb": round(max(s.rss() or 0 for s in servers) / 1e6, 1),
                }
            )
        time.sleep(_LOOK_S)
    curve.points.append({**curve.points[-1], "committed": _committed(str(lake))})
    return round(time.monotonic() - began, 1)


def _committed(lake: str) -> int:
    found = query.run(hslake.open(lake), "select count(*) from samples")
    return int(found.column(0)[0].as_py())


def _table(folder: Path) -> dict[str, int]:
    """Files, bytes and versions of a Delta table."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    log = [p for p in files if p.parent.name == "_delta_log" and p.suffix == ".json"]
    size = sum(p.stat().st_size for p in files)
    return {"files": len(files), "bytes": size, "versions": len(log)}


def _coverage_s(lake: str) -> dict[str, float]:
    """Seconds of opening the lake and asking for its coverage, first and again."""
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        query.run(hslake.open(lake), "coverage")
        seconds.append(time.perf_counter() - began)
    return {"first": round(seconds[0], 3), "again": round(min(seconds[1:]), 3)}


def summarise(result: dict[str, Any], driver: Path, kills: Path) -> dict[str, Any]:
    """The issue's figures, of this run, of the kills and of the driver alone."""
    killed = json.loads(kills.read_text("utf-8")) if kills.exists() else {}
    alone = json.loads(driver.read_text("utf-8")) if driver.exists() else {}
    wrong = {k: result["audit"][k] + killed.get(k, 0) for k in ("lost", "duplicated", "torn")}
    return {
        "samples": result["samples"],
        "tokens": result["tokens"],
        "kills": killed.get("kills", 0),
        **wrong,
        "driver_rss_growth_mb": result["driver_rss_growth_mb"],
        "requests_per_s": max(
            (r["requests"]["requests_per_s"] for r in alone.values()), default=None
        ),
    }


def conditions(note: str) -> dict[str, Any]:
    """The machine, and how busy others kept it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9),
        "python": platform.python_version(),
        "load_average_before": round(os.getloadavg()[0], 1),
        "conditions": note,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.0, help="tokens/s a server; 0: as it can")
    parser.add_argument("--trouble", default=TROUBLE, help="of the servers (tests.sim.trouble)")
    parser.add_argument("--compare", type=int, default=2000, help="samples compared bit by bit")
    parser.add_argument("--folder", type=Path, help="for the lake, on a disk (default: temporary)")
    parser.add_argument("--staging", type=Path, help="default: in /dev/shm where there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="about the machine, for the JSON")
    parser.add_argument("--driver", type=Path, default=RESULTS / "extract_driver.json")
    parser.add_argument("--kills", type=Path, default=RESULTS / "extract_kills.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "extract_scale.json")
    options = parser.parse_args()
    # Told to end, it ends its processes too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine = conditions(options.note)
    ram = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="extract-scale-", dir=options.folder))
    staging = Path(tempfile.mkdtemp(prefix="extract-scale-", dir=options.staging or ram))
    try:
        result = extraction(options, folder, staging)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    machine["load_average_after"] = round(os.getloadavg()[0], 1)
    whole = {
        "summary": summarise(result, options.driver, options.kills),
        "machine": machine,
        "servers": options.servers,
        "trouble": options.trouble,
        **result,
    }
    options.out.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    console.print_json(json.dumps(whole["summary"]))
    if whole.get("sound", True):
        shutil.rmtree(folder)
    else:
        sys.exit(f"not sound: left in {folder}")


if __name__ == "__main__":
    main()
