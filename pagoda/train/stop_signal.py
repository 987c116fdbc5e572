"""Asking a running loop to stop: the first SIGINT or SIGTERM is remembered, a second SIGINT stops at once."""

import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any


class StopSignal(AbstractContextManager["StopSignal"]):
    """While entered, the first signal sets `received`, which ends the loop; the next acts as usual.

    In a thread that is not the main one, where Python delivers no signals, it never receives any.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """Number of the signal, or None."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
