"""Forecasts a run: plans a model for a machine and budgets, and simulates a step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from pagoda.errors import BudgetError
from pagoda.forecast.activations import ActivationEstimate, activations_of
from pagoda.forecast.compute import Compute
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.machine import Machine, with_precision
from pagoda.forecast.model_description import ModelDescription, describe_model
from pagoda.forecast.problem import EXPERT_S, Problem, experts_of
from pagoda.forecast.resolve_auto import resolve_auto, resolved_problem, without_recomputing
from pagoda.forecast.search import Choice, search, usual
from pagoda.forecast.tensor_parallel import tensor_part_of
from pagoda.plan.activations import recomputes
from pagoda.plan.combinations import check_features
from pagoda.plan.planner import Plan
from pagoda.plan.traffic import bytes_written_to_ssd
from pagoda.simulate.timeline import Timeline


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run."""

    config: PlanConfig
    machine: Machine
    described: ModelDescription
    activations: ActivationEstimate
    notes: tuple[str, ...]
    """Where the budgets and compute times come from."""
    resolved: tuple[str, ...]
    """The settings that were left open, with the values chosen for them."""
    problem: Problem | None = None
    """None if activations alone do not fit. If there are many experts, the problem has joined ones."""
    choice: Choice | None = None
    """The plans of the problem."""
    chosen: Plan | None = None
    """The best of them, with every expert."""
    refusal: BudgetError | None = None
    """Why nothing fits. None exactly if there is a choice."""

    @property
    def fits(self) -> bool:
        return self.choice is not None

    @property
    def plan(self) -> Plan:
        assert self.chosen is not None
        return self.chosen

    @property
    def timeline(self) -> Timeline:
        assert self.choice is not None
        return self.choice.best.timeline

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step of all GPUs."""
        return self.machine.ranks.data_parallel * self.config.tokens * self.config.gradient_accumulation_steps

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all GPUs."""
        return self.tokens_per_step / self.timeline.step_s

    @property
    def flop_per_s(self) -> float:
        """FLOP/s of each GPU, counted as three times forward, or twice for frozen weights. Recomputation is not
        counted."""
        return self.described.step_flops * self.config.gradient_accumulation_steps / self.timeline.step_s

    @property
    def share_of_peak(self) -> float:
        rate = self.machine.hardware.matmul(self.config.chosen_precision)
        return self.flop_per_s / rate.peak_flop_per_s.value

    @property
    def ssd_bytes_written_per_step(self) -> int:
        """Bytes that a step writes to the drives of one node."""
        return self.machine.hardware.gpus_per_node * bytes_written_to_ssd(self.plan)

    @property
    def steps_until_worn(self) -> float:
        """Number of steps that write as many bytes as the drives are rated for."""
        drive, written = self.machine.hardware.ssd, self.ssd_bytes_written_per_step
        return inf if drive is None or written == 0 else drive.endurance_bytes.value / written


def forecast(
    config: PlanConfig, machine: Machine, measure: bool = True, described: ModelDescription | None = None
) -> Forecast:
    """Plan `config.model`, or the given description, on `machine`. A model that does not fit is a result, not an error.

    With `measure`, compute is measured if this machine's CPU does the computing, and the plan's step is simulated with
    those times. The plan itself does not change, because a run chooses its plan without measuring.

    Raises ConfigError for an unknown model or a setting that cannot be used.
    """
    config, why = with_precision(config, machine.hardware)
    check_configured(config)
    config = replace(config, per_device_train_batch_size=max(1, config.per_device_train_batch_size))
    whole = described or describe_model(config)
    described = tensor_part_of(whole, config.tensor_parallel, config.states[0].whole)
    config, chosen = resolve_auto(config, machine, described)
    made = Forecast(config, machine, described, activations_of(config, described), (), (*why, *chosen))
    try:
        problem, notes = resolved_problem(config, machine, described)
        made = replace(made, notes=notes, problem=problem)
        problem, choice, plan = _chosen(problem, usual if config.plan == "usual" else search)
    except BudgetError as refusal:
        return replace(made, refusal=refusal)
    rate = machine.hardware.matmul(config.chosen_precision).reached_flop_per_s
    how = f"FLOPs at {rate.value / 1e12:.3g} TFLOP/s ({rate.source})"
    if described.packed:
        how += ", and reads and writes of memory that dequantize weights"
    if machine.hardware.device is not None and (experts := len(experts_of(described.root))):
        how += f"; a visit to one of {experts:,} experts takes {EXPERT_S * 1e3:g} ms or more (assumed)"
    if measure and machine.here and machine.hardware.device is None and described.measurable:
        problem = replace(problem, compute=_measured(config, problem))
        choice = choice.with_times(problem)
        how = f"a layer and the head, measured here just now; what chose the plan is {how}"
    activations = made.activations
    if config.activations == "auto":
        activations = activations.with_policies(problem.saved)
    notes = (*notes, f"compute: {how}.", *machine.speeds())
    return replace(made, activations=activations, notes=notes, problem=problem, choice=choice, chosen=plan)


def _chosen(problem: Problem, choose: Callable[[Problem], Choice]) -> tuple[Problem, Choice, Plan]:
    """Choose a plan. Returns the problem in which plans were compared, which has joined experts if they fit too, the
    choice, and its plan with every expert. Raises BudgetError if no plan fits."""
    joined = problem.with_joined_experts()
    if joined is not problem:
        try:
            choice = choose(joined)
            options = replace(choice.best.options, page_bytes=problem.options.page_bytes)
            return joined, choice, replace(problem, options=options).plan()
        except BudgetError:
            pass  # joined experts are larger
    choice = choose(problem)
    return problem, choice, choice.best.plan


def check_configured(config: PlanConfig) -> None:
    """Raises ConfigError if settings do not work together."""
    check_features(config.states, config.tile_limit is not None)


def _measured(config: PlanConfig, problem: Problem) -> Compute:
    """Seconds of each module, measured on this machine's CPU."""
    from pagoda.calibrate.model import ComputeProfiler

    assert config.model is not None
    profiler = ComputeProfiler(
        config.model,
        batch_size=config.per_device_train_batch_size,
        seq_len=config.seq_len,
        precision=config.chosen_precision,
        gradient_checkpointing=recomputes(config.activations),
    )
    times = Compute.from_profile(profiler.measure(), problem.root)
    if config.activations != "auto":
        return times
    return without_recomputing(times, problem.root, problem.saved.policies)
