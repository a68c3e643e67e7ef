"""`hslake preflight`: go or no-go before a long run. Changes nothing in the lake."""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hslake
from hslake import query
from hslake.checks import FAIL, WARN, Check, failed, passed, warned
from hslake.errors import HslakeError, InvalidInput, Missing, without_secrets
from hslake.lake import Lake
from hslake.probe import PROBE_TOKENS, check_server
from hslake.progress import ProgressMaker, Silent
from hslake.server import Server, new_session
from hslake.staging import read_part, read_status, scan
from hslake.staging.check import check_part
from hslake.staging.memory import part_bytes
from hslake.staging.space import cgroup_headroom
from hslake.units import format_bytes
from hslake.worklist import Worklist, read_ids, worklist

_SPARE = 1.1  # of the forecast


@dataclass(frozen=True)
class PreflightReport:
    """The checks, in the order of the data's way. `passed`: none failed."""

    lake: str
    servers: list[str]
    passed: bool
    checks: list[Check]

    @property
    def warnings(self) -> list[Check]:
        """Those to think about."""
        return [c for c in self.checks if c.ok == WARN]

    @property
    def failures(self) -> list[Check]:
        """Those that forbid a run."""
        return [c for c in self.checks if c.ok == FAIL]


def preflight(
    lake_url: str,
    servers: Sequence[str],
    *,
    staging: Sequence[str | Path] = (),
    probe_timeout: float = 20.0,
    progress: ProgressMaker = Silent,
) -> PreflightReport:
    """Check lake, plan, target, staging and every server; each server captures a probe.

    `staging`: the servers' staging folders, as far as they are on this machine; without them the
    states themselves are not looked at. `probe_timeout`: seconds the hook has to acknowledge the
    probe. Raises Missing or InvalidInput only when there is nothing to check (no lake, no server
    named, an impossible address).
    """
    if not servers:
        raise InvalidInput("no server given: name at least one with --server http://HOST:PORT")
    lake = hslake.open(lake_url)
    urls, roots = list(dict.fromkeys(servers)), [Path(s) for s in staging]
    with progress(3 + len(urls), "preflight") as bar:
        checks = list(_lake(lake))
        listing = worklist(lake)
        checks += [_plan(lake_url, listing), _target(lake), _free_space(lake)]
        bar.advance(2)
        checks += _staging(roots, lake)
        bar.advance()
        longest = max(((i.sample_id, i.length) for i in listing.missing), key=_tokens, default=None)
        ids = _probe_ids(lake, listing)

        async def ask() -> None:
            async with new_session() as session:
                for server in [Server(url, session, request_timeout=300.0) for url in urls]:
                    found = await check_server(
                        server,
                        lake.spec,
                        longest=longest,
                        probe_ids=ids,
                        staging=roots,
                        wait_s=probe_timeout,
                    )
                    checks.extend(found)
                    bar.advance()

        asyncio.run(ask())
    shown = [without_secrets(u) for u in urls]
    return PreflightReport(lake_url, shown, not any(c.ok == FAIL for c in checks), checks)


def _tokens(item: tuple[str, int]) -> int:
    return item[1]


# -- lake and plan ------------------------------------------------------------------------------


def _lake(lake: Lake) -> Iterator[Check]:
    spec = lake.spec
    streams = ", ".join(spec.streams)
    yield passed("lake", f"{lake.url}: streams {streams}, hidden {spec.hidden_size}, {spec.dtype}")
    if not any(spec.model.fingerprint.values()):
        todo = "make sure yourself that the server runs the right weights (or create with them)"
        yield warned("fingerprint", "the lake has none: any model of this shape would pass", todo)
    else:
        known = ", ".join(k for k, v in spec.model.fingerprint.items() if v)
        yield passed("fingerprint", f"of the model's {known}; a hook arms only if it agrees")


def _plan(lake_url: str, listing: Worklist) -> Check:
    if not listing.planned:
        todo = f"register samples: hslake plan {lake_url} FILE --source NAME"
        return failed("plan", "nothing is planned", todo)
    tokens = sum(i.length for i in listing.missing)
    if not listing.missing:
        todo = "nothing needs to be extracted"
        return warned("plan", f"all {listing.planned:,} samples are committed", todo)
    left = f"{len(listing.missing):,} of {listing.planned:,} samples to capture, {tokens:,} tokens"
    return passed("plan", left)


def _target(lake: Lake) -> Check:
    try:
        lake.store.check_put_new()
    except (HslakeError, OSError) as error:
        todo = "give write access to the lake, on a store with conditional put"
        return failed("target", f"{type(error).__name__}: {error}", todo)
    return passed("target", "writable; a second conditional put of one key is refused")


def _free_space(lake: Lake) -> Check:
    name = "disk space"
    forecast = query.run(lake, "forecast").to_pylist()[0]
    need = max(0, forecast["forecast_stored_bytes"] - forecast["stored_bytes"])
    text = f"{format_bytes(need)} still to write ({forecast['basis']} ratio)"
    if not lake.store.is_local:
        return passed(name, f"{text}; an object store's limits are not known here")
    free = shutil.disk_usage(lake.store.root).free
    text += f", {format_bytes(free)} free"
    todo = "free space, move the lake, or plan less"
    if free < need:
        return failed(name, text, todo)
    if free < need * _SPARE:
        return warned(name, f"{text}: little to spare", todo)
    return passed(name, text)


def _probe_ids(lake: Lake, listing: Worklist) -> list[int]:
    """Ten token ids that the model knows: the beginning of a planned sample, as far as there is."""
    ids: list[int] = []
    if listing.missing:
        item = listing.missing[0]
        ids = read_ids(lake, [item])[item.sample_id].tolist()[:PROBE_TOKENS]
    # Repeated ids still get different states by their position, except at boundary 0.
    vocab = lake.spec.model.vocab_size or 100
    return (ids + [i % vocab for i in range(5, 5 + PROBE_TOKENS)])[:PROBE_TOKENS]


# -- staging ------------------------------------------------------------------------------------


def _staging(roots: Sequence[Path], lake: Lake) -> Iterator[Check]:
    if not roots:
        todo = "run preflight on the server's machine with --staging DIR"
        yield warned("staging", "not looked at: no --staging given", todo)
    for root in roots:
        try:
            yield from _one_staging(root, lake)
        except Missing as error:
            yield failed("staging", str(error), "name the --staging that `hslake serve` was given")


def _one_staging(root: Path, lake: Lake) -> Iterator[Check]:
    foreign, waiting = [], 0
    for writer in scan(root):
        for path in writer.parts:
            try:
                part = read_part(path, dead=not writer.alive)
                check_part(path, part.attributes, lake.spec)
            except HslakeError as error:
                foreign.append(str(error))
                continue
            if not writer.alive and not part.done:
                waiting += sum(r.state == "complete" for r in part.reserved)
    if foreign:
        todo = "compact it into its own lake, or delete it; or use another --staging"
        more = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
        yield failed("foreign parts", f"{foreign[0]}{more}", todo)
    else:
        yield passed("foreign parts", f"none in {root}")
    if waiting:
        todo = f"run `hslake compact LAKE --staging {root}` first, or they are captured again"
        yield warned("left behind", f"{waiting:,} samples of writers that have ended", todo)
    yield _ram(root, lake)


def _ram(root: Path, lake: Lake) -> Check:
    """Parts are made as they are needed: is there room for those still to come?"""
    need = 0
    for writer in read_status(root)["writers"]:
        size = writer["largest_reservation"]
        if writer["alive"] and size:
            unmade = writer["capacity_rows"] // size - len(writer["parts"])
            need += max(0, unmade) * part_bytes(lake.spec, size)
    rooms = {"the filesystem": shutil.disk_usage(root).free}
    headroom = cgroup_headroom()
    if headroom is not None:
        rooms["the memory cgroup"] = headroom
    where, free = min(rooms.items(), key=lambda item: item[1])
    text = f"{format_bytes(need)} of parts still to be made in {root}, {where} has "
    text += format_bytes(free)
    if free < need:
        todo = "lower the server's --max-parts or --part-tokens, or give the machine more RAM"
        return failed("staging space", text, todo)
    return passed("staging space", text)
