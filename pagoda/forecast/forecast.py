"""The forecast: a model, a machine and budgets, planned and simulated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.activations import ActivationEstimate
from pagoda.forecast.compute import Compute
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.inputs import PlanInputs, activations_of, subject_of
from pagoda.forecast.machine import Machine
from pagoda.forecast.mixed import spared
from pagoda.forecast.model_description import ModelDescription
from pagoda.forecast.resolve_auto import inputs_with_policies, resolve_auto
from pagoda.forecast.search import Choice
from pagoda.plan.activations import recomputes
from pagoda.plan.planner import Plan
from pagoda.plan.traffic import bytes_written_to_ssd
from pagoda.simulate.timeline import Timeline

_TRAINING_FACTOR = 3.0
"""FLOPs of forward and backward together, per FLOP of forward."""


@dataclass(frozen=True)
class Forecast:
    """What can be said of a run before it starts."""

    config: PlanConfig
    machine: Machine
    described: ModelDescription
    activations: ActivationEstimate
    notes: tuple[str, ...]
    """How budgets and compute times were found."""
    inputs: PlanInputs | None
    """None where activations alone do not fit."""
    choice: Choice | None
    refusal: BudgetError | None
    """Why it does not fit; None exactly where there is a choice."""
    resolved: tuple[str, ...] = ()
    """What the configuration left open, and what was chosen."""

    @property
    def fits(self) -> bool:
        return self.choice is not None

    @property
    def plan(self) -> Plan:
        assert self.choice is not None
        return self.choice.best.plan

    @property
    def timeline(self) -> Timeline:
        assert self.choice is not None
        return self.choice.best.timeline

    @property
    def tokens_per_step(self) -> int:
        """Of all GPUs."""
        return self.machine.rank_count * self.config.tokens * self.config.accumulation_steps

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs."""
        return self.tokens_per_step / self.timeline.step_s

    @property
    def flop_per_s(self) -> float:
        """Of each GPU: three times forward, so what recomputing costs is not counted."""
        forward = sum(self.described.forward_flops.values()) * self.config.accumulation_steps
        return _TRAINING_FACTOR * forward / self.timeline.step_s

    @property
    def share_of_peak(self) -> float:
        rate = self.machine.hardware.matmul(self.config.precision)
        return self.flop_per_s / rate.peak_flop_per_s.value

    @property
    def ssd_bytes_written_per_step(self) -> int:
        """To the drives of a node."""
        return self.machine.hardware.gpus_per_node * bytes_written_to_ssd(self.plan)

    @property
    def steps_until_worn(self) -> float:
        """Steps until as much has been written as the drives are rated for."""
        drive, written = self.machine.hardware.ssd, self.ssd_bytes_written_per_step
        return inf if drive is None or written == 0 else drive.endurance_bytes.value / written

    @property
    def bytes(self) -> Mapping[str, Mapping[str, int]]:
        """tier -> state -> bytes of one rank; tiers that hold nothing are left out."""
        return {tier: dict(lines) for tier, lines in self.plan.bytes.items() if lines}


def forecast(config: PlanConfig, machine: Machine, measure: bool = True) -> Forecast:
    """Plan `config.model` on `machine`. What does not fit is part of the answer, not an error.

    With `measure`, the plan's step is timed with compute that is measured, where this machine's processors compute. The
    plan is the same without.

    Raises ConfigError: unknown model, or a setting that cannot be used.
    """
    if config.update == "async" and machine.rank_count > 1:
        raise ConfigError("--update async is not for several ranks yet: leave it out, or plan one (--gpus-per-node 1)")
    described = subject_of(config)
    config, chosen = resolve_auto(config, machine, described)
    activations = activations_of(config, described)
    try:
        inputs, notes = inputs_with_policies(config, machine, described)
    except BudgetError as refusal:
        return Forecast(config, machine, described, activations, (), None, None, refusal, chosen)
    try:
        inputs.usual_plan()
    except BudgetError as refusal:
        return Forecast(config, machine, described, activations, notes, inputs, None, refusal, chosen)
    rate = machine.hardware.matmul(config.precision).reached_flop_per_s
    how = f"compute: FLOPs at {rate.value / 1e12:.3g} TFLOP/s ({rate.source})"
    if measure and machine.here and machine.hardware.device is None and described.measurable:
        inputs = replace(inputs, compute=_measured(config, inputs))
        how = f"compute: a layer and the head, measured here just now; what chose the plan is {how[9:]}"
    if config.activations == "auto" and inputs.saved is not None:
        activations = activations.with_policies(inputs.saved)
    notes = (*notes, f"{how}.")
    return Forecast(config, machine, described, activations, notes, inputs, inputs.search(), None, chosen)


def _measured(config: PlanConfig, inputs: PlanInputs) -> Compute:
    """Seconds of each module on this machine's processors."""
    from pagoda.calibrate import ComputeProfiler

    described = inputs.described
    profiler = ComputeProfiler(
        described.name,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        precision=config.precision,
        gradient_checkpointing=recomputes(config.activations),
    )
    times = Compute.from_profile(profiler.measure(), described.root)
    if config.activations != "auto" or inputs.saved is None:
        return times
    return spared(times, described.root, inputs.saved.policies)
