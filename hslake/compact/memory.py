"""Memory of a process that compacts: kept once it was had."""

import contextlib
import ctypes
import sys

_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -8, -3, -1, -2  # malloc.h of glibc


def keep_memory() -> None:
    """Have the C library keep freed memory for the next chunk, where it is glibc.

    Encoded chunks of megabytes come and go. Given back to the kernel each time, they cost a page
    fault every 4 KB, an eighth of a second a gigabyte. For the command only: it is the process's.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option, value in (
            (_ARENA_MAX, 1),
            (_MMAP_THRESHOLD, 32 << 20),
            (_TRIM_THRESHOLD, 1 << 30),
            (_TOP_PAD, 64 << 20),
        ):
            libc.mallopt(option, value)
