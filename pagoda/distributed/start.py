"""The start: what ranks must have in common before a model can be theirs together."""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence

import torch

from pagoda.distributed.transport import Transport
from pagoda.errors import BudgetError, ConfigError
from pagoda.plan.layout import PIECE_ELEMENTS
from pagoda.plan.ops import HOST
from pagoda.plan.placement import LEASES, Budgets
from pagoda.plan.planner import Plan
from pagoda.plan.units import ModuleSpec

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_START = re.compile(r"start=\d+")
_MUST_BE_EQUAL = {
    "rank": "Every rank must wrap the same model with the same settings",
    "stage": "Stages are parts of one model, which has one optimizer",
}


def least_budgets(transport: Transport, mine: Budgets) -> Budgets:
    """The least that any rank has of each tier, so that all make the same plan."""
    by_rank = transport.announce(mine)
    if len({(each.device is None, each.ssd is None) for each in by_rank}) > 1:
        raise ConfigError(
            "Some ranks have memory.device or memory.ssd and others have none: give all of them the same."
        )
    device = min((each.device for each in by_rank if each.device is not None), default=None)
    ssd = min((each.ssd for each in by_rank if each.ssd is not None), default=None)
    return Budgets(min(each.host for each in by_rank), device, ssd)


def check_equal(transport: Transport, who: str = "rank", **settings: object) -> None:
    """Raises ConfigError, on every rank, naming the ranks whose settings read otherwise than rank 0's, and which. `who`
    is what is told apart."""
    readable = {name: _readable(value) for name, value in settings.items()}
    by_rank = transport.announce([hashlib.blake2b(text.encode()).digest() for text in readable.values()])
    for name, column in zip(readable, zip(*by_rank, strict=True), strict=True):
        others = [str(rank) for rank, value in enumerate(column) if value != column[0]]
        if others:
            raise ConfigError(
                f"{who.capitalize()}s have different {name}: {who} {', '.join(others)} not that of {who} 0 (here: "
                f"{readable[name]:.200}). {_MUST_BE_EQUAL[who]}."
            )


def _readable(value: object) -> str:
    """How a setting reads, whichever process it is in: without the addresses of objects that have no better name."""
    return _ADDRESS.sub("", value if isinstance(value, str) else repr(value))


def on_any_rank(thing: object, root: ModuleSpec) -> str:
    """How something of a model reads on every rank: experts by their place in a rank's part, not by number, and
    tiles without their first element, which follows from the sizes of those before."""
    text = _START.sub("start=", repr(thing))
    first: dict[str, int] = {}
    for expert in root.experts():
        row = expert.rstrip("0123456789")
        first.setdefault(row, int(expert[len(row) :]))
    if not any(first.values()):
        return text
    numbered = re.compile(rf"({'|'.join(map(re.escape, first))})(\d+)")
    return numbered.sub(lambda found: f"{found[1]}{int(found[2]) - first[found[1]]}", text)


def agreed_plan(transport: Transport, make: Callable[[], Plan], root: ModuleSpec) -> Plan:
    """The plan that `make` makes on this rank, once every rank has one, and all fit together.

    Raises BudgetError, on every rank, where one has none, ConfigError where they differ.
    """
    plan, refusal = None, None
    try:
        plan = make()
    except BudgetError as error:
        refusal = error
    said = transport.announce("" if refusal is None else str(refusal))
    if refusal is not None:
        raise refusal
    refused = [rank for rank, text in enumerate(said) if text]
    if refused:
        raise BudgetError(f"Rank {refused[0]} cannot hold its share: {said[refused[0]]}")
    assert plan is not None
    check_equal(transport, plan=on_any_rank(in_common(plan), root))
    return plan


def in_common(plan: Plan) -> dict[str, object]:
    """What of a plan must be the same on all ranks, in plain values, which read alike in every process.

    Where ranks hold other numbers of elements, each has its own homes for them, and where no weight is gathered before
    use, its own leases.
    """
    layout, trace = plan.layout, plan.trace
    common: dict[str, object] = {
        "units": layout.units,
        "experts": sorted(layout.expert_units),
        "page_bytes": layout.page_bytes,
        "states": [(state.name, str(state.dtype), state.per) for state in layout.states],
        "gradient": str(layout.gradient_dtype),
        "ranks": layout.ranks,
        "trace": [(access.unit, access.phase.name) for access in trace.accesses],
    }
    if plan.ranks is not None and plan.ranks.shards_weights:
        common["leases"] = plan.placement.pages(plan.lease_tier or HOST, LEASES)
    if layout.slices.differ:
        places = {unit.index: range(layout.group(unit)) for unit in plan.units}
        common["slices"] = [[layout.slices.trained(unit, at) for at in places[unit.index]] for unit in plan.units]
    else:
        common["homes"] = sorted(plan.placement.homes.items())
    return common


class FromFirst:
    """Gives every rank the first one's values, as DDP does at its start: what was drawn at random may differ.

    The first is rank 0, and of a parameter that only some ranks have the first of those.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __call__(self, tensor: torch.Tensor, having: Sequence[int] | None = None) -> torch.Tensor:
        """The first rank's tensor, in place of an equally large one; every rank asks for one at once.

        `having` are the ranks that have the same one, this one among them; by default all.
        """
        first, *others = having if having is not None else range(self._transport.size)
        flat = tensor.detach().contiguous().reshape(-1)
        if self._transport.rank != first:
            flat = flat.clone()
        for piece in flat.split(PIECE_ELEMENTS):  # type: ignore[no-untyped-call]
            if self._transport.rank == first:
                self._transport.trade([(rank, piece) for rank in others], ())
            else:
                self._transport.trade((), [(first, piece)])
        return flat.view(tensor.shape)

    def copy(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""
        for tensor in tensors:
            tensor.copy_(self(tensor))
