"""The bytes that each operation on a unit moves, without the times at which they move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from pagoda.plan.activations import OFFLOAD_LANES, recomputes
from pagoda.plan.exchanges import Exchange
from pagoda.plan.lanes import LaneName
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.planner import Plan
from pagoda.plan.ranks import ring_bytes
from pagoda.plan.slices import slice_elements
from pagoda.plan.tiers import DEVICE, SSD
from pagoda.plan.trace import Phase, gradients_of
from pagoda.plan.units import UnitSpec, around_of

_SUM_BYTES = 4
"""Replicas exchange sums in fp32."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that each operation on one unit moves on one rank. For a collective, the bytes that the rank sends."""

    fetched: int
    """FETCH: the weights, or this rank's slice of them, from their home to a lease. 0 if ranks gather slices from homes
    in the tier of the lease."""
    gathered: int
    """FETCH: the slices of all ranks, until every rank has the whole unit."""
    reduced: int
    """OFFLOAD: every rank's gradient, until every rank has the sum or its slice of it."""
    merged: int
    """OFFLOAD: this rank's fp32 sums, to the ranks of other replicas with the same slice."""
    offloaded: int
    """OFFLOAD: the gradient, from where autograd makes it to its buffer. 0 if its home is the device, or if the
    unit computes in RAM."""
    buffer: int
    """SPILL and RELOAD: the pages of the gradient's buffer."""
    streamed: int
    """UPDATE: states that come from SSD and go back there."""
    passed: int
    """UPDATE: states that come to the device and go back to RAM."""
    brought: int
    """UPDATE: the gradient, if it comes to the device from another home."""
    touched: int
    """UPDATE: the bytes that its arithmetic reads and writes."""
    published: int
    """UPDATE: the new weights, if every rank keeps all slices."""
    sent_from_ssd: int
    """UPDATE: this rank's part of these weights, if their home is SSD, from which they are read to be sent."""
    kept_on_ssd: int
    """UPDATE: the other ranks' parts of these weights, which this rank writes to SSD."""


def traffic_of(plan: Plan) -> tuple[Traffic, ...]:
    """The traffic of every unit."""
    leased = plan.leased_pages()
    return tuple(_of_unit(plan, unit, leased.get(unit.index, 0)) for unit in plan.units)


def _of_unit(plan: Plan, unit: UnitSpec, lease: int) -> Traffic:
    layout, placement, page = plan.layout, plan.placement, plan.page_bytes
    ranks, group, index = plan.ranks, layout.group(unit), unit.index
    fetched, gathered = lease * page, 0
    if lease and ranks.shards_weights:
        gathered = ring_bytes(fetched, group)
        moves = placement.home(index, WEIGHT) != plan.lease_tier
        fetched = layout.pages(unit, WEIGHT) * page if moves else 0
    passes = 1 if ranks.shards_gradients else 2
    reduced = passes * ring_bytes(unit.trainable_numel * layout.itemsize(unit, GRAD), group)
    merged = (ranks.replicas - 1) * slice_elements(unit.trainable_numel, group) * _SUM_BYTES
    published = unit.trainable_numel * layout.itemsize(unit, WEIGHT) if layout.gathers_after_update(unit) else 0
    elements = layout.updated_elements(unit)
    through_ssd = published if placement.home(index, WEIGHT) == SSD else 0
    sent_from_ssd = min(through_ssd, elements * layout.itemsize(unit, WEIGHT))
    gradient = elements * layout.itemsize(unit, GRAD)
    on_device, made_at_home = index in placement.on_device, placement.home(index, GRAD) == DEVICE
    states = sum(layout.updated_bytes(unit, state) for state in layout.states_of(unit))
    streamed = placement.streamed(index, layout.states_of(unit))
    moving = {state.name: layout.updated_bytes(unit, state) for state in streamed}
    return Traffic(
        fetched=fetched,
        gathered=gathered,
        reduced=reduced,
        merged=merged,
        offloaded=0 if made_at_home or unit.on_host else layout.elements(unit, GRAD) * layout.offloaded_itemsize(unit),
        buffer=layout.pages(unit, GRAD) * page,
        streamed=sum(nbytes for name, nbytes in moving.items() if placement.home(index, name) == SSD),
        passed=sum(moving.values()) if on_device else 0,
        brought=gradient if on_device and not made_at_home else 0,
        touched=2 * states + gradient if unit.trainable_numel else 0,
        published=ring_bytes(published, group),
        sent_from_ssd=sent_from_ssd,
        kept_on_ssd=through_ssd - sent_from_ssd,
    )


def activations_at(plan: Plan) -> Mapping[int, Sequence[tuple[str, int]]]:
    """tick -> (lane, bytes) of each activation that leaves during an access of forward, or is used during an access of
    backward, where the last is used first."""
    moves = plan.activations.moves
    at: dict[int, list[tuple[str, int]]] = {}
    accesses = enumerate(plan.trace.accesses[:-1])
    passes = (
        [[tick for tick, _ in run] for _, run in groupby(accesses, lambda access: access[1].phase)] if moves else []
    )
    for forward, backward in zip(passes[::2], passes[1::2], strict=True):
        for move in moves:
            out, back = OFFLOAD_LANES[move.tier]
            at.setdefault(forward[move.use], []).append((out, move.nbytes))
            at.setdefault(backward[-1 - move.use], []).append((back, move.nbytes))
    return at


def exchanges_at(plan: Plan) -> Mapping[int, Sequence[Exchange]]:
    """tick -> the exchanges before compute starts an access, as often as they happen.

    In each forward and each backward, an exchange happens at the first access of a unit that belongs to its module: a
    unit inside it, or the one around it.
    """
    by_unit = _exchanges_by_unit(plan)
    repeats = recomputes(plan.options.activations)
    at: dict[int, list[Exchange]] = {}
    before: set[tuple[str, str, Phase]] = set()
    for tick, access in enumerate(plan.trace.accesses[:-1]) if by_unit else ():
        backward = access.phase is Phase.BACKWARD
        now = set()
        for exchange in by_unit.get(access.unit, ()):
            now.add(key := (exchange.kind, exchange.module, access.phase))
            times = (
                exchange.backward + exchange.forward * (exchange.repeated and repeats) if backward else exchange.forward
            )
            if times and key not in before:
                at.setdefault(tick, []).extend([exchange] * times)
        before = now
    return at


def _exchanges_by_unit(plan: Plan) -> Mapping[int, Sequence[Exchange]]:
    """unit -> the exchanges that its accesses may begin."""
    by_module: dict[str, list[Exchange]] = {}
    for exchange in plan.exchanges:
        by_module.setdefault(exchange.module, []).append(exchange)
    found: dict[int, list[Exchange]] = {}
    inside: set[str] = set()
    for unit in plan.units if by_module else ():
        for module in (unit.module, *around_of(unit.module)):
            if module in by_module:
                found.setdefault(unit.index, []).extend(by_module[module])
                inside.add(module)
    units = {unit.module: unit.index for unit in plan.units}
    for module in by_module.keys() - inside:
        nearest = next(units[around] for around in around_of(module) if around in units)
        found.setdefault(nearest, []).extend(by_module[module])
    return found


def bytes_written_to_ssd(plan: Plan) -> int:
    """Most bytes that one rank writes to SSD in a step: states, gradients (unless they are used as soon as they are
    complete), and activations."""
    traffic, placement = traffic_of(plan), plan.placement
    trained = frozenset(unit.index for unit in plan.units if unit.trainable_numel)
    states = sum(traffic[unit].streamed for unit in trained)
    states += sum(of.kept_on_ssd for of in traffic)
    during_backward = plan.options.update_during_backward
    made = (g for g in gradients_of(plan.trace, trained) if not (during_backward and g.last))
    gradients = sum(traffic[g.unit].buffer for g in made if placement.home(g.unit, GRAD) == SSD)
    moves = (move for of_tick in activations_at(plan).values() for move in of_tick)
    return states + gradients + sum(nbytes for lane, nbytes in moves if lane == LaneName.SSD_WRITE)
