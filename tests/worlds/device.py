"""A device whose copies and kernels take their time: other threads run before, between and after their parts."""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import torch

from pagoda.memory.arena import Arena, copy_bytes
from pagoda.plan.buffers import DEVICE_SLOTS as PIPES
from pagoda.runtime.device import PAST, Arrival, Device, Event, StoreGradient, UpdateKernel, store_in_ram

from .threads import Thread, Threads


class DeviceError(RuntimeError):
    """A copy or a kernel has failed."""


class SlowDevice(Device):
    """The CPU as a device, with pauses. A copy moves its bytes in parts, and fails at random."""

    def __init__(self, threads: Threads, rng: Random, failures: float) -> None:
        self._threads = threads
        self._rng = rng
        self.failures = failures
        """How likely a copy fails."""
        self.failed = 0
        self.failed_in_place = False
        """Whether a kernel has failed that changed a state in its home."""
        self.healthy = False

    def may_fail(self) -> None:
        """Raises DeviceError at random."""
        if not self.healthy and self.failures > 0 and self._rng.random() < self.failures:
            self.failed += 1
            raise DeviceError("a copy of this world's device failed")

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        self.may_fail()
        return super().copy_in(target, source, after)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        half = target.numel() // 2
        self._threads.pause()
        for part in (slice(0, half), slice(half, None)):
            if target[part].numel():
                copy_bytes(target[part], source[part])
            self._threads.pause()

    def compute(self, work: Callable[[], object]) -> None:
        """Compute does this now."""
        work()

    def stop(self) -> None:
        """The world ends."""

    def finish(self) -> None:
        """Wait until all work is done."""

    def store_gradient(
        self, kernel: StoreGradient, target: torch.Tensor, gradient: torch.Tensor, after: Event
    ) -> Arrival:
        self.may_fail()
        self._threads.pause()
        arrival = super().store_gradient(kernel, target, gradient, after)
        self._threads.pause()
        return arrival


_LEAST_ADDRESS = 1 << 24
"""Other whole numbers that kernels take are smaller."""


def slow_kernel(threads: Threads, make: Callable[..., Any], end: Callable[[list[int]], None]) -> Callable[..., Any]:
    """Kernels before and after which other threads may run. `end` is called with the addresses of states that were
    changed where they are, and may raise."""

    def made(*settings: Any, **more: Any) -> Any:
        kernel = make(*settings, **more)

        def run(*arguments: Any) -> Any:
            threads.pause()
            kernel(*arguments)
            places = [each for each in arguments if isinstance(each, int) and each > _LEAST_ADDRESS]
            *states, _gradient = places
            end([each for each in places if places.count(each) > 1] if "elsewhere" in more else states)
            threads.pause()

        return run

    return made


def slow_copy(threads: Threads) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """`copy_bytes`, before and after which other threads may run."""

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        threads.pause()
        copy_bytes(target, source)
        threads.pause()

    return copy


class Point:
    """The event of a point in a queue."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._waiters: list[Thread] = []
        self.passed = False

    def synchronize(self) -> None:
        while not self.passed:
            self._threads.block(self._waiters)

    def reach(self) -> None:
        self.passed = True
        self._threads.wake(self._waiters)


class _QueuedArena(Arena):
    """Memory that is poisoned when compute has come to that point."""

    device: "QueuedDevice"

    def poison(self, offset: int, nbytes: int) -> None:
        self.device.put(self.device.computes, partial(ctypes.memset, self.address + offset, 0xFF, nbytes))


class QueuedDevice(SlowDevice):
    """A device with queues, as a GPU has: compute's, one for copies in each direction, and one for each pipe.

    Calls only put work into a queue. A thread does the work later, the queues in any order, and each behind the points
    of other queues for which it waits.
    """

    def __init__(self, threads: Threads, rng: Random, failures: float) -> None:
        super().__init__(threads, rng, failures)
        self._queues: list[deque[Point | Callable[[], object]]] = [deque() for _ in range(4 + PIPES)]
        self.computes, self._in, self._out, self._adds, *self._pipes = self._queues
        self._idle: list[Thread] = []
        self._stopped = False
        self._recording: deque[Any] | None = None
        """The queue to which copies and kernels go now."""
        self._kept: list[torch.Tensor] = []
        """Memory that work in queues may still use."""
        self._thread = threads.start(self._run, "device")

    def _run(self) -> None:
        while True:
            ready = [queue for queue in self._queues if queue and not (type(queue[0]) is Wait and not queue[0].over)]
            if not ready:
                if self._stopped:
                    return
                self._threads.block(self._idle)
                continue
            work = self._rng.choice(ready).popleft()
            if isinstance(work, Point):
                work.reach()
            elif type(work) is not Wait:
                work()
            self._threads.pause()

    def put(self, queue: Any, *works: Any) -> None:
        """Put work, points, and waits for points into a queue."""
        queue.extend(works)
        self._threads.wake(self._idle)

    def stop(self) -> None:
        """Do the work that is left, and end the thread."""
        self._stopped = True
        self._threads.wake(self._idle)
        self._thread.join()

    def finish(self) -> None:
        """Wait until every queue is empty."""
        for queue in self._queues:
            self._point(queue).synchronize()

    def settle(self) -> None:
        self.finish()

    def compute(self, work: Callable[[], object]) -> None:
        """Compute does this when it comes to it."""
        self.put(self.computes, work)

    def arena(self, nbytes: int) -> Arena:
        arena = _QueuedArena(nbytes)
        arena.device = self
        self._kept.append(arena.tensor(0, nbytes, torch.uint8))
        return arena

    def fence(self) -> Event:
        return self._point(self.computes)

    def wait_for(self, event: Event) -> None:
        self.put(self.computes, *_behind(event))

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        return self._copy(self._in, target, source, after)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        return self._copy(self._out, target, source, after)

    def store_gradient(
        self, kernel: StoreGradient, target: torch.Tensor, gradient: torch.Tensor, after: Event
    ) -> Arrival:
        return self._arrival(self._out, kernel, target, gradient, after)

    def add_gradient(
        self, kernel: StoreGradient, target: torch.Tensor, gradient: torch.Tensor, after: Event
    ) -> Arrival:
        return self._arrival(self._adds, kernel, target, gradient, after)

    def update_kernel(self, *settings: Any) -> UpdateKernel:
        kernel = super().update_kernel(*settings)

        def run(states: Sequence[torch.Tensor], gradient: torch.Tensor, arguments: Sequence[float]) -> None:
            assert self._recording is not None, "a kernel outside a pipe"
            self.put(self._recording, partial(kernel, states, gradient, arguments))

        return run

    def pipe(self, number: int, work: Callable[[], None], after: Event = PAST) -> Event:
        queue = self._pipes[number]
        self.put(queue, *_behind(after))
        before, self._recording = self._recording, queue
        try:
            work()
        finally:
            self._recording = before
        return self._point(queue)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._recording is None:
            super().copy(target, source)
        else:
            self.put(self._recording, partial(super().copy, target, source))

    def _copy(self, queue: Any, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        self.may_fail()
        self.put(queue, *_behind(after), partial(super().copy, target, source))
        return self._point(queue)

    def _arrival(
        self, queue: Any, kernel: StoreGradient, target: torch.Tensor, gradient: torch.Tensor, after: Event
    ) -> Arrival:
        self.may_fail()
        sums: list[float] = []
        self.put(queue, *_behind(after), lambda: sums.extend(store_in_ram(kernel, target, gradient)))
        return Arrival((self._point(queue),), lambda: sums)

    def _point(self, queue: Any) -> Point:
        point = Point(self._threads)
        self.put(queue, point)
        return point


class Wait:
    """A queue goes on behind a point of another one."""

    def __init__(self, point: Point) -> None:
        self._point = point

    @property
    def over(self) -> bool:
        return self._point.passed


def _behind(event: Event) -> tuple[Wait, ...]:
    return (Wait(event),) if isinstance(event, Point) else ()
