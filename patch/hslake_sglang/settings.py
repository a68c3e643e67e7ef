"""The hook's environment: how `serve` tells the server's processes what to do."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hslake.errors import InvalidInput, Missing, NoSpace
from hslake.spec import LakeSpec, read_spec
from hslake.staging import space
from hslake.staging.memory import part_bytes, rows_in

STAGING = "HSLAKE_STAGING"
LAKE = "HSLAKE_LAKE"
SPEC = "HSLAKE_SPEC"
PART_TOKENS = "HSLAKE_PART_TOKENS"
MAX_PARTS = "HSLAKE_MAX_PARTS"
RUN = "HSLAKE_RUN"
GPU_MEMORY_TAKEN = "HSLAKE_GPU_MEMORY_TAKEN"  # serve has lowered --mem-fraction-static for the hook

DEFAULT_PART_TOKENS = 32_768
DEFAULT_PARTS = 4
_SMALLEST_PART = 1_024


@dataclass(frozen=True)
class Settings:
    """What one hook process needs to know; `writers` share the staging space of this server."""

    staging: Path
    spec: LakeSpec
    part_tokens: int
    max_parts: int
    run: str


def wanted(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the hook is asked for at all; without HSLAKE_STAGING it must do nothing."""
    return bool(env.get(STAGING))


def load(env: Mapping[str, str] = os.environ, *, writers: int = 1) -> Settings:
    """Read the environment. Raises InvalidInput, Missing or NoSpace with what to do about it."""
    staging = check_staging(env.get(STAGING, ""))
    if env.get(SPEC):
        spec = LakeSpec.from_json(env[SPEC], where=SPEC)
    elif env.get(LAKE):
        spec = read_spec(env[LAKE])
    else:
        raise InvalidInput(f"neither {SPEC} nor {LAKE} is set; start the server with hslake serve")
    part_tokens, max_parts = count(env, PART_TOKENS), count(env, MAX_PARTS)
    if part_tokens is None or max_parts is None:
        size = staging_size(staging, spec, part_tokens, max_parts, writers=writers)
        part_tokens, max_parts = size
    return Settings(staging, spec, part_tokens, max_parts, env.get(RUN, ""))


def count(env: Mapping[str, str], name: str) -> int | None:
    """The positive whole number in a variable, or None without one. Raises InvalidInput."""
    text = env.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise InvalidInput(f"{name}={text!r}: expected a positive whole number")
    return int(text)


def check_staging(path: str | Path) -> Path:
    """The staging directory, which must exist and be writable."""
    staging = Path(path)
    if staging.exists() and not staging.is_dir():
        raise InvalidInput(f"staging {str(path)!r} is a file, expected a directory on /dev/shm")
    if not str(path) or not staging.is_dir():
        raise Missing(f"staging directory {str(path)!r} does not exist: make it, on /dev/shm")
    if not os.access(staging, os.W_OK | os.X_OK):
        raise InvalidInput(f"staging directory {str(path)!r} is not writable by this user")
    return staging


def staging_size(
    staging: Path,
    spec: LakeSpec,
    part_tokens: int | None = None,
    max_parts: int | None = None,
    *,
    writers: int = 1,
    longest: int = 0,
) -> tuple[int, int]:
    """(tokens of a part, parts) of each of `writers`: given values, else defaults that leave half
    of the free space alone and hold a sample of `longest` tokens.

    Without `max_parts` there may be fewer parts than by default. Raises NoSpace when what is asked
    for does not fit beside the reserve that parts leave.
    """
    free, where = space.free_bytes(staging)
    room = free - space.RESERVE
    if part_tokens is None:
        room = min(room, free // 2)
    least = part_tokens or max(_SMALLEST_PART, longest)
    fit = max(0, room) // writers // part_bytes(spec, least)
    parts = max_parts or min(DEFAULT_PARTS, fit)
    if not 0 < parts <= fit:
        asked = max_parts or 1
        need = part_bytes(spec, least) * asked * writers
        shorter = ""
        if part_tokens is None and least == longest:
            shorter = (
                "; a part holds the longest sample that the lake lacks: a smaller --context-length "
                "leaves longer samples out"
            )
        raise NoSpace(
            f"staging {staging}: {writers} writer(s) of {asked} parts of {least:,} tokens need "
            f"{_gib(need)}; {where} has {_gib(free)} left, of which {_gib(max(0, room))} may be "
            f"taken ({space.RESERVE >> 20} MiB stay in reserve); make room there, or take smaller "
            f"or fewer parts with --part-tokens and --max-parts ({PART_TOKENS} and {MAX_PARTS})"
            f"{shorter}"
        )
    most = rows_in(spec, room // (parts * writers))
    return part_tokens or min(max(DEFAULT_PART_TOKENS, longest), most), parts


def _gib(size: int) -> str:
    return f"{math.ceil(size / 2**20) / 1024:.2f} GiB"


def spec_env(spec: LakeSpec) -> str:
    """The spec as one line for HSLAKE_SPEC."""
    return json.dumps(json.loads(spec.to_json()), separators=(",", ":"))
