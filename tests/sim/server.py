"""A simulated SGLang server with the real hook, as a process of its own:

    python -m tests.sim.server LAKE --staging DIR --port 30000 --trouble error=0.01,crash=0.0001

Batches, chunks, delays and troubles are those of the real one; what it computes is a function of
token, position, stream and channel (tests.sim.states), so an audit can tell every row.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from hslake_sglang import endpoint, report
from hslake_sglang.capture import Capture

import hslake
from hslake import checksum
from hslake.ids import parse_request_id
from hslake.spec import LakeSpec, read_spec
from hslake.staging import StagingWriter, StatusReader
from tests.models import log_probs
from tests.sim.engine import ABORTED, Ask, Engine, Pace, TableTaps
from tests.sim.scheduler import Request
from tests.sim.states import states_of
from tests.sim.trouble import REFUSED, parse_trouble

_HEALTH_S = 20.0


class App:
    """The HTTP side."""

    def __init__(self, spec: LakeSpec, engine: Engine, options: argparse.Namespace) -> None:
        self.spec, self.engine, self.options = spec, engine, options
        self._rng = random.Random(options.seed + 1)
        self._busy: set[str] = set()
        self._reader = StatusReader(options.staging)
        self._memory = endpoint.Memory()
        self._head = None if options.head is None else np.load(options.head).astype(np.float64)

    def routes(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health_generate", self._health_generate)
        app.router.add_get("/get_server_info", self._info)
        app.router.add_get("/server_info", self._info)
        app.router.add_get(endpoint.PATH, self._status)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _health_generate(self, request: web.Request) -> web.Response:
        ask = Ask(Request(f"HEALTH_CHECK_{time.time()}", [0], 1))
        self.engine.submit(ask)
        try:
            async with asyncio.timeout(_HEALTH_S):
                await asyncio.wrap_future(ask.end)
        except TimeoutError:
            return web.Response(status=503)
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        o = self.options
        return web.json_response(
            {
                "model_path": "simulated",
                "version": "0",
                "context_length": o.context,
                "max_req_input_len": o.context - 6,
                "max_total_num_tokens": o.kv,
                "chunked_prefill_size": o.chunk,
            }
        )

    async def _status(self, request: web.Request) -> web.Response:
        since = request.query.get("since")
        more: dict[str, Any] = {"others": True} if request.query.get("others") else {}
        found = await asyncio.to_thread(
            endpoint.answer, self._reader, self.options.run, since, self._memory, **more
        )
        return web.json_response(found)

    async def _abort(self, request: web.Request) -> web.Response:
        self.engine.abort((await request.json())["rid"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        raw, ids = body.get("rid") or uuid.uuid4().hex, body["input_ids"]
        if len(ids) >= self.options.context:
            return _error(400, f"The input ({len(ids)} tokens) is longer than the context length")
        if raw in self._busy:
            return _error(400, f"Duplicate request ID detected: {raw}")
        self._busy.add(raw)
        try:
            return await self._serve(request, raw, ids, body)
        finally:
            self._busy.discard(raw)

    async def _serve(
        self, request: web.Request, raw: str, ids: list[int], body: dict[str, Any]
    ) -> web.Response:
        trouble = self.options.trouble
        rid = parse_request_id(raw)
        fate = trouble.of_request(self._rng) if rid else "ok"
        if fate == "error":
            return _error(500, "CUDA error: an illegal memory access was encountered")
        if fate == "refuse" or (rid and rid.sample_id.startswith(REFUSED)):
            return _error(400, "input_ids: token id out of the vocabulary")
        new_tokens = int(body.get("sampling_params", {}).get("max_new_tokens", 128))
        prompt = np.asarray(ids, np.int32) if new_tokens <= 1 else ids
        ask = Ask(Request(raw, prompt, new_tokens), fate)
        self.engine.submit(ask)
        try:
            end = await asyncio.shield(asyncio.wrap_future(ask.end))
        except asyncio.CancelledError:
            self.engine.abort(raw)  # the client has gone
            raise
        if fate == "late":
            await asyncio.sleep(trouble.late_s)
        if fate == "late_error":
            return _error(500, "the detokenizer died")
        if fate == "broken" and request.transport is not None:
            request.transport.abort()
        return web.json_response(self._answer(raw, ids, end, body))

    def _answer(self, raw: str, ids: list[int], end: str, body: dict[str, Any]) -> dict[str, Any]:
        reason: dict[str, Any] = {"type": "length", "length": 1}
        if end == ABORTED:
            reason = {"type": "abort", "message": "Abort before prefill"}
        meta = {"id": raw, "finish_reason": reason, "prompt_tokens": len(ids), "cached_tokens": 0}
        if body.get("return_logprob") and end != ABORTED:
            start = max(0, int(body.get("logprob_start_len", 0)))
            meta["input_token_logprobs"] = self._log_probs(ids, start)
        return {"text": "", "output_ids": [1], "meta_info": meta}

    def _log_probs(self, ids: list[int], start: int) -> list[list[Any]]:
        """[log-prob, token, text] of the tokens from `start` on, the first without a log-prob, as
        SGLang gives them; without a head, those of one that is all zero."""
        if self._head is None:
            values = [-float(np.log(self.options.vocab))] * (len(ids) - start - 1)
        else:
            final = states_of(self.spec, ids)[self.spec.streams.index("final"), start:-1]
            rows = checksum.to_float32(final, self.spec.dtype).astype(np.float64)
            values = log_probs(rows @ self._head.T, ids[start + 1 :]).tolist()
        return [[v, i, None] for v, i in zip([None, *values], ids[start:], strict=True)]


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _writer(spec: LakeSpec, options: argparse.Namespace) -> StagingWriter:
    return StagingWriter(
        options.staging,
        spec,
        part_tokens=options.part_tokens,
        max_parts=options.max_parts,
        fingerprint=spec.model.fingerprint,
        engine={
            "engine": "simulated",
            "engine_version": "0",
            "hook_version": hslake.__version__,
            "tp": "1",
            "dp_rank": "0",
            "chunk_size": str(options.chunk),
            "run": options.run,
        },
        ahead=True,
        buffered=True,
    )


async def serve(options: argparse.Namespace) -> None:
    """Until SIGTERM or SIGINT, which seals what is in staging."""
    spec = read_spec(options.lake)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
    await asyncio.sleep(options.startup)
    report.begin(options.staging, options.run)
    writer = _writer(spec, options)
    capture = Capture(spec, TableTaps(), writer)  # type: ignore[arg-type]
    report.tell_writer(options.staging, options.run, writer.writer_id)
    pace = Pace(options.rate, options.overhead, options.jitter)
    engine = Engine(
        spec,
        capture,
        chunk=options.chunk,
        kv=options.kv,
        mixed=options.mixed,
        pace=pace,
        trouble=options.trouble,
        traffic=options.traffic,
        seed=options.seed,
    )
    engine.start()
    runner = web.AppRunner(
        App(spec, engine, options).routes(), access_log=None, shutdown_timeout=0.1
    )
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port, reuse_address=True).start()
    logging.info("serving %s at port %d", spec.lake_id, options.port)
    await stop.wait()
    await asyncio.to_thread(engine.stop)
    capture.close()
    await runner.cleanup()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim.server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("lake")
    parser.add_argument("--staging", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--part-tokens", type=int, default=65_536)
    parser.add_argument("--max-parts", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=8192, help="prefill tokens of a forward")
    parser.add_argument("--kv", type=int, default=262_144, help="tokens of the KV cache")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--mixed", action="store_true", help="decode rows in prefill batches")
    parser.add_argument("--rate", type=float, default=0.0, help="tokens/s; 0: as fast as possible")
    parser.add_argument("--overhead", type=float, default=0.0, help="seconds a forward, besides")
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="of both: 0.5 for up to half more"
    )
    parser.add_argument("--startup", type=float, default=0.0, help="seconds before it serves")
    parser.add_argument("--traffic", type=float, default=0.0, help="other people's requests/s")
    parser.add_argument("--trouble", type=parse_trouble, default=parse_trouble(""))
    parser.add_argument("--head", type=Path, help="npy file [vocab, hidden] for log-probs")
    parser.add_argument("--vocab", type=int, default=163_840)
    parser.add_argument("--seed", type=int, help="of all chance (default: another every time)")
    options = parser.parse_args(argv)
    options.run = uuid.uuid4().hex
    if options.seed is None:
        options.seed = int(options.run[:8], 16)
    return options


def main() -> int:
    """Run the command."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parse()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
