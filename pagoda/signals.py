"""Signals that end a run in good order: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (a terminal that was closed)."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_STDERR = 2
_TOGETHER_S = 1.0
"""Signals within this time are one event: a terminal and torchrun both pass Ctrl-C on, as different signals."""


@contextmanager
def first_signal(
    explain: Callable[[str], str], numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
) -> Iterator[list[int]]:
    """A list that receives the first signal of these `numbers` inside the context. `explain` returns, for the signal's
    name, the message that goes to stderr at once; an empty one is not written.

    Signals in the following second count as the same one. Any later signal has its usual effect. A signal that the
    process ignores (as SIGHUP with nohup) stays ignored. The list stays empty in a thread other than the main one,
    because Python delivers no signals there.
    """
    received: list[int] = []
    began = 0.0
    before: dict[int, Any] = {}

    def receive(number: int, _frame: FrameType | None) -> None:
        nonlocal began
        if not received:
            began = time.monotonic()
            received.append(number)
            if message := explain(signal.Signals(number).name):
                with suppress(OSError):  # not print, which may be what the signal has interrupted
                    os.write(_STDERR, f"\npagoda: {message}\n".encode())
        elif time.monotonic() - began > _TOGETHER_S:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():
        for number in map(int, numbers):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not Python's
                before[number] = signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
