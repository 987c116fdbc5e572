"""Searches the family `models.papers.gpt_of_step` for the largest GPT that fits."""

from bisect import bisect_left
from dataclasses import replace

from pagoda.errors import BudgetError
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.machine import Machine
from pagoda.forecast.model_description import describe_model
from pagoda.forecast.problem import Problem, problem_of
from pagoda.forecast.resolve_auto import alternatives
from pagoda.memory.sizes import format_bytes
from pagoda.models.papers import gpt_of_step

_MOST_STEPS = 1 << 14


def largest_model(config: PlanConfig, machine: Machine) -> str:
    """Name of the largest `gpt-<layers>x<hidden>` that can be planned, with room for its activations.

    Raises BudgetError if not even the smallest one fits.
    """

    def refusal(step: int) -> BudgetError | None:
        """Why number `step` of the family does not fit. None if it fits."""
        asked = replace(config, model=gpt_of_step(step).name, max_model=False)
        described = describe_model(asked, count_flops=False)
        refusals: list[BudgetError] = []
        for closed in alternatives(asked, machine, described):
            try:
                problem, _ = problem_of(closed, machine, described)
                _check_in_all(problem)
                problem.plan()
                return None
            except BudgetError as refused:
                refusals.append(refused)
        return refusals[0]

    if (refused := refusal(0)) is not None:
        raise refused
    too_large = 1
    while too_large < _MOST_STEPS and refusal(too_large) is None:
        too_large *= 2
    between = range(too_large // 2, too_large)
    step = between[bisect_left(between, True, key=lambda step: refusal(step) is not None) - 1]
    return gpt_of_step(step).name


def _check_in_all(problem: Problem) -> None:
    """Raises BudgetError if all tiers together are too small. This is the most common reason, and it is fast to check.

    States with shapes of their own, padding and buffers are not counted.
    """
    params = problem.root.numel
    states = (state for state in problem.states if state.shape_of is None)
    least = sum(state.nbytes(params) for state in states)
    budgets, options = problem.budgets, problem.options
    if budgets.ssd is not None or not options.update_during_backward:  # gradients have homes
        least += params * (options.gradients or problem.states[0].dtype).itemsize
    least //= problem.ranks.data_parallel
    there = sum(filter(None, (budgets.device, budgets.host, budgets.ssd)))
    if least > there:
        raise BudgetError(
            f"The training state does not fit: it takes {format_bytes(least)}, and all tiers together have "
            f"{format_bytes(there)}. Raise memory.host, or add memory.ssd='DIR'.",
        )
