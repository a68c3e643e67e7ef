"""GPU memory of the capture: how much it is, and how much less SGLang may take for it."""

import math
import os
import subprocess
from collections.abc import Mapping

from hslake.spec import LakeSpec

FORWARDS = 2  # whose states are held at most: one copies to staging while the next computes
SCRATCH_BYTES = 64 << 20  # temporaries of checksums and statistics
_ASK = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")


def capture_bytes(spec: LakeSpec, chunk_tokens: int) -> int:
    """GPU bytes that the capture takes at most on a rank of forwards of `chunk_tokens` tokens:
    the streams of the forwards in flight, one stream laid out for its copy, and temporaries."""
    one_stream = chunk_tokens * spec.hidden_size * spec.itemsize
    return FORWARDS * chunk_tokens * spec.bytes_per_token + one_stream + SCRATCH_BYTES


def lowered(fraction: float, need: int, total: int) -> float:
    """SGLang's --mem-fraction-static `fraction` of `total` bytes, less `need` bytes; rounded down
    to four digits, and never below a thousandth (SGLang says itself when that is too little)."""
    return max(math.floor((fraction - need / total) * 10_000 + 1e-6) / 10_000, 0.001)


def smallest_gpu(env: Mapping[str, str] = os.environ) -> int | None:
    """Bytes of the smallest GPU that a process with this environment sees; None without any."""
    try:
        answer = subprocess.run(_ASK, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return smallest(answer.stdout, env.get("CUDA_VISIBLE_DEVICES"))


def smallest(table: str, visible: str | None) -> int | None:
    """The same, from nvidia-smi's lines `index, uuid, MiB` and CUDA_VISIBLE_DEVICES: numbers or
    beginnings of UUIDs, of which CUDA takes those before the first that does not exist."""
    gpus: dict[str, int] = {}
    uuids: dict[str, int] = {}
    for line in table.splitlines():
        index, uuid, mib = (part.strip() for part in (*line.split(","), "", "")[:3])
        if mib.isdigit():  # else "[N/A]": a GPU without memory of its own
            gpus[index] = uuids[uuid] = int(mib) << 20
    chosen = list(gpus.values())
    if visible is not None:
        chosen = []
        for name in filter(None, (n.strip() for n in visible.split(","))):
            fits = [size for uuid, size in uuids.items() if uuid.startswith(name)]
            if name not in gpus and len(fits) != 1:
                break
            chosen.append(gpus[name] if name in gpus else fits[0])
    return min(chosen, default=None)
