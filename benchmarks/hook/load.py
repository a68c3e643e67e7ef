"""The load generator, the same for every mode: a fixed number of requests in flight.

`max_new_tokens` is 1 everywhere: it is what `hslake extract` sends, and the one token falls out of
the prefill itself, so no decode step runs (0 would spare its sampling, but some SGLang versions
refuse it).
"""

import asyncio
import contextlib
import json
import random
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
    came back in HTTP mode, `largest` the biggest answer in bytes; `waited`: seconds that requests
    waited for room in staging, added up."""

    requests: int = 0
    tokens: int = 0
    rows: int = 0
    largest: int = 0
    seconds: float = 0.0
    started: float = 0.0
    waited: float = 0.0
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


def send(
    url: str,
    requests: Sequence[Request],
    in_flight: int,
    limit: float,
    *,
    credits: bool = False,
    jitter: float = 0.0,
) -> Load:
    """Send all, `in_flight` at once, and read and parse every answer; at most `limit` seconds.

    `credits`: send no more than fits the server's staging, as `hslake extract` does. `jitter`:
    each request waits for up to so many seconds first, the same ones in every call.
    """
    return asyncio.run(_send(url, requests, in_flight, limit, credits, jitter))


async def _send(
    url: str,
    requests: Sequence[Request],
    in_flight: int,
    limit: float,
    credits: bool,
    jitter: float,
) -> Load:
    rng = random.Random(0)
    load, rest = Load(started=time.time()), iter(requests)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=limit)
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=1 << 20
    ) as session:
        room = Credits(session, url) if credits else None
        looking = asyncio.create_task(room.look()) if room else None

        async def work() -> None:
            for one in rest:
                if jitter:
                    await asyncio.sleep(rng.uniform(0, jitter))
                if room:
                    load.waited += await room.take(one.tokens)
                await _one(session, url, one, load)
                if room:
                    room.give(one.tokens)

        start = time.perf_counter()
        try:
            async with asyncio.timeout(limit):
                await asyncio.gather(*(work() for _ in range(in_flight)))
        except TimeoutError:
            load.errors.append(f"not all answered within {limit:.0f} s")
        load.seconds = time.perf_counter() - start
        if looking:
            looking.cancel()
    return load


class Credits:
    """Rows of staging that may still be asked for: free ones less what is on its way."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url + "/hslake/status"
        self.free = self.on_way = self.ended = 0
        self._looked = asyncio.Event()

    async def look(self) -> None:
        """Ask the server again and again, until cancelled."""
        since = ""
        while True:
            ended = self.ended  # these had their rows before the answer that comes now was made
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, KeyError):
                async with self.session.get(self.url + since) as answer:
                    writers = _loads(await answer.read())["writers"]
                since = "?since=" + ",".join(f"{w['writer']}:{w['cursor']}" for w in writers)
                # Which writer gets a request is not ours to say: the fullest one decides.
                self.free = min(int(w["free_rows"]) for w in writers) * len(writers)
                self.on_way, self.ended = self.on_way - ended, self.ended - ended
                self._looked.set()
                self._looked.clear()
            await asyncio.sleep(0.05)

    async def take(self, tokens: int) -> float:
        """Wait for room for `tokens` rows; returns the seconds."""
        start = time.perf_counter()
        while self.free - self.on_way < tokens:
            await self._looked.wait()
        self.on_way += tokens
        return time.perf_counter() - start

    def give(self, tokens: int) -> None:
        """A request of so many tokens was answered."""
        self.ended += tokens


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
