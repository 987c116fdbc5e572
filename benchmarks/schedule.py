"""What an event costs the scheduler, whatever the number of units.

    python benchmarks/schedule.py

A world without a machine: every operation ends at once, or after as many events as a slow lane would take. The mean is
the CPU's time for a whole step over its events, and so includes what the world itself does. A clock around each event
would ask the system twice, which may take longer than the event. Frames hold half of the weights, and gradients share
buffers for a tenth of them. The first unit is as large as an embedding among experts, so many leases share a slab of
frames.
"""

import time
from collections import deque
from statistics import quantiles

import tyro

from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.schedule.operations import Offload, Operation, Question, SchedulePlan, UnitPlan, Update
from pagoda.schedule.scheduler import Scheduler

STEPS = 4
LARGEST = 128
"""Frames of the first unit."""


class Clock:
    """Reports events and notes how long each takes."""

    def __init__(self, units: int, speculative: bool) -> None:
        sizes = [LARGEST, *(1 + index % 3 for index in range(1, units))]
        plans = [
            UnitPlan(lease_frames=size, buffer_pages=size, states=(("host", size),), speculated=speculative)
            for size in sizes
        ]
        forward = [Access(unit, Phase.FORWARD) for unit in range(units)]
        backward = [Access(unit, Phase.BACKWARD) for unit in reversed(range(units))]
        self.accesses = forward + backward
        self.scheduler = Scheduler(
            SchedulePlan(
                plans,
                Trace((*forward, *backward, STEP)),
                frame_pool=max(2 * LARGEST, sum(sizes) // 2),
                buffer_pool=max(2 * LARGEST, sum(sizes) // 10),
                spares={"host": tuple(sizes) if speculative else ()},
            )
        )
        self.seconds: list[float] = []
        self.under_way: deque[tuple[Operation, int]] = deque()

    def event(self, name: str, *arguments: object, **settings: object) -> None:
        start = time.perf_counter()
        getattr(self.scheduler, name)(*arguments, **settings)
        new = self.scheduler.take()
        self.seconds.append(time.perf_counter() - start)
        self.under_way.extend((op, 0) for op in new if op.reported)

    def until(self, ready: str, *arguments: object) -> None:
        while True:
            answer = getattr(self.scheduler, ready)
            if answer(*arguments) if callable(answer) else answer:
                return
            self.end_one()

    def end_one(self) -> None:
        op, stage = self.under_way.popleft()
        if isinstance(op, Question):
            self.event("reclaimed", op, True)
        elif isinstance(op, Update) and stage < 2:
            self.under_way.appendleft((op, stage + 1))
            self.event(("gradient_used", "weights_written")[stage], op)
        else:
            self.event("ended", op)

    def step(self) -> None:
        for access in self.accesses:
            self.event("access", access)
            self.until("ready", access.unit)
            if access.phase is Phase.BACKWARD:
                self.event("gradient", access.unit, complete=True, last=True)
                while self.scheduler.gradients.buffer_awaited:
                    self.end_one()
            self.event("release", access.unit)
        while any(isinstance(op, Offload) for op, _ in self.under_way):
            self.end_one()
        self.event("end_step")


def measure(units: int, speculative: bool) -> str:
    clock = Clock(units, speculative)
    clock.step()
    clock.seconds.clear()
    start = time.thread_time()
    for _ in range(STEPS):
        clock.step()
    events = len(clock.seconds)
    mean, tail = (time.thread_time() - start) / events, quantiles(clock.seconds, n=100)[-1]
    return (
        f"{units:6} units{', speculative' * speculative}: {events / STEPS:8,.0f} events a step, "
        f"{mean * 1e6:5.1f} us each, 99% below {tail * 1e6:6.1f} us, {mean * events / STEPS * 1e3:7.1f} ms a step"
    )


def main(units: tuple[int, ...] = (20, 200, 2000, 8000)) -> None:
    """Print what events cost for each of these numbers of units."""
    for count in units:
        for speculative in (False, True):
            print(measure(count, speculative))


if __name__ == "__main__":
    tyro.cli(main)
