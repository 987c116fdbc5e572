"""Policies: what becomes of each block's activations, as asked or as forwards before have shown to be best."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pagoda.errors import BudgetError
from pagoda.memory.sizes import format_at_least, format_bytes
from pagoda.plan.activations import (
    ActivationBytes,
    ActivationPlan,
    Bucket,
    Policy,
    Room,
    StepSizes,
    bucket_of,
    choose,
    growth,
    peak_of,
)
from pagoda.plan.options import Options
from pagoda.runtime.device import Device
from pagoda.runtime.forward_trace import ForwardTrace
from pagoda.runtime.places import Place
from pagoda.runtime.saved import SavedStorage

_MOST_BUCKETS = 64
"""Shapes whose plans are remembered."""
_NO_LIMIT = 1 << 62


class Policies:
    """Follows forwards, and has a policy for every block.

    With the mode "auto", the first forward of a bucket of shapes recomputes every block, which shows how large each is;
    from the next one on the plan made of that is followed. No policy changes a bit, so plans may change at any time.
    """

    def __init__(self, options: Options, places: Sequence[Place[Any]], device: Device, page_bytes: int) -> None:
        self._options = options
        self._places = places
        self._device = device
        self._page_bytes = page_bytes
        self._fixed = None if options.activations == "auto" else Policy(options.activations)
        self._rates: dict[str, tuple[float, float]] | None = None
        """Of each place, once measured."""
        self._plans: dict[Bucket, ActivationPlan] = {}
        self._refusals: dict[Bucket, str] = {}
        self._bucket: Bucket = ()
        self._growth = 1.0
        self._peak = ActivationBytes()
        self.trace = self._new_trace()
        """That of the last forward."""

    def plan(self, taken: ActivationBytes) -> ActivationPlan:
        """The policies of the last forward that was planned, and the largest peak that any forward was planned with, or
        what several graphs at once have `taken`, if that is more."""
        latest = self._plans.get(self._bucket, ActivationPlan((), ActivationBytes()))
        return replace(latest, peak=self._peak.or_more(taken))

    def begin_forward(self, shapes: Sequence[Sequence[int]]) -> None:
        """A forward of the whole model starts; `shapes` are those of its arguments.

        Raises BudgetError where one with inputs as large has shown that it cannot keep to the budget.
        """
        self._learn()
        self._bucket = bucket_of(shapes)
        self._growth = growth(shapes)
        self.trace = self._new_trace()
        if self._bucket in self._refusals:
            raise BudgetError(self._refusals[self._bucket])

    def next_policy(self) -> Policy:
        """The policy of the next block of the forward."""
        if self._fixed is not None:
            return self._fixed
        plan, index = self._plans.get(self._bucket), len(self.trace.blocks)
        return Policy.RECOMPUTE if plan is None or index >= len(plan.policies) else plan.policies[index]

    def note(self, storage: SavedStorage) -> None:
        """A graph saves a storage."""
        if torch._C._current_graph_task_id() == -1:  # no backward runs
            self.trace.note(storage)

    def end_of_step(self) -> None:
        """Make a plan of what has been seen."""
        self._learn(ended=True)
        self.trace = self._new_trace()

    def _new_trace(self) -> ForwardTrace:
        planned = self._fixed is not None or self._bucket in self._plans
        return ForwardTrace(self._page_bytes, None if planned else self._device)

    def _learn(self, ended: bool = False) -> None:
        """Plan for the bucket of the last forward, once, if all of that has been seen.

        When a step has `ended`, what has not been recomputed needs no gradients.
        """
        if self._bucket in self._plans or not (self.trace.complete or (ended and self.trace.begun)):
            return
        sizes = self.trace.sizes
        room = self._room(sizes)
        if self._fixed is None:
            plan = choose(sizes.scaled(self._growth), room)
            needed = peak_of(sizes, plan.policies, room.host).kept
            if self._options.activations_limited and needed > room.kept:
                self._refusals[self._bucket] = (
                    f"Activations do not fit: for inputs of shapes {', '.join(map(str, self._bucket))} graphs keep "
                    f"{format_at_least(needed)} even with every block recomputed, and memory.activations allows "
                    f"{format_bytes(room.kept)}. Raise it, give memory.ssd to offload to, or make the batch smaller."
                )
        else:
            policies = (self._fixed,) * len(sizes.blocks)
            plan = ActivationPlan(policies, peak_of(sizes, policies, room.host), sizes)
        if len(self._plans) == _MOST_BUCKETS:
            del self._plans[next(iter(self._plans))]
        self._plans[self._bucket] = plan
        self._peak = self._peak.or_more(plan.peak)

    def _room(self, sizes: StepSizes) -> Room:
        """What the activations of a step may use."""
        if self._rates is None:
            self._rates = {place.tier: place.rates() for place in self._places} if self._fixed is None else {}
        limit = self._options.activation_bytes
        kept = _NO_LIMIT if limit is None else limit
        return Room.of_step(sizes, kept, {place.tier: place.scratch.room_bytes for place in self._places}, self._rates)
