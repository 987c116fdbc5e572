"""Gathering: whole weights of a unit, made of every rank's slice."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from pagoda.parallel.foreseen import Foreseen
from pagoda.parallel.groups import Group
from pagoda.parallel.service import Service
from pagoda.parallel.world import rank_timeout_s
from pagoda.plan.collective import MESSAGE_BYTES, reserve_pages
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import COLLECTIVE, HOST
from pagoda.plan.placement import SERVING
from pagoda.plan.ranks import ring_bytes
from pagoda.plan.slices import Span
from pagoda.plan.units import UnitSpec
from pagoda.runtime.collective import Collectives
from pagoda.runtime.device import PAST, Device, Event
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.sharing import check_version
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit

Fill = Callable[[LiveUnit, torch.Tensor, Event, tuple[Handle, ...]], Handle]
"""Brings this rank's slice of a unit to its place among whole weights; see `Fetcher.fill`."""


class Gathering:
    """Gathers into leases, where ranks have slices of the weights (stage 3).

    What is foreseen goes over a lane and a group of its own, in the order of the list. What is not, this rank asks the
    others for, one by one; their services answer at any time. Neither waits for anything but updates.
    """

    def __init__(
        self,
        collectives: Collectives,
        store: Store,
        units: Sequence[LiveUnit],
        device: Device,
        latest: Callable[[LiveUnit], Handle | None],
        is_to_come: Callable[[LiveUnit], bool],
        fill: Fill,
    ) -> None:
        """`latest` gives what ends when the latest update of a unit that was asked for has written its weights, and
        `is_to_come` says whether it has yet to begin."""
        self._is_to_come = is_to_come
        self._collectives = collectives
        self._shards = collectives.shards
        self._store = store
        self._units = units
        self._device = device
        self._latest = latest
        self._fill = fill
        self._dtype = store.dtype(WEIGHT)
        self._lane, self._asking = Lane(COLLECTIVE), Lane(COLLECTIVE)
        self.lanes = {"gather": self._lane, "ask": self._asking}
        self._group = collectives.new_group(expert=False)
        pages = store.plan.placement.pages(HOST, SERVING)
        self._window = store.host.take(pages).view() if pages else None
        """What a slice on SSD passes, message by message."""
        self._window_lock = threading.Lock()
        reserve = reserve_pages(store.plan.layout)
        self._reserve = (store.device or store.host).take(reserve) if reserve else None
        """Where weights arrive that this rank has no use for."""
        self._service = Service(collectives.wire, collectives.mesh.world, self._answer)
        self.foreseen = Foreseen()
        collectives.pass_gathers = lambda: self._pass_over(self.foreseen.overdue())
        self._events = 0
        """Of compute, in this step."""
        self._training = True
        """Whether compute's latest access was part of a step: evaluation never is foreseen."""
        self._asked: list[Handle] = []
        """Requests that may be under way."""
        self._passing: list[Handle] = []
        """Entries that are passed over."""
        self._latest_of: dict[int, Handle] = {}
        """unit -> its latest gather."""
        self.asked = 0
        """Units that this rank has asked the others for, one by one."""

    @property
    def groups(self) -> Sequence[Group]:
        return (self._group,)

    # --- events of compute ---

    def begin(self, recorded: bool | None = None) -> None:
        """An event of compute: an access, `recorded` if it is part of the step, or the end of one."""
        self._training = self._training if recorded is None else recorded
        self._events += self._training

    def end(self) -> None:
        """The scheduler has worked off the event: what should have come by then is passed over."""
        if self._training:
            self._pass_over(self.foreseen.overdue(self._events))

    def finish(self) -> None:
        """Nothing more of this step comes: take part in what is left of the list. Returns when this rank asks for
        nothing any more, so that others may change their weights."""
        self._pass_over(self.foreseen.overdue())
        _end(self._asked)

    def settle(self) -> None:
        """Every rank has finished, so what is left of the list ends: wait for that, as it reads this rank's weights."""
        _end(self._passing)

    def end_step(self, agreed: bool) -> None:
        """A step has ended; `agreed`: all ranks came to the same in it."""
        self.foreseen.end_step(agreed)
        self._events, self._training = 0, True

    # --- operations ---

    def gather(self, unit: LiveUnit, weights: torch.Tensor, own: Handle, free: Event) -> Handle:
        """Complete a lease, shape [numel or more], in which this rank's slice lies once `own` has ended, and which
        others' slices may overwrite once compute has passed `free`."""
        spec, version = unit.spec, unit.version
        nbytes = spec.numel * self._dtype.itemsize
        sent, label = ring_bytes(nbytes, len(self._shards.sharers(spec))), f"gather {spec.name}"
        passed = None
        if self._training and not self._shards.is_expert(spec):
            passed = self.foreseen.claim(unit.index, self._events)
        if passed is None:
            handle = self._asking.submit(lambda: self._ask(unit, version, weights, free), (own,), sent, label)
            self._latest_of[unit.index] = handle
            self._asked = [*(each for each in self._asked if not each.done), handle]
            return handle

        def work() -> None:
            free.synchronize()
            self._complete(spec, weights)

        self._pass_over(passed)
        handle = self._lane.submit(self._collectives.in_turn(work, (own,)), (), sent, label)
        self._latest_of[unit.index] = handle
        return handle

    def gathered(self, unit: int) -> Handle:
        """What ends when this rank gathers a unit no more, however that has gone."""
        done, latest = Handle(COLLECTIVE), self._latest_of.get(unit)
        if latest is None:
            done.finish()
        else:
            latest.then(lambda _: done.finish())
        return done

    def close(self) -> None:
        """Answer nobody any more, and join the threads."""
        self._lane.close()
        self._service.close()
        self._asking.close()

    def _pass_over(self, units: Iterable[int]) -> None:
        """Take part in gathers that this rank has no use for."""
        for index in units:
            unit = self._units[index]

            def work(unit: LiveUnit = unit) -> None:
                assert self._reserve is not None
                pages = -(-unit.spec.numel * self._dtype.itemsize // self._store.plan.page_bytes)
                nbytes, latest = pages * self._store.plan.page_bytes, self._latest(unit)
                after = (latest,) if latest is not None else ()
                self._fill(unit, self._reserve.tensor(torch.uint8, nbytes), PAST, after).wait()
                self._complete(unit.spec, self._reserve.tensor(self._dtype))

            handle = self._lane.submit(self._collectives.in_turn(work, ()), (), 0, f"pass {unit.spec.name}")
            self._passing.append(handle)

    def _complete(self, spec: UnitSpec, whole: torch.Tensor) -> None:
        """Have all slices of a unit, of which this rank's lies in `whole`. What is frozen comes first: the padding of
        the trained slices lies there."""
        for spans in (self._shards.frozen_slices(spec), self._shards.trained_slices(spec)):
            self._group.gather(whole, [(span.start, span.stop) for span in spans])

    # --- one by one ---

    def _ask(self, unit: LiveUnit, version: int, whole: torch.Tensor, free: Event) -> None:
        """Have the other ranks' slices of a unit after `version` updates."""
        free.synchronize()
        self.asked += 1
        others = [rank for rank in self._shards.sharers(unit.spec) if rank != self._shards.rank]
        most = MESSAGE_BYTES // self._dtype.itemsize
        targets = []
        for rank in others:
            spans = self._shards.spans(unit.spec, WEIGHT, rank)
            targets.append((rank, [part for s in spans for part in torch.split(whole[s.start : s.stop], most)]))
        with self._device.beside_compute():
            self._service.ask(unit.index, version, targets)
            if whole.is_cuda:
                torch.cuda.current_stream(whole.device).synchronize()

    def _answer(self, index: int, version: int) -> Iterator[torch.Tensor]:
        """This rank's slice of a unit after `version` updates, in messages; for a rank that asks."""
        unit = self._units[index]
        deadline = time.monotonic() + rank_timeout_s()
        while unit.version < version and time.monotonic() < deadline:
            time.sleep(0.001)  # this rank's compute is about to ask for the same update
        self._check_version(unit, version)
        update = self._latest(unit)
        if update is not None and unit.version == version:
            update.wait()
        for span in self._shards.spans(unit.spec, WEIGHT):
            yield from self._messages(unit, span, version)
        self._check_version(unit, version)

    def _messages(self, unit: LiveUnit, span: Span, version: int) -> Iterator[torch.Tensor]:
        """A span of this rank's home of a unit's weights, in RAM."""
        home, itemsize = self._store.tensor(unit.index, WEIGHT), self._dtype.itemsize
        most = MESSAGE_BYTES // itemsize
        for start in range(span.at, span.at + len(span), most):
            count = min(most, span.at + len(span) - start)
            self._check_version(unit, version)
            if home is not None:
                yield home[start : start + count].cpu()
                continue
            assert self._window is not None, "a plan with weights on SSD has room to serve them"
            with self._window_lock:
                data = self._store.read_into(self._window, unit.index, WEIGHT, start, count)
                yield torch.frombuffer(data, dtype=self._dtype)

    def _check_version(self, unit: LiveUnit, version: int) -> None:
        """A unit whose next update waits for its gradient has the weights before: under backward, that update waits for
        all ranks, so for the one that asks."""
        if not (unit.version == version + 1 and self._is_to_come(unit)):
            check_version(unit, version, self._shards.rank)


def _end(handles: list[Handle]) -> None:
    """Wait for work that has been noted down, however it ends: what it was for raises its error."""
    while handles:
        handles.pop().wait_until_done()
