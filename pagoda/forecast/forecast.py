"""The forecast: a model, a machine and budgets, planned and simulated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from pagoda.errors import BudgetError
from pagoda.forecast.activations import Activations, estimate_activations
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.machine import Machine, budgets_for
from pagoda.forecast.subject import Subject, find_subject
from pagoda.memory.sizes import parse_bytes
from pagoda.optim.rule import StateSpec, kept_dtype
from pagoda.plan.activations import recomputes
from pagoda.plan.compute import Compute
from pagoda.plan.hardware import Hardware
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import Options, Plan, make_plan
from pagoda.plan.ranks import Ranks
from pagoda.plan.search import Choice, search
from pagoda.plan.timeline import Timeline
from pagoda.settings import PlanMode

_TRAINING_FACTOR = 3.0
"""FLOPs of forward and backward together, per FLOP of forward."""


@dataclass(frozen=True)
class Setting:
    """All that a search needs: what advice varies."""

    subject: Subject
    hardware: Hardware
    from_flops: Compute
    """Times that choose a plan: the same in a forecast and in a run, which has no time to measure any."""
    compute: Compute
    """Times that a step is forecast with: measured ones where there are some."""
    budgets: Budgets
    options: Options
    states: tuple[StateSpec, ...]
    ranks: Ranks | None = None
    mode: PlanMode = "search"

    @property
    def exchanges(self) -> Mapping[str, int]:
        """Bytes of tokens that a rank sends to the experts of others in one forward pass, as `make_plan` takes them."""
        return {module: n * self.states[0].dtype.itemsize for module, n in self.subject.exchanged.items()}

    def usual_plan(self) -> Plan:
        """The planner's first choice. Raises BudgetError when no plan fits."""
        return make_plan(
            self.subject.root, self.states, self.budgets, self.options, self.ranks, exchanges=self.exchanges
        )

    def search(self) -> Choice:
        """The plan that a run takes, and beside it all others that fit, fastest first.

        Raises BudgetError when no plan fits.
        """
        found = search(
            self.subject.root,
            self.states,
            self.budgets,
            self.options,
            self.hardware,
            self.from_flops,
            self.ranks,
            self.exchanges,
        )
        if self.mode == "usual":
            found = found.usual()
        if self.compute is self.from_flops:
            return found
        return found.with_times(self.subject.root, self.hardware, self.compute)


@dataclass(frozen=True)
class Forecast:
    """What can be said of a run before it starts."""

    config: PlanConfig
    machine: Machine
    subject: Subject
    activations: Activations
    notes: tuple[str, ...]
    """How budgets and compute times were found."""
    setting: Setting | None
    """None where activations alone do not fit."""
    choice: Choice | None
    refusal: BudgetError | None
    """Why it does not fit; None exactly where there is a choice."""

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
        forward = sum(self.subject.forward_flops.values()) * self.config.accumulation_steps
        return _TRAINING_FACTOR * forward / self.timeline.step_s

    @property
    def share_of_peak(self) -> float:
        rate = self.machine.hardware.matmul(self.config.precision)
        return self.flop_per_s / rate.peak_flop_per_s.value

    @property
    def ssd_bytes_written_per_step(self) -> int:
        """To the drives of a node."""
        return self.machine.hardware.gpus_per_node * sum(op.nbytes for op in self.plan.ops if op.lane == "ssd_write")

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
    assert config.model is not None
    subject = find_subject(
        config.model,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        expert_parallel=config.expert_parallel,
    )
    states = config.rule().states(config.precision)
    activations = estimate_activations(
        subject,
        config.tokens,
        states[0].dtype.itemsize,
        config.activations,
        config.chunked_loss,
        config.tile_tokens,
    )
    try:
        budgets, notes = budgets_for(machine, config.memory, activations)
    except BudgetError as refusal:
        return Forecast(config, machine, subject, activations, (), None, None, refusal)
    rate = machine.hardware.matmul(config.precision).reached_flop_per_s
    times = Compute.from_flops(subject.forward_flops, rate.value, recomputes(config.activations))
    setting = Setting(
        subject, machine.hardware, times, times, budgets, options_of(config), states, machine.ranks, mode=config.plan
    )
    try:
        setting.usual_plan()
    except BudgetError as refusal:
        return Forecast(config, machine, subject, activations, notes, setting, None, refusal)
    how = f"compute: FLOPs at {rate.value / 1e12:.3g} TFLOP/s ({rate.source})"
    if measure and machine.here and machine.hardware.device is None and subject.measurable:
        setting = replace(setting, compute=_measured(config, subject))
        how = f"compute: a layer and the head, measured here just now; what chose the plan is {how[9:]}"
    return Forecast(config, machine, subject, activations, (*notes, f"{how}."), setting, setting.search(), None)


def _measured(config: PlanConfig, subject: Subject) -> Compute:
    """Seconds of each module on this machine's processors."""
    from pagoda.calibrate import ComputeProfiler

    profiler = ComputeProfiler(
        subject.name,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        precision=config.precision,
        gradient_checkpointing=recomputes(config.activations),
    )
    return Compute.from_profile(profiler.measure(), subject.root)


def options_of(config: PlanConfig) -> Options:
    """The planner's options, as `pagoda train` sets them."""
    memory = config.memory
    return Options(
        None if memory.page_size is None else parse_bytes(memory.page_size, "memory.page_size"),
        None if memory.unit_limit is None else parse_bytes(memory.unit_limit, "memory.unit_limit"),
        config.accumulation_steps,
        config.clip_grad_norm is not None,
        speculate=config.speculate,
        keep_checkpoints=config.keep_checkpoints,
        gradients=kept_dtype(config.gradients),
        may_skip=config.precision == "fp16",
    )
