"""The runs of all cells, interleaved, until they are done or time is over."""

import contextlib
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hslake_sglang.process import ServerProcess

from benchmarks.hook import lakeside, load, prompts, results
from benchmarks.hook.lakeside import LakeSide
from benchmarks.hook.settings import (
    HSLAKE,
    HTTP,
    NONE,
    PLAIN,
    PREFIX,
    SLOWEST,
    TORCH_SAVE,
    Settings,
)
from hslake.ids import RequestId, new_attempt
from hslake.spec import LakeSpec

Row = dict[str, Any]
_SAVED_BYTES = 6 << 30  # of torch_save's files, before the oldest are deleted while it runs
_AFTER_RUN = {HSLAKE: 25.0}  # seconds: draining, verifying
_END = 12.0  # seconds kept for the end of the call


class Clock:
    """The time that this call has, from the start of the process."""

    def __init__(self, limit: float) -> None:
        self.start, self.limit = time.monotonic(), limit

    def left(self) -> float:
        """Seconds until nothing new should run."""
        return self.limit - _END - (time.monotonic() - self.start)


class Measure:
    """Runs cells against running servers and adds what they give to `out`."""

    def __init__(
        self,
        s: Settings,
        spec: LakeSpec,
        servers: dict[str, list[ServerProcess]],
        side: LakeSide | None,
        saved: Path,
        out: Row,
        session: str,
        clock: Clock,
        files: list[Path],
    ) -> None:
        self.s, self.spec, self.servers, self.side = s, spec, servers, side
        self.saved, self.out, self.session = saved, out, session
        self.clock, self.files = clock, files
        self.vocab = prompts.vocabulary(s.model)
        self.rates = dict(SLOWEST)
        self.warm: set[str] = set()  # urls of servers that were sent something

    def all(self) -> None:
        """Every cell: for each prompt length and concurrency the modes take turns; HTTP last."""
        pairs = [(p, c) for p in self.s.prompts for c in self.s.concurrency]
        for prompt, concurrency in pairs:
            for repeat, mode in self.turns(prompt, concurrency):
                self._turn(mode, prompt, concurrency, repeat)
        for prompt, concurrency in pairs:
            if HTTP in self.servers and not self._have(HTTP, prompt, concurrency):
                self._turn(HTTP, prompt, concurrency, 0)

    def turns(self, prompt: int, concurrency: int) -> list[tuple[int, str]]:
        """(repeat, mode) of one prompt length and concurrency. Each round starts one mode further,
        so that no mode always follows the same one."""
        modes = [m for m in (NONE, HSLAKE, PLAIN, TORCH_SAVE) if m in self.servers]
        if all(self._have(m, prompt, concurrency) for m in modes):
            return []
        found = []
        for repeat in range(max(self.s.runs_of(m) for m in modes)):
            turn = repeat % len(modes)
            found += [
                (repeat, m)
                for m in modes[turn:] + modes[:turn]
                if repeat < self.s.runs_of(m)
                and not (m == TORCH_SAVE and self._have(m, prompt, concurrency))
            ]
        return found

    def _have(self, mode: str, prompt: int, concurrency: int) -> bool:
        """Whether an earlier call has measured this cell."""
        wanted = (self.s.config, mode, prompt, concurrency)
        runs = [
            r
            for r in self.out["runs"]
            if (r["config"], r["mode"], r["prompt"], r["concurrency"]) == wanted
        ]
        return sum(results.good(r) for r in runs) >= self.s.runs_of(mode)

    def _turn(self, mode: str, prompt: int, concurrency: int, repeat: int) -> None:
        what = f"{self.s.config} {mode} {prompt} x {concurrency}, run {repeat}"
        batches = prompts.run_batches(self.s, mode, prompt, concurrency, repeat)
        tokens = sum(b.prompt * b.count for b in batches)
        need = 1.15 * tokens / self.rates[mode] + _AFTER_RUN.get(mode, 1.0)
        why = None
        if need > self.clock.left():
            why = f"would need {need:.0f} s, {max(0, self.clock.left()):.0f} s are left"
        elif not self._server(mode, repeat).alive():
            why = "the server has ended: " + self._server(mode, repeat).log_tail(5)
        elif mode == HSLAKE and self.side and self.side.problem():
            why = self.side.problem()
        if why:
            self._missing(what, why)
            return
        try:
            run = self._run(mode, prompt, concurrency, repeat, batches)
        except Exception as error:  # one failed run must not cost the others
            self._missing(what, f"{type(error).__name__}: {error}")
            return
        self.out["runs"].append(run)
        self.out["missing"] = [m for m in self.out["missing"] if m["what"] != what]
        if results.good(run):
            self.rates[mode] = run["rate"]
        print(
            f"[{time.monotonic() - self.clock.start:5.0f} s] {what}: {run['rate']:,.0f} tokens/s, "
            f"{run['tokens']:,} tokens in {run['seconds']:.1f} s"
            + "".join(f"\n    error: {e}" for e in run["errors"][:3])
            + (f"\n    {run['found']}" if "found" in run else ""),
            flush=True,
        )
        results.save(self.out, self.files)

    def _server(self, mode: str, repeat: int) -> ServerProcess:
        return self.servers[mode][repeat % len(self.servers[mode])]

    def _missing(self, what: str, why: str) -> None:
        print(f"NOT MEASURED: {what}: {why}", file=sys.stderr, flush=True)
        self.out["missing"].append({"session": self.session, "what": what, "why": why})
        results.save(self.out, self.files)

    def _run(
        self, mode: str, prompt: int, concurrency: int, repeat: int, batches: list[prompts.Batch]
    ) -> Row:
        server, at_once = self._server(mode, repeat), self.s.in_flight(mode, concurrency, prompt)
        warm, timed = ([*self._requests(b, mode)] for b in batches)
        before = lakeside.totals(lakeside.status(server.url)) if mode == HSLAKE else {}
        # Only where /dev/shm is too small for a whole run: waiting is then part of the result.
        need = 2 * self.s.part_tokens * self.s.dp + sum(r.tokens for r in warm + timed)
        credits = mode == HSLAKE and before["capacity_rows"] < need - self.s.part_tokens
        deleter = Deleter(self.saved, _SAVED_BYTES) if mode == TORCH_SAVE else None
        try:
            limit = max(1.0, self.clock.left())
            if server.url not in self.warm and mode != HTTP:
                self.warm.add(server.url)  # twice at first: kernels are compiled
                load.send(server.url, [*self._requests(batches[0], NONE)], at_once, limit)
            heated = load.send(server.url, warm, at_once, limit, credits=credits)
            limit = max(1.0, self.clock.left())
            with self.side.timed() if self.side else contextlib.nullcontext():
                found = load.send(
                    server.url, timed, at_once, limit, credits=credits, jitter=self.s.jitter
                )
        finally:
            if deleter:
                deleter.stop()
        row: Row = {
            "session": self.session,
            "config": self.s.config,
            "mode": mode,
            "prompt": prompt,
            "concurrency": concurrency,
            "repeat": repeat,
            "instance": repeat % len(self.servers[mode]),
            "in_flight": at_once,
            "credits": credits,
            **asdict(found),
            "rate": found.rate,
            "errors": heated.errors + found.errors,
        }
        if deleter:
            row |= {"files": deleter.files, "file_bytes": deleter.size}
            if not deleter.files:
                row["errors"].append("torch.save wrote no file: see server-torch_save.log")
        if mode == HTTP and found.rows < found.tokens:
            # Chunked prefill returns the last chunk only; counted as it is.
            row["note"] = f"{found.rows} of {found.tokens} rows came back"
        if mode == HSLAKE and self.side is not None:
            self._settle(row, batches, server.url, before)
        return row

    def _requests(self, batch: prompts.Batch, mode: str) -> list[load.Request]:
        made = []
        for name, ids in zip(batch.sample_ids(), batch.prompts(self.vocab), strict=True):
            rid = PREFIX + new_attempt() + name
            if mode == HSLAKE:
                attempt = new_attempt()
                one = RequestId(self.spec.lake8, attempt, len(ids), batch.source, name)
                rid = one.encode()
            made.append(load.request(rid, ids, mode))
        return made

    def _settle(self, row: Row, batches: list[prompts.Batch], url: str, before: Row) -> None:
        """Wait for the compactor, check and verify everything that was sent, wait for room."""
        assert self.side is not None
        sent = [name for b in batches for name in b.sample_ids()]
        sources = [b.source for b in batches]
        document = lakeside.status(url)
        after = lakeside.totals(document)
        dropped = after["dropped"] - before["dropped"]
        row["backlog_rows"] = after["capacity_rows"] - after["free_rows"]
        limit = max(5.0, self.clock.left())
        drain = self.side.drain(sources, len(sent) - dropped, limit)
        found = self.side.check(sources, sent)
        found.drain_s = drain
        row |= {"found": asdict(found), "dropped": dropped, "armed": document["armed"]}
        row["hook"] = [w.get("hook") for w in document["writers"]]
        if not document["armed"]:
            row["errors"].append(f"the hook is not armed: {document['error']}")
        if not results.verified(row["found"]):
            row["errors"].append("not everything sent is in the lake, once and intact")
        end = time.monotonic() + min(10.0, max(0.0, self.clock.left()))
        while time.monotonic() < end:  # parts are recycled by the writer, four times a second
            now = lakeside.totals(lakeside.status(url))
            if now["free_rows"] >= now["capacity_rows"]:
                break
            time.sleep(0.1)


class Deleter:
    """Keeps a folder of written files below `most` bytes while it runs and empties it at the end:
    RAM would fill. Counts what it deletes."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self.files = self.size = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Delete all that is left."""
        self._over.set()
        self._thread.join(30)
        self._delete(0)

    def _run(self) -> None:
        while not self._over.wait(0.2):
            self._delete(self.most)

    def _delete(self, most: int) -> None:
        found = []
        for path in self.folder.glob("*.pt"):
            try:
                stat = path.stat()
            except OSError:
                continue
            found.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        # The newest may still be written to.
        for _, size, path in sorted(found)[: len(found) if not most else max(0, len(found) - 4)]:
            if total <= most:
                break
            path.unlink(missing_ok=True)
            total -= size
            self.files, self.size = self.files + 1, self.size + size
