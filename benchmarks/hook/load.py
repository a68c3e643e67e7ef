"""The load generator, the same for every mode: a fixed number of requests in flight.

`max_new_tokens` is 1 everywhere: it is what `hslake extract` sends, and the one token falls out of
the prefill itself, so no decode step runs (0 would spare its sampling, but some SGLang versions
refuse it).
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.hook.settings import HTTP

try:
    from orjson import loads as _loads
except ImportError:
    _loads = json.loads
PARSER = _loads.__module__


@dataclass(frozen=True)
class Request:
    """One prompt, encoded before the clock starts."""

    rid: str
    tokens: int
    body: bytes


@dataclass
class Load:
    """What one call of `send` saw. `seconds`: first send to last answer; `rows`: hidden states that
    came back in HTTP mode, `largest` the biggest answer in bytes."""

    requests: int = 0
    tokens: int = 0
    rows: int = 0
    largest: int = 0
    seconds: float = 0.0
    started: float = 0.0
    errors: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Answered tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def request(rid: str, ids: Sequence[int], mode: str) -> Request:
    """The /generate request of one prompt."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": [int(i) for i in ids],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }
    if mode == HTTP:
        body["return_hidden_states"] = True
    return Request(rid, len(ids), json.dumps(body, separators=(",", ":")).encode())


def send(url: str, requests: Sequence[Request], in_flight: int, limit: float) -> Load:
    """Send all, `in_flight` at once, and read and parse every answer; at most `limit` seconds."""
    return asyncio.run(_send(url, requests, in_flight, limit))


async def _send(url: str, requests: Sequence[Request], in_flight: int, limit: float) -> Load:
    load, rest = Load(started=time.time()), iter(requests)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=limit)
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=1 << 20
    ) as session:

        async def work() -> None:
            for one in rest:
                await _one(session, url, one, load)

        start = time.perf_counter()
        try:
            async with asyncio.timeout(limit):
                await asyncio.gather(*(work() for _ in range(in_flight)))
        except TimeoutError:
            load.errors.append(f"not all answered within {limit:.0f} s")
        load.seconds = time.perf_counter() - start
    return load


async def _one(session: aiohttp.ClientSession, url: str, one: Request, load: Load) -> None:
    try:
        async with session.post(url + "/generate", data=one.body) as answer:
            text = await answer.read()
            if answer.status != 200:
                load.errors.append(f"{one.rid}: HTTP {answer.status}: {text[:200]!r}")
                return
        meta = _loads(text)["meta_info"]
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        load.errors.append(f"{one.rid}: {type(error).__name__}: {error}")
        return
    why = meta.get("finish_reason") or {}
    if why.get("type") == "abort" or meta.get("prompt_tokens") != one.tokens:
        load.errors.append(f"{one.rid}: {why}, {meta.get('prompt_tokens')} prompt tokens")
        return
    load.requests += 1
    load.tokens += one.tokens
    load.largest = max(load.largest, len(text))
    load.rows += sum(_rows(item) for item in meta.get("hidden_states") or ())


def _rows(item: Any) -> int:
    """Rows of one entry of meta_info.hidden_states: a list of rows (prefill), or one row."""
    return len(item) if item and isinstance(item[0], list) else 1
