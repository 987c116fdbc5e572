"""Work in forked processes, for tests. A process that is forked ends with the one that has forked it, so a test that is
cut off leaves none behind."""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_parent = os.getpid()


def _note_parent() -> None:
    global _parent
    _parent = os.getpid()


def end_with_parent(end: bool = True) -> None:
    """Let this process be killed when the thread that has started it ends, or not any more."""
    if hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if end else 0)


def _end_with_parent() -> None:
    end_with_parent()
    if os.getppid() != _parent:  # it ended meanwhile
        os._exit(1)


os.register_at_fork(before=_note_parent, after_in_child=_end_with_parent)


def fork(work: Callable[[], object]) -> int:
    """Start a process that does `work` and ends at once, with status 1 if that raises; returns its number."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def ended(child: int) -> int:
    """The exit status of a process, for which this waits; minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
