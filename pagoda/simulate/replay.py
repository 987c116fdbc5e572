"""Replays a recorded step: what the scheduler decides, with the durations that work had in a run."""

from collections.abc import Iterable
from itertools import groupby

from pagoda.plan.ops import COLLECTIVE
from pagoda.plan.planner import Plan
from pagoda.plan.trace import Phase
from pagoda.simulate.rates import DEVICE_UPDATE, UPDATE, Rates
from pagoda.simulate.simulation import Simulation
from pagoda.simulate.timeline import COMPUTE, Span, Timeline

STEP = "step"
"""What compute is at in `step()`."""


def replay(plan: Plan, recorded: Timeline) -> Timeline:
    """A step of `plan` in steady state, in which lanes are as fast as in a step that was recorded, and compute takes as
    long for each access.

    Raises ValueError if the recorded step has other accesses than the plan's trace.
    """
    spans = sorted((span for span in recorded.spans if span.lane == COMPUTE), key=lambda span: span.start_s)
    found = [
        (name, sum(span.end_s - span.start_s for span in of_name))
        for name, of_name in groupby(spans, lambda span: span.name)
    ]
    verbs = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward"}
    wanted = [f"{verbs[access.phase]} {plan.units[access.unit].name}" for access in plan.trace.accesses[:-1]]
    if [name for name, _ in found if name != STEP] != wanted:
        raise ValueError("the recorded step has other accesses than the plan's trace")
    return Simulation(plan, RecordedRates(plan, recorded), [seconds for _, seconds in found]).run()


class RecordedRates(Rates):
    """How fast each lane was in a recorded step, whatever worked at the same time."""

    def __init__(self, plan: Plan, recorded: Timeline) -> None:
        self.task_switch_s = self.parameter_s = 0.0  # recorded with compute
        lanes = {span.lane for span in recorded.spans}
        busy_s = {lane: _covered_s(span for span in recorded.spans if span.lane == lane) for lane in lanes}
        moved = recorded.bytes_moved
        self._s_per_byte = {lane: busy_s[lane] / moved[lane] if moved[lane] else 0.0 for lane in lanes}
        on_device = plan.placement.on_device
        parameters = {UPDATE: 0, DEVICE_UPDATE: 0}
        for unit in plan.units:
            parameters[DEVICE_UPDATE if unit.index in on_device else UPDATE] += plan.layout.updated_elements(unit)
        self._s_per_parameter = {lane: busy_s.get(lane, 0.0) / (count or 1) for lane, count in parameters.items()}

    def seconds(self, lane: str, nbytes: int) -> float:
        return nbytes * self._s_per_byte.get(lane, 0.0)

    def ring_seconds(self, sent: int, group: int) -> float:
        return self.seconds(COLLECTIVE, sent)

    def exchange_seconds(self, sent: int, group: int) -> float:
        return self.seconds(COLLECTIVE, sent)

    def update_seconds(self, parameters: int) -> float:
        return parameters * self._s_per_parameter[UPDATE]

    def device_update_seconds(self, parameters: int) -> float:
        return parameters * self._s_per_parameter[DEVICE_UPDATE]

    def shared(self, lanes: frozenset[str]) -> dict[str, float]:
        return dict.fromkeys(lanes, 1.0)


def _covered_s(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans lies."""
    covered, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_s):
        covered += max(0.0, span.end_s - max(span.start_s, until))
        until = max(until, span.end_s)
    return covered
