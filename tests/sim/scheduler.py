"""A model of SGLang's scheduler: what batches it can make of requests, and nothing of how fast.

Chunked prefill of one request at a time beside whole ones, mixed chunks with decode rows, decode
batches, a KV cache that bounds what is alive at once, retraction (everything computed is thrown
away, what was generated is kept), aborts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Entry = tuple[str, Sequence[int], int, int]  # request id, tokens, prefix, rows of this forward
Forward = Callable[[list[Entry], str], None]


@dataclass(eq=False)
class Request:
    """One request in one life; the same id may come again in another. `prompt`: a list, or an
    array where no more than one token is to be generated."""

    rid: str
    prompt: Sequence[int]
    new_tokens: int
    output: list[int] = field(default_factory=list)
    computed: int = 0
    prefilled: bool = False  # whether all of the prompt was computed in one go from position 0

    @property
    def tokens(self) -> Sequence[int]:
        return [*self.prompt, *self.output] if self.output else self.prompt

    @property
    def size(self) -> int:
        """Tokens of the KV cache that it may come to need."""
        return len(self.prompt) + self.new_tokens


class Scheduler:
    """Calls `forward(entries, mode)` for every batch; `chunk` bounds the prefill rows of one, `kv`
    the tokens of all requests that were begun, but for a first one."""

    def __init__(self, forward: Forward, *, chunk: int, mixed: bool, kv: int | None = None) -> None:
        self.forward, self.chunk, self.mixed, self.kv = forward, chunk, mixed, kv
        self.waiting: list[Request] = []
        self.chunked: Request | None = None
        self.running: list[Request] = []
        self.ended: list[Request] = []

    @property
    def alive(self) -> list[Request]:
        first = [self.chunked] if self.chunked else []
        return [*first, *self.waiting, *self.running]

    def submit(self, request: Request) -> bool:
        """False for an id that is in use: HTTP 400."""
        if any(r.rid == request.rid for r in self.alive):
            return False
        self.waiting.append(request)
        return True

    def step(self) -> None:
        """One forward pass: prefill when there is any to do, else decode."""
        entries, ready = self._prefill()
        mode = "EXTEND"
        decoding = list(self.running)
        if entries and self.mixed and decoding:
            entries, mode = [*entries, *(self._decode_row(r) for r in decoding)], "MIXED"
        elif entries:
            decoding = []
        else:
            entries, mode = [self._decode_row(r) for r in decoding], "DECODE"
        if entries:
            self.forward(entries, mode)
        for request in ready:
            request.prefilled = True
        for request in (*ready, *decoding):
            self._sample(request)

    def _prefill(self) -> tuple[list[Entry], list[Request]]:
        entries: list[Entry] = []
        ready: list[Request] = []
        room = self.chunk
        begun = sum(r.size for r in self.running)
        while room and (self.chunked or self.waiting):
            begun += (self.chunked or self.waiting[0]).size
            if self.kv is not None and begun > self.kv and (entries or self.running):
                break
            request, self.chunked = self.chunked or self.waiting.pop(0), None
            rows = min(room, len(request.tokens) - request.computed)
            entries.append((request.rid, request.tokens, request.computed, rows))
            request.computed += rows
            room -= rows
            if request.computed < len(request.tokens):
                self.chunked = request
            else:
                ready.append(request)
        return entries, ready

    def _decode_row(self, request: Request) -> Entry:
        entry = (request.rid, request.tokens, request.computed, 1)
        request.computed += 1
        return entry

    def _sample(self, request: Request) -> None:
        """The forward's last row of a request gives its next token, or its end."""
        if request not in self.running:
            self.running.append(request)
        if request.new_tokens:
            request.output.append(len(request.output) + 1)
        if len(request.output) >= request.new_tokens:
            self.running.remove(request)
            self.ended.append(request)

    def retract(self, index: int) -> None:
        """Throw away what was computed of a running or half prefilled request."""
        some = [*([self.chunked] if self.chunked else []), *self.running]
        if some:
            request = some[index % len(some)]
            self._take_out(request)
            request.computed = 0
            self.waiting.insert(0, request)

    def abort(self, index: int) -> None:
        """End a request wherever it is."""
        if self.alive:
            request = self.alive[index % len(self.alive)]
            self._take_out(request)
            self.ended.append(request)

    def _take_out(self, request: Request) -> None:
        if request is self.chunked:
            self.chunked = None
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
