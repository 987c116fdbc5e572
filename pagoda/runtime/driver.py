"""The driver: passes events to the scheduler, and the resulting operations to the executor."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

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
    """

    def __init__(self, scheduler: Scheduler, execute: Callable[[Operation], None]) -> None:
        """`execute` passes an operation to its lane. It may report the end at once."""
        self.scheduler = scheduler
        self.observe: Callable[[Scheduler], None] = lambda _: None
        """Called after events, under the lock."""
        self._execute = execute
        self._events: deque[Event] = deque()
        self._changed = threading.Condition(threading.Lock())
        """Notified after every event."""
        self._holder: int | None = None
        """The thread that is processing events."""
        self._broken: BaseException | None = None

    def tell(self, event: Callable[..., None], *arguments: Any) -> None:
        """Pass on an event. On return it has been processed, unless this thread is already processing another one."""
        self._events.append((event, arguments))
        if self._holder != threading.get_ident():
            with self._changed:
                self._process()

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Answer a question about the scheduler, between two events."""
        with self._changed:
            return question()

    def wait(self, until: Callable[[], bool], stuck: Callable[[], None]) -> None:
        """Block until a condition on the scheduler holds.

        `stuck` is called without the lock if the condition does not hold and no operation is under way. It must change
        something or raise.
        """
        while True:
            with self._changed:
                self._check()
                while not until() and not self.scheduler.idle:
                    self._changed.wait()
                    self._check()
                if until():
                    return
            stuck()

    def _process(self) -> None:
        self._holder = threading.get_ident()
        try:
            while self._events:
                event, arguments = self._events.popleft()
                event(*arguments)
                for operation in self.scheduler.take():
                    self._execute(operation)
            self.observe(self.scheduler)
        except BaseException as error:
            self._broken = error
            raise
        finally:
            self._holder = None
            self._changed.notify_all()

    def _check(self) -> None:
        if self._broken is not None:
            raise RuntimeError("the scheduler has failed on another thread") from self._broken
