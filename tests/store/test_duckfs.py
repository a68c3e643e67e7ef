"""Threads that share an open file read what they asked for."""

import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec

from hslake.store.duckfs import ForThreads

DATA = bytes(range(256)) * 64


def made(name: str) -> ForThreads:
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"/duckfs/{name}", DATA)
    return ForThreads(memory)


def test_a_seek_of_another_thread_moves_nobody() -> None:
    file = made("one").open("memory://duckfs/one")
    file.seek(10)
    other = threading.Thread(target=lambda: (file.seek(4096), file.read(3)))
    other.start()
    other.join()
    assert file.read(5) == DATA[10:15] and file.tell() == 15
    assert file.seek(-6, 2) == len(DATA) - 6 and file.read() == DATA[-6:]
    file.seek(1)
    assert file.seek(2, 1) == 3


def test_many_threads() -> None:
    file = made("many").open("memory://duckfs/many")

    def read(at: int) -> bool:
        file.seek(at)
        return bool(file.read(100) == DATA[at : at + 100])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, [i * 97 % 16_000 for i in range(2_000)]))


def test_the_rest_is_the_inner_ones() -> None:
    fs = made("rest")
    assert fs.protocol == "memory" and fs.exists("memory://duckfs/rest")
    assert fs.size("/duckfs/rest") == len(DATA) and fs.isfile("/duckfs/rest")
    assert (
        fs.unstrip_protocol(fs._strip_protocol("memory://duckfs/rest")) == "memory:///duckfs/rest"
    )
    assert fs.glob("/duckfs/re*") == ["/duckfs/rest"] and fs.modified("/duckfs/rest")
