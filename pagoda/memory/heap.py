"""The C heap: what the process frees, it keeps for itself."""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = (1 << 31) - 1
"""The largest threshold that mallopt takes, in bytes."""


def keep_freed_memory() -> bool:
    """Have malloc reuse freed blocks in place of giving them back to the system; returns whether it does from now on.

    glibc maps blocks above 32 MiB at most anew for each allocation, and gives back the top of its heap. A step of
    training takes and frees the same activations every time, so on the CPU each step waits for the system to find and
    clear these pages again: half of a step with 2048 tokens of llama-15m where that is slow, as on virtual machines. In
    exchange the heap keeps what fragmentation costs. For a whole process: only a program may call this, no library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # not glibc
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
