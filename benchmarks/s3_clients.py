"""Which S3 client: s3fs, obstore (direct, and its fsspec face) and zarr's ObjectStore, same run.

    python -m benchmarks.s3_clients --endpoint NAME=URL,KEY,SECRET ... [--out FILE.json]

Without --endpoint, a moto server of its own is measured. Every client works in a process of its
own, one after another, `--rounds` times in turn: puts of one large object from pieces as the
compactor has them, ranged gets of a reader's chunk run on one and eight threads, small puts. Server
and client share the machine's cores, so only the clients' order means something.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

MB = 1_000_000
PIECE = 3_700_000  # a chunk run of one sample
SMALL = 4_000
BUCKET = "clients"
CLIENTS = ("s3fs", "obstore", "obstore-fsspec", "zarr-objectstore")

Put = Callable[[str, Sequence[bytes]], None]
Get = Callable[[str, int, int], Any]


def _client(name: str) -> tuple[Put, Get]:
    """put(key, pieces) and get(key, start, end) as a store on top of this client would do them."""
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    if name == "s3fs":
        import s3fs

        fs = s3fs.S3FileSystem()
        return (
            lambda key, pieces: fs.pipe_file(f"{BUCKET}/{key}", b"".join(pieces)),
            lambda key, a, b: fs.cat_file(f"{BUCKET}/{key}", start=a, end=b),
        )
    if name == "obstore-fsspec":
        from obstore.fsspec import FsspecStore

        face = FsspecStore("s3", endpoint=endpoint, client_options={"allow_http": True})
        return (
            lambda key, pieces: face.pipe_file(f"{BUCKET}/{key}", b"".join(pieces)),
            lambda key, a, b: face.cat_file(f"{BUCKET}/{key}", start=a, end=b),
        )
    import obstore
    from obstore.store import S3Store

    store = S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True})
    if name == "obstore":

        def put(key: str, pieces: Sequence[bytes]) -> None:
            large = sum(map(len, pieces)) > 16 << 20
            obstore.put(
                store,
                key,
                iter(pieces) if large else b"".join(pieces),
                use_multipart=large,
                chunk_size=16 << 20,
                max_concurrency=4,
            )

        return put, lambda key, a, b: memoryview(obstore.get_range(store, key, start=a, end=b))

    from zarr.abc.store import RangeByteRequest
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync
    from zarr.storage import ObjectStore

    zarr_store, prototype = ObjectStore(store), default_buffer_prototype()

    def zarr_put(key: str, pieces: Sequence[bytes]) -> None:
        sync(zarr_store.set(key, prototype.buffer.from_bytes(b"".join(pieces))))

    def zarr_get(key: str, a: int, b: int) -> Any:
        found = sync(zarr_store.get(key, prototype, RangeByteRequest(a, b)))
        assert found is not None
        return found.as_array_like()

    return zarr_put, zarr_get


def _measure(name: str, size: int, gets: int, smalls: int, sent: Any) -> None:
    """In a fresh process: MB/s, puts a second, and MB of memory above the objects themselves."""
    put, get = _client(name)
    put("warm", [b"x"])
    pieces = [random.randbytes(PIECE) for _ in range(size // PIECE)]
    total = sum(map(len, pieces))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    put("large", pieces)
    put_s = time.perf_counter() - start
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert bytes(get("large", total - 10, total)) == pieces[-1][-10:]
    result = {"put_MBps": total / put_s / MB, "put_extra_memory_MB": memory / MB}
    for threads in (1, 8):
        starts = [random.randrange(total - PIECE) for _ in range(gets)]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            done = sum(pool.map(lambda a: len(get("large", a, a + PIECE)), starts))
            result[f"get_MBps_{threads}_threads"] = done / (time.perf_counter() - start) / MB
    start = time.perf_counter()
    for i in range(smalls):
        put(f"small/{i}", [b"x" * SMALL])
    result["small_puts_per_s"] = smalls / (time.perf_counter() - start)
    start = time.perf_counter()
    for i in range(smalls):
        get(f"small/{i}", 0, SMALL)
    result["small_gets_per_s"] = smalls / (time.perf_counter() - start)
    sent.send(result)


def run(endpoint: str, key: str, secret: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, by client."""
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint)
    if BUCKET not in [b["Name"] for b in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET)
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CLIENTS}
    for _ in range(args.rounds):
        for name in CLIENTS:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_measure, args=(name, args.megabytes * MB, args.gets, args.smalls, theirs)
            )
            process.start()
            theirs.close()
            found[name].append(ours.recv())
            process.join()
    return {
        name: {k: round(statistics.median(r[k] for r in rounds), 1) for k in rounds[0]}
        for name, rounds in found.items()
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--endpoint", action="append", default=[], metavar="NAME=URL,KEY,SECRET")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--gets", type=int, default=24)
    parser.add_argument("--smalls", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "object_MB": args.megabytes,
        "get_MB": PIECE / MB,
        "rounds": args.rounds,
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "servers": {},
    }
    with ExitStack() as stack:
        endpoints = dict(e.split("=", 1) for e in args.endpoint)
        if not endpoints:
            from tests.s3server import moto

            endpoints = {"moto": f"{stack.enter_context(moto()).url},testing,testing"}
        for name, where in endpoints.items():
            result["servers"][name] = run(*where.split(","), args)
            print(json.dumps({name: result["servers"][name]}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
