"""A live step against a simulated one that has its durations: what is left is how the simulator decides and overlaps.

    python benchmarks/live_durations.py --ssd DIR [--model llama-15m] [--batch-sizes 1 4] [--rounds 7]

For each placement, steps of a live run are recorded as timelines. Each is simulated again, with compute as long for
each access as it was in the recorded step, and with lanes as fast. The table has the simulated step over the recorded
one: the median over rounds, and the lowest and highest.
"""

import statistics
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import tyro
from rich.console import Console

import pagoda
from pagoda.config.training import Precision
from pagoda.models import build_model
from pagoda.plan.exchanges import Exchange
from pagoda.plan.lanes import LaneName
from pagoda.plan.planner import Plan
from pagoda.plan.trace import Phase
from pagoda.plan.units import UnitSpec
from pagoda.prepare.construct import describe
from pagoda.simulate.rates import Rates
from pagoda.simulate.simulation import Simulation
from pagoda.simulate.timeline import Timeline, TimelineSpan
from predict import PLACEMENTS, SEQ_LEN, Case, Trainer, budgets
from script import begin

STEP = "step"
"""What compute is at in `step()`."""


def replay(plan: Plan, recorded: Timeline) -> Timeline:
    """A step of `plan` in steady state, in which lanes are as fast as in a step that was recorded, and compute takes as
    long for each access.

    Raises ValueError if the recorded step has other accesses than the plan's trace.
    """
    spans = sorted((span for span in recorded.spans if span.lane == LaneName.COMPUTE), key=lambda span: span.start_s)
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
        self.python_ahead, self.update_threads = False, 1
        lanes = {span.lane for span in recorded.spans}
        busy_s = {lane: _covered_s(span for span in recorded.spans if span.lane == lane) for lane in lanes}
        moved = recorded.bytes_moved
        self._s_per_byte = {lane: busy_s[lane] / moved[lane] if moved[lane] else 0.0 for lane in lanes}
        on_device = plan.placement.on_device
        parameters = {LaneName.UPDATE: 0, LaneName.DEVICE_UPDATE: 0}
        for unit in plan.units:
            parameters[LaneName.DEVICE_UPDATE if unit.index in on_device else LaneName.UPDATE] += (
                plan.layout.updated_elements(unit)
            )
        self._s_per_parameter = {lane: busy_s.get(lane, 0.0) / (count or 1) for lane, count in parameters.items()}

    def seconds(self, lane: str, nbytes: int) -> float:
        return nbytes * self._s_per_byte.get(lane, 0.0)

    def ring_seconds(self, sent: int, group: int) -> float:
        return self.seconds(LaneName.COLLECTIVE, sent)

    def merge_seconds(self, sent: int) -> float:
        return self.seconds(LaneName.COLLECTIVE, sent)

    def exchange_seconds(self, exchange: Exchange) -> float:
        return self.seconds(LaneName.COLLECTIVE, exchange.sent)

    def update_seconds(self, unit: UnitSpec, parameters: int) -> float:
        return parameters * self._s_per_parameter[LaneName.UPDATE]

    def device_update_seconds(self, unit: UnitSpec, parameters: int, blocks: int) -> float:
        return parameters * self._s_per_parameter[LaneName.DEVICE_UPDATE]

    def adding_seconds(self, touched: int) -> float:
        return 0.0  # recorded with the bytes that arrive

    def shared(self, lanes: frozenset[str]) -> dict[str, float]:
        return dict.fromkeys(lanes, 1.0)

    def lost(self, lanes: frozenset[str]) -> dict[str, tuple[str, float]]:
        return {}  # recorded with the lane


def _covered_s(spans: Iterable[TimelineSpan]) -> float:
    """Seconds in which at least one of the spans lies."""
    covered, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_s):
        covered += max(0.0, span.end_s - max(span.start_s, until))
        until = max(until, span.end_s)
    return covered


def main(
    ssd: Path,
    model: str = "llama-15m",
    batch_sizes: tuple[int, ...] = (1, 4),
    placements: tuple[str, ...] = PLACEMENTS,
    precision: Precision = "bf16",
    rounds: int = 7,
) -> None:
    """Record steps of every placement, with and without clipping, and simulate each with its own durations."""
    begin()
    console = Console()
    with pagoda.deferred_init():
        root = describe(build_model(model, seq_len=SEQ_LEN, gradient_checkpointing=True))
    for batch_size in batch_sizes:
        for placement in placements:
            for clip in (None, 1.0):
                case = Case(model, batch_size, clip, placement, precision)
                ratios = sorted(_ratios(case, Trainer(case, budgets(root, case), ssd), rounds))
                console.print(
                    f"{model} {batch_size * SEQ_LEN} {placement} clip {clip}: {statistics.median(ratios):.3f} "
                    f"({ratios[0]:.3f} to {ratios[-1]:.3f})",
                    highlight=False,
                )


def _ratios(case: Case, trainer: Trainer, rounds: int) -> Iterable[float]:
    """Simulated over recorded, for several steps of a run."""
    try:
        for _ in range(rounds):
            trainer.step()
            trainer.optimizer.trace_next_step()
            trainer.step()
            recorded = trainer.optimizer.timeline
            assert recorded is not None, "a step has ended"
            yield replay(pagoda.plan_of(trainer.model), recorded).step_s / recorded.step_s
    finally:
        trainer.optimizer.close()


if __name__ == "__main__":
    tyro.cli(main)
