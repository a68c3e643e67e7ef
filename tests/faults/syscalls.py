"""Death inside native code: the kernel ends this process at a system call, by seccomp.

deltalake writes a log entry in Rust, where no Python hook sees a step. A seccomp filter sees every
one, in all threads, and needs neither privileges nor a debugger.
"""

import ctypes
import os
import platform
import struct

# A step -> (system calls by machine, index of the argument looked at, bits of it, any of which
# must be set; 0: whatever it is).
_O_CREAT = os.O_CREAT
_LONG = 0xFFFF_FF80  # a length of 128 or more: not the few bytes with which threads wake each other
STEPS: dict[str, tuple[dict[str, tuple[int, ...]], int, int]] = {
    "create": ({"x86_64": (257,), "aarch64": (56,)}, 2, _O_CREAT),
    "write": ({"x86_64": (1, 18), "aarch64": (64, 68)}, 2, _LONG),
    "link": ({"x86_64": (86, 265), "aarch64": (37,)}, 2, 0),
    "unlink": ({"x86_64": (87, 263), "aarch64": (35,)}, 2, 0),
    "rename": ({"x86_64": (82, 264, 316), "aarch64": (38, 276)}, 2, 0),
}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_NO_NEW_PRIVS, _SET_FILTER, _ALL_THREADS = 38, 1, 1
_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARGUMENTS = 0, 16  # offsets in struct seccomp_data


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def die_at(step: str) -> bool:
    """From now on this process dies at its next system call of the kind `step`. False: the kernel
    or the machine does not do that here."""
    machine = platform.machine()
    calls, argument, bits = STEPS[step]
    if machine not in _SECCOMP or not hasattr(ctypes, "CDLL"):
        return False
    numbers = calls[machine]
    # One block a system call: compare the number, load the argument, look at its bits, die.
    code = [(_LOAD, 0, 0, _NUMBER)]
    for at, number in enumerate(numbers):
        code += [
            (_EQUAL, 0, 3 if bits else 1, number),
            *([(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_ANY_BIT, 0, 1, bits)] if bits else []),
            (_RETURN, 0, 0, _KILL_PROCESS),
        ]
        if at + 1 < len(numbers):
            code.append((_LOAD, 0, 0, _NUMBER))
    code.append((_RETURN, 0, 0, _ALLOW))
    raw = b"".join(struct.pack("<HBBI", *each) for each in code)
    buffer = ctypes.create_string_buffer(raw, len(raw))
    program = _Program(len(code), ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    done = libc.syscall(_SECCOMP[machine], _SET_FILTER, _ALL_THREADS, ctypes.byref(program))
    return bool(done == 0)
