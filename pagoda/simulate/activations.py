"""Simulated offloading: activations leave while forward computes them, and come back one access ahead of backward."""

from collections.abc import Callable
from itertools import pairwise

from pagoda.plan.activations import BUFFERED
from pagoda.plan.ops import Op, OpKind
from pagoda.plan.planner import Plan
from pagoda.simulate.lanes import SimulatedLanes, Task, Work
from pagoda.simulate.rates import Rates


class SimulatedActivations:
    """Follows a plan's SAVE and RETURN ops, whose bytes compute makes and uses bit by bit during their access."""

    def __init__(self, plan: Plan, lanes: SimulatedLanes, rates: Rates, wait: Callable[[Task], None]) -> None:
        """`wait` lets compute wait for a task."""
        self._at = plan.activations_at
        self._lanes = lanes
        self._rates = rates
        self._wait = wait
        returns = [tick for tick, ops in self._at.items() if ops[0].kind is OpKind.RETURN]
        self._following = dict(pairwise(returns))
        """tick of returns -> the next such tick"""
        activations = plan.activations
        blocks = activations.sizes.blocks if activations is not None and activations.sizes is not None else ()
        self._window = BUFFERED * max((part.largest for b in blocks for part in (b.inputs, b.inner)), default=0)
        """Bytes that compute may be ahead of what has left."""
        self._leaving: list[Task] = []
        self._coming: dict[int, list[Task]] = {}

    def begin(self, tick: int) -> None:
        """Compute turns to an access: what it saves starts to leave; what it needs must be there."""
        ops = self._at.get(tick, ())
        if not ops:
            return
        if ops[0].kind is OpKind.SAVE:
            self._leaving += [self._moved(op, "save activation", []) for op in ops]
            return
        self._fetch(tick)
        if (following := self._following.get(tick)) is not None:
            self._fetch(following)
        for task in self._coming.pop(tick):
            self._wait(task)

    def end(self, tick: int) -> None:
        """Compute is through with an access: most of what it saved must have left."""
        if tick in self._at:
            self._leaving = [task for task in self._leaving if not task.done]
            while sum(task.work.nbytes for task in self._leaving) > self._window:
                self._wait(self._leaving.pop(0))

    def _fetch(self, tick: int) -> None:
        if tick not in self._coming:
            leaving = [task for task in self._leaving if not task.done]
            self._coming[tick] = [self._moved(op, "return activation", leaving) for op in self._at[tick]]

    def _moved(self, op: Op, name: str, after: list[Task]) -> Task:
        return self._lanes.submit(Work(op.lane, name, op.nbytes, self._rates.seconds(op.lane, op.nbytes)), after)
