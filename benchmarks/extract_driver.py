"""How many requests a second the driver of `hslake extract` sustains on one core.

    python benchmarks/extract_driver.py                        # 100,000 samples of 878 tokens
    python benchmarks/extract_driver.py --samples 1000000 --tokens 8    # memory of a large plan

A real lake with a real plan (log-normal lengths, cut at 8,192), the real `extract`, and a server
that answers at once and tells every attempt as captured: in a process and on a core of its own, as
cheap as Python makes it, so that what is measured is the driver. The driver is held to one core.
Nothing is staged and nothing computed.

Reports requests a second of wall time and of the driver's own CPU time (what it would be with the
core to itself), over the requests alone and over the whole call, and memory (resident, at 10 % and
at 100 % of the requests). Writes benchmarks/results/extract_driver.json.
"""

import argparse
import asyncio
import base64
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MEAN, LONGEST, SIGMA = 878, 8192, 1.0
COMMITS = 20  # of the plan
WRITER = "0194d3c2-6b7e-7c3a-9f10-8d2f6a1b2c3d"
ROWS = 1 << 30  # of staging that never fills
PAGE = 5000  # events of one answer, as the hook's
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
ANSWER = (
    b'{"text":"","meta_info":{"finish_reason":{"type":"length","length":1},"completion_tokens":1}}'
)


# -- the lake -----------------------------------------------------------------------------------


def make_lake(folder: Path, samples: int, mean: int) -> str:
    """A lake with `samples` planned, of `mean` tokens on average."""
    import numpy as np
    import pyarrow as pa

    import hslake
    from hslake.ids import token_hash
    from hslake.tables import catalog

    lake = hslake.create(folder / "lake", hidden_size=8, num_layers=61, capture="eagle3")
    rng = np.random.default_rng(1)
    shape = rng.lognormal(0.0, SIGMA, samples)
    low, high = 0.0, 1e6
    while high - low > 1e-6 * high:  # the scale at which the mean is that after the cut
        scale = (low + high) / 2
        cut = np.clip(scale * shape, 1, LONGEST).mean()
        low, high = (scale, high) if cut < mean else (low, scale)
    lengths = np.clip(scale * shape, 1, LONGEST).astype(np.int32)
    now = datetime.now(UTC)
    for first in range(0, samples, -(-samples // COMMITS)):
        some = lengths[first : first + -(-samples // COMMITS)]
        offsets = np.concatenate([[0], np.cumsum(some)]).astype(np.int32)
        ids = rng.integers(0, 163_840, int(offsets[-1]), dtype=np.int32)
        hashes = [token_hash(ids[a:b]) for a, b in itertools.pairwise(offsets)]
        count = len(some)
        table = pa.table(
            {
                "op": pa.array(["add"] * count),
                "sample_id": [f"A1-{first + i:08d}" for i in range(count)],
                "source": pa.array(["A1"] * count),
                "split": pa.array(["train"] * count),
                "length": some,
                "supervised_tokens": some,
                "token_hash": hashes,
                "input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids)),
                "loss_mask": pa.ListArray.from_arrays(
                    pa.array(offsets), pa.array(np.ones(len(ids), np.int32))
                ),
                "planned_at": pa.array([now] * count, pa.timestamp("us", "UTC")),
            }
        )
        catalog.commit(lake.store, "plan", lambda _, t=table: t, f"benchmark-{first}")
    return lake.url


# -- the server ---------------------------------------------------------------------------------


class Server(asyncio.Protocol):
    """HTTP/1.1 as far as the driver speaks it: keep-alive, whole bodies with a content-length."""

    lake_id = ""
    events: list[bytes] = []  # noqa: RUF012 - of the process
    requests = 0
    body_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.kept = b""

    def data_received(self, data: bytes) -> None:
        data = self.kept + data if self.kept else data
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                break
            at = data.lower().find(b"content-length:", 0, end)
            length = int(data[at + 15 : data.index(b"\r\n", at)]) if at >= 0 else 0
            whole = end + 4 + length
            if len(data) < whole:
                break
            self.answer(data[: data.index(b" ", 5)], data[end + 4 : whole])
            data = data[whole:]
        self.kept = data

    def answer(self, line: bytes, body: bytes) -> None:
        cls = type(self)
        if line == b"POST /generate":
            start = body.index(b'"hslake.') + 1
            parts = body[start : body.index(b'"', start)].split(b".")
            name = base64.urlsafe_b64decode(parts[5] + b"==")
            cls.events.append(
                b'{"seq":%d,"attempt":"%s","sample_id":"%s","state":"captured","reason":null,'
                b'"part":"part-000001"}' % (len(cls.events) + 1, parts[2], name)
            )
            cls.requests += 1
            cls.body_bytes += len(body)
            text = ANSWER
        elif line.startswith(b"GET /hslake/status"):
            text = self.status(line)
        elif line.startswith(b"GET /get_server_info"):
            text = b'{"model_path":"none","context_length":%d}' % (2 * LONGEST)
        elif line.startswith(b"GET /figures"):
            figures = {
                "cpu_s": time.process_time(),
                "requests": cls.requests,
                "bytes": cls.body_bytes,
            }
            text = json.dumps(figures).encode()
        else:
            text = b"{}"
        self.transport.write(OK % (len(text), text))

    def status(self, line: bytes) -> bytes:
        cls = type(self)
        since = int(line.rpartition(b":")[2]) if b"since=" in line else 0
        events = cls.events[since : since + PAGE]
        writer = {
            "writer": WRITER, "armed": True, "error": None, "lake_id": cls.lake_id,
            "engine": {"run": "1"}, "free_rows": ROWS - 8, "capacity_rows": ROWS,
            "largest_reservation": ROWS,
            "parts": [{"name": "part-000001", "rows": ROWS, "reserved": 8, "state": "open"}],
            "last_seq": len(cls.events), "samples_captured": len(cls.events),
            "tokens_captured": 0, "bytes_captured": 0, "dropped": 0,
            "updated_at": time.time(), "alive": True, "cursor": since + len(events),
        }  # fmt: skip
        told = {
            "format": 1, "armed": True, "error": None, "lake_id": cls.lake_id,
            "engine": {}, "hook_version": "0", "writers": [{**writer, "events": []}],
        }  # fmt: skip
        return json.dumps(told).encode()[:-4] + b",".join(events) + b"]}]}"


def serve(lake_id: str) -> None:
    """Serve on a free port, which is printed, until killed."""

    async def main() -> None:
        Server.lake_id = lake_id
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Server, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(main())


# -- the driver ---------------------------------------------------------------------------------


class Marks:
    """A progress bar that notes time, CPU and memory at shares of the work."""

    def __init__(self, total: float | None, description: str) -> None:
        self.total, self.done, self.next = total or 1.0, 0.0, 0
        self.marks: list[dict[str, float]] = []

    def __call__(self, total: float | None, description: str) -> Self:
        if description.startswith("extract"):
            self.__init__(total, description)  # type: ignore[misc]
        return self

    def advance(self, n: float = 1) -> None:
        self.done += n
        if self.done >= self.next * self.total / 10:
            self.marks.append(here(self.next / 10))
            self.next += 1

    def note(self, text: str) -> None: ...

    def resize(self, total: float) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...


def here(share: float) -> dict[str, float]:
    """Where this process stands."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "share": share,
        "wall_s": round(time.monotonic(), 3),
        "cpu_s": round(time.process_time(), 3),
        "rss_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1),
    }


def drive(lake: str, url: str, concurrency: int) -> None:
    """The whole `extract`; prints what was measured."""
    from hslake.extract import ExtractOptions, extract
    from hslake.extract.drive import Limits

    marks = Marks(1, "")
    begun = here(0)
    options = ExtractOptions(limits=Limits(requests=concurrency))
    report = extract(lake, [url], options, progress=marks)
    end = here(1)
    first, last = marks.marks[0], marks.marks[-1]

    def rates(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
        wall, cpu = b["wall_s"] - a["wall_s"], b["cpu_s"] - a["cpu_s"]
        return {
            "wall_s": round(wall, 2),
            "cpu_s": round(cpu, 2),
            "requests_per_s": round(report.captured / wall),
            "requests_per_cpu_s": round(report.captured / cpu),
        }

    print(
        json.dumps(
            {
                "complete": report.complete,
                "samples": report.captured,
                "tokens": report.captured_tokens,
                "retried": report.retried,
                "requests": rates(first, last),
                "whole_call": rates(begun, end),
                "rss_mb": {
                    "before": begun["rss_mb"],
                    **{f"{m['share']:.0%}": m["rss_mb"] for m in marks.marks},
                    "peak": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1),
                },
                "rss_growth_mb": round(last["rss_mb"] - marks.marks[1]["rss_mb"], 1),
            }
        )
    )


def measure(lake: str, concurrency: int) -> dict[str, Any]:
    """The figures of one run, server and driver each on a core of their own."""
    import hslake

    cores = sorted(os.sched_getaffinity(0))
    own, others = {cores[0]}, set(cores[1:]) or {cores[0]}
    me = [sys.executable, __file__]
    server = subprocess.Popen(
        [*me, "--serve", hslake.open(lake).spec.lake_id],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, others),
    )
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        load = round(os.getloadavg()[0], 2)
        out = subprocess.run(
            [*me, "--drive", lake, url, "--concurrency", str(concurrency)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, own),
        ).stdout
        with urllib.request.urlopen(f"{url}/figures") as answer:
            served = json.load(answer)
    finally:
        server.kill()
        server.wait()
    found = json.loads(out.splitlines()[-1])
    return {"load_before": load, **found, "server": served}


def main() -> None:
    """Make the lake, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=MEAN, help="mean length of a sample")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="keep the lake here; used when it is there")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/extract_driver.json")
    parser.add_argument("--serve", metavar="LAKE_ID", help=argparse.SUPPRESS)
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    if args.drive:
        return drive(*args.drive, args.concurrency)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="hslake-driver-"))
    try:
        if not (folder / "lake/hslake.json").exists():
            make_lake(folder, args.samples, args.tokens)
        found = measure(str(folder / "lake"), args.concurrency)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)
    machine = {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    report = {"machine": machine, **found}
    print(json.dumps(report, indent=1))
    shapes = json.loads(args.out.read_text()) if args.out.exists() else {}
    shapes[f"{found['samples']} samples of {args.tokens} tokens"] = report
    args.out.write_text(json.dumps(shapes, indent=1) + "\n")


if __name__ == "__main__":
    main()
