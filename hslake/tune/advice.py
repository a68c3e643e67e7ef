"""From what was measured to what to write on the command line, and what to doubt."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hslake.spec import LakeSpec
from hslake.tune.report import Group, Trial
from hslake.tune.search import STARVED, enough, levels, noise

_ROUND = 1024  # tokens, that --max-tokens is a multiple of
_CHUNK = "--chunked-prefill-size"
_BUSY = 0.8  # of a core: this process may be what held the servers back
_SEALED = 0.5  # of the rows in use: then room is the compactor's matter
_NOISY = 0.1
_SHORT = 0.6  # of the requests that were allowed


def group_of(
    spec: LakeSpec, chunk: int | None, servers: Sequence[str], trials: Sequence[Trial]
) -> Group:
    """What the trials on these servers say."""
    found = levels(trials)
    best = enough(found)
    tokens = None
    if best is not None:
        tokens = max(1, -(-best.most_tokens // _ROUND)) * _ROUND
    return Group(
        chunk, list(servers), found, list(trials), best, tokens, memory_of(spec, chunk or 0)
    )


def memory_of(spec: LakeSpec, chunk: int) -> int | None:
    """Bytes of GPU memory that the capture takes at this chunk size; None when it is not known."""
    if not chunk:
        return None
    try:
        from hslake_sglang.memory import capture_bytes
    except ImportError:  # an installation without the hook
        return None
    return capture_bytes(spec, chunk)


def warnings(groups: Sequence[Group], compactor: bool | None) -> list[str]:
    """Why the bursts may not have measured concurrency. `compactor`: whether one was seen at work
    on this machine; None when no staging folder was named."""
    told = []
    for group in groups:
        at = f"chunk size {group.chunk:,}: " if group.chunk and len(groups) > 1 else ""
        starved = [t for t in group.trials if t.starved > STARVED]
        if starved:
            worst = max(starved, key=lambda t: t.starved)
            why = "the compactor was behind" if worst.sealed >= _SEALED else "staging is small"
            todo = "run `hslake compact LAKE --staging DIR --watch` beside it"
            if worst.sealed < _SEALED:
                todo = "start the server with more --max-parts"
            elif compactor:
                todo = "give the compactor more cores, or a nearer store"
            told.append(
                f"{at}staging had no room in {worst.starved:.0%} of the burst at "
                f"{worst.requests}: {why}, so that was measured and not concurrency; {todo}"
            )
        if group.best is not None and group.best.on_the_way < _SHORT * group.best.requests:
            told.append(
                f"{at}at {group.best.requests} only {group.best.on_the_way:.0f} requests were on "
                "their way on average: they are answered faster than they are sent"
            )
        if any(t.busy > _BUSY for t in group.trials):
            told.append(
                f"{at}tune itself took most of a core: servers may do more than it measured"
            )
        if group.trials and noise(group.levels) > _NOISY:
            told.append(
                f"{at}bursts at one concurrency differ by {noise(group.levels):.0%}: take more "
                "--seconds and --repeats, on a machine that does nothing else"
            )
        if dropped := sum(t.dropped for t in group.trials):
            told.append(f"{at}the hook dropped {dropped} captures: see the server's log")
        if not group.trials:
            told.append(f"{at}nothing was captured in any burst: see `hslake preflight`")
        elif group.best == group.levels[-1] and len(group.levels) > 1 and not starved:
            told.append(f"{at}the most that was tried is the best: try more with --most")
    return told


def commands(
    lake: str,
    servers: Sequence[str],
    staging: Sequence[Path],
    sglang_args: Sequence[str],
    best: Group | None,
) -> list[str]:
    """`hslake serve` and `hslake extract` with the best figures, to be copied into a shell."""
    if best is None or best.best is None:
        return []
    found = []
    if best.chunk:
        where = shlex.quote(str(staging[0])) if staging else "DIR"
        args = shlex.join(sglang_args) or "…"
        found.append(
            f"hslake serve {shlex.quote(lake)} --staging {where} -- {args} {_CHUNK} {best.chunk}"
        )
    urls = list(servers) or ["http://localhost:30000"]
    named = " ".join(f"--server {shlex.quote(url)}" for url in urls)
    found.append(
        f"hslake extract {shlex.quote(lake)} {named} --concurrency {best.best.requests} "
        f"--max-tokens {best.max_tokens}"
    )
    return found
