"""Updaters: on the CPU and on the device, of blocks of elements and of whole parameters."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from pagoda.memory.arena import copy_bytes
from pagoda.optim.adafactor import Adafactor
from pagoda.optim.flat import join, split
from pagoda.optim.kernels import UpdateKernel as HostKernel, update_kernel
from pagoda.optim.rule import DTYPES, LOW, PRECISIONS, ElementwiseRule, Rule, StateSpec, TensorRule
from pagoda.plan.blocks import StreamPlan, stream_plan
from pagoda.plan.buffers import DEVICE_SLOTS
from pagoda.plan.device_updates import WORK, slot_offsets, slot_pages
from pagoda.plan.lanes import LaneName
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.packed import ShapedSpan
from pagoda.plan.units import UnitSpec
from pagoda.runtime.device import PAST, Device, UpdateKernel
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.next_update import Segment
from pagoda.runtime.store import Store
from pagoda.runtime.updates import BlockUpdate, StatePart, Tensors, Updater, UpdateStream


class HostUpdater(Updater):
    """Updates blocks by an element-wise rule, on the update lane's threads. States in RAM are updated in place, or from
    one run to another."""

    def __init__(
        self,
        store: Store,
        lanes: dict[str, Lane],
        plan: StreamPlan,
        kernels: Mapping[torch.dtype, tuple[HostKernel, HostKernel]] | None,
    ) -> None:
        """`kernels` of the element-wise rule, by the dtype of weights: in place, and from old states to new ones
        elsewhere."""
        super().__init__(store, lanes, plan)
        self._kernels = kernels
        self._work = None if store.work is None else store.work.tensor(torch.float32)
        """If there is one, the update lane has one thread, so only one update uses it."""

    def _compute(self, block: BlockUpdate) -> Handle:
        unit, extents, store = block.update.unit, block.update.extents, self._store
        at, count = store.shards.origin(unit.spec, GRAD) + block.start, block.stop - block.start
        moves = bool(extents.moved)

        def compute() -> None:
            # Not earlier: small objects that live long fragment the memory that autograd's large tensors come from.
            new = self._tensors(block, extents.write)
            old = self._copy_unchanged(block, self._tensors(block, extents.read), new) if moves else new
            self._copy_frozen(block, copy_bytes)
            self._apply_all(block, lambda: block.update.gradient.buffer[at : at + count], old, new, self._work)

        states_bytes = sum(
            len(part.elements) * store.dtype(unit.index, name).itemsize for name, part in block.parts.items()
        )
        touched = 2 * states_bytes + count * store.dtype(unit.index, GRAD).itemsize
        return self._lanes[LaneName.UPDATE].submit(compute, (), touched, f"update {unit.spec.name}")

    def _copy_unchanged(self, block: BlockUpdate, old: Tensors, new: Tensors) -> Tensors:
        """Copy from `old` to `new` what no kernel writes there. Returns the states that the update reads."""
        states = [state for state in self._states_of(block) if state.name in new]
        moved = [state for state in states if old[state.name].data_ptr() != new[state.name].data_ptr()]
        if self._kernels is None:  # the rule updates in place
            for state in moved:
                copy_bytes(new[state.name], old[state.name])
            return new
        origin = self._store.shards.updated(block.update.unit.spec).start + block.start
        first, end = 0, block.stop - block.start
        for start, stop in [*((s.start - origin, s.stop - origin) for s in block.segments), (end, end)]:
            for state in moved if start > first else ():
                gap = slice(state.elements(first), state.elements(start))
                copy_bytes(new[state.name][gap], old[state.name][gap])
            first = stop
        return old

    def _apply(
        self,
        block: BlockUpdate,
        piece: Segment,
        gradient: torch.Tensor,
        old: Tensors,
        new: Tensors,
        work: torch.Tensor | None,
    ) -> None:
        first = piece.start - self._store.shards.updated(block.update.unit.spec).start - block.start
        read, write = (
            [states[state.name].data_ptr() + state.nbytes(first) for state in self._states_of(block)]
            for states in (old, new)
        )
        at = gradient.data_ptr() + first * gradient.element_size()
        assert self._kernels is not None
        in_place, elsewhere = self._kernels[new[WEIGHT].dtype]
        if read == write:
            in_place(*write, at, piece.stop - piece.start, *piece.arguments)
        else:
            elsewhere(*read, at, piece.stop - piece.start, *write, *piece.arguments)


class DeviceSlot(NamedTuple):
    """Room on the device for a block of every state and its gradient, each in uint8."""

    states: Mapping[str, torch.Tensor]
    """By name, in the order of the StateSpecs."""
    gradient: torch.Tensor
    work: torch.Tensor | None
    """For fp32 copies, if the rule computes on them."""

    def state(self, like: torch.Tensor, name: str) -> torch.Tensor:
        """Room for a part of a state."""
        return self.states[name].view(like.dtype)[: len(like)]


class DeviceUpdater(Updater):
    """Updates blocks on the device, by an element-wise rule.

    States that live on the device are updated there, weights once compute has read them for the last time. Other states
    come from RAM, or from SSD through the ring in RAM. A block of them is copied to a slot on the device,
    updated, and copied back. All three steps are in the pipe of the slot, so the device waits for no thread between
    them. Blocks of other slots move at the same time. The gradient is copied too, unless it lives on the device.
    An update ends when all its states are home, as on the CPU.
    """

    def __init__(
        self,
        store: Store,
        lanes: dict[str, Lane],
        plan: StreamPlan,
        kernels: Mapping[torch.dtype, UpdateKernel] | None,
        device: Device,
    ) -> None:
        """`kernels` of the element-wise rule, by the dtype of weights."""
        super().__init__(store, lanes, plan)
        self._kernels = kernels
        self._device = device
        self._slots = self._open_slots()

    def _open_slots(self) -> list[DeviceSlot]:
        """The slots in the device's memory, if the plan has them."""
        layout, tier = self._store.plan.layout, self._store.device
        assert tier is not None
        at, _ = slot_offsets(layout)
        slots = []
        for _ in range(self._plan.places[1]):
            pages = tier.take(slot_pages(layout))
            states = {
                state.name: pages.tensor(torch.uint8, elements * layout.widest(state.name), at[state.name])
                for state in layout.states
                if (elements := layout.most_in_block(state))
            }
            gradient = pages.tensor(torch.uint8, layout.block_elements * layout.widest(GRAD), at[GRAD])
            work = layout.work_elements
            slots.append(DeviceSlot(states, gradient, pages.tensor(torch.float32, work, at[WORK]) if work else None))
        return slots

    def _compute(self, block: BlockUpdate) -> Handle:
        update, start, count, device = block.update, block.start, block.stop - block.start, self._device
        unit, extents = update.unit, update.extents
        old, new = (self._tensors(block, names) for names in extents)
        moved = extents.moved
        moving = [name for name in new if not self._store.lives_on_device(unit.index, name)]
        brings = not self._store.lives_on_device(unit.index, GRAD)
        at, nbytes = self._store.shards.origin(unit.spec, GRAD) + start, sum(tensor.nbytes for tensor in new.values())
        gradient_bytes = count * self._store.dtype(unit.index, GRAD).itemsize * bool(block.segments)
        there = None if block.place is None else self._slots[block.place]

        def gradient_part() -> torch.Tensor:
            gradient = update.gradient.buffer[at : at + count]
            if there is not None and brings:
                landing = there.gradient.view(gradient.dtype)[:count]
                device.copy(landing, gradient)
                gradient = landing
            return gradient

        def work() -> None:
            states = dict(new)
            if there is not None:
                states |= {name: there.state(new[name], name) for name in moving}
            for name in moved:
                if name in new and name not in moving:
                    device.copy(new[name], old[name])
            for name in moving:
                device.copy(states[name], old[name])
            self._copy_frozen(block, device.copy)
            self._apply_all(block, gradient_part, states, states, None if there is None else there.work)
            for name in moving:
                device.copy(new[name], states[name])

        passed = sum(new[name].nbytes for name in moving)
        self._lanes[LaneName.H2D].count(passed + gradient_bytes * brings)
        self._lanes[LaneName.D2H].count(passed)
        # Compute may still read weights that live there.
        read = PAST if WEIGHT in moving else update.gradient.issued
        pipe = unit.index % DEVICE_SLOTS if block.place is None else block.place
        label, touched = f"update {unit.spec.name}", 2 * nbytes + gradient_bytes
        queued = partial(device.pipe, pipe, work, read)
        return self._lanes[LaneName.DEVICE_UPDATE].submit(queued, (), touched, label)

    def _apply(
        self,
        block: BlockUpdate,
        piece: Segment,
        gradient: torch.Tensor,
        old: Tensors,
        new: Tensors,
        work: torch.Tensor | None,
    ) -> None:
        first = piece.start - self._store.shards.updated(block.update.unit.spec).start - block.start
        size = piece.stop - piece.start
        parts = [new[s.name][s.elements(first) :][: s.elements(size)] for s in self._states_of(block)]
        assert self._kernels is not None
        self._kernels[new[WEIGHT].dtype](parts, gradient[first : first + size], piece.arguments)


class ParameterUpdater(Updater):
    """Updates parameters, or pieces of those that may be cut, one in each block."""

    def __init__(self, store: Store, *others: Any) -> None:
        super().__init__(store, *others)
        self._layout = store.plan.layout
        self._cuts_of = [
            {cut.start - store.shards.updated(unit).start: cut for cut in self._layout.cuts(unit)}
            for unit in store.plan.units
        ]
        """unit -> first element of a cut, counted from the first element that this rank updates -> cut."""

    def _parts(self, unit: int, start: int, stop: int) -> dict[str, StatePart]:
        return {
            state.name: StatePart(range(span.first, span.first + span.count), self._layout.window(span, state)[0])
            for state, span in self._spans(self._store.plan.units[unit], start).items()
        }

    def _spans(self, unit: UnitSpec, start: int) -> dict[StateSpec, ShapedSpan]:
        """The part of each state that belongs to the block that begins at `start`. States that its parameter does not
        have are left out."""
        cut = self._cuts_of[unit.index][start]
        spans = {state: self._layout.part(unit, cut, state) for state in self._layout.states_of(unit)}
        return {state: span for state, span in spans.items() if span is not None}

    def _apply(
        self,
        block: BlockUpdate,
        piece: Segment,
        gradient: torch.Tensor,
        old: Tensors,
        new: Tensors,
        work: torch.Tensor | None,
    ) -> None:
        unit, rule, kept = block.update.unit.spec, piece.hyper.rule, gradient[: piece.stop - piece.start]
        cut = self._cuts_of[unit.index][block.start]
        shape = unit.slots[cut.slot].param.shape if cut.whole else (cut.stop - cut.start,)
        shapes = {state.name: span.shape for state, span in self._spans(unit, block.start).items()}
        shaped = {name: tensor.view(shapes[name]) for name, tensor in new.items() if name not in (WEIGHT, LOW)}
        step, scale, weight, low = piece.hyper.step, piece.hyper.grad_scale, new[WEIGHT], new.get(LOW)
        if work is None:
            assert isinstance(rule, Adafactor)
            rule.update(step, weight.view(shape), kept.view(shape), shaped, low, scale)
            return
        # On fp32 copies of the gradient, and of the master if it is stored in halves.
        assert isinstance(rule, TensorRule)
        count = kept.numel()
        copy, *rest = work.chunk(1 if low is None else 2)
        copy = copy[:count].copy_(kept)
        if scale != 1.0:
            copy.mul_(scale)
        if low is None:
            rule.update(step, weight.view(shape), copy.view(shape), shaped)
            return
        master = rest[0][:count]
        join(weight, low, master)
        rule.update(step, master.view(shape), copy.view(shape), shaped)
        split(master, weight, low)


class HostParameterUpdater(ParameterUpdater, HostUpdater):
    """Updates parameters where their states are: at home in RAM, or in the ring."""


class DeviceParameterUpdater(ParameterUpdater, DeviceUpdater):
    """Updates parameters on the device. Every slot there has a work area if the rule needs one."""


def open_update_stream(store: Store, lanes: dict[str, Lane], rule: Rule, device: Device) -> UpdateStream:
    """What carries out the updates of a plan, on the CPU and on the device."""
    lane, updated = lanes[LaneName.UPDATE], store.shards.updated
    forms = [(PRECISIONS[weight], gradient) for weight, gradient in store.plan.layout.forms]

    def opened() -> tuple[list[Updater], StreamPlan]:
        plan = stream_plan(store.plan, lane.threads, lane.inline_bytes, lambda unit: len(updated(unit)))
        on_device, parts = bool(store.plan.placement.on_device), (store, lanes, plan)
        updaters: list[Updater]
        if isinstance(rule, ElementwiseRule):
            on_host = {
                DTYPES[form[0]]: (update_kernel(rule, *form), update_kernel(rule, *form, elsewhere=True))
                for form in forms
            }
            updaters = [HostUpdater(*parts, on_host)]
            if on_device:
                there = {DTYPES[form[0]]: device.update_kernel(rule, *form) for form in forms}
                updaters.append(DeviceUpdater(*parts, there, device))
        else:
            updaters = [HostParameterUpdater(*parts, None)]
            if on_device:
                updaters.append(DeviceParameterUpdater(*parts, None, device))
        return updaters, plan

    return UpdateStream(store, opened)
