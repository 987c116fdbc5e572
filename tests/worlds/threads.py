"""Threads that take turns: one runs at a time, and a seed decides which one goes on wherever another could.

The package's own threads, locks, conditions and queues run unchanged, because its modules get `Threading` in place of
the module `threading`. A thread gives up its turn where it waits, and now and then where it takes a lock, hands
something over, or where a fake of memory, a drive or a device calls `pause`. So a run depends on its seed alone. If no
thread can go on, that is a deadlock.
"""

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from random import Random
from types import ModuleType
from typing import Any

from pagoda import interrupts, process

_NEVER = 1 << 62
_LANES = (
    *("compute", "device", "pagoda-h2d", "pagoda-d2h", "pagoda-ssd_read", "pagoda-ssd_write", "pagoda-update"),
    *("pagoda-device_update", *["pagoda-checkpoint"] * 3, *["nobody"] * 4),
)
"""How names of threads begin. The last ones are of none."""


class ViolationError(AssertionError):
    """What must never be."""


class OverError(BaseException):
    """The world has ended. Raised in every thread that waits."""


class SignalError(BaseException):
    """What a signal's handler raises, such as that of Ctrl-C."""


class Thread:
    """A thread of a world. It runs when it has the turn."""

    def __init__(self, name: str, priority: float) -> None:
        self.name = name
        self.priority = priority
        self.turn = threading.Lock()
        self.turn.acquire()
        self.waiters: list[Thread] = []
        """Threads that wait for its end."""
        self.ended = False
        self.lazy = False
        """Whether it hardly goes on where another can."""
        self.rank = 0
        """Of the program to which it belongs."""
        self.signals = 0.0
        """How likely a signal comes where another thread could go on."""
        self.holds_back = False
        """Whether signals are held back."""
        self.real: threading.Thread | None = None
        self.world: Threads

    def join(self, timeout: float | None = None) -> None:
        while not self.ended:
            self.world.block(self.waiters)

    def is_alive(self) -> bool:
        return not self.ended


class Threads:
    """All threads of a world. The thread that creates it is the first and has the turn."""

    def __init__(self, rng: Random, most_turns: int = 200_000) -> None:
        self._rng = rng
        self._most_turns = most_turns
        self.turns = 0
        """How often another thread went on."""
        self.over = False
        self.cause: BaseException | None = None
        """Why the world has ended early."""
        self._runnable: list[Thread] = []
        """Threads that could go on, without the one that has the turn."""
        self._sleeping: list[Thread] = []
        """Threads that wait for a time, or for an event that may come first."""
        self._rate = rng.choice([4.0, 15.0, 60.0])
        """Chances to give up a turn for each one that is taken, on average."""
        self._left = self._gap()
        self._lazy = rng.choice(_LANES)
        """Threads whose names begin so hardly go on where another can."""
        self.all: list[Thread] = []
        self.running = self._new("compute")

    def _new(self, name: str) -> Thread:
        thread = Thread(name, self._rng.random())
        thread.world, thread.lazy = self, name.startswith(self._lazy)
        self.all.append(thread)
        return thread

    def start(self, work: Callable[..., object], name: str, *arguments: object) -> Thread:
        """Start a thread, as `process.start_thread` does."""
        thread = self._new(name)
        thread.rank = self.running.rank

        def run() -> None:
            thread.turn.acquire()
            try:
                if not self.over:
                    work(*arguments)
            except OverError:
                pass
            except BaseException as error:
                self.end(error)
            thread.ended = True
            self.wake(thread.waiters)
            with suppress(OverError):
                if not self.over:
                    self._go_on(thread)

        thread.real = threading.Thread(target=run, name=name, daemon=True)
        thread.real.start()
        self._runnable.append(thread)
        return thread

    # --- turns ---

    def pause(self) -> None:
        """Another thread may go on here, or a signal may come."""
        self.signal()
        self._left -= 1
        if self._left <= 0 and not self.over:
            self._left = self._gap()
            self.let_others()

    def signal(self) -> None:
        """Raises SignalError at random."""
        me = self.running
        if me.signals and not (me.holds_back or self.over) and self._rng.random() < me.signals:
            raise SignalError

    def let_others(self) -> None:
        """One of the threads that could goes on: perhaps this one."""
        me = self.running
        self._runnable.append(me)
        self._go_on(me)

    def block(self, waiters: list[Thread], timed: bool = False) -> None:
        """Wait among `waiters` until `wake`, or if `timed`, until nothing else can go on."""
        if self.over:
            raise OverError
        me = self.running
        waiters.append(me)
        if timed:
            self._sleeping.append(me)
        self._go_on(me)
        if me in waiters:  # its time has come
            waiters.remove(me)
        self.signal()

    def wake(self, waiters: list[Thread], most: int = _NEVER) -> None:
        """Let threads that wait go on."""
        woken, waiters[:] = waiters[:most], waiters[most:]
        for thread in woken:
            if thread in self._sleeping:
                self._sleeping.remove(thread)
        self._runnable += woken

    def _gap(self) -> int:
        return int(self._rng.expovariate(1.0 / self._rate)) + 1

    def _go_on(self, me: Thread) -> None:
        self.turns += 1
        if self.turns > self._most_turns:
            self.end(ViolationError(f"the world takes more than {self._most_turns} turns"))
        if not self._runnable:
            if not self._sleeping:
                self.end(ViolationError("no thread can go on: " + self._where()))
                raise OverError
            self._runnable.append(self._sleeping.pop(self._rng.randrange(len(self._sleeping))))
        if self.over:
            raise OverError
        chosen = self._choose()
        if chosen is me:
            return
        self.running = chosen
        chosen.turn.release()
        if me.ended:
            return
        me.turn.acquire()
        if self.over:
            raise OverError

    def _choose(self) -> Thread:
        """Mostly the one with the highest priority, so that some threads stand still for long. Priorities change."""
        rng, runnable = self._rng, self._runnable
        if len(runnable) == 1:
            return runnable.pop()
        roll = rng.random()
        if roll < 0.1:
            runnable[int(rng.random() * len(runnable))].priority = rng.random()
        others = runnable if roll > 0.97 else [each for each in runnable if not each.lazy] or runnable
        if roll < 0.25:
            chosen = others[int(rng.random() * len(others))]
        else:
            chosen = max(others, key=lambda thread: thread.priority)
        runnable.remove(chosen)
        return chosen

    def end(self, cause: BaseException | None = None) -> None:
        """End the world: every thread that waits gets OverError."""
        if not self.over:
            self.over, self.cause = True, cause
        for thread in self.all:
            if thread is not self.running and not thread.ended and thread.turn.locked():
                thread.turn.release()

    def join(self) -> None:
        """After `end`: wait until every thread has ended."""
        for thread in self.all:
            if thread.real is not None and thread.real is not threading.current_thread():
                thread.real.join(10)

    def _where(self) -> str:
        """Where each thread waits."""
        frames, told = sys._current_frames(), []
        for thread in self.all:
            number = threading.main_thread().ident if thread.real is None else thread.real.ident
            frame = frames.get(number or 0)
            if thread.ended or frame is None:
                continue
            stack = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in traceback.extract_stack(frame)]
            ours = [place for place in stack if not place.startswith(("threads.py", "threading.py"))]
            told.append(f"{thread.name} at {' < '.join(reversed(ours[-4:]))}")
        return "; ".join(told)


class Lock:
    """threading.Lock."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._holder: Thread | None = None
        self._waiters: list[Thread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        threads = self._threads
        threads.pause()
        while self._holder is not None and not threads.over:
            if not blocking:
                return False
            threads.block(self._waiters)
        self._holder = threads.running
        return True

    def release(self) -> None:
        self._holder = None
        if self._waiters:
            self._threads.wake(self._waiters)

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """threading.RLock."""

    _count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._holder is not self._threads.running and not super().acquire(blocking, timeout):
            return False
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            super().release()


class Condition:
    """threading.Condition."""

    def __init__(self, threads: Threads, lock: Lock | None = None) -> None:
        self._threads = threads
        self._lock = RLock(threads) if lock is None else lock
        self._waiters: list[Thread] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        lock, count = self._lock, getattr(self._lock, "_count", 1)
        for _ in range(count):
            lock.release()
        try:
            self._threads.block(self._waiters, timed=timeout is not None)
        finally:
            for _ in range(count):
                lock.acquire()
        return True

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        while not predicate():
            self.wait(timeout)
        return True

    def notify(self, n: int = 1) -> None:
        self._threads.wake(self._waiters, n)

    def notify_all(self) -> None:
        if self._waiters:
            self._threads.wake(self._waiters)


class Event:
    """threading.Event."""

    def __init__(self, threads: Threads) -> None:
        self._condition, self._set = Condition(threads), False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._condition.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            while not self._set:
                self._condition.wait(timeout)
                if timeout is not None:
                    break
        return self._set


class Queue:
    """queue.SimpleQueue."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._items: deque[Any] = deque()
        self._waiters: list[Thread] = []

    def put(self, item: Any, *_: object) -> None:
        self._items.append(item)
        if self._waiters:
            self._threads.wake(self._waiters, 1)

    def get(self, *_: object) -> Any:
        self._threads.pause()
        while not self._items:
            self._threads.block(self._waiters)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class Threading:
    """The module `threading` for the package's modules, in a world."""

    def __init__(self, threads: Threads) -> None:
        self.Lock = lambda: Lock(threads)
        self.RLock = lambda: RLock(threads)
        self.Condition = lambda lock=None: Condition(threads, lock)
        self.Event = lambda: Event(threads)
        self.Thread = _thread_class(threads)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


def _thread_class(threads: Threads) -> Callable[..., Any]:
    class Starting:
        def __init__(self, target: Any, name: str = "", args: tuple[Any, ...] = (), daemon: bool = True) -> None:
            self._start = lambda: threads.start(target, name, *args)

        def start(self) -> None:
            self._started = self._start()

        def join(self, timeout: float | None = None) -> None:
            self._started.join()

    return Starting


class _Time:
    """The module `time`: who sleeps lets others go on, and sleep alone takes time."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._now = 0.0

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        self._threads.block([], timed=True)

    def monotonic(self) -> float:
        return self._now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _Interrupts:
    """The functions of `pagoda.interrupts`."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def without_signals(self, work: Callable[..., Any], *arguments: Any) -> Any:
        with self.holding_signals():
            return work(*arguments)

    def allowed(self, wait: Callable[..., Any], *arguments: Any) -> Any:
        with self._holding_back(False):
            self._threads.signal()
            result = wait(*arguments)
            self._threads.signal()
            return result

    @contextmanager
    def holding_signals(self) -> Iterator[None]:
        with self._holding_back(True):
            yield
        self._threads.signal()

    @contextmanager
    def _holding_back(self, holds_back: bool) -> Iterator[None]:
        me = self._threads.running
        before, me.holds_back = me.holds_back, holds_back
        try:
            yield
        finally:
            me.holds_back = before


_IN_TURNS = ("pagoda.runtime", "pagoda.memory", "pagoda.ranks", "pagoda.checkpoint", "pagoda.optimizer")
"""The modules whose threads, locks and queues take turns."""
_INTERRUPTS = ("without_signals", "holding_signals", "allowed")


@contextmanager
def in_turns(threads: Threads) -> Iterator[None]:
    """Inside, the package's threads take turns. They end with it."""
    simulated = Threading(threads)
    places: dict[int, Any] = {
        id(threading): simulated,
        id(time): _Time(threads),
        id(process.start_thread): threads.start,
        id(SimpleQueue): lambda: Queue(threads),
        id(sys.modules["queue"]): _queue_module(threads),
    }
    signals = _Interrupts(threads)
    everywhere = {id(getattr(interrupts, name)): getattr(signals, name) for name in _INTERRUPTS}
    replaced: list[tuple[ModuleType, str, Any]] = []
    for name, module in [*sys.modules.items()]:
        if not name.startswith("pagoda."):
            continue
        found = {**places, **everywhere} if name.startswith(_IN_TURNS) else everywhere
        for attribute, value in [*vars(module).items()]:
            if id(value) in found:
                replaced.append((module, attribute, value))
                setattr(module, attribute, found[id(value)])
    try:
        yield
    finally:
        threads.end()
        threads.join()
        for module, attribute, value in replaced:
            setattr(module, attribute, value)


def _queue_module(threads: Threads) -> ModuleType:
    module = ModuleType("queue")
    module.__dict__.update(vars(sys.modules["queue"]), SimpleQueue=lambda: Queue(threads))
    return module
