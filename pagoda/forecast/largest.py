"""The largest GPT that fits: a search over the family of `models.papers.gpt_shape`."""

from bisect import bisect_left

from pagoda.errors import BudgetError
from pagoda.forecast.activations import estimate_activations
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.forecast import options_of
from pagoda.forecast.machine import Machine, budgets_for
from pagoda.forecast.subject import find_subject
from pagoda.models.papers import gpt_of_step
from pagoda.plan.planner import make_plan

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
    subject = find_subject(
        gpt_of_step(step).name,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        count_flops=False,
        expert_parallel=config.expert_parallel,
    )
    states = config.rule().states(config.precision)
    itemsize = states[0].dtype.itemsize
    activations = estimate_activations(
        subject, config.tokens, itemsize, config.activations, config.chunked_loss, config.tile_tokens
    )
    budgets, _ = budgets_for(machine, config.memory, activations)
    make_plan(subject.root, states, budgets, options_of(config), machine.ranks)
