"""Interrupts: Ctrl-C waits until a change that consists of several steps is complete.

Python runs the handlers of signals on the main thread, between any two instructions. A KeyboardInterrupt there would
leave half of an event behind, and no later step could be right.
"""

import _signal  # type: ignore[import-not-found]  # `signal` has enums around these, which take most of the time
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGINT = int(signal.SIGINT)
_CHECK_S = 0.2
"""How long a wait may take before it looks for an interrupt, in seconds."""


class Interrupts:
    """Inside the context, a SIGINT on the main thread waits for the end of the context, or for `deliver`.

    A second SIGINT has its usual effect at once. In other threads, in which Python runs no handlers, the context does
    nothing. Contexts may be nested. A handler that Python did not install is left alone.
    """

    def __init__(self) -> None:
        self._depth = 0
        """Contexts that the main thread is in."""
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        """The handler that waits."""
        self._received: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if not _on_main_thread():
            return
        if not self._depth:
            handler = _signal.getsignal(_SIGINT)
            if callable(handler):
                self._handler, self._received = handler, None
                _signal.signal(_SIGINT, self._receive)
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        if not _on_main_thread():
            return
        self._depth -= 1
        if not self._depth and self._handler is not None:
            handler, self._handler = self._handler, None
            _signal.signal(_SIGINT, handler)
            received, self._received = self._received, None
            if received is not None:
                handler(*received)

    def wait_for(self, condition: threading.Condition) -> None:
        """Wait until `condition` is notified, or for a moment. Delivers an interrupt that waits."""
        if not self._depth or not _on_main_thread():
            condition.wait()
            return
        condition.wait(_CHECK_S)
        self.deliver()

    def deliver(self) -> None:
        """Call the handler if an interrupt waits. It usually raises."""
        if self._handler is not None and self._received is not None and _on_main_thread():
            received, self._received = self._received, None
            self._handler(*received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            self.deliver()
        self._received = number, frame


INTERRUPTS = Interrupts()
"""Those of this process, because handlers belong to a process."""


class Turn:
    """A lock that a thread may hold several times. Interrupts wait meanwhile."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """For a turn that takes long and may be interrupted."""
        self._holder: int | None = None
        self._depth = 0
        """How often the thread that holds the turn has taken it."""

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if self._holder != thread:
            INTERRUPTS.__enter__()
            try:
                while not self.lock.acquire(timeout=_CHECK_S):
                    INTERRUPTS.deliver()
            except BaseException:
                INTERRUPTS.__exit__()
                raise
            self._holder = thread
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self.lock.release()
            INTERRUPTS.__exit__()


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
