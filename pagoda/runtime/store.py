"""The store: the home of every extent, and slow access to its elements."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from pagoda.errors import StorageError
from pagoda.interrupts import holding_signals
from pagoda.memory.arena import copy_bytes
from pagoda.memory.page import PageRun, pages_for
from pagoda.memory.region import Region
from pagoda.memory.ssd.tier import SSDTier
from pagoda.memory.versions import EMPTY
from pagoda.mesh.shards import Shards
from pagoda.plan.device_updates import WORK
from pagoda.plan.layout import GRAD, WEIGHT, WEIGHT_BACK
from pagoda.plan.placement import ACTIVATIONS, CHECKPOINT, RING, VERSIONS
from pagoda.plan.planner import Plan
from pagoda.plan.slices import Span
from pagoda.plan.tiers import DEVICE, HOST, SSD
from pagoda.plan.units import UnitSpec
from pagoda.runtime.buffer_pool import BufferPool
from pagoda.runtime.device import PAST, Device
from pagoda.schedule.operations import schedule_plan
from pagoda.schedule.scheduler import Scheduler
from pagoda.schedule.versions import version_pools

Runs = Mapping[str, PageRun]
"""State -> the run in which it is, of one unit."""


class Store:
    """Allocates every extent where the plan puts it.

    The pages of a tier for states are runs, which the scheduler gives to versions (`schedule/versions.py`). A run in
    memory is a tensor over the tier's arena; one on SSD is pages of the tier's file. Gradients have extents of their
    own; those on SSD are in no checkpoint. `read` and `write` of elements serve construction, checkpoints and
    inspection. They run only while no update is in flight, and wait for a slot of the ring, through which pages of SSD
    pass.

    As a state (`Plan.saved_states`), WEIGHT_BACK is the weights that accesses read. As a line of the plan, it is the
    room for new ones beside these.

    | question | answer |
    |---|---|
    | `tier(unit, state)` | in which tier a state is |
    | `newest(unit, state)`, `newest_runs(unit)` | in which run its newest version is; that of every state |
    | `named(unit, runs)` | the states of runs that the scheduler names |
    | `tensor(unit, state, run)` | what a run in memory has, or the newest version |
    | `run_on_ssd(unit, state)` | the newest version's pages, if it is on SSD |
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
        self._directories = directories
        self._device = device
        self._poison = poison
        self.ssd: SSDTier | None = None
        self.writes = 0
        """Number of calls of `write`."""
        self._writing = threading.Lock()
        """Held while elements on SSD are written: threads may write to different parts of one page."""
        self._replaced: set[int] | None = None
        """While every state is being replaced: the pages on SSD of which a part has been written."""
        self.aside: dict[tuple[int, str], torch.Tensor] = {}
        """(unit, state) -> its newest values, while states of a separate device are in RAM to move."""
        self.open(plan)
        for unit in plan.units:
            for state in self.numbers[unit.index]:
                if (home := self.tensor(unit.index, state)) is not None:
                    home.zero_()
        self.make_room_on_ssd(plan)
        self.place_on_ssd({})
        self.host.arena.lock()

    def open(self, plan: Plan) -> None:
        """Take the memory of a plan. Extents have no values yet, and none on SSD before `place_on_ssd`."""
        placement = plan.placement
        device = _open_device_tier(plan, self._device, self._poison)
        arena = self._device.host_arena(max(plan.page_bytes, plan.peak_bytes.get(HOST, 0)), locked=False)
        self.plan = plan
        self.device = device
        """All pages of a separate device. None if compute reads RAM."""
        self.host = Region.of(HOST, arena, plan.page_bytes, poison=self._poison)
        pools = version_pools(schedule_plan(plan))
        self._regions: dict[str, Region] = {}
        """Tier in memory -> its pages for states."""
        for tier, (homes, spares, reserve) in pools.items():
            if tier != SSD:
                memory = self.host if tier == HOST else self.device
                assert memory is not None, "a plan has states only in tiers that it has"
                self._regions[tier] = memory.take(sum(homes) + sum(spares) + reserve)
        self.numbers = [
            {state.name: number for number, state in enumerate(plan.layout.states_of(unit))} for unit in plan.units
        ]
        """By unit: state -> its number."""
        homes, spares, _ = pools.get(SSD, ([], [], 0))
        self._on_ssd = sum(homes) + sum(spares)
        """Page numbers on SSD for states. Those of gradients follow."""
        self._gradient_runs: dict[int, PageRun] = {}
        """unit -> the pages on SSD of its gradient."""
        self.gradients = {unit.index: self._open_gradients(unit) for unit in plan.units}
        """unit -> its gradient extents in memory. There are two with asynchronous updates."""
        slots = placement.ring_slots
        self.slots = [self.host.take(placement.pages(HOST, RING) // slots) for _ in range(slots)]
        """Slots through which states on SSD stream. Each serves one block at a time."""
        self._ring = BufferPool(self.slots)
        """The slots, while no update is in flight."""
        work = placement.pages(HOST, WORK)
        self.work = self.host.take(work) if work else None
        """Frames for fp32 copies, if the rule computes on them."""
        self.spare = self.host.take(placement.pages(HOST, CHECKPOINT))
        """Frames for a piece of state on its way to a checkpoint."""

    def make_room_on_ssd(self, plan: Plan) -> None:
        """Open the SSD tier that a plan needs, or let it grow. Raises StorageError and BudgetError."""
        pages, spare = _pages_on_ssd(plan)
        if self.ssd is not None:
            self.ssd.make_room(pages, spare)
        elif pages or plan.placement.pages(HOST, ACTIVATIONS):
            assert self._directories, "a plan uses SSD only where there is a directory"
            self.ssd = SSDTier(self._directories, max(len(self._directories), pages), plan.page_bytes, spare)

    def place_on_ssd(self, kept: Mapping[PageRun, PageRun]) -> None:
        """Give the extents on SSD their pages. `kept`: run -> the run of before whose content it has."""
        if self.ssd is not None:
            gradients = sum(run.count for run in self._gradient_runs.values())
            self.ssd.rearrange(*_pages_on_ssd(self.plan), kept, self._on_ssd + gradients)

    def dtype(self, unit: int, state: str) -> torch.dtype:
        """Dtype of a state of a unit."""
        return self.plan.layout.dtype(self.plan.units[unit], state)

    def newest(self, unit: int, state: str) -> PageRun:
        """The run with the newest version of a state, which is empty if the unit does not have it. For WEIGHT_BACK, the
        run of the weights that accesses read."""
        weights, number = self._scheduler.weights(unit), self.numbers[unit].get(state)
        if number is None:
            return weights.read if state == WEIGHT_BACK else EMPTY
        return weights.runs[number]

    def newest_runs(self, unit: int) -> Runs:
        """State -> the run with its newest version."""
        return self.named(unit, self._scheduler.weights(unit).runs)

    def named(self, unit: int, runs: Sequence[PageRun]) -> Runs:
        """State -> its run, of the runs of all states. A further run is that of the weights that accesses read."""
        named = dict(zip(self.numbers[unit], runs, strict=False))
        return named if len(runs) == len(named) else {**named, WEIGHT_BACK: runs[-1]}

    def tier(self, unit: int, state: str) -> str:
        """The tier in which a state is."""
        return self.plan.placement.homes.get((unit, WEIGHT if state == WEIGHT_BACK else state), HOST)

    def tensor(self, unit: int, state: str, run: PageRun | None = None) -> torch.Tensor | None:
        """A state in RAM or on the device, as it is in a run, or its newest version. Shape [elements of its pages].
        None if the state is on SSD."""
        tier = self.tier(unit, state)
        if tier == SSD:
            return None
        run, dtype = self.newest(unit, state) if run is None else run, self.dtype(unit, state)
        if not run.count:
            return torch.empty(0, dtype=dtype)
        region, page = self._regions[tier], self.plan.page_bytes
        return region.arena.tensor((region.start + run.start) * page, run.count * page // dtype.itemsize, dtype)

    def run_on_ssd(self, unit: int, state: str) -> PageRun | None:
        """The pages on SSD with the newest version of a state, or with the gradient. None if it is elsewhere."""
        if state == GRAD:
            return self._gradient_runs.get(unit)
        run = self.newest(unit, state)
        return run if self.tier(unit, state) == SSD and run.count else None

    def in_place(self, unit: int, numel: int) -> torch.Tensor:
        """The first `numel` weights of a unit in memory that accesses read, with a storage object that nobody else
        holds."""
        region = self._regions[self.tier(unit, WEIGHT)].part(self.newest(unit, WEIGHT_BACK))
        return region.tensor(self.dtype(unit, WEIGHT), numel)

    def copy_out(self, source: torch.Tensor, into: memoryview) -> None:
        """Copy elements of a state on a separate device to the bytes of `into`, and wait."""
        self._device.copy_out(torch.frombuffer(into, dtype=source.dtype), source, PAST).synchronize()

    def lives_on_device(self, unit: int, state: str) -> bool:
        """Whether the home of a state is a separate device."""
        return self.plan.placement.home(unit, state) == DEVICE

    def begin_version(self, unit: int, read: Runs, write: Runs) -> None:
        """States on SSD that an update moves have their old content at first. What it does not write stays."""
        for state, run in write.items():
            if run != read[state] and self.tier(unit, state) == SSD:
                assert self.ssd is not None, "it has pages"
                self.ssd.share(read[state], run)

    def frozen(self, unit: int, run: PageRun) -> torch.Tensor:
        """The weights in a run in memory that updates never change. Empty if the weights are on SSD."""
        home, spec, layout = self.tensor(unit, WEIGHT, run), self.plan.units[unit], self.plan.layout
        if home is None:
            return torch.empty(0)
        return home[layout.trained_elements(spec) : layout.elements(spec, WEIGHT)]

    def free(self, unit: int, number: int, run: PageRun) -> None:
        """Nothing needs the content of a run of a state any more. In debug mode, fill it with NaN."""
        tier = self.tier(unit, [*self.numbers[unit]][number])
        if tier == SSD:
            assert self.ssd is not None, "it has pages"
            self.ssd.drop(run)
        elif self._poison:
            with self._device.as_compute() if tier == DEVICE else nullcontext():  # compute may still read what is there
                self._regions[tier].part(run).poison()

    def read(self, unit: int, state: str, start: int, count: int) -> torch.Tensor:
        """A copy of elements [start, start + count) of a unit's state, shape [count]. Those that only other ranks have
        are undefined: see `Collectives.completed`."""
        spec, run = self.plan.units[unit], self.newest(unit, state)
        if not self.shards.is_sliced(spec, state):
            return self._read(unit, state, run, start, count)
        out = torch.empty(count, dtype=self.dtype(unit, state))
        for held in self._held(spec, state, start, start + count):
            out[held.start - start : held.stop - start] = self._read(unit, state, run, held.at, len(held))
        return out

    def _read(self, unit: int, state: str, run: PageRun, start: int, count: int) -> torch.Tensor:
        """A copy of elements [start, start + count) of an extent."""
        home = self.tensor(unit, state, run)
        if home is not None:
            return home[start : start + count].to("cpu", copy=True)
        out = torch.empty(count, dtype=self.dtype(unit, state))
        with holding_signals(), self._ring.one() as slot:
            for part, offset, window, elements in self._windows(slot, out.dtype, start, count):
                self.load(run, offset, window)
                out[part] = elements
        return out

    def read_into(self, window: memoryview, dtype: torch.dtype, run: PageRun, start: int, count: int) -> memoryview:
        """The bytes of elements [start, start + count) of an extent on SSD, read into `window`, which is page-aligned.

        Updates of other elements may be in flight.
        """
        first, end = start * dtype.itemsize, (start + count) * dtype.itemsize
        page = self.plan.page_bytes
        offset = first // page * page
        self.load(run, offset, window[: pages_for(end - offset, page) * page])
        return window[first - offset : end - offset]

    def write(self, unit: int, state: str, start: int, values: torch.Tensor) -> None:
        """Overwrite elements of a unit's state, from `start` on, with `values` of shape [count] and the state's dtype.

        Elements of other ranks are not written. Weights that accesses read are written too, if they are elsewhere.
        WEIGHT_BACK is then written after the weights.
        """
        self.writes += 1
        runs = {self.newest(unit, state), *([self.newest(unit, WEIGHT_BACK)] if state == WEIGHT else [])}
        for held in self._held(self.plan.units[unit], state, start, start + values.numel()):
            for run in runs:
                self._write(unit, state, run, held.at, values[held.start - start : held.stop - start])

    def holds(self, unit: UnitSpec, state: str, start: int, stop: int) -> bool:
        """Whether some of the elements [start, stop) of a unit's state are on this rank."""
        return bool(self._held(unit, state, start, stop))

    def _held(self, unit: UnitSpec, state: str, start: int, stop: int) -> list[Span]:
        """The parts of a state's elements [start, stop) that are on this rank."""
        return [part for span in self.shards.held(unit, state) if (part := span.within(start, stop)) is not None]

    def _write(self, unit: int, state: str, run: PageRun, start: int, values: torch.Tensor) -> None:
        """Overwrite elements of an extent from `start` on. Frozen weights on SSD that have these values already are not
        written, because no slot is planned for them while a checkpoint keeps their pages."""
        home = self.tensor(unit, state, run)
        if home is not None:
            target = home[start : start + values.numel()]
            if target.is_cpu and values.is_cpu and values.is_contiguous() and values.dtype is target.dtype:
                copy_bytes(target, values)  # several threads may write, and torch's copies would start more
            else:
                target.copy_(values)
            return
        frozen = state in (WEIGHT, WEIGHT_BACK) and start >= self.plan.layout.trained_elements(self.plan.units[unit])
        with holding_signals(), self._writing, self._ring.one() as slot:
            for part, offset, window, elements in self._windows(slot, self.dtype(unit, state), start, values.numel()):
                if frozen or elements.nbytes != window.nbytes:
                    is_whole = self._load_around(run, offset, window)
                    if frozen and is_whole and torch.equal(*(t.view(torch.uint8) for t in (elements, values[part]))):
                        continue
                elements.copy_(values[part])
                self.save(run, offset, window)
                if self._replaced is not None and elements.nbytes != window.nbytes:
                    pages = run.part(offset, window.nbytes, self.plan.page_bytes)
                    self._replaced.update((pages.start, pages.stop - 1))

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Inside, parts of a page can be written even if the page cannot be read. The rest of the page is lost. It will
        be written too, or is not needed."""
        self._replaced = set()
        try:
            yield
        finally:
            self._replaced = None

    def _open_gradients(self, unit: UnitSpec) -> list[torch.Tensor]:
        """Take the pages of a unit's gradients."""
        layout, placement = self.plan.layout, self.plan.placement
        pages, dtype, home = layout.pages(unit, GRAD), layout.dtype(unit, GRAD), placement.homes.get((unit.index, GRAD))
        if not pages or home is None:
            return []
        if home == SSD:
            before = next(reversed(self._gradient_runs.values()), PageRun(self._on_ssd, 0))
            self._gradient_runs[unit.index] = PageRun(before.stop, pages)
            return []
        if home == HOST and GRAD not in placement.lines[HOST]:
            return []
        memory = self.device if home == DEVICE else self.host
        assert memory is not None
        return [memory.take(pages).tensor(dtype) for _ in range(1 + self.plan.options.asynchronous)]

    def close(self, device: bool = True) -> None:
        """Release the tiers, and the device only if `device`. RAM is released with the last tensor in it."""
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

    def load(self, run: PageRun, offset: int, into: memoryview) -> None:
        """Read whole pages of a run on SSD, from byte `offset` on. Raises the errors of `SSDTier.load`."""
        assert self.ssd is not None, "what is not in RAM is on SSD"
        self.ssd.load(run, offset, into)

    def save(self, run: PageRun, offset: int, data: memoryview) -> None:
        """Write whole pages of a run on SSD, from byte `offset` on. Raises the errors of `SSDTier.store`."""
        assert self.ssd is not None, "what is not in RAM is on SSD"
        self.ssd.store(run, offset, data)

    def _load_around(self, run: PageRun, offset: int, window: memoryview) -> bool:
        """Load the bytes of a window that are not about to be overwritten. Returns whether they could be read."""
        try:
            self.load(run, offset, window)
        except StorageError:
            if self._replaced is None:
                raise
            size = self.plan.page_bytes
            for at in range(0, window.nbytes, size):  # some of them may have been written a moment ago
                try:
                    self.load(run, offset + at, window[at : at + size])
                except StorageError:
                    if run.start + (offset + at) // size in self._replaced:
                        raise
                    torch.frombuffer(window[at : at + size], dtype=torch.uint8).zero_()
            return False
        return True


def _pages_on_ssd(plan: Plan) -> tuple[int, int]:
    """Pages that a plan has on SSD, and spare ones."""
    spare = plan.placement.pages(SSD, VERSIONS)
    return sum(plan.placement.lines.get(SSD, {}).values()) - spare, spare


def _open_device_tier(plan: Plan, device: Device, poison: bool) -> Region | None:
    if plan.budgets.device is None:
        return None
    tier = Region.of(DEVICE, device.arena(plan.peak_bytes[DEVICE]), plan.page_bytes, poison=poison)
    device.fence().synchronize()  # else it might be poisoned after the first copies have come
    return tier
