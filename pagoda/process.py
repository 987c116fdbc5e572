"""The process: what a program asks of its own, where the CPU computes, and what a forked one has not.

What it asks lasts as long as the process: no library may ask.
"""

import ctypes
import os
import sys

from pagoda.errors import UsageError

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = (1 << 31) - 1
"""The largest threshold that mallopt takes, in bytes."""
_SPINS = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
"""For how long OpenMP's threads wait awake: GNU's library counts, LLVM's and Intel's take milliseconds."""


def keep_freed_memory() -> bool:
    """Have malloc reuse freed blocks in place of giving them back to the system; returns whether it does from now on.

    glibc maps blocks above 32 MiB at most anew for each allocation, and gives back the top of its heap. A step of
    training takes and frees the same activations every time, so on the CPU each step waits for the system to find and
    clear these pages again: half of a step with 2048 tokens of llama-15m where that is slow, as on virtual machines. In
    exchange the heap keeps what fragmentation costs.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # not glibc
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))


def spin_briefly() -> bool:
    """Have OpenMP's threads that wait for each other sleep after 0.1 ms or so, unless the environment says otherwise.

    torch's operators end when the last of their threads does. The others spin for milliseconds by default; where
    anything else runs, lanes of transfers and updates included, they keep it, and the thread they wait for, from the
    cores. Returns False if it is too late: the library reads this once, when torch is imported.
    """
    for name, value in _SPINS.items():
        os.environ.setdefault(name, value)
    return "torch" not in sys.modules


def restart_spinning_briefly() -> None:
    """The same for a program that has imported torch: unless its environment has it, the process starts again."""
    if any(name not in os.environ for name in _SPINS) and not spin_briefly():
        os.execv(sys.executable, sys.orig_argv)


_forks = 0
"""How many forks made this process out of the one that imported this module."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def forks() -> int:
    """A number that stays the same in a process, and is another one in a process forked from it."""
    return _forks


def check_not_forked(since: int) -> None:
    """Raises UsageError if this process was forked since `forks()` returned `since`, instead of waiting for ever.

    A fork copies one thread: the threads that move states stay in the process that made them.
    """
    if since != _forks:
        raise UsageError(
            f"Process {os.getpid()} was forked from the one that called pagoda.wrap(), and the threads and memory that "
            "hold this model's state are only there. Train, evaluate and save in that process; the workers of a "
            "DataLoader must not use the model. To train in another process, start it with multiprocessing's 'spawn' "
            "method and call pagoda.wrap() there."
        )
