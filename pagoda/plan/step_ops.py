"""The ops of one step, from a placement and a trace."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

from pagoda.plan.activations import ActivationPlan
from pagoda.plan.device_updates import state_bytes
from pagoda.plan.layout import GRAD, WEIGHT, Layout
from pagoda.plan.offloading import move_ops
from pagoda.plan.ops import COLLECTIVE, DEVICE, SSD, Kind, Op
from pagoda.plan.placement import LEASES, Placement
from pagoda.plan.ranks import ring_bytes
from pagoda.plan.schedule import schedule_leases
from pagoda.plan.trace import STEP, Phase, Trace
from pagoda.plan.units import UnitSpec, enclosing, is_within


class StepOps:
    """Writes down every op of a step."""

    def __init__(
        self,
        layout: Layout,
        placement: Placement,
        under_backward: bool,
        exchanges: Mapping[str, int],
        activations: ActivationPlan | None,
    ) -> None:
        self._layout = layout
        self._placement = placement
        self._under_backward = under_backward
        """Whether every unit is updated under backward; those that are speculated on are in any case."""
        self._exchanges = exchanges
        self._activations = activations
        self._trainable = frozenset(u.index for u in layout.units if u.trainable_numel)

    def of(self, trace: Trace, leased: Mapping[int, int], tier: str | None, slab: int) -> tuple[Op, ...]:
        """The ops of a step of `trace`, in the order of their ticks; `leased`, `tier` and `slab` are the plan's."""
        ops = list(self._fetches(trace, leased, tier, slab)) if tier is not None else []
        last = len(trace.accesses) - 1
        final_backward: dict[int, int] = {}
        for tick, unit in self._gradients(trace):
            final_backward[unit] = tick
            ops += self._gradient(self._layout.units[unit], tick)
        early = self._trainable if self._under_backward else self._placement.speculated
        order = [(u, tick) for u, tick in sorted(final_backward.items(), key=lambda item: item[1]) if u in early]
        if not self._under_backward:
            late = self._trainable - {unit for unit, _ in order}
            order += dict.fromkeys((a.unit, last) for a in trace.accesses if a != STEP and a.unit in late)
        for unit, tick in order:
            ops += self._update(self._layout.units[unit], tick)
        ops += self._all_to_alls(trace)
        if self._activations is not None and self._activations.moves:
            ops += move_ops(self._activations, trace)
        return tuple(sorted(ops, key=lambda op: op.tick))

    def _gradients(self, trace: Trace) -> Iterator[tuple[int, int]]:
        """(tick, trainable unit) of the gradients of a step: each backward access of the unit, or the end of the pass
        if its backward reads none of the unit's weights, as an embedding's does not."""
        unread: dict[int, None] = {}
        for tick, (access, following) in enumerate(pairwise(trace.accesses)):
            if access.unit in self._trainable:
                if access.phase is Phase.FORWARD:
                    unread[access.unit] = None
                else:
                    unread.pop(access.unit, None)
                    yield tick, access.unit
            if access.phase is Phase.BACKWARD and following.phase is not Phase.BACKWARD:
                yield from ((tick, unit) for unit in unread)
                unread = {}

    def _fetches(self, trace: Trace, leased: Mapping[int, int], tier: str | None, slab: int) -> Iterator[Op]:
        """FETCH and EVICT ops, each FETCH with the ALL_GATHER that makes a unit of every rank's slice."""
        layout, placement = self._layout, self._placement
        page = layout.page_bytes
        lanes = dict.fromkeys(leased, "h2d" if tier == DEVICE else "ssd_read")
        capacity = placement.pages(tier or "", LEASES)
        around = enclosing(layout.units)
        for op in schedule_leases(trace, leased, lanes, self._trainable, around, capacity, slab, page):
            if op.kind is not Kind.FETCH or layout.ranks is None or not layout.ranks.shards_weights:
                yield op
                continue
            unit = layout.units[op.unit]
            moves = tier == DEVICE or placement.home(op.unit, WEIGHT) == SSD
            yield Op(Kind.FETCH, op.unit, op.lane, layout.pages(unit, WEIGHT) * page if moves else 0, op.tick)
            if layout.group(unit) > 1:
                sent = ring_bytes(op.nbytes, layout.group(unit))
                yield Op(Kind.ALL_GATHER, op.unit, COLLECTIVE, sent, op.tick)

    def _gradient(self, unit: UnitSpec, tick: int) -> Iterator[Op]:
        layout = self._layout
        if layout.ranks is not None and layout.group(unit) > 1:
            sent = ring_bytes(unit.trainable_numel * layout.itemsize(GRAD), layout.group(unit))
            if layout.ranks.shards_gradients:
                yield Op(Kind.REDUCE_SCATTER, unit.index, COLLECTIVE, sent, tick)
            else:
                yield Op(Kind.ALL_REDUCE, unit.index, COLLECTIVE, 2 * sent, tick)
        if unit.index in self._placement.resident:
            return
        yield Op(Kind.OFFLOAD, unit.index, "d2h", layout.elements(unit, GRAD) * layout.offloaded_itemsize, tick)
        if self._placement.home(unit.index, GRAD) == SSD and not self._under_backward:
            yield Op(Kind.SPILL, unit.index, "ssd_write", layout.pages(unit, GRAD) * layout.page_bytes, tick)

    def _update(self, unit: UnitSpec, tick: int) -> Iterator[Op]:
        layout, placement = self._layout, self._placement
        elements = layout.updated_elements(unit)
        read = write = touched = 0
        for state in layout.states:
            nbytes = layout.updated_bytes(unit, state)
            touched += 2 * nbytes
            if placement.home(unit.index, state.name) == SSD:
                read += nbytes
                write += nbytes
        if placement.home(unit.index, GRAD) == SSD and not self._under_backward:
            read += layout.pages(unit, GRAD) * layout.page_bytes
        if read:
            yield Op(Kind.READ, unit.index, "ssd_read", read, tick)
        if unit.index in placement.resident:
            touched = 2 * state_bytes(layout.states, elements) + elements * layout.itemsize(GRAD)
            yield Op(Kind.UPDATE, unit.index, "device_update", touched, tick)
            return
        if unit.index in placement.updated_on_device:
            states, gradient = state_bytes(layout.states, elements), elements * layout.itemsize(GRAD)
            yield Op(Kind.READ, unit.index, "h2d", states + gradient, tick)
            yield Op(Kind.UPDATE, unit.index, "device_update", 2 * states + gradient, tick)
            yield Op(Kind.WRITE, unit.index, "d2h", states, tick)
            return
        yield Op(Kind.UPDATE, unit.index, "update", touched + elements * layout.itemsize(GRAD), tick)
        if write:
            yield Op(Kind.WRITE, unit.index, "ssd_write", write, tick)
        if layout.gathers_after_update(unit):
            sent = ring_bytes(unit.trainable_numel * layout.weight.dtype.itemsize, layout.group(unit))
            yield Op(Kind.ALL_GATHER, unit.index, COLLECTIVE, sent, tick)

    def _all_to_alls(self, trace: Trace) -> Iterator[Op]:
        """Tokens go to their experts and come back, at the first access of a row of experts in each pass."""
        before = None
        for tick, access in enumerate(trace.accesses):
            if access == STEP:
                break
            name = self._layout.units[access.unit].module
            experts = next((module for module in self._exchanges if is_within(name, (module,))), None)
            if experts is not None and (experts, access.phase) != before:
                for _ in range(2):
                    yield Op(Kind.ALL_TO_ALL, access.unit, COLLECTIVE, self._exchanges[experts], tick)
            before = (experts, access.phase)
