"""Settings of this process that help when the CPU computes, threads, and the detection of forks.

The settings last as long as the process. So a library must not change them; only programs do.
"""

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pagoda.errors import UsageError

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = (1 << 31) - 1
"""The largest threshold that mallopt accepts, in bytes."""
_SPINS = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
"""How long OpenMP's waiting threads stay awake. GNU's library counts iterations, LLVM's and Intel's count
milliseconds."""


def keep_freed_memory() -> bool:
    """Make malloc reuse freed blocks instead of returning them to the system. Returns whether that succeeded.

    glibc maps a block of more than 32 MiB anew for each allocation, and returns the top of its heap. Every training
    step allocates and frees the same activations. So on the CPU, each step waits for the system to find and clear these
    pages again. On virtual machines that can be half of a step with 2,048 tokens of llama-15m. In exchange, the heap
    keeps memory that is lost to fragmentation.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # not glibc
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))


def spin_briefly() -> bool:
    """Make OpenMP's waiting threads sleep after about 0.1 ms, unless the environment sets another time.

    An operator of torch ends when the last of its threads ends. By default, the other threads spin for milliseconds. If
    anything else runs, such as lanes for transfers and updates, they keep it, and the thread that they wait for, from
    the cores. Returns False if it is too late, because the library reads this setting once, when torch is imported.
    """
    for name, value in _SPINS.items():
        os.environ.setdefault(name, value)
    return "torch" not in sys.modules


def restart_spinning_briefly() -> None:
    """The same for a program that has already imported torch. Restarts the process unless its environment has the
    setting."""
    if any(name not in os.environ for name in _SPINS) and not spin_briefly():
        os.execv(sys.executable, sys.orig_argv)


@contextmanager
def temporarily(owner: object, **values: Any) -> Iterator[None]:
    """Inside, attributes of an object or of a module have other values. Afterwards it has the old ones as attributes of
    its own, also those that it had from its class."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For work that makes many objects and drops few: imports, models, simulations. The garbage collector would look
    at all of them again and again, and finds nothing before its end. That takes up to a third of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def callers_gpu() -> Callable[[], None]:
    """A function that gives the thread that calls it this thread's current GPU, if the process uses GPUs.

    A new thread's current GPU is GPU 0. Even if it only waits for an event there, each rank takes hundreds of MB of
    GPU 0's memory.
    """
    cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
    gpu = cuda.current_device() if cuda is not None and cuda.is_initialized() else None
    return lambda: None if cuda is None or gpu is None else cuda.set_device(gpu)


def start_thread(work: Callable[..., object], name: str, *arguments: object) -> threading.Thread:
    """Start a daemon thread that runs `work(*arguments)`, with the caller's current GPU."""
    use_gpu = callers_gpu()

    def run() -> None:
        use_gpu()
        work(*arguments)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


_forks = 0
"""Number of forks between the process that imported this module and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def forks() -> int:
    """A number that stays the same within a process and differs in every process forked from it."""
    return _forks


def check_not_forked(since: int) -> None:
    """Raises UsageError if this process was forked after `forks()` returned `since`. Otherwise it would wait for ever.

    A fork copies one thread. The threads that move states stay in the process that started them.
    """
    if since != _forks:
        raise UsageError(
            f"Process {os.getpid()} was forked from the one that called pagoda.wrap(), and the threads and memory that "
            "hold this model's state are only there. Train, evaluate and save in that process; the workers of a "
            "DataLoader must not use the model. To train in another process, start it with multiprocessing's 'spawn' "
            "method and call pagoda.wrap() there."
        )
