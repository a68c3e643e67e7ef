"""Client of one SGLang server that runs the dump hook: the few HTTP calls hslake makes.

Errors say what the caller should do: ServerDown (no answer: set the server aside), RequestFailed
(this request failed: ask again), RequestRefused (the server will not take this request).
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from hslake.errors import Conflict, InvalidInput, without_secrets
from hslake.ids import RequestId
from hslake.server.status import (
    CAPTURED,
    DROPPED,
    Event,
    NotLetIn,
    Part,
    ServerDown,
    ServerStatus,
    WriterStatus,
    parse_status,
)

__all__ = [
    "CAPTURED",
    "DROPPED",
    "Event",
    "NotLetIn",
    "Part",
    "RequestFailed",
    "RequestRefused",
    "Server",
    "ServerDown",
    "ServerStatus",
    "WriterStatus",
    "check_url",
    "context_limit",
    "new_session",
    "parse_status",
    "whole_status",
]

API_KEY = "HSLAKE_API_KEY"
STATUS_PATH = "/hslake/status"
_BODY_SHOWN = 300
# How servers say that a prompt is too long for them: a matter of how they were started.
_ABOUT_SETTINGS = re.compile(
    r"length|context|too (?:long|large|many)|exceed|maximum", re.IGNORECASE
)
# The prompt's last token is followed by one that nobody reads: prefill is all that is wanted.
_SAMPLING = {"max_new_tokens": 1, "temperature": 0}


class RequestFailed(Conflict):
    """The server failed at this request; another attempt may succeed."""


class RequestRefused(InvalidInput):
    """The server says that this request is wrong; the same again would be refused again.

    `lasting`: by any server of this model, not only by one that was started like this one."""

    lasting = True


def check_url(url: str) -> str:
    """The server's base URL without a slash at the end. Raises InvalidInput."""
    clean = url.strip().rstrip("/")
    if not clean.startswith(("http://", "https://")) or len(clean.split("://", 1)[1]) == 0:
        raise InvalidInput(
            f"server {url!r}: expected an address such as http://127.0.0.1:30000 (what `hslake "
            "serve` listens on)"
        )
    return clean


def new_session() -> aiohttp.ClientSession:
    """A session without limits of its own: the driver bounds what is in flight.

    It sends the API key in HSLAKE_API_KEY, where there is one (of servers with --api-key)."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get(API_KEY):
        headers["authorization"] = f"Bearer {key}"
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60)
    return aiohttp.ClientSession(connector=connector, headers=headers)


class Server:
    """One server. All calls raise ServerDown when it does not answer in time."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        request_timeout: float = 900.0,
        status_timeout: float = 20.0,
    ) -> None:
        self._address = check_url(url)
        self.url = without_secrets(self._address)  # what reports and messages show
        self._session = session
        self._request = aiohttp.ClientTimeout(total=request_timeout, sock_connect=10)
        self._status = aiohttp.ClientTimeout(total=status_timeout, sock_connect=10)

    async def generate(self, rid: RequestId, input_ids: Any, **more: Any) -> Any:
        """Prefill `input_ids` (a list, or a NumPy array of int32) under `rid`; returns the server's
        parsed answer.

        `more` are further fields of the request. Raises ServerDown, RequestFailed (5xx, an aborted
        request, no answer in time) or RequestRefused (4xx).
        """
        body = {
            "rid": rid.encode(),
            "input_ids": input_ids,
            "sampling_params": _SAMPLING,
            **more,
        }
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            status, text = await self._call("POST", "/generate", self._request, data=data)
        except TimeoutError:
            raise RequestFailed(
                f"no answer to a prompt of {rid.length} tokens within {self._request.total:.0f} s"
            ) from None
        if status == 200:
            return _finished(_json(text, f"{self.url}/generate"))
        shown = _message(text)
        if status in (400, 413, 422):
            refused = RequestRefused(f"HTTP {status}: {shown}")
            refused.lasting = status != 413 and not _ABOUT_SETTINGS.search(shown)
            raise refused
        if status in (408, 425, 429) or status >= 500:
            raise RequestFailed(f"HTTP {status}: {shown}")
        # 401, 404 and their like are about the address or the key, not about this request.
        raise _no_answer(f"{self.url}/generate", status, text)

    async def abort(self, rid: RequestId) -> None:
        """Ask the server to forget a request; best effort, raises ServerDown only."""
        data = json.dumps({"rid": rid.encode()}).encode()
        await self._get_or_post("POST", "/abort_request", data)

    async def healthy(self) -> bool:
        """Whether /health answers 200."""
        try:
            return (await self._get_or_post("GET", "/health"))[0] == 200
        except ServerDown:
            return False

    async def info(self) -> dict[str, Any]:
        """What the server says of itself (/get_server_info, or /server_info where it moved)."""
        for path in ("/get_server_info", "/server_info"):
            status, text = await self._get_or_post("GET", path)
            if status == 200:
                found = _json(text, self.url + path)
                if isinstance(found, dict):
                    return found
            if status != 404:
                break
        raise _no_answer(f"{self.url}{path}", status, text)

    async def status(
        self, since: Mapping[str, int] | None = None, *, others: bool = False
    ) -> ServerStatus:
        """GET /hslake/status: events newer than `since` (writer -> cursor), room, health. With
        `others`, also of the other writers in its staging folder, where the server can."""
        asked = ["others=1"] if others else []
        if since:
            asked.append("since=" + ",".join(f"{w}:{c}" for w, c in since.items()))
        path = f"{STATUS_PATH}?{'&'.join(asked)}" if asked else STATUS_PATH
        status, text = await self._get_or_post("GET", path)
        if status == 404:
            why = "this server runs without the dump hook; start it with"
            root = urlsplit(self.url)
            if root.path:
                why = f"--server must be the server's root (here perhaps {root.scheme}://"
                why += f"{root.netloc}), or it runs without the dump hook: start it with"
            raise ServerDown(
                f"{self.url}{STATUS_PATH}: not found: {why} `hslake serve LAKE --staging DIR -- …`"
            )
        if status != 200:
            raise _no_answer(f"{self.url}{STATUS_PATH}", status, text)
        found = parse_status(_json(text, self.url + STATUS_PATH), self.url)
        known = since or {}
        if any(w.events and w.cursor <= known.get(w.writer, -1) for w in found.everyone):
            # Whoever asks until there are no more events would ask for ever.
            raise ServerDown(
                f"{self.url}{STATUS_PATH}: it tells events again that it has told, "
                "whatever `since` says: is a proxy with a cache in between? Name the server itself"
            )
        if found.more and not any(w.events for w in found.everyone):
            raise ServerDown(
                f"{self.url}{STATUS_PATH}: it says that more events wait, and tells none: use the "
                "same hslake here and in the server's environment"
            )
        return found

    async def _get_or_post(
        self, method: str, path: str, data: bytes | None = None
    ) -> tuple[int, bytes]:
        try:
            return await self._call(method, path, self._status, data=data)
        except TimeoutError:
            raise ServerDown(
                f"{self.url}{path.split('?')[0]}: no answer within {self._status.total:.0f} s"
            ) from None

    async def _call(
        self, method: str, path: str, timeout: aiohttp.ClientTimeout, data: bytes | None = None
    ) -> tuple[int, bytes]:
        try:
            async with self._session.request(
                method, self._address + path, data=data, timeout=timeout
            ) as answer:
                return answer.status, await answer.read()
        except TimeoutError:  # also aiohttp's own, which is no ClientError to us
            raise TimeoutError from None
        except (aiohttp.ClientError, OSError) as error:
            text = str(error) or type(error).__name__
            raise ServerDown(f"{self.url}: no answer ({text})") from error


async def whole_status(server: Server, *, held_only: bool = False) -> ServerStatus | ServerDown:
    """Status with all writers in its staging and all events that the server still knows, or why
    there is none. `held_only`: without those of samples that are in staging no more."""
    events: dict[str, list[Event]] = {}
    status = None
    try:
        while status is None or status.more:
            status = await server.status(status.cursors if status else None, others=True)
            for writer in status.everyone:
                found = filter(writer.holder(), writer.events) if held_only else writer.events
                events.setdefault(writer.writer, []).extend(found)
    except ServerDown as error:
        return error

    def whole(writers: Sequence[WriterStatus]) -> tuple[WriterStatus, ...]:
        return tuple(replace(w, events=tuple(events[w.writer])) for w in writers)

    return replace(status, writers=whole(status.writers), others=whole(status.others))


def context_limit(info: Mapping[str, Any]) -> int | None:
    """The longest prompt, in tokens, that a server with this info takes; None when it says nothing.

    SGLang refuses prompts of `max_req_input_len` and more, and of its context length and more.
    """
    limits = [
        int(info[key]) - 1
        for key in ("max_req_input_len", "context_length", "max_total_num_tokens")
        if isinstance(info.get(key), int) and info[key] > 0
    ]
    return min(limits, default=None)


def _no_answer(where: str, status: int, text: bytes) -> ServerDown:
    told = f"{where}: HTTP {status}: {_message(text)}"
    if status not in (401, 403):
        return ServerDown(told)
    which = "another key than the one in" if os.environ.get(API_KEY) else "a key in"
    return NotLetIn(f"{told}: it wants {which} {API_KEY}, the one of its --api-key")


def _finished(answer: Any) -> Any:
    """The answer, unless it says that the request was aborted."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and reason.get("type") == "abort":
        why = _shown(reason.get("message") or "no reason given")
        raise RequestFailed(f"aborted by the server: {why}")
    return answer


def _json(text: bytes, where: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:  # also of NaN and Infinity, which Python writes and reads
        pass
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ServerDown(f"{where}: found {text[:80]!r}, expected JSON") from None


def _message(text: bytes) -> str:
    """The human part of an error body, on one line."""
    shown = text.decode("utf-8", "replace")
    try:
        found = json.loads(shown)
        error = found.get("error", found) if isinstance(found, dict) else found
        shown = error.get("message", shown) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, RecursionError):
        pass
    return _shown(shown) or "no message"


def _shown(told: Any) -> str:
    """The beginning on one line, without what a terminal would obey or no file can hold."""
    line = " ".join(str(told)[: 4 * _BODY_SHOWN].split())[:_BODY_SHOWN]
    return "".join(c if c.isprintable() else "\ufffd" for c in line)
