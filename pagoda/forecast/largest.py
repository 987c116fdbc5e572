"""The largest GPT that fits: a search over the family of `models.papers.gpt_shape`."""

from bisect import bisect_left
from dataclasses import replace

from pagoda.errors import BudgetError
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.inputs import PlanInputs, inputs_of, subject_of
from pagoda.forecast.machine import Machine
from pagoda.forecast.resolve_auto import alternatives
from pagoda.memory.sizes import format_bytes
from pagoda.models.papers import gpt_of_step

_MOST_STEPS = 1 << 14


def largest_model(config: PlanConfig, machine: Machine) -> str:
    """Name of the largest `gpt-<layers>x<hidden>` for which `make_plan` has a plan, activations considered.

    Raises BudgetError when not even the smallest fits.
    """
    _check(0, config, machine)
    too_large = 1
    while too_large < _MOST_STEPS and _fits(too_large, config, machine):
        too_large *= 2
    between = range(too_large // 2, too_large)
    step = between[bisect_left(between, True, key=lambda step: not _fits(step, config, machine)) - 1]
    return gpt_of_step(step).name


def _fits(step: int, config: PlanConfig, machine: Machine) -> bool:
    try:
        _check(step, config, machine)
    except BudgetError:
        return False
    return True


def _check(step: int, config: PlanConfig, machine: Machine) -> None:
    """Raises BudgetError when number `step` of the family does not fit."""
    config = replace(config, model=gpt_of_step(step).name, max_model=False)
    described = subject_of(config, count_flops=False)
    refusals: list[BudgetError] = []
    for closed in alternatives(config, machine, described):
        try:
            inputs, _ = inputs_of(closed, machine, described)
            _check_in_all(inputs)
            inputs.usual_plan()
            return
        except BudgetError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _check_in_all(inputs: PlanInputs) -> None:
    """Raises BudgetError where all tiers together are too small: found out fast, as it is what most refusals are.

    States with shapes of their own are left out, and so are padding and buffers.
    """
    params = sum(param.numel for param in inputs.described.root.walk())
    states = (state for state in inputs.states if state.shape_of is None)
    least = sum(state.nbytes(params) for state in states)
    budgets, options = inputs.budgets, inputs.options
    if budgets.ssd is not None or not options.update_under_backward:  # gradients have homes
        least += params * (options.gradients or inputs.states[0].dtype).itemsize
    least //= inputs.ranks.data_parallel if inputs.ranks else 1
    there = sum(filter(None, (budgets.device, budgets.host, budgets.ssd)))
    if least > there:
        raise BudgetError(
            f"The training state does not fit: it takes {format_bytes(least)}, and all tiers together have "
            f"{format_bytes(there)}. Raise memory.host, or add memory.ssd='DIR'.",
        )
