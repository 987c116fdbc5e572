"""The start: what must be equal on all ranks before they can train one model."""

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from pagoda.errors import BudgetError, ConfigError
from pagoda.plan.buffers import PIECE_ELEMENTS
from pagoda.plan.placement import LEASES
from pagoda.plan.planner import Plan
from pagoda.plan.tiers import HOST, Budgets
from pagoda.plan.units import ModuleSpec
from pagoda.ranks.transport import Transport

T = TypeVar("T")

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_START = re.compile(r"start=\d+")
_MUST_BE_EQUAL = {
    "rank": "Every rank must wrap the same model with the same settings",
    "stage": "Stages are parts of one model, which has one optimizer",
}


def least_budgets(transport: Transport, mine: Budgets) -> Budgets:
    """The minimum over ranks of each tier's budget, so that all ranks make the same plan."""
    by_rank = transport.announce(mine)
    if len({(each.device is None, each.ssd is None) for each in by_rank}) > 1:
        raise ConfigError("Some ranks have memory.device or memory.ssd and others do not: set the same on all ranks.")
    device = min((each.device for each in by_rank if each.device is not None), default=None)
    ssd = min((each.ssd for each in by_rank if each.ssd is not None), default=None)
    return Budgets(min(each.host for each in by_rank), device, ssd)


def check_equal(transport: Transport, who: str = "rank", **settings: object) -> None:
    """Raises ConfigError on every rank if settings differ from rank 0's. The error names the ranks and the setting.
    `who`: whether the transport connects ranks or stages."""
    readable = {name: _readable(value) for name, value in settings.items()}
    by_rank = transport.announce([hashlib.blake2b(text.encode()).digest() for text in readable.values()])
    for name, column in zip(readable, zip(*by_rank, strict=True), strict=True):
        others = [str(rank) for rank, value in enumerate(column) if value != column[0]]
        if others:
            raise ConfigError(
                f"{who.capitalize()}s have different {name}: {who} {', '.join(others)} differs from {who} 0 (here: "
                f"{readable[name]:.200}). {_MUST_BE_EQUAL[who]}."
            )


def _readable(value: object) -> str:
    """The text of a setting, without addresses of objects, so that it is the same in every process."""
    return _ADDRESS.sub("", value if isinstance(value, str) else repr(value))


def rank_independent_text(thing: object, root: ModuleSpec) -> str:
    """The text of a model or of values of a plan, without what differs between ranks. Each rank's experts are numbered
    from 0. The first element of a tile is left out, because it follows from the sizes of the tiles before."""
    text = _START.sub("start=", repr(thing))
    first: dict[str, int] = {}
    for expert in root.experts():
        prefix = expert.rstrip("0123456789")
        first.setdefault(prefix, int(expert[len(prefix) :]))
    if not any(first.values()):
        return text
    numbered = re.compile(rf"({'|'.join(map(re.escape, first))})(\d+)")
    return numbered.sub(lambda found: f"{found[1]}{int(found[2]) - first[found[1]]}", text)


def made_by_all(make: Callable[[], T], announce: Callable[[str], list[str]], who: str) -> T:
    """The result of `make` on this process, once all processes have theirs. `announce` sends a text to all, and returns
    every process's text in order. Raises BudgetError on all if one has no room. `who` names the processes in the error.
    """
    made, refusal = None, None
    try:
        made = make()
    except BudgetError as error:
        refusal = error
    said = announce("" if refusal is None else str(refusal))
    if refusal is not None:
        raise refusal
    for number, text in enumerate(said):
        if text:
            raise BudgetError(f"{who} {number} cannot hold its share: {text}")
    assert made is not None
    return made


def agreed_plan(transport: Transport, make: Callable[[], Plan], root: ModuleSpec) -> Plan:
    """The result of `make` on this rank, once every rank has a plan and all plans agree.

    Raises BudgetError on every rank if one has no plan, and ConfigError if plans differ.
    """
    plan = made_by_all(make, transport.announce, "Rank")
    check_equal(transport, plan=rank_independent_text(in_common(plan), root))
    return plan


def in_common(plan: Plan) -> dict[str, object]:
    """The parts of a plan that must be the same on all ranks, as values whose text is the same in every process.

    Homes may differ if ranks hold different numbers of elements. Leases may differ if no weight is gathered before use.
    """
    layout, trace = plan.layout, plan.trace
    common: dict[str, object] = {
        "units": layout.units,
        "experts": sorted(layout.expert_units),
        "page_bytes": layout.page_bytes,
        "states": [(state.name, str(state.dtype), state.per) for state in layout.states],
        "gradient": str(layout.gradient),
        "ranks": layout.ranks,
        "trace": [(access.unit, access.phase.name) for access in trace.accesses],
    }
    if plan.ranks.shards_weights:
        common["leases"] = plan.placement.pages(plan.lease_tier or HOST, LEASES)
    if layout.slices.differ:
        places = {unit.index: range(layout.group(unit)) for unit in plan.units}
        common["slices"] = [[layout.slices.trained(unit, at) for at in places[unit.index]] for unit in plan.units]
    else:
        common["homes"] = sorted(plan.placement.homes.items())
    return common


def from_first(transport: Transport, tensor: torch.Tensor, having: Sequence[int] | None = None) -> torch.Tensor:
    """The first rank's values of a tensor, like DDP at its start, because random initial values may differ.

    `having`: the ranks that have this tensor, in order. The default is all. They must call it at the same point, with
    tensors of the same size.
    """
    first, *others = having if having is not None else range(transport.size)
    flat = tensor.detach().contiguous().reshape(-1)
    if transport.rank != first:
        flat = flat.clone()
    for piece in flat.split(PIECE_ELEMENTS):  # type: ignore[no-untyped-call]
        if transport.rank == first:
            transport.trade([(rank, piece) for rank in others], ())
        else:
            transport.trade((), [(first, piece)])
    return flat.view(tensor.shape)
