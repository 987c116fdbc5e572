"""Offloaded activations in a plan: how much of every block leaves, where to, and in which accesses of a step."""

from collections.abc import Iterator, Mapping, Sequence

from pagoda.errors import BudgetError
from pagoda.memory.sizes import format_bytes
from pagoda.plan.activations import OFFLOAD_LANES, ActivationPlan, Move, SavedBlocks, peak_of
from pagoda.plan.layout import Layout
from pagoda.plan.ops import HOST, SSD, Op, OpKind
from pagoda.plan.placement import ACTIVATIONS, Budgets, Placement
from pagoda.plan.trace import STEP, Phase, Trace
from pagoda.plan.units import ModuleSpec, Use, is_within, layers_of


def offload_room(layout: Layout, placement: Placement, budgets: Budgets) -> dict[str, int]:
    """tier -> bytes that pages leave to offloaded activations: RAM where compute has a memory of its own, and SSD where
    there are buffers on the way to it."""
    room = dict.fromkeys((HOST, SSD), 0)
    if budgets.device is not None:
        room[HOST] = budgets.host - sum(placement.lines.get(HOST, {}).values()) * layout.page_bytes
    if placement.pages(HOST, ACTIVATIONS) and budgets.ssd is not None:
        room[SSD] = budgets.ssd - sum(placement.lines.get(SSD, {}).values()) * layout.page_bytes
    return room


def plan_activations(
    root: ModuleSpec, uses: Sequence[Use], saved: SavedBlocks, room: Mapping[str, int]
) -> ActivationPlan:
    """What policies take, and where what they offload goes in a forward that has the given uses of units.

    Raises BudgetError where that has no room.
    """
    peak = peak_of(saved.sizes, saved.policies, room[HOST])
    if peak.ssd > room[SSD]:
        tier = SSD if room[SSD] else HOST
        raise BudgetError(
            f"Offloaded activations do not fit: they take {format_bytes(peak.host + peak.ssd)}, and beside the "
            f"training state {HOST} has {format_bytes(room[HOST])} and {SSD} {format_bytes(room[SSD])}. Raise "
            f"memory.{tier}, or use activations='recompute'.",
            tier=tier,
        )
    moves = []
    left = room[HOST]
    blocks = zip(saved.sizes.blocks, saved.policies, _uses_of_blocks(root, uses), strict=True)
    for block, policy, at in blocks:
        away = block.away(policy)
        host = min(away, left)
        left -= host
        for index, use in enumerate(at):
            for tier, total in ((HOST, host), (SSD, away - host)):
                nbytes = total * (index + 1) // len(at) - total * index // len(at)  # as evenly as can be
                if nbytes:
                    moves.append(Move(use, tier, nbytes))
    return ActivationPlan(saved.policies, peak, saved.sizes, tuple(moves))


def move_ops(activations: ActivationPlan, trace: Trace) -> Iterator[Op]:
    """Every SAVE and RETURN of a step."""
    ticks: dict[Phase, list[list[int]]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    """Phase -> ticks of each pass."""
    before = None
    for tick, access in enumerate(trace.accesses):
        if access == STEP:
            break
        if access.phase != before:
            ticks[access.phase].append([])
        before = access.phase
        ticks[access.phase][-1].append(tick)
    for forward, backward in zip(ticks[Phase.FORWARD], ticks[Phase.BACKWARD], strict=True):
        for move in activations.moves:
            out, back = OFFLOAD_LANES[move.tier]
            saved_at, returned_at = forward[move.use], backward[len(backward) - 1 - move.use]
            unit = trace.accesses[saved_at].unit
            yield Op(OpKind.SAVE, unit, out, move.nbytes, saved_at)
            yield Op(OpKind.RETURN, unit, back, move.nbytes, returned_at)


def _uses_of_blocks(root: ModuleSpec, uses: Sequence[Use]) -> list[tuple[int, ...]]:
    """The uses inside each of the model's layers; where a unit holds more than a layer, the one around it."""
    found = []
    for layer in layers_of(root):
        inside = tuple(i for i, use in enumerate(uses) if is_within(use.module, (layer.name,)))
        around = (i for i, use in enumerate(uses) if is_within(layer.name, (use.module,)))
        found.append(inside or (next(around, 0),))
    return found
