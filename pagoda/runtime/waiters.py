"""Waiters: threads that wait for a change, without a lock that an exception could leave locked."""

import threading
from collections.abc import Callable
from typing import Any


class Waiters:
    """Threads that wait for a change of something that a lock guards.

    Unlike threading.Condition, this leaves the lock alone, so that an exception that a signal's handler raises in a
    wait cannot leave it locked or unlocked by mistake: a thread registers with `add` under the lock, and then waits
    without it.
    """

    def __init__(self) -> None:
        self._waiting: list[Any] = []

    def add(self) -> Callable[[], object]:
        """A function that waits until the next `wake`. Call it without the lock."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiting.append(waiter)
        return waiter.acquire

    def wake(self) -> None:
        """Let all go on that wait."""
        waiting, woken = self._waiting, 0
        for waiter in waiting:
            woken += 1
            if waiter.locked():
                waiter.release()
        del waiting[:woken]
