"""Simulated offloading: activations leave while forward computes them, and come back one access ahead of backward."""

from collections.abc import Callable
from itertools import pairwise

from pagoda.plan.activations import BUFFERED
from pagoda.plan.planner import Plan
from pagoda.plan.trace import Phase
from pagoda.plan.traffic import activations_at
from pagoda.simulate.lanes import SimulatedLanes, Task


class SimulatedActivations:
    """Moves the activations that a plan offloads. Compute makes and uses their bytes gradually during an access."""

    def __init__(self, plan: Plan, lanes: SimulatedLanes, wait: Callable[[Task], None]) -> None:
        """`wait` makes compute wait for a task."""
        self._at = activations_at(plan)
        self._lanes = lanes
        self._wait = wait
        self._returns = {tick for tick in self._at if plan.trace.accesses[tick].phase is Phase.BACKWARD}
        self._following = {tick: later for tick, later in pairwise(self._at) if {tick, later} <= self._returns}
        """tick of returns -> the next such tick of the same pass"""
        blocks = plan.activations.sizes.blocks
        self._window = BUFFERED * max((part.largest for b in blocks for part in (b.inputs, b.inner)), default=0)
        """Bytes by which compute may be ahead of the transfers."""
        self._leaving: list[Task] = []
        self._coming: dict[int, list[Task]] = {}

    def begin(self, tick: int) -> None:
        """Compute begins an access. The activations that it saves start to leave, and those that it needs must be
        there."""
        if tick not in self._at:
            return
        if tick not in self._returns:
            self._leaving += self._moved(tick, "save activation", [])
            return
        for coming in (tick, self._following.get(tick)):
            if coming is not None and coming not in self._coming:
                leaving = [task for task in self._leaving if not task.done]
                self._coming[coming] = self._moved(coming, "return activation", leaving)
        for task in self._coming.pop(tick):
            self._wait(task)

    def end(self, tick: int) -> None:
        """Compute ends an access. Most of what it saved must have left."""
        if tick in self._at:
            self._leaving = [task for task in self._leaving if not task.done]
            while sum(task.work.nbytes for task in self._leaving) > self._window:
                self._wait(self._leaving.pop(0))

    def _moved(self, tick: int, name: str, after: list[Task]) -> list[Task]:
        lanes = self._lanes
        return [lanes.submit(lanes.move(lane, name, nbytes), after) for lane, nbytes in self._at[tick]]
