"""Lanes: ordered executors, one per resource, and handles for their work."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import NamedTuple

from torch.autograd import profiler

from pagoda.interrupts import without_signals
from pagoda.plan.lanes import INLINE_BYTES, LaneName
from pagoda.process import check_not_forked, forks, start_thread
from pagoda.runtime.device import PAST, Event
from pagoda.runtime.waiters import Waiters

SSD_THREADS = 4
"""Number of threads of `ssd_read` and `ssd_write` for each drive. While some threads hash, the others keep the drive
busy."""
THREAD_NAMES = "pagoda-"
"""The names of all threads of this package begin with this."""

_PENDING, _ISSUED, _DONE = range(3)


class Handle:
    """Work submitted to a lane. Waiting for it raises the work's error.

    A step makes thousands of handles, and few of them are waited for. So the objects for waiting are made when
    something waits.
    """

    __slots__ = ("_callbacks", "_error", "_event", "_forks", "_lock", "_on_issue", "_state", "_waiters", "lane")

    def __init__(self, lane: str = "") -> None:
        self.lane = lane
        """The lane that does the work, if known."""
        self._lock = threading.Lock()
        self._waiters: Waiters | None = None
        """Threads that wait for the next state. Created by the first wait."""
        self._state = _PENDING
        self._forks = forks()
        self._event = PAST
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[BaseException | None], None]] = []
        self._on_issue: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        return self._state == _DONE

    @property
    def succeeded(self) -> bool:
        """True once the work has ended without an error."""
        return self._state == _DONE and self._error is None

    @property
    def issued(self) -> bool:
        """True once the work has ended, or all of it is in a device's queue."""
        return self._state >= _ISSUED

    def wait(self) -> None:
        """Block until the work has ended. Raises its error."""
        self._wait_for(_DONE)
        if self._error is not None:
            raise self._error

    def wait_until_done(self) -> None:
        """Block until the work has ended, with or without an error."""
        self._wait_for(_DONE)

    def wait_until_issued(self) -> Event:
        """Block until the work has ended, or all of it is in a device's queue. Raises its error.

        A caller that queues its own work behind the returned event need not wait for the end.
        """
        self._wait_for(_ISSUED)
        if self._state == _DONE:
            self.wait()
            return PAST
        return self._event

    def issue(self, event: Event) -> None:
        """All work is in a device's queue, before `event`. Called by the thread that does the work, before `finish`."""
        with self._lock:
            self._event = event
            self._reach(_ISSUED)
        if self._on_issue is not None:
            self._on_issue()

    def when_issued(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once all of the work is in a device's queue. It may never be called if the work is never in
        one, or has already ended. A handle has at most one such callback."""
        with self._lock:
            self._on_issue = callback
            issued = self._state == _ISSUED
        if issued:
            callback()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the work as ended. Called once, by the thread that does the work.

        If a callback raises, its error becomes the work's error for later callbacks and waits. It is raised after them,
        because on the main thread it may be that of a signal's handler.
        """
        with self._lock:
            self._error, self._event = error, PAST
            self._reach(_DONE)
            callbacks, self._callbacks = self._callbacks, []
        first: BaseException | None = None
        for callback in callbacks:
            try:
                callback(self._error)
            except BaseException as raised:
                first = first or raised
                self._error = self._error or raised
        if first is not None:
            raise first

    def _reach(self, state: int) -> None:
        self._state = state
        if self._waiters is not None:
            self._waiters.wake()

    def _wait_for(self, state: int) -> None:
        if self._state < state:
            check_not_forked(self._forks)
        while self._state < state:
            with self._lock:
                if self._state >= state:
                    return
                if self._waiters is None:
                    self._waiters = Waiters()
                wait = self._waiters.add()
            wait()

    def then(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call `callback(error)` once the work has ended: on the thread that ends it, or now if it has ended."""
        with self._lock:
            if self._state != _DONE:
                self._callbacks.append(callback)
                return
        callback(self._error)


def all_of(handles: Sequence[Handle]) -> Handle:
    """A handle that ends when all of these have ended, with the first error. It is issued when all are, unless one has
    failed. All that a device queues must be in one queue: then the event of the one that was issued last is behind
    all."""
    if len(handles) == 1:
        return handles[0]
    whole, lock, left = Handle(handles[-1].lane if handles else ""), threading.Lock(), len(handles)
    unissued = {*range(left)}
    first_error: BaseException | None = None

    def issued(number: int) -> None:
        with lock:
            last = unissued == {number}
            unissued.discard(number)
        if last:
            whole.issue(handles[number]._event)

    def ended(number: int, error: BaseException | None) -> None:
        nonlocal left, first_error
        with lock:
            first_error = first_error or error
            left -= 1
            last = left == 0
            if error is None:
                unissued.discard(number)
        if last:
            whole.finish(first_error)

    if not handles:
        whole.finish()
    for number, handle in enumerate(handles):
        handle.when_issued(partial(issued, number))
        handle.then(partial(ended, number))
    return whole


Work = Callable[[], Event | None]
"""The work of a lane. Work that only queues operations on a device returns the event behind them."""
Report = Callable[[str, str, float, float, int], None]
"""Takes the lane and the label of work that has ended, its start and end (by `time.perf_counter`), and its bytes."""


class _Ticket(NamedTuple):
    """Facts about a piece of work."""

    label: str
    nbytes: int
    handle: Handle


class Lane:
    """The executor of one resource. Work starts in the order in which it becomes ready, on `threads` threads.

    Work that depends on other lanes names their handles in `after`, and is ready when they have ended. So no thread
    waits while there is other work, and work may depend on work that is submitted to this lane later.

    Work on at most `inline_bytes` is done at once by the submitting thread if the lane is empty. Handing it to another
    thread would take longer, because Python's threads take turns.

    Work that returns an event has only been queued on a device. The next work follows at once, so that the device
    always has work. The handle ends when another thread has waited for the event.
    """

    def __init__(self, name: str, threads: int = 1, inline_bytes: int = 0, report: Report = lambda *_: None) -> None:
        """`report` is told of all work when it ends."""
        self.name = str(name)  # statistics have it, which may be pickled
        self.threads = threads
        self.inline_bytes = inline_bytes
        self._open = 0
        """Number of pieces of work that were queued and have not ended. Read without the lock, as a hint."""
        self.report = report
        self._label = f"pagoda::{name}"
        self._queue: queue.SimpleQueue[tuple[Work, _Ticket] | None] = queue.SimpleQueue()
        self._queued: queue.SimpleQueue[tuple[Work, _Ticket, Event, float] | None] = queue.SimpleQueue()
        """Work in a device's queue, each with the time at which it was queued."""
        self._finisher: threading.Thread | None = None
        self._lock = threading.Lock()
        self._forks = forks()
        self._busy_s = 0.0
        self._bytes = 0
        self._threads = [start_thread(self._run, f"{THREAD_NAMES}{name}-{i}") for i in range(threads)]

    def submit(self, work: Work, after: Iterable[Handle] = (), nbytes: int = 0, label: str = "") -> Handle:
        """Do `work`, which moves `nbytes`, once `after` have ended. If one of them failed, the work fails with that
        error.

        `label` names it in a timeline: a verb and a unit's name, as in a simulated timeline.
        """
        check_not_forked(self._forks)
        handle = Handle(self.name)
        pending = [other for other in after if not other.succeeded]
        ticket = _Ticket(label, nbytes, handle)

        def ready(error: BaseException | None) -> None:
            if error is not None:
                handle.finish(error)
                return
            now = not pending and 0 < nbytes <= self.inline_bytes and not self._open
            with self._lock:
                self._open += 1
            if now:
                without_signals(self._do_now, work, ticket)
            else:
                self._queue.put((work, ticket))

        if pending:
            all_of(pending).then(ready)
        else:
            ready(None)
        return handle

    def count(self, nbytes: int) -> None:
        """Count bytes for this lane that moved as part of another lane's work."""
        with self._lock:
            self._bytes += nbytes

    def take_counters(self) -> tuple[float, int]:
        """Seconds of work (added up over threads) and bytes moved since the last call."""
        with self._lock:
            counters = self._busy_s, self._bytes
            self._busy_s, self._bytes = 0.0, 0
        return counters

    def close(self) -> None:
        """Finish the queued work and join the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        if self._finisher is not None:
            self._queued.put(None)
            self._finisher.join()

    def clear(self) -> None:
        """Drop work that was submitted after `close`, with everything that it refers to."""
        while not self._queue.empty():
            self._queue.get()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, ticket = item
            start = time.perf_counter()
            event, error = self._do(work)
            if event is not None and event is not PAST:
                self._finish_later(work, ticket, event, start)
                del item, work
            else:
                # Drop references first, or the last gradient of a step would live until the next one.
                del item, work
                with suppress(BaseException):  # who waits gets it
                    self._end(ticket, start, error)
            del ticket, event, error

    def _do_now(self, work: Work, ticket: _Ticket) -> None:
        start = time.perf_counter()
        event, error = self._do(work)
        assert event is None or event is PAST, "work for a device's queue is handed to the lane's thread"
        self._end(ticket, start, error)

    def _do(self, work: Work) -> tuple[Event | None, BaseException | None]:
        try:
            with labelled(self._label):
                return work(), None
        except BaseException as error:
            return None, error

    def _finish_later(self, work: Work, ticket: _Ticket, event: Event, start: float) -> None:
        """Let the finisher thread wait for work in a device's queue. `work` keeps the tensors alive that the device
        reads and writes."""
        ticket.handle.issue(event)
        if self._finisher is None:  # lanes whose work is put in a device's queue have one thread that does so
            self._finisher = start_thread(self._finish, f"{THREAD_NAMES}{self.name}-finisher")
        self._queued.put((work, ticket, event, start))

    def _finish(self) -> None:
        """End the work in a device's queue, in the order of the queue."""
        before = 0.0
        while (queued := self._queued.get()) is not None:
            work, ticket, event, start = queued
            error: BaseException | None = None
            try:
                event.synchronize()
            except BaseException as caught:
                error = caught
            begun, before = max(start, before), time.perf_counter()
            del queued, work, event
            with suppress(BaseException):  # who waits gets it
                self._end(ticket, begun, error)
            del ticket, error

    def _end(self, ticket: _Ticket, start: float, error: BaseException | None) -> None:
        end = time.perf_counter()
        with self._lock:
            self._busy_s += end - start
            self._bytes += ticket.nbytes
            self._open -= 1
        self.report(self.name, ticket.label or self.name, start, end, ticket.nbytes)
        ticket.handle.finish(error)


def open_lanes(drives: int, update_threads: int, inline: bool, inline_updates: bool, report: Report) -> dict[str, Lane]:
    """The lanes of a process by name, each before the lanes that it feeds, without the lane for communication between
    ranks. `inline`: compute is on the CPU, whose small copies need no lane. `inline_updates`: small updates need no
    lane either, because they share no work area."""
    ssd_threads = SSD_THREADS * max(1, drives)
    nbytes, lane = INLINE_BYTES if inline else 0, partial(Lane, report=report)
    lanes: list[Lane] = [
        lane(LaneName.SSD_READ, ssd_threads),
        lane(LaneName.H2D, inline_bytes=nbytes),
        lane(LaneName.DEVICE_UPDATE),
        lane(LaneName.UPDATE, update_threads, nbytes if inline_updates else 0),
        lane(LaneName.D2H, inline_bytes=nbytes),
        lane(LaneName.SSD_WRITE, ssd_threads),
    ]
    return {each.name: each for each in lanes}


def labelled(label: str) -> AbstractContextManager[object]:
    """Names the time spent inside for torch's profiler. Does nothing while the profiler is off, because asking it would
    release the GIL."""
    return profiler.record_function(label) if profiler._is_profiler_enabled else nullcontext()


def wait_all(handles: Iterable[Handle]) -> None:
    """Wait for every handle, then raise the first error, so that no work still runs when an exception is raised."""
    error: BaseException | None = None
    for handle in handles:
        try:
            handle.wait()
        except BaseException as caught:
            error = error or caught
    if error is not None:
        raise error
