"""Ctrl-C and SIGTERM as an event in the running loop."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stopping(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets `stop`; the handlers are those from before then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    both = (signal.SIGINT, signal.SIGTERM)
    before = {one: signal.getsignal(one) for one in both}

    def remove() -> None:
        for one, handler in before.items():
            if loop.remove_signal_handler(one) and handler is not None:
                signal.signal(one, handler)

    def handle() -> None:
        stop.set()
        remove()

    for one in both:
        loop.add_signal_handler(one, handle)
    try:
        yield
    finally:
        remove()
