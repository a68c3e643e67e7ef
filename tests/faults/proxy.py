"""An HTTP proxy on a loopback port in front of an S3 server, which breaks what a rule names.

The rule is asked for every request and names a fault of `FAULTS`, or None. Counts what it did.
"""

import http.client
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HANG_S = 60.0  # at most: the proxy's end ends it
# name: (statuses it answers with instead of asking, or what it does)
FAULTS = {
    "500": "answers 500 InternalError; nothing is carried out",
    "503": "answers 503 SlowDown; nothing is carried out",
    "reset-request": "takes half of the request and resets the connection",
    "reset-response": "carries it out and resets the connection in mid-answer",
    "lost-answer": "carries it out and resets the connection without an answer",
    "hang": "neither carries out nor answers",
    "hang-after": "carries it out and does not answer",
    "412-done": "carries it out and answers 412",
    "truncated": "ends the answer's body early and closes the connection",
    "short": "ends the answer's body early and says that this is its length",
    "stale-list": "leaves the newest keys out of a listing",
    "no-condition": "takes the condition away from a conditional write",
}


@dataclass(frozen=True)
class Request:
    """What a rule sees."""

    method: str
    path: str  # with the query
    conditional: bool
    size: int

    @property
    def is_list(self) -> bool:
        """Whether it asks for a listing."""
        return self.method == "GET" and "list-type=2" in self.path


Rule = Callable[[Request], str | None]


class Proxy:
    """A running proxy. `rule` may be changed at any time; None lets everything pass."""

    def __init__(self, upstream: str, rule: Rule | None = None) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.rule = rule
        self.done: Counter[str] = Counter()  # by fault
        self.seen: list[Request] = []
        self.ending = threading.Event()
        self.lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def choose(self, request: Request) -> str | None:
        """The fault of this request, counted."""
        with self.lock:
            self.seen.append(request)
            fault = self.rule(request) if self.rule else None
            if fault == "412-done" and not request.conditional:
                fault = None  # no server answers so without a condition
            if fault == "no-condition" and not request.conditional:
                fault = None
            if fault == "stale-list" and not request.is_list:
                fault = None
            if fault in ("truncated", "short") and (request.method != "GET" or request.is_list):
                fault = None
            if fault:
                self.done[fault] += 1
            return fault


@contextmanager
def proxied(upstream: str, rule: Rule | None = None) -> Iterator[Proxy]:
    """A proxy in front of the server at the URL `upstream`."""
    proxy = Proxy(upstream, rule)
    thread = threading.Thread(target=proxy.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.ending.set()
        proxy.server.shutdown()
        proxy.server.server_close()
        thread.join()


def first(n: int, fault: str, when: Callable[[Request], bool] = lambda _: True) -> Rule:
    """A rule: the first `n` requests for which `when` holds meet `fault`."""
    left = [n]

    def rule(request: Request) -> str | None:
        if left[0] and when(request):
            left[0] -= 1
            return fault
        return None

    return rule


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *args: object) -> None:
        """Nothing: clients that gave up have closed their end."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Proxy

    def log_message(self, *args: object) -> None:
        """Nothing: thousands of requests."""

    def _any(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        request = Request(self.command, self.path, "If-None-Match" in self.headers, size)
        fault = self.owner.choose(request)
        if fault == "reset-request":
            self.rfile.read(size // 2)
            return self._reset()
        body = self.rfile.read(size)
        if fault == "hang":
            return self._hang()
        if fault in ("500", "503"):
            code = "SlowDown" if fault == "503" else "InternalError"
            return self._answer(int(fault), _error(code))
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        if fault == "no-condition":
            headers = {k: v for k, v in headers.items() if k.lower() != "if-none-match"}
        status, reply, answer = self._forward(body, headers)
        if fault == "lost-answer":
            return self._reset()
        if fault == "hang-after":
            return self._hang()
        if fault == "412-done":
            return self._answer(412, _error("PreconditionFailed"))
        if fault == "stale-list":
            answer = _without_newest(answer)
        if fault == "short":
            answer = answer[: len(answer) // 2]
        self.send_response(status)
        for key, value in reply:
            if key.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(key, value)
        length = {k.lower(): v for k, v in reply}.get("content-length", "0")
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(answer)))
        self.end_headers()
        if fault in ("reset-response", "truncated"):
            self.wfile.write(answer[: len(answer) // 2])
            self.wfile.flush()
            if fault == "reset-response":
                return self._reset()
            self.close_connection = True
            return None
        self.wfile.write(answer)
        return None

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

    def _forward(
        self, body: bytes, headers: dict[str, str]
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(self.owner.upstream, timeout=120)
        try:
            # The Host header stays: it is signed.
            upstream.request(self.command, self.path, body, headers)
            found = upstream.getresponse()
            return found.status, found.getheaders(), found.read()
        finally:
            upstream.close()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _hang(self) -> None:
        self.owner.ending.wait(HANG_S)
        self._reset()

    def _reset(self) -> None:
        """RST, not FIN."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.wfile = open("/dev/null", "wb")  # noqa: PTH123, SIM115 - what the handler flushes


def _error(code: str) -> bytes:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
        f"<Message>injected at {time.time():.3f}</Message></Error>"
    ).encode()


def _without_newest(listing: bytes) -> bytes:
    """A listing as it was some time ago: without its newest key."""
    found = re.findall(rb"<Contents>.*?</Contents>", listing, re.DOTALL)
    if not found:
        return listing
    when = re.compile(rb"<LastModified>(.*?)</LastModified>")

    def age(entry: bytes) -> tuple[bytes, bytes]:
        match = when.search(entry)
        return (match[1] if match else b"", entry)

    return listing.replace(max(found, key=age), b"")
