"""A simulated SGLang server with the dump hook, in this process, on a thread of its own.

Speaks /generate, /abort_request, /health, /get_server_info and /hslake/status (the hook's own
endpoint code), and writes real staging through the real StagingWriter, in chunks of several
requests interleaved. `script` says what befalls each request. It watches the driver: `violations`
lists every request that came without room for it.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from aiohttp import web
from hslake_sglang import endpoint, report

import hslake
from hslake import checksum
from hslake.errors import InvalidInput, NoSpace
from hslake.ids import RequestId, parse_request_id
from hslake.staging import Reservation, StagingWriter, StatusReader
from tests.models import log_probs
from tests.sim.states import states_of

T = TypeVar("T")
Script = Callable[[RequestId, int], str]
"""(request id, how often this sample came before) -> what happens:
ok | drop (the hook loses it) | error (HTTP 500) | late-error (captured, then HTTP 500) |
silent (answered, never captured) | refuse (HTTP 400) | hang (no answer) | abort (HTTP 200, aborted)
"""


_served_states = states_of  # what it answers from, whatever a test lets it capture


class FakeServer:
    """Use as a context manager, or start and stop. `url` stays the same over deaths."""

    def __init__(
        self,
        lake_url: str,
        staging: Path,
        *,
        part_tokens: int = 1024,
        max_parts: int = 4,
        context: int | None = None,
        chunk: int = 32,
        delay: float = 0.0,
        idle_s: float = 5.0,
        script: Script = lambda rid, nth: "ok",
        head: np.ndarray | None = None,
        tells: bool = True,
        refuse_log_probs: bool = False,
    ) -> None:
        self.spec = hslake.open(lake_url).spec
        self.staging, self.part_tokens, self.max_parts = staging, part_tokens, max_parts
        self.context, self.chunk, self.delay, self.script = context, chunk, delay, script
        self.idle_s = idle_s
        # [vocab, hidden] float32: gives log-probs of prompts; without, they are made up
        self.head, self.tells = head, tells
        self.refuse_log_probs = refuse_log_probs
        self.log_probs_from: list[int] = []  # where each request for log-probs began
        self.break_log_probs = False  # HTTP 500 to whoever asks for them
        self._canaries = self.most_canaries = 0  # such requests that are, or were, here at once
        self.requests: list[RequestId] = []
        self.captured: Counter[str] = Counter()
        self.aborted: list[str] = []
        self.violations: list[str] = []
        self.no_space = self.most_open = self.lives = 0
        self.status_lake_id: str | None = None  # pretends to serve another lake
        self.tells_others = True  # as servers of before did not
        self.port = 0
        self.writer: StagingWriter | None = None
        self._open: dict[str, web.Request] = {}
        self._not_begun: Counter[str] = Counter()  # rows of requests without a reservation yet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def start(self) -> None:
        """A new server process: a new writer, on the same port as before."""
        self._call(self._start())

    def stop(self) -> None:
        """An orderly end: the writer seals its parts."""
        self._call(self._stop(orderly=True))

    def die(self) -> None:
        """kill -9: connections break, the lock falls, nothing is sealed."""
        self._call(self._stop(orderly=False))

    def disarm(self, reason: str) -> None:
        """The hook fails inside; the server goes on serving."""

        async def now() -> None:
            assert self.writer is not None
            self.writer.set_health(False, reason)

        self._call(now())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    # -- on the server's thread ----------------------------------------------------------------

    async def _start(self) -> None:
        self.lives += 1
        self._reader, self._memory = StatusReader(self.staging), endpoint.Memory()
        self._run = f"{id(self):x}-{self.lives}"
        self.writer = StagingWriter(
            self.staging,
            self.spec,
            part_tokens=self.part_tokens,
            max_parts=self.max_parts,
            fingerprint=self.spec.model.fingerprint,
            engine={
                "engine": "fake",
                "engine_version": "0",
                "hook_version": hslake.__version__,
                "tp": "1",
                "dp_rank": "0",
                "chunk_size": str(self.chunk),
                "run": self._run,
            },
            idle_s=self.idle_s,
        )
        report.tell_writer(self.staging, self._run, self.writer.writer_id)
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/get_server_info", self._info)
        app.router.add_get("/hslake/status", self._status)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self.port or site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self._ticker = asyncio.create_task(self._tick())

    async def _stop(self, *, orderly: bool) -> None:
        if self._runner is None or self.writer is None or self._ticker is None:
            return
        self._ticker.cancel()
        writer, self.writer = self.writer, None
        for request in self._open.values():
            if request.transport is not None:
                request.transport.abort()
        await self._runner.cleanup()
        self._runner = None
        self._open.clear()
        self._not_begun.clear()
        if orderly:
            writer.close()
        else:
            writer._lock.release()  # what the kernel does for a dead process

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            if self.writer is not None:
                self.writer.tick()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        limits = {} if self.context is None else {"context_length": self.context}
        return web.json_response({"model_path": "fake", "version": "0", **limits})

    async def _status(self, request: web.Request) -> web.Response:
        others, since = self.tells_others and "others" in request.query, request.query.get("since")
        found = endpoint.answer(self._reader, self._run, since, self._memory, others=others)
        if self.status_lake_id is not None:
            found["lake_id"] = self.status_lake_id
        return web.json_response(found)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        raw, ids = body["rid"], body["input_ids"]
        if self.context is not None and len(ids) >= self.context:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        asked = body.get("logprob_start_len", -1) if body.get("return_logprob") else None
        if asked is not None:
            self.log_probs_from.append(asked)
            if self.refuse_log_probs:
                told = {"error": {"message": "no log-probs here"}}
                return web.json_response(told, status=400)
            if self.break_log_probs:
                return web.json_response({"error": {"message": "CUDA error"}}, status=500)
        rid = parse_request_id(raw)
        self._open[raw] = request
        self.most_open = max(self.most_open, len(self._open))
        self._canaries += asked is not None
        self.most_canaries = max(self.most_canaries, self._canaries)
        try:
            return await self._serve(rid, ids, asked)
        finally:
            self._canaries -= asked is not None
            self._open.pop(raw, None)
            self._not_begun.pop(raw, None)

    async def _serve(
        self, rid: RequestId | None, ids: list[int], log_probs_from: int | None = None
    ) -> web.Response:
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}}
        answer: dict[str, Any] = {"text": "", "meta_info": meta}
        if log_probs_from is not None and self.tells:
            told = self._log_probs(ids)[log_probs_from:]
            meta["input_token_logprobs"] = [[None, *told[0][1:]], *told[1:]]
        if rid is None:
            return web.json_response(answer)
        nth = sum(r.sample_id == rid.sample_id for r in self.requests)
        self.requests.append(rid)
        action = self.script(rid, nth)
        self._watch_credit(rid)
        if self.delay:
            await asyncio.sleep(self.delay)
        if action == "hang":
            await asyncio.sleep(3600)
        if action == "error":
            return web.json_response({"error": {"message": "CUDA error"}}, status=500)
        if action == "refuse":
            return web.json_response({"error": {"message": "bad tokens"}}, status=400)
        if action == "abort":
            answer["meta_info"] = {"finish_reason": {"type": "abort", "message": "retracted"}}
            return web.json_response(answer)
        if action == "drop" and self.writer is not None:
            self.writer.drop(rid, "a forward was lost")
        if action in ("ok", "late-error"):
            await self._capture(rid, ids)
        if action == "late-error":
            return web.json_response({"error": {"message": "detokenizer died"}}, status=500)
        return web.json_response(answer)

    def _log_probs(self, ids: list[int]) -> list[list[Any]]:
        """As SGLang gives them: [log-prob, token, text], the first without a log-prob."""
        if self.head is None:
            return [[-1.0, i, None] for i in ids]
        final = _served_states(self.spec, ids)[self.spec.streams.index("final")]
        rows = checksum.to_float32(final, self.spec.dtype).astype(np.float64)
        values = log_probs(rows[:-1] @ self.head.T.astype(np.float64), ids[1:]).tolist()
        return [[v, i, None] for v, i in zip([None, *values], ids, strict=True)]

    def _watch_credit(self, rid: RequestId) -> None:
        assert self.writer is not None
        self._not_begun[rid.encode()] = rid.length
        asked, free = sum(self._not_begun.values()), self.writer.free_rows()
        if asked > free:
            self.violations.append(f"{asked} rows asked for, {free} free")

    async def _capture(self, rid: RequestId, ids: list[int]) -> None:
        writer = self.writer
        place = await self._begin(writer, rid) if writer is not None else None
        if writer is None or place is None:
            return
        states = states_of(self.spec, ids)
        for at in range(0, rid.length, self.chunk):
            if at:
                await asyncio.sleep(0)  # another request's chunk comes in between
            if self.writer is not writer:
                return  # died meanwhile
            n = min(self.chunk, rid.length - at)
            rows = place.rows(at, n)
            sums, stats = [], []
            for k, view in enumerate(rows.hidden):
                part = np.ascontiguousarray(states[k, at : at + n])
                view[...] = part
                sums.append(checksum.rows_checksum(part, at))
                stats.append(checksum.row_stats(checksum.to_float32(part, self.spec.dtype)))
            rows.input_ids[...] = ids[at : at + n]
            if writer.wrote(place, at, n, sums, stats):
                self.captured[rid.sample_id] += 1

    async def _begin(self, writer: StagingWriter, rid: RequestId) -> Reservation | None:
        self._not_begun.pop(rid.encode(), None)
        for waited in range(5):
            try:
                return writer.begin(rid)
            except InvalidInput as error:
                writer.drop(rid, str(error))
                return None
            except NoSpace as error:
                self.no_space += waited == 0
                reason = f"no space: {error}"
            await asyncio.sleep(0.02)
            if self.writer is not writer:
                return None
            writer.tick()
        writer.drop(rid, reason)
        return None
