"""`resident`: keeps all weights of a model where compute reads them, for many forwards without training."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from pagoda.checkpoint.state import states_of
from pagoda.engine import Engine
from pagoda.errors import BudgetError
from pagoda.memory.sizes import format_bytes
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.placement import LEASES
from pagoda.plan.tiers import HOST


@contextmanager
def resident(model: nn.Module) -> Iterator[None]:
    """Inside the block, all weights of `model`, a wrapped model or a module of one, stay leased in compute's memory.

    Forwards without gradients then fetch nothing, as when a policy generates text token by token, and have the same
    bits as outside. The block begins when all updates of these weights have ended, and takes the memory that the plan
    has for leases. On several ranks, all begin and end it at the same point, and between them no forward communicates.

    Raises BudgetError if the weights do not fit there. Inside, forwards with gradients, `step()` and all that changes
    weights raise UsageError.
    """
    units: dict[Engine, dict[int, LiveUnit]] = {}
    for state in states_of(model).values():
        units.setdefault(state.engine, {})[state.unit.index] = state.unit
    with ExitStack() as leases:
        for engine, own in units.items():
            _check_room(engine, own)
            leases.enter_context(engine.active_forwards.resident(own.values()))
        yield


def _check_room(engine: Engine, units: dict[int, LiveUnit]) -> None:
    plan, tier = engine.plan, engine.plan.lease_tier
    pages = sum(count for unit, count in plan.leased_pages().items() if unit in units)
    if tier is not None and pages > plan.placement.pages(tier, LEASES):
        needed, room = pages * plan.page_bytes, plan.placement.pages(tier, LEASES) * plan.page_bytes
        more = f"raise memory.device by at least {format_bytes(needed - room)}"
        if tier == HOST:  # homes get what a larger budget adds
            more = "raise memory.host until weights live there"
            if plan.ranks.shards_weights:
                more = "give open_mesh(stage=2), where each rank has all weights"
        raise BudgetError(
            f"pagoda.resident needs {format_bytes(needed)} on {tier} for the weights of all {len(units)} units at "
            f"once, and the plan has {format_bytes(room)} there for leases: {more}, or leave out the block.",
            tier=tier,
        )
