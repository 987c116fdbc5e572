"""The store: the home of every extent, and slow access to its elements."""

import ctypes
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from pagoda.errors import StorageError
from pagoda.interrupts import holding_back
from pagoda.memory.arena import Arena, copy_bytes, tensor_bytes
from pagoda.memory.page import PageRun, pages_for
from pagoda.memory.ram import free_ram
from pagoda.memory.region import Region
from pagoda.memory.ssd.tier import SSDTier
from pagoda.mesh.shards import Shards
from pagoda.plan.device_updates import WORK
from pagoda.plan.layout import GRAD, WEIGHT, WEIGHT_BACK, back
from pagoda.plan.placement import ACTIVATIONS, CHECKPOINT, LEASES, RING, SPARE, STAGING, UNDO
from pagoda.plan.planner import Plan
from pagoda.plan.slices import Span
from pagoda.plan.tiers import DEVICE, HOST, SSD
from pagoda.plan.units import UnitSpec
from pagoda.runtime.device import PAST, Device
from pagoda.runtime.lanes import SSD_THREADS
from pagoda.runtime.ring import Ring
from pagoda.schedule.scheduler import Scheduler


class _Move(NamedTuple):
    """The newest values of a state of a unit, on their way to its home in another plan."""

    tensor: torch.Tensor | None
    """Where they are in memory, if they are there."""
    run: PageRun | None
    """Where they are on SSD, if they are there."""
    to: Collection[tuple[int, str]]
    """Unit and name of each extent to which they go."""


class Store:
    """Allocates every extent where the plan puts it.

    Extents in RAM are tensors over the host arena. Extents on SSD are runs of pages; those of gradients are in no
    checkpoint. `read` and `write` of elements serve construction, checkpoints and inspection. They run only while no
    update is in flight, and wait for a slot of the ring, through which pages of SSD pass.

    A state may have two extents, numbered 0 and 1: weights with asynchronous updates, and every state in RAM of a unit
    that is updated speculatively. Leases read the `front`. An update writes the other one, and then they are exchanged.
    The scheduler knows which is which. As a state of its own (`Plan.saved_states`), WEIGHT_BACK is the extent of the
    weights without the newest values.
    """

    def __init__(
        self,
        plan: Plan,
        directories: Mapping[Path, int | None],
        poison: bool,
        device: Device,
        shards: Shards,
        scheduler: Scheduler,
    ) -> None:
        """`directories` of the SSD tier, each with its most bytes, or None for no limit. Raises the errors of
        `SSDTier`."""
        self._scheduler = scheduler
        self.shards = shards
        """The elements that the extents hold."""
        self.assemble: Callable[[UnitSpec, str, int, torch.Tensor], None] | None = None
        """Called on every rank at once: fills in the other ranks' elements of a state."""
        self._directories = directories
        self._device = device
        self._poison = poison
        self.ssd: SSDTier | None = None
        self.writes = 0
        """Number of calls of `write`."""
        self._writing = threading.Lock()
        """Held while elements on SSD are written: threads may write to different parts of one page."""
        self._replaced: set[tuple[int, str, int]] | None = None
        """While every state is being replaced: the pages of which a part has been written, by unit, extent and first
        byte."""
        self._open(plan)
        for (_, state), tensor in self._tensors.items():
            if state != GRAD:
                tensor.zero_()
        self._make_room_on_ssd(plan)
        self._place_on_ssd({})
        self.host.arena.lock()

    def _open(self, plan: Plan) -> None:
        """Take the memory of a plan. Extents have no values yet, and none on SSD before `_place_on_ssd`."""
        device = _open_device_tier(plan, self._device, self._poison)
        host = self._device.host_arena(max(plan.page_bytes, plan.peak_bytes.get(HOST, 0)), locked=False)
        self._divide(plan, Region.of(HOST, host, plan.page_bytes, poison=self._poison), device)

    def _divide(self, plan: Plan, host: Region, device: Region | None) -> None:
        """Take all pages of a plan from its memory."""
        placement, page = plan.placement, plan.page_bytes
        self.plan = plan
        self.device = device
        """All pages of a separate device. None if compute reads RAM."""
        self.host = host
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        self._runs: dict[tuple[int, str], PageRun] = {}
        for unit in plan.units:
            self._open_unit(unit)
        self.gradients = {unit.index: self._gradient_extents(unit) for unit in plan.units}
        """unit -> all its gradient extents in RAM. There are several if gradients wait for updates."""
        slots = placement.ring_slots
        self.slots = [self.host.take(placement.pages(HOST, RING) // slots) for _ in range(slots)]
        """Slots through which states on SSD stream. Each serves one block at a time."""
        self._ring = Ring(self.slots)
        """The slots, while no update is in flight."""
        work = placement.pages(HOST, WORK)
        self.work = self.host.take(work) if work else None
        """Frames for fp32 copies, if the rule computes on them."""
        self.spare = self.host.take(placement.pages(HOST, CHECKPOINT))
        """Frames for states that a checkpoint has not written when their next update comes."""
        self.host_bytes = page * sum(n for line, n in placement.lines[HOST].items() if line not in (LEASES, STAGING))
        """Bytes of homes and rings, without leases and staging, whose use varies."""

    def _make_room_on_ssd(self, plan: Plan) -> None:
        """Open the SSD tier that a plan needs, or let it grow. Raises StorageError and BudgetError."""
        pages, spare = _pages_on_ssd(plan)
        if self.ssd is not None:
            self.ssd.make_room(pages, spare)
        elif pages or plan.placement.pages(HOST, ACTIVATIONS):
            assert self._directories, "a plan uses SSD only where there is a directory"
            self.ssd = SSDTier(self._directories, max(len(self._directories), pages), plan.page_bytes, spare)

    def _place_on_ssd(self, kept: Mapping[PageRun, PageRun]) -> None:
        """Give the extents on SSD their pages. `kept`: run -> the run of before whose content it has."""
        if self.ssd is not None:
            self.ssd.rearrange(*_pages_on_ssd(self.plan), kept)

    def dtype(self, unit: int, state: str) -> torch.dtype:
        """Dtype of a state of a unit."""
        return self.plan.layout.dtype(self.plan.units[unit], state)

    def tensor(self, unit: int, state: str) -> torch.Tensor | None:
        """An extent in RAM or on the device, shape [elements of its pages]. None if its home is SSD."""
        return self._tensors.get((unit, state))

    def in_place(self, unit: int, numel: int) -> torch.Tensor:
        """The first `numel` weights of a unit in memory, with a storage object that nobody else holds."""
        home = self._tensors[unit, self.front_extent(unit)]
        tier = self._tier_of(unit, WEIGHT)
        return tier.arena.tensor(home.data_ptr() - tier.arena.address, numel, home.dtype)

    def copy_out(self, unit: int, state: str, first: int, count: int, into: memoryview) -> None:
        """Copy the newest elements [first, first + count) of a state in memory to the bytes of `into`, and wait."""
        source = self._tensors[unit, self.newest_extent(unit, state)][first : first + count]
        target = torch.frombuffer(into, dtype=source.dtype)
        if self.lives_on_device(unit, state):
            self._device.copy_out(target, source, PAST).synchronize()
        else:
            copy_bytes(target, source)

    def lives_on_device(self, unit: int, state: str) -> bool:
        """Whether the home of a state is a separate device."""
        return self.plan.placement.home(unit, state) == DEVICE

    def extent(self, unit: int, state: str, number: int) -> str:
        """Name of an extent of a state. A state with one extent has the same for both numbers."""
        if state == WEIGHT_BACK:
            return self.extent(unit, WEIGHT, 1 - number)
        second = unit, back(state)
        return second[1] if number and (second in self._tensors or second in self._runs) else state

    def extents(self, unit: int, number: int) -> dict[str, str]:
        """State -> name of an extent of it."""
        states = self.plan.layout.states_of(self.plan.units[unit])
        return {state.name: self.extent(unit, state.name, number) for state in states}

    def newest_extents(self, unit: int) -> dict[str, str]:
        """State -> name of the extent with its newest values."""
        return self.extents(unit, self._scheduler.weights(unit).extent)

    def front_extent(self, unit: int) -> str:
        """Name of the extent of the weights that compute reads."""
        return self.extent(unit, WEIGHT, self._scheduler.weights(unit).front)

    def newest_extent(self, unit: int, state: str) -> str:
        """Name of the extent with the newest values of a state."""
        return self.extent(unit, state, self._scheduler.weights(unit).extent)

    def poison(self, unit: int, number: int) -> None:
        """In debug mode, fill with NaN what an update writes of an extent, for states that have two."""
        if not self.host.poisoned:
            return
        spec = self.plan.units[unit]
        updated = len(self.shards.updated(spec))
        for state in self.plan.layout.states_of(spec):
            if self.extent(unit, state.name, 1) == state.name:
                continue
            tensor = self._tensors[unit, self.extent(unit, state.name, number)]
            if state.shape_of is None:
                origin = self.shards.origin(spec, state.name)
                tensor = tensor[state.elements(origin) : state.elements(origin + updated)]
            ctypes.memset(tensor.data_ptr(), 0xFF, tensor.nbytes)

    def run(self, unit: int, state: str) -> PageRun | None:
        """The slots of an extent on SSD, or None if its home is elsewhere."""
        return self._runs.get((unit, state))

    def all_extents(self, unit: int, state: str) -> list[str]:
        """Names of the extents that get the values of a state when they are replaced."""
        newest = self._scheduler.weights(unit).extent
        numbers = (newest,) if state == WEIGHT_BACK else (newest, 1 - newest)
        return [*dict.fromkeys(self.extent(unit, state, number) for number in numbers)]

    def runs(self, unit: int, state: str) -> list[PageRun]:
        """The slots of every extent of a state on SSD. With asynchronous updates, weights have two."""
        return [run for name in self.all_extents(unit, state) if (run := self.run(unit, name)) is not None]

    def read(self, unit: int, state: str, start: int, count: int) -> torch.Tensor:
        """A copy of elements [start, start + count) of a unit's state, shape [count].

        If ranks have slices of the state, every rank must ask for the same elements at once.
        """
        spec = self.plan.units[unit]
        extent = self.newest_extent(unit, state)
        if not self.shards.is_sliced(spec, state):
            return self._read(unit, extent, start, count)
        out = torch.empty(count, dtype=self.dtype(unit, state))
        for held in self._held(spec, state, start, start + count):
            out[held.start - start : held.stop - start] = self._read(unit, extent, held.at, len(held))
        assert self.assemble is not None
        self.assemble(spec, state, start, out)
        return out

    def _read(self, unit: int, state: str, start: int, count: int) -> torch.Tensor:
        """A copy of elements [start, start + count) of an extent."""
        home = self.tensor(unit, state)
        if home is not None:
            return home[start : start + count].to("cpu", copy=True)
        out = torch.empty(count, dtype=self.dtype(unit, state))
        with holding_back(), self._ring.one() as slot:
            for part, offset, window, elements in self._windows(slot, out.dtype, start, count):
                self.load(unit, state, offset, window)
                out[part] = elements
        return out

    def read_into(self, window: memoryview, unit: int, state: str, start: int, count: int) -> memoryview:
        """The bytes of elements [start, start + count) of an extent on SSD, read into `window`, which is page-aligned.

        Updates of other elements may be in flight.
        """
        itemsize = self.dtype(unit, state).itemsize
        first, end = start * itemsize, (start + count) * itemsize
        page = self.plan.page_bytes
        offset = first // page * page
        self.load(unit, state, offset, window[: pages_for(end - offset, page) * page])
        return window[first - offset : end - offset]

    def write(self, unit: int, state: str, start: int, values: torch.Tensor) -> None:
        """Overwrite elements of a unit's state, from `start` on, with `values` of shape [count] and the state's dtype.

        Elements of other ranks are not written. If the state has two extents, both are written, because updates copy
        only the weights that they train. WEIGHT_BACK is then written after the weights.
        """
        self.writes += 1
        extents = self.all_extents(unit, state)
        for held in self._held(self.plan.units[unit], state, start, start + values.numel()):
            for extent in extents:
                self._write(unit, extent, held.at, values[held.start - start : held.stop - start])

    def holds(self, unit: UnitSpec, state: str, start: int, stop: int) -> bool:
        """Whether some of the elements [start, stop) of a unit's state are on this rank."""
        return bool(self._held(unit, state, start, stop))

    def _held(self, unit: UnitSpec, state: str, start: int, stop: int) -> list[Span]:
        """The parts of a state's elements [start, stop) that are on this rank."""
        return [part for span in self.shards.held(unit, state) if (part := span.within(start, stop)) is not None]

    def _write(self, unit: int, state: str, start: int, values: torch.Tensor) -> None:
        """Overwrite elements of an extent from `start` on. Frozen weights on SSD that have these values already are not
        written, because no slot is planned for them while a checkpoint keeps their pages."""
        home = self.tensor(unit, state)
        if home is not None:
            target = home[start : start + values.numel()]
            if target.is_cpu and values.is_cpu and values.is_contiguous() and values.dtype is target.dtype:
                copy_bytes(target, values)  # several threads may write, and torch's copies would start more
            else:
                target.copy_(values)
            return
        frozen = state in (WEIGHT, WEIGHT_BACK) and start >= self.plan.layout.trained_elements(self.plan.units[unit])
        with holding_back(), self._writing, self._ring.one() as slot:
            for part, offset, window, elements in self._windows(slot, self.dtype(unit, state), start, values.numel()):
                if frozen or elements.nbytes != window.nbytes:
                    is_whole = self._load_around(unit, state, offset, window)
                    if frozen and is_whole and torch.equal(*(t.view(torch.uint8) for t in (elements, values[part]))):
                        continue
                elements.copy_(values[part])
                self.save(unit, state, offset, window)
                if self._replaced is not None and elements.nbytes != window.nbytes:
                    ends = offset, offset + window.nbytes - self.plan.page_bytes
                    self._replaced.update((unit, state, end) for end in ends)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Inside, parts of a page can be written even if the page cannot be read. The rest of the page is lost. It will
        be written too, or is not needed."""
        self._replaced = set()
        try:
            yield
        finally:
            self._replaced = None

    def _open_unit(self, unit: UnitSpec) -> None:
        """Take the pages of a unit's extents."""
        layout, placement = self.plan.layout, self.plan.placement
        states = [state.name for state in layout.states_of(unit)]
        for state in (*states, *((WEIGHT_BACK,) if self.plan.options.asynchronous else ()), GRAD):
            pages, dtype = layout.pages(unit, state), layout.dtype(unit, state)
            home = placement.home(unit.index, state)
            if pages and home == SSD and state in placement.lines[SSD]:
                before = next(reversed(self._runs.values()), PageRun(0, 0))
                self._runs[unit.index, state] = PageRun(before.stop, pages)
            elif pages and home == HOST and state in placement.lines[HOST]:
                self._tensors[unit.index, state] = self.host.take(pages).tensor(dtype)
                if unit.index in placement.speculated and state != GRAD:
                    self._tensors[unit.index, back(state)] = self.host.take(pages).tensor(dtype)
            elif pages and home == DEVICE:
                assert self.device is not None
                self._tensors[unit.index, state] = self.device.take(pages).tensor(dtype)

    def _gradient_extents(self, unit: UnitSpec) -> list[torch.Tensor]:
        home = self._tensors.get((unit.index, GRAD))
        if home is None:
            return []
        if not self.plan.options.asynchronous:
            return [home]
        pages, tier = self.plan.layout.pages(unit, GRAD), self._tier_of(unit.index, GRAD)
        return [home, tier.take(pages).tensor(home.dtype)]

    def _tier_of(self, unit: int, state: str) -> Region:
        """The memory that holds a state that is not on SSD."""
        tier = self.device if self.lives_on_device(unit, state) else self.host
        assert tier is not None
        return tier

    # --- another placement --------------------------------------------------------------------------------

    def move(self, plan: Plan) -> None:
        """Move every state to its home in another plan of the same units. Nothing may use states, leases or buffers
        meanwhile, nor later those of before.

        RAM holds each state once, because what has moved returns its old pages to the system. States on a separate
        device pass through RAM.

        Raises BudgetError if a tier has no room. States are then as before, but on a separate device they, and leases,
        have no memory until a `move` to the plan of before. Raises StorageError if a drive fails. States are then lost.
        """
        self._make_room_on_ssd(plan)
        if self.device is not None:
            self._leave_device(self.device)
        old = copy(self)
        self._open(plan)
        old.host.arena.unlock()
        moves = [
            _Move(
                old._tensors.pop((unit.index, extent), None),
                old._runs.get((unit.index, extent)),
                {(unit.index, self.extent(unit.index, state, number)) for number in (0, 1)},
            )
            for unit in plan.units
            for state, extent in old.newest_extents(unit.index).items()
        ]
        for outdated in old._tensors.values():
            old._give_back(outdated)
        with ThreadPoolExecutor(SSD_THREADS) as pool:
            [*pool.map(partial(self._fill, old), moves)]
        on_ssd = [(self._runs[key], move) for move in moves for key in move.to if key in self._runs]
        self._place_on_ssd({run: move.run for run, move in on_ssd if move.run is not None})
        for run, move in on_ssd:
            if move.tensor is not None:
                assert self.ssd is not None, "it has been opened"
                self.ssd.store(run, 0, tensor_bytes(move.tensor))
        old.host.arena.close()
        self.host.arena.lock()
        self._device.settle()

    @property
    def may_move(self) -> bool:
        """Whether RAM has room for the states on a separate device, which pass through it."""
        return sum(tensor.nbytes for tensor in self._on_device.values()) <= free_ram()

    @property
    def _on_device(self) -> dict[tuple[int, str], torch.Tensor]:
        """(unit, state) -> extent, for states on a separate device."""
        homes = self.plan.placement.homes
        return {key: at for key, at in self._tensors.items() if homes.get(key) == DEVICE and key[1] != GRAD}

    def _leave_device(self, tier: Region) -> None:
        """Copy the states on a separate device to RAM, and free its memory."""
        for key, tensor in self._on_device.items():
            self._tensors[key] = Arena(tensor.nbytes).tensor(0, tensor.numel(), tensor.dtype).copy_(tensor)
        self._device.free(tier.arena)

    def _fill(self, old: "Store", move: "_Move") -> None:
        """Fill the extents in memory to which a state moves. If no other needs its old pages, `old` returns them."""
        targets = [self._tensors[key].view(torch.uint8) for key in move.to if key in self._tensors]
        for target in targets:
            if move.tensor is not None:
                target.copy_(move.tensor.view(torch.uint8))
            elif move.run is not None:
                landing = target if target.is_cpu else Arena(target.nbytes).tensor(0, target.nbytes, torch.uint8)
                assert self.ssd is not None, "it has pages"
                self.ssd.load(move.run, 0, tensor_bytes(landing))
                if landing is not target:
                    target.copy_(landing)
        if move.tensor is not None and len(targets) == len(move.to):
            old._give_back(move.tensor)

    def _give_back(self, extent: torch.Tensor) -> None:
        """Return an extent's pages to the system, if they are this plan's RAM."""
        arena = self.host.arena
        if extent.is_cpu and 0 <= (at := extent.data_ptr() - arena.address) < arena.nbytes:
            arena.discard(at, extent.nbytes)

    def close(self, device: bool = True) -> None:
        """Release the tiers, and the device only if `device`. RAM is released with the last tensor in it."""
        self._tensors.clear()
        self.gradients.clear()
        self.host.arena.close()
        if device and self.device is not None:
            self.device.arena.close()
        if self.ssd is not None:
            self.ssd.close()

    def _windows(
        self, slot: Region, dtype: torch.dtype, start: int, count: int
    ) -> Iterator[tuple[slice, int, memoryview, torch.Tensor]]:
        """Cut elements [start, start + count) of an extent on SSD into parts. Each part has its slice of the elements,
        its byte offset in the extent, the whole pages to move, and the elements in them. The pages are those of a slot
        of the ring."""
        page, end = self.plan.page_bytes, start + count
        first = start
        while first < end:
            offset = first * dtype.itemsize // page * page
            left = pages_for(end * dtype.itemsize - offset, page) * page
            window = slot.view(0, min(slot.nbytes, left))
            last = min(end, (offset + window.nbytes) // dtype.itemsize)
            skip = first - offset // dtype.itemsize
            elements = torch.frombuffer(window, dtype=dtype)[skip : skip + last - first]
            yield slice(first - start, last - start), offset, window, elements
            first = last

    def load(self, unit: int, state: str, offset: int, into: memoryview) -> None:
        """Read whole pages of an extent on SSD, from byte `offset` on. Raises the errors of `SSDTier.load`."""
        assert self.ssd is not None, "extents that are not in RAM are on SSD"
        self.ssd.load(self._runs[unit, state], offset, into)

    def save(self, unit: int, state: str, offset: int, data: memoryview) -> None:
        """Write whole pages of an extent on SSD, from byte `offset` on. Raises the errors of `SSDTier.store`."""
        assert self.ssd is not None, "extents that are not in RAM are on SSD"
        self.ssd.store(self._runs[unit, state], offset, data)

    def _load_around(self, unit: int, state: str, offset: int, window: memoryview) -> bool:
        """Load the bytes of a window that are not about to be overwritten. Returns whether they could be read."""
        try:
            self.load(unit, state, offset, window)
        except StorageError:
            if self._replaced is None:
                raise
            size = self.plan.page_bytes
            for at in range(0, window.nbytes, size):  # some of them may have been written a moment ago
                try:
                    self.load(unit, state, offset + at, window[at : at + size])
                except StorageError:
                    if (unit, state, offset + at) in self._replaced:
                        raise
                    torch.frombuffer(window[at : at + size], dtype=torch.uint8).zero_()
            return False
        return True


def _pages_on_ssd(plan: Plan) -> tuple[int, int]:
    """Pages that a plan has on SSD, and spare ones."""
    spare = plan.placement.pages(SSD, SPARE) + plan.placement.pages(SSD, UNDO)
    return sum(plan.placement.lines.get(SSD, {}).values()) - spare, spare


def _open_device_tier(plan: Plan, device: Device, poison: bool) -> Region | None:
    if plan.budgets.device is None:
        return None
    tier = Region.of(DEVICE, device.arena(plan.peak_bytes[DEVICE]), plan.page_bytes, poison=poison)
    device.fence().synchronize()  # else it might be poisoned after the first copies have come
    return tier
