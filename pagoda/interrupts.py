"""Signals are held back while Pagoda changes its own state, such as that of Ctrl-C.

Python runs a signal's handler on the main thread, between any two instructions, and the handler may raise: that of
Ctrl-C raises KeyboardInterrupt. In the middle of an event of training, this would leave half of the event behind. So
an event runs by `without_signals`, and handlers of signals that come meanwhile run at its end. Where an event waits,
it waits by `allowed`, and handlers run at once. (Databases do the same, as PostgreSQL with HOLD_INTERRUPTS.)
"""

import _signal  # type: ignore[import-not-found]  # the module behind `signal`
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_Result = TypeVar("_Result")

_MAIN = threading.main_thread().ident
_CANDIDATES = [
    getattr(signal, name)
    for name in ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2"]
    if hasattr(signal, name)
]
# Those of `signal` convert from and to enumerations, which takes several times longer.
_set: Callable[..., Any] = _signal.signal
_get: Callable[..., Any] = _signal.getsignal
_raising: tuple[signal.Signals, ...] = ()
"""The signals that had a handler of Python's when `look` was called last."""
_held: list[tuple[signal.Signals, Any]] | None = None
"""While signals are held back: each with its handler."""
_pending: list[int] = []
"""The signals that have come meanwhile."""


def look() -> None:
    """Find the signals whose handlers may raise. Call it now and then, because a program may install handlers."""
    global _raising
    if threading.get_ident() == _MAIN and _held is None:
        _raising = tuple(number for number in _CANDIDATES if callable(_get(number)))


def without_signals(work: Callable[..., _Result], *arguments: Any) -> _Result:
    """Run `work(*arguments)`. On the main thread, handlers of signals that come meanwhile run after it."""
    if _held is not None or threading.get_ident() != _MAIN:
        return work(*arguments)
    try:
        _hold()
        return work(*arguments)
    finally:
        _release()


@contextmanager
def holding_signals() -> Iterator[None]:
    """Inside, signals are held back as by `without_signals`."""
    if _held is not None or threading.get_ident() != _MAIN:
        yield
        return
    try:
        _hold()
        yield
    finally:
        _release()


def allowed(wait: Callable[..., _Result], *arguments: Any) -> _Result:
    """Run `wait(*arguments)`, a part of work that runs by `without_signals`. Handlers of signals run before it
    and during it, and may end it by an exception."""
    if _held is None or threading.get_ident() != _MAIN:
        return wait(*arguments)
    try:
        _release()
        return wait(*arguments)
    finally:
        _hold()


def _hold() -> None:
    global _held
    _held = [(number, _get(number)) for number in _raising]
    for number in _raising:
        _set(number, _note)


def _release() -> None:
    global _held
    handlers, _held = _held, None
    _restore(handlers or [])
    while _pending:
        signal.raise_signal(_pending.pop())


def _restore(handlers: list[tuple[signal.Signals, Any]]) -> None:
    try:
        while handlers:
            _set(*handlers[-1])  # may raise what the handler raises
            handlers.pop()
    finally:
        if handlers:
            _restore(handlers)


def _note(number: int, _frame: object) -> None:
    _pending.append(number)
