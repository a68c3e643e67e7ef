"""Preflight's look at one server: is it well, does it serve this lake, do states arrive?

The probe is a real capture request under a sample id that no plan holds, so the compactor gives it
up: a probe never reaches the lake.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import hslake
from hslake.checks import Check, failed, passed, warned
from hslake.checksum import sample_checksum, to_float32
from hslake.errors import HslakeError
from hslake.ids import PROBE_PREFIX, RequestId, new_attempt
from hslake.server import CAPTURED, Event, Server, ServerDown, ServerStatus, context_limit
from hslake.slot import unfit
from hslake.spec import LakeSpec
from hslake.staging import PartInfo, Reserved, read_part, scan
from hslake.staging.reader import read_rows

PROBE_TOKENS = 10
_SOURCE = "probe"
_POLL_S = 0.1


async def check_server(
    server: Server,
    spec: LakeSpec,
    *,
    longest: tuple[str, int] | None,
    probe_ids: Sequence[int],
    staging: Sequence[Path],
    wait_s: float = 20.0,
) -> list[Check]:
    """All checks of one server. `longest`: id and tokens of the longest sample to ask for."""
    try:
        status = await server.status()
    except ServerDown as error:
        todo = "start it with `hslake serve LAKE --staging DIR -- …`, or correct --server"
        return [failed("server", str(error), todo)]
    checks = [await _healthy(server), _hook(server, status, spec)]
    if unfit(status, spec.lake_id):
        return checks
    checks.append(_same_version(server, status))
    checks.append(_room(server, status))
    checks.append(await _longest_fits(server, status, longest))
    checks += await _probe(server, status, spec, probe_ids, staging, wait_s)
    return checks


async def _healthy(server: Server) -> Check:
    if await server.healthy():
        return passed("server", f"{server.url} answers /health")
    todo = "look into the server's log; it may still be loading"
    return failed("server", f"{server.url}/health does not answer 200", todo)


def _hook(server: Server, status: ServerStatus, spec: LakeSpec) -> Check:
    problem = unfit(status, spec.lake_id)
    if problem:
        todo = "start it with `hslake serve LAKE --staging DIR -- …`; its log says why not"
        return failed("hook", f"{server.url}: {problem}", todo)
    engine = f"{status.engine.get('engine', '?')} {status.engine.get('engine_version', '?')}"
    writers = f"{len(status.writers)} writer{'s' * (len(status.writers) > 1)}"
    return passed("hook", f"{server.url}: armed for lake {spec.lake8}, {engine}, {writers}")


def _same_version(server: Server, status: ServerStatus) -> Check:
    if status.hook_version == hslake.__version__:
        return passed("hook version", f"{server.url}: {status.hook_version}, as here")
    todo = "install the same hslake in the server's environment before a long run"
    found = f"{server.url}: the hook is {status.hook_version}, this hslake is {hslake.__version__}"
    return warned("hook version", found, todo)


def _room(server: Server, status: ServerStatus) -> Check:
    name, free, rows = "staging room", status.free_rows, status.capacity_rows
    found = f"{server.url}: {free:,} of {rows:,} rows free"
    parts = min(w.capacity_rows // max(1, w.largest_reservation) for w in status.writers)
    if free == 0:
        return failed(name, found, "run `hslake compact LAKE --staging DIR` to empty it")
    if parts < 2:
        todo = "start the server with at least two parts: one fills while the other is compacted"
        return warned(name, f"{found}, in a single part", todo)
    if free < rows // 4:
        return warned(name, found, "run `hslake compact LAKE --staging DIR`, or extract will wait")
    return passed(name, found)


async def _longest_fits(
    server: Server, status: ServerStatus, longest: tuple[str, int] | None
) -> Check:
    name = "longest sample"
    if longest is None:
        return passed(name, "nothing is left to ask for")
    sample_id, tokens = longest
    try:
        limit = context_limit(await server.info())
    except ServerDown as error:
        return warned(name, str(error), "see why /get_server_info does not answer")
    rows = status.largest_reservation
    found = f"{server.url}: {sample_id!r} has {tokens:,} tokens"
    if tokens > rows:
        todo = f"start the server with parts of at least {tokens:,} tokens, or extract refuses it"
        return failed(name, f"{found}, a staging part holds {rows:,}", todo)
    if limit is not None and tokens > limit:
        todo = "raise --context-length or the KV cache, or plan shorter samples"
        return failed(name, f"{found}, the server takes {limit:,}", todo)
    takes = "any" if limit is None else f"{limit:,}"
    return passed(name, f"{found}; parts hold {rows:,}, the server takes {takes}")


# -- the probe ----------------------------------------------------------------------------------


async def _probe(
    server: Server,
    status: ServerStatus,
    spec: LakeSpec,
    ids: Sequence[int],
    staging: Sequence[Path],
    wait_s: float,
) -> list[Check]:
    name = "probe"
    sample_id = f"{PROBE_PREFIX}{secrets.token_hex(4)}"
    rid = RequestId(spec.lake8, new_attempt(), len(ids), _SOURCE, sample_id)
    try:
        await server.generate(rid, list(ids))
        event = await _event(server, status, rid, wait_s)
    except HslakeError as error:
        return [failed(name, f"{server.url}: {error}", "see the server's log")]
    if event is None:
        found = f"{server.url} answered, but within {wait_s:.0f} s the hook acknowledged nothing"
        return [failed(name, found, "see the server's log: the hook is loaded but sees no request")]
    if event.state != CAPTURED:
        todo = "see the reason; staging that is full wants `hslake compact`"
        return [failed(name, f"{server.url}: the hook dropped it: {event.reason}", todo)]
    acknowledged = f"{server.url}: {len(ids)} tokens captured and acknowledged"
    for root in staging:
        found_part = await asyncio.to_thread(_find, root, rid.attempt)
        if found_part is not None:
            return [passed(name, acknowledged), *_inspect(*found_part, spec, ids)]
    todo = "run preflight on the server's machine with --staging DIR, to look at the states"
    where = "; it is not in the --staging given" if staging else ""
    return [passed(name, acknowledged), warned("states", f"not looked at{where}", todo)]


async def _event(
    server: Server, status: ServerStatus, rid: RequestId, wait_s: float
) -> Event | None:
    """The event of `rid`'s attempt, or None when it does not come in time."""
    end = time.monotonic() + wait_s
    cursors = status.cursors
    while True:
        now = await server.status(cursors)
        cursors = now.cursors
        for writer in now.writers:
            for event in writer.events:
                if event.attempt == rid.attempt:
                    return event
        if time.monotonic() > end:
            return None
        if not now.more:
            await asyncio.sleep(_POLL_S)


def _find(root: Path, attempt: str) -> tuple[PartInfo, Reserved] | None:
    if not root.is_dir():
        return None  # a check of its own says so
    for writer in scan(root):
        for path in writer.parts:
            part = read_part(path)
            for reserved in part.reserved:
                if reserved.attempt == attempt and reserved.state == "complete":
                    return part, reserved
    return None


def _inspect(part: PartInfo, reserved: Reserved, spec: LakeSpec, ids: Sequence[int]) -> list[Check]:
    """The probe's states as they lie in staging."""
    todo = "do not extract: report this with the server's log and SGLang version"
    attributes = part.attributes
    want = {"streams": list(spec.streams), "dtype": spec.dtype, "hidden_size": spec.hidden_size}
    found = {key: attributes[key] for key in want}
    if found != want:
        return [failed("structure", f"{part.path}: {found}, expected {want}", todo)]
    try:
        hidden, stored_ids = read_rows(part, reserved)
    except HslakeError as error:
        return [failed("structure", str(error), todo)]
    size = sum(h.nbytes for h in hidden)
    if len(hidden) != len(spec.streams) or size != len(ids) * spec.bytes_per_token:
        text = f"{len(hidden)} streams, {size} bytes for {len(ids)} tokens"
        return [failed("structure", text, todo)]
    shape = f"{len(hidden)} streams of {hidden[0].shape[0]} x {hidden[0].shape[1]} {spec.dtype}"
    checks = [passed("structure", f"{shape}, {size:,} bytes")]
    wrong = []
    if stored_ids.tolist() != list(ids):
        wrong.append("the token ids are not those sent")
    sums = [sample_checksum(np.ascontiguousarray(h)) for h in hidden]
    if sums != list(reserved.checksum):
        wrong.append("the rows are not those that the hook checksummed")
    values = [to_float32(np.ascontiguousarray(h), spec.dtype) for h in hidden]
    for stream, v in zip(spec.streams, values, strict=True):
        if not np.isfinite(v).all():
            wrong.append(f"stream {stream} has values that are not finite")
        elif not (v.std(axis=1) > 0).all():
            wrong.append(f"stream {stream} has constant rows")
        elif len(v) > 1 and (v == v[0]).all():
            wrong.append(f"stream {stream} is the same for every token")
    pairs = itertools.combinations(zip(spec.streams, hidden, strict=True), 2)
    wrong += [f"streams {a} and {b} are equal" for (a, x), (b, y) in pairs if np.array_equal(x, y)]
    if wrong:
        checks.append(failed("states", "; ".join(wrong), todo))
    else:
        rms = ", ".join(
            f"{s} {np.sqrt((v**2).mean()):.3g}" for s, v in zip(spec.streams, values, strict=True)
        )
        checks.append(passed("states", f"finite, varied, all different; rms {rms}"))
    return checks
