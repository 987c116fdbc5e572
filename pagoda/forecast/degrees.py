"""Searches the degrees: into how many ranks layers, pipeline stages, experts and replicas of the state are divided."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any

from pagoda.config.settings import flag
from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.forecast import check_configured
from pagoda.forecast.machine import Machine, find_machine_for
from pagoda.forecast.model_description import ModelDescription, describe_model
from pagoda.forecast.pipeline import stages_of
from pagoda.forecast.problem import pass_bound_s, work_of
from pagoda.forecast.resolve_auto import resolve_auto, resolved_problem
from pagoda.forecast.step_size import with_step_size
from pagoda.forecast.tensor_parallel import tensor_part_of
from pagoda.plan.activations import recomputes

_DEGREES = {
    "tensor": "tensor_parallel",
    "pipeline": "pipeline_parallel",
    "expert": "expert_parallel",
    "replicas": "replicas",
}
"""Degree that can be searched -> the setting."""
_WHOLE = 3
"""Most candidates that are simulated again with all layers and more micro-batches."""
_CLOSE = 1.1
"""They are simulated again if they take at most this many times as long as the fastest."""


@dataclass(frozen=True)
class Way:
    """One way to divide the ranks, and how long a step takes with it."""

    config: PlanConfig
    machine: Machine
    bound_s: float
    """Seconds for compute and the communication within it. No step is shorter."""
    kinds: tuple[ModelDescription, ...] = ()
    """For each kind of pipeline stage, its part of the model."""
    numbers: tuple[int, ...] = ()
    """The kind of each stage."""
    step_s: float = inf
    """Seconds per step with the default plan, infinite if no plan fits."""

    @property
    def flags(self) -> str:
        """The command-line flags that ask for it."""
        return " ".join(f"{flag(name)} {value}" for name, value in self.config.degrees.items())


def search_degrees(config: PlanConfig) -> tuple[PlanConfig, tuple[str, ...]]:
    """Find the degrees with the fastest default plan. Returns the configuration with these degrees, and the reasons.

    Every candidate has the same number of sequences per step. If ranks share a batch, the step accumulates more
    micro-batches. If no candidate fits, all searched degrees are 1. With activations="auto", the fastest few candidates
    are compared with one policy each: activations are kept if they fit, and otherwise recomputed.

    Raises ConfigError with the reason if no candidate can be used.
    """
    config, sized = with_step_size(config, find_machine_for(_plain(config)))
    ways, refusals = _ways(config)
    if not ways:
        raise refusals[0][1]
    reasons = [*sized, *_left_at_one(config, ways, refusals)]
    tried: list[Way] = []
    for way in sorted(ways, key=lambda way: way.bound_s):
        if tried and way.bound_s >= min(way.step_s for way in tried):
            break  # and so are all that follow
        tried.append(replace(way, step_s=_step_s(way)))
    tried.sort(key=lambda way: way.step_s)
    close = [way for way in tried[:_WHOLE] if way.step_s <= _CLOSE * tried[0].step_s]
    if len(close) > 1:
        tried = sorted((replace(way, step_s=_step_s(way, whole=True)) for way in close), key=lambda way: way.step_s)
    best, *others = tried
    if best.step_s == inf:
        return _plain(config), (f"degrees: none of {len(ways)} ways to divide the ranks fits.", *reasons)
    chosen = f"degrees: {best.flags}. Of {len(ways)} ways to divide the ranks, its usual plan is the fastest."
    if others and others[0].step_s < inf:
        longer = others[0].step_s / best.step_s - 1
        chosen += f" The next takes {longer:.1%} longer: {others[0].flags}."
    return best.config, (chosen, *reasons)


def _ways(config: PlanConfig) -> tuple[list[Way], list[tuple[PlanConfig, ConfigError]]]:
    """All divisions of the ranks that `wrap` accepts, and the reasons why it refuses the others."""
    found: list[Way] = []
    refused: list[tuple[PlanConfig, ConfigError]] = []
    described: dict[int, ModelDescription] = {}
    for asked in _candidates(config):
        try:
            machine, experts = find_machine_for(asked), asked.expert_parallel
            check_configured(asked)
            if experts not in described:
                described[experts] = describe_model(asked)
            found.append(_way(asked, machine, described[experts]))
        except ConfigError as refusal:
            refused.append((asked, refusal))
    return found, refused


def _candidates(config: PlanConfig) -> Iterator[PlanConfig]:
    """Every combination of the searched degrees. Tensor-parallel ranks stay within a node."""
    plain = _plain(config)
    hardware = find_machine_for(plain).hardware  # refuses degrees that stay as set and do not divide the ranks
    count = config.nodes * hardware.gpus_per_node
    if count == 1:
        raise ConfigError("--search-degrees is given, but there is only one rank: leave it out")
    most = {"tensor": hardware.gpus_per_node}
    sizes = [
        _divisors(most.get(name, count)) if name in config.search_degrees else [getattr(config, degree)]
        for name, degree in _DEGREES.items()
    ]
    for parts, stages, row, copies in product(*sizes):
        if count % (parts * stages) == 0 and count // (parts * stages) % (row * copies) == 0:
            more = parts * stages // (plain.tensor_parallel * plain.pipeline_parallel)
            yield replace(
                plain,
                tensor_parallel=parts,
                pipeline_parallel=stages,
                expert_parallel=row,
                replicas=copies,
                gradient_accumulation_steps=config.gradient_accumulation_steps * more,
            )


def _plain(config: PlanConfig) -> PlanConfig:
    """The configuration with every searched degree set to 1."""
    degrees: dict[str, Any] = {_DEGREES[name]: 1 for name in config.search_degrees}
    return replace(config, search_degrees=(), **degrees)


def _left_at_one(
    config: PlanConfig, ways: Sequence[Way], refused: Sequence[tuple[PlanConfig, ConfigError]]
) -> Iterator[str]:
    """Reasons why some searched degrees cannot be above 1."""
    for degree in (_DEGREES[name] for name in config.search_degrees):
        reason = next((why for asked, why in refused if getattr(asked, degree) > 1), None)
        if reason is not None and all(getattr(way.config, degree) == 1 for way in ways):
            yield f"{flag(degree)} can only be 1: {reason}"


def _way(config: PlanConfig, machine: Machine, described: ModelDescription) -> Way:
    """Describe one candidate. Raises ConfigError if it cannot be used."""
    kinds, numbers = [described], [0]
    if config.pipeline_parallel > 1:
        kinds, numbers = stages_of(config, machine.ranks, described)
    whole = config.states[0].whole
    kinds = [tensor_part_of(part, config.tensor_parallel, whole) for part in kinds]
    again = recomputes(config.activations) and config.activations != "auto"
    passes = [
        pass_bound_s(machine.hardware, machine.ranks, *work_of(config, machine, part, again), again) for part in kinds
    ]
    of_stages = [passes[number] for number in numbers]
    bound = sum(of_stages) + (config.gradient_accumulation_steps - 1) * max(of_stages)
    return Way(config, machine, bound, tuple(kinds), tuple(numbers))


def _step_s(way: Way, whole: bool = False) -> float:
    """Seconds per step of the default plan, infinite if none fits. Unless `whole` is set, they are estimated."""
    steps, passes = [], []
    for part in way.kinds:
        try:
            closed, _ = resolve_auto(way.config, way.machine, part, timed=whole)
            problem, _ = resolved_problem(closed, way.machine, part)
            plan = problem.plan()
            if whole:
                timeline = problem.simulated(plan)
                step_s, pass_s = timeline.step_s, timeline.pass_s
            else:
                step_s, pass_s = problem.estimated(plan)
        except BudgetError:
            return inf
        steps.append(step_s)
        passes.append(pass_s)
    slowest = max(way.numbers, key=lambda number: steps[number])
    others = sum(passes[number] for number in way.numbers) - passes[slowest]
    return steps[slowest] + others


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
