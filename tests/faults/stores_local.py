"""A local target that refuses: the kernel answers system calls of a compactor with an error.

    python -m tests.faults.stores_local [--count ROUNDS] [--seed S] [--out FILE.json]

A seccomp filter makes one kind of system call of the child fail, in Python and in Rust alike, from
its N-th on: EIO needs no broken disk then. Real limits come on top: a full and a read-only
filesystem (tmpfs, where this user may mount), the limits of file sizes and of open files. Each time
the compactor must end with an error that says that a retry may mend it, and nothing may be wrong:
the lake verifies, and a sound compactor then commits every sample, exactly once, bit for bit.
"""

import argparse
import ctypes
import errno
import json
import os
import platform
import random
import resource
import struct
import subprocess
import sys
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
from hslake.errors import HslakeError
from hslake.verify import verify
from tests.faults.results import RESULTS, record
from tests.lakes import MadeLake, make_lake, random_states

LENGTHS = (300, 20, 700)
# Call: (x86_64 numbers, argument looked at, its bits of which one must be set; 0: any).
CALLS: dict[str, tuple[tuple[int, ...], int, int]] = {
    "create": ((257,), 2, os.O_CREAT),
    "write": ((1, 18, 20), 2, 0xFFFF_FF80),  # 128 bytes or more: threads wake each other with fewer
    "fsync": ((74,), 0, 0),
    "link": ((86, 265), 0, 0),
    "rename": ((82, 264, 316), 0, 0),
    "mkdir": ((83, 258), 0, 0),
    "pread": ((295, 327), 0, 0),
}
KINDS = (
    ("create", errno.EACCES),
    ("create", errno.EROFS),
    ("create", errno.EMFILE),
    ("create", errno.ENOSPC),
    ("write", errno.ENOSPC),
    ("write", errno.EDQUOT),
    ("write", errno.EIO),
    ("fsync", errno.EIO),
    ("fsync", errno.ENOSPC),
    ("link", errno.EIO),
    ("rename", errno.EIO),
    ("mkdir", errno.ENOSPC),
    ("mkdir", errno.EROFS),
    ("pread", errno.EIO),
)
LIMITS = ("file size", "open files")
_SECCOMP, _AUDIT_X86_64 = 317, 0xC000003E
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


@dataclass
class Counts:
    """What happened. `wrong` and what follows must stay empty or 0."""

    faults: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    succeeded: int = 0  # where the fault met nothing that mattered
    skipped: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    duplicated: int = 0
    torn: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.__dict__, "errors": dict(self.errors)}


def refuse(call: str, code: int) -> None:
    """From now on a kind of system call of this process fails with `code`."""
    numbers, argument, bits = CALLS[call]
    program: list[tuple[int, int, int, int]] = []
    for number in numbers:
        program += [(0x20, 0, 0, 0), (0x15, 0, 3 if bits else 1, number)]
        if bits:
            program += [(0x20, 0, 0, 16 + 8 * argument), (0x45, 0, 1, bits)]
        program.append((0x06, 0, 0, _ERRNO | code))
    program.append((0x06, 0, 0, _ALLOW))
    raw = b"".join(struct.pack("<HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(raw, len(raw))
    head = struct.pack("HP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.syscall(_SECCOMP, 1, 1, head):
        raise OSError(ctypes.get_errno(), "seccomp")


def can_refuse() -> bool:
    """Whether this machine has the numbers above and lets a process filter its own calls."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    text = "import errno; from tests.faults.stores_local import refuse; refuse('link', errno.EIO)"
    return not subprocess.run([sys.executable, "-c", text], capture_output=True).returncode


def child(lake: str, staging: str, kind: str, after: int) -> None:
    """In a process of its own: compact, failing from the `after`-th object on."""
    import hslake.store.local as local

    compact(lake, [Path(staging) / "nothing"])  # everything is imported
    done = 0
    real = local._temp

    def counted(*args: Any) -> Any:
        nonlocal done
        if done == after:
            _begin(kind)
        done += 1
        return real(*args)

    if kind.startswith("pread"):
        _begin(kind)
    local._temp = counted
    try:
        troubles = compact(lake, [staging]).troubles  # of parts; others go on
        found = {"kind": "Unavailable" if troubles else "", "text": "".join(troubles)}
    except Exception as error:
        mine = isinstance(error, HslakeError)
        found = {"kind": ("" if mine else "foreign ") + type(error).__name__, "text": str(error)}
    for line in (found["kind"], found["text"][:400]):  # short: writes of 128 bytes may fail
        for at in range(0, len(line), 60):
            os.write(1, line[at : at + 60].encode(errors="replace"))
        os.write(1, b"\n")


def _begin(kind: str) -> None:
    if kind == "file size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    elif kind == "open files":
        used = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1, used - 1))
    else:
        call, code = kind.split()
        refuse(call, getattr(errno, code))


def run_child(lake: str, staging: Path, kind: str, after: int) -> tuple[str, str]:
    """(kind of the error that compact raised, "" for none; its message)."""
    (staging / "nothing").mkdir(exist_ok=True)
    given = json.dumps([lake, str(staging), kind, after])
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.stores_local", "--child", given],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    name, _, text = done.stdout.partition("\n")
    if done.returncode:
        return f"foreign exit {done.returncode}", done.stderr[-2000:]
    return name, text


def staged(folder: Path) -> MadeLake:
    """A lake with one sample in it and more of them in staging."""
    made = make_lake(folder, lengths=[50], states=random_states(4, 8, "bfloat16"))
    made.stage(made.plan(LENGTHS))
    return made


def one(kind: str, after: int, folder: Path, counts: Counts) -> None:
    """One fault on one lake."""
    made = staged(folder)
    where = f"{kind} from object {after} on"
    counts.faults += 1
    name, text = run_child(made.url, made.staging, kind, after)
    if not name:
        counts.succeeded += 1
    elif name not in ("Unavailable", "NoSpace") or str(folder) not in text:
        counts.wrong.append(f"{where}: {name}: {text}")
    else:
        counts.errors[f"{kind}: {name}"] += 1
    settle(made, where, counts)


def settle(made: MadeLake, where: str, counts: Counts) -> None:
    """What is there is sound, and a sound compactor commits the rest, once."""
    counts.torn += len(verify(made.url, "full").damage)
    compact(made.url, [made.staging])
    counts.torn += len(verify(made.url, "full").damage)
    lake = hslake.open(made.url)
    adds = Counter(
        r[0] for r in lake.sql("select sample_id from manifest where op = 'add'").fetchall()
    )
    counts.lost += len(made.samples.keys() - adds.keys())
    counts.duplicated += sum(n - 1 for n in adds.values())
    for sample in adds:
        if not np.array_equal(lake.read(sample).hidden_states, made.samples[sample].states):
            counts.wrong.append(f"{where}: {sample} is stored differently")


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[str | None]:
    """A tmpfs at `folder` for a while; yields why not when this user may not mount one."""
    folder.mkdir(parents=True)
    argv = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    out = subprocess.run(argv, capture_output=True, text=True, check=False)
    if out.returncode:
        yield f"cannot mount a tmpfs ({out.stderr.strip()})"
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", str(folder)], check=False)


def full(folder: Path, counts: Counts) -> None:
    """A target without room, and later with it; its segments on a filesystem of their own."""
    _mounted(folder, "size=150k", "size=50m", "NoSpace", counts)


def read_only(folder: Path, counts: Counts) -> None:
    """A target that became read-only, and later is not."""
    _mounted(folder, "size=50m,ro", "size=50m,rw", "Unavailable", counts)


def _mounted(folder: Path, options: str, later: str, expected: str, counts: Counts) -> None:
    made = MadeLake(str(folder / "lake"), folder / "staging", random_states(4, 64, "bfloat16"))
    model: dict[str, Any] = {"hidden_size": 64, "num_layers": 8, "codec": "none"}
    hslake.create(made.url, streams=[2, 4, 6, "final"], **model)
    made.staging.mkdir(parents=True)
    with tmpfs(folder / "lake" / "segments", options) as why:
        if why:
            counts.skipped.append(why)
            return
        made.stage(made.plan(LENGTHS))
        counts.faults += 1
        try:
            compact(made.url, [made.staging])
            counts.wrong.append(f"{options}: everything went well")
        except HslakeError as error:
            if type(error).__name__ != expected or str(folder) not in str(error):
                counts.wrong.append(f"{options}: {type(error).__name__}: {error}")
            counts.errors[f"{options}: {type(error).__name__}"] += 1
        argv = ["mount", "-o", f"remount,{later}", str(folder / "lake" / "segments")]
        subprocess.run(argv, check=True)
        settle(made, options, counts)


def campaign(kinds: list[str], afters: Callable[[], int], folder: Path, counts: Counts) -> None:
    """Each kind once."""
    for kind in kinds:
        after = afters()
        one(kind, after, folder / f"{counts.faults}", counts)


def all_kinds() -> list[str]:
    """System calls that fail, where this machine can make them; limits."""
    calls = [f"{call} {errno.errorcode[code]}" for call, code in KINDS] if can_refuse() else []
    return [*calls, *LIMITS]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=5, help="rounds over all kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*json.loads(args.child))
        return 0
    rng, counts = random.Random(args.seed), Counts()
    with tempfile.TemporaryDirectory() as folder:
        for k in range(args.count):
            root = Path(folder) / str(k)
            campaign(all_kinds(), lambda: rng.randrange(7), root, counts)
            full(root / "full", counts)
            read_only(root / "read-only", counts)
            print(counts.as_dict(), flush=True)
    record(args.out, "stores_local", counts.as_dict())
    return 1 if counts.wrong or counts.lost or counts.duplicated or counts.torn else 0


if __name__ == "__main__":
    raise SystemExit(main())
