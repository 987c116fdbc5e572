"""The driver: passes events to the scheduler, and the resulting operations to the executor."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from pagoda.interrupts import without_signals
from pagoda.runtime.damage import Damage
from pagoda.runtime.waiters import Waiters
from pagoda.schedule.operations import Operation
from pagoda.schedule.scheduler import Scheduler

Answer = TypeVar("Answer")
Event = tuple[Callable[..., None], tuple[Any, ...]]
"""A method of the scheduler, and its arguments."""


class Driver:
    """The one queue of events.

    Any thread appends events, and then processes the queue under the one lock. An event told while another is being
    processed comes after it. So the scheduler sees one event after another, and operations are in their lanes' queues
    before the lock is released. Nothing waits or runs user code under the lock. Bytes move under it only in lanes that
    do small work at once (`Lane.inline_bytes`).

    An error in an event leaves half of it behind. Then the states are damaged and the driver stops: it ignores events,
    and refuses to wait. That is a fault of Pagoda or of the system. A signal such as Ctrl-C is no such error: it takes
    effect after the event (`without_signals`), or after all events of an access or a step (`ComputeLock` in
    `autograd/accesses.py`).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        execute: Callable[[Operation], None],
        damage: Damage,
        observe: Callable[[Scheduler], None],
        on_stop: Callable[[BaseException], None],
    ) -> None:
        """`execute` passes an operation to its lane. It may report the end at once. `observe` is called after events,
        under the lock. `on_stop` lets work fail that waits for events, when the driver has stopped."""
        self.scheduler = scheduler
        self._observe = observe
        self._on_stop = on_stop
        self._execute = execute
        self._damage = damage
        self._lock = threading.Lock()
        self._changed = Waiters()
        """Threads that wait for the next event."""
        self._events: deque[Event] = deque()
        self._holder: int | None = None
        """The thread that is processing events."""
        self.stopped = False

    def stop(self, error: BaseException) -> None:
        """Half of an event was left behind by an error."""
        self._note(error)
        with self._lock:
            self._changed.wake()

    def _note(self, error: BaseException) -> None:
        self._damage.note(error)
        self._damage.is_final = self.stopped = True
        self._on_stop(error)

    def tell(self, event: Callable[..., None], *arguments: Any) -> None:
        """Pass on an event. On return it has been processed, unless this thread is already processing another one."""
        if self.stopped:
            return
        self._events.append((event, arguments))
        if not (self._holder == threading.get_ident() and self._lock.locked()):
            with self._lock:
                without_signals(self._process)

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Answer a question about the scheduler, between two events."""
        with self._lock:
            return question()

    def wait(self, until: Callable[[], bool], stuck: Callable[[], None]) -> None:
        """Block until a condition on the scheduler holds.

        `stuck` is called without the lock if the condition does not hold and no operation is under way. It must change
        something or raise. Raises StorageError if the driver has stopped.
        """
        while True:
            with self._lock:
                if self.stopped:
                    self._damage.check()
                if until():
                    return
                wait = None if self.scheduler.idle else self._changed.add()
            (wait or stuck)()

    def _process(self) -> None:
        try:
            self._holder = threading.get_ident()
            while self._events and not self.stopped:
                event, arguments = self._events.popleft()
                event(*arguments)
                for operation in self.scheduler.take():
                    self._execute(operation)
            self._observe(self.scheduler)
        except BaseException as error:
            self._note(error)
            raise
        finally:
            self._holder = None
            self._changed.wake()
