"""The lane `collective`: runs the collectives of all ranks, one after another."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pagoda.errors import NonFiniteGradientError
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.shards import Shards
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.lanes import LaneName
from pagoda.plan.ranks import ring_bytes
from pagoda.plan.slices import Span
from pagoda.plan.units import UnitSpec
from pagoda.ranks.order import FIRST, Call, CollectiveKind, CollectiveOrder, ProgramPart, Section
from pagoda.ranks.transport import Group, Transport
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import Handle, Lane, Report, wait_all
from pagoda.schedule.scheduler import Scheduler

T = TypeVar("T")
TakePart = Callable[[LiveUnit, int | None], None]
"""Takes part in a collective that this rank does not want, given the unit and its number of updates (None if only ranks
with other parts of the unit take part). Once something has failed here, others cannot use what this rank gives."""

_BETWEEN, _STEP = range(2)


@dataclass(eq=False, repr=False)
class Collectives:
    """One thread that talks to the other ranks, in the order in which compute asks; see `CollectiveOrder` for what
    comes next.

    Compute's thread alone submits, at points of its program, so ranks that run the same program ask in the same order.
    What a collective waits for never waits for a later one: loads, copies and updates are on lanes of their own, and
    updates need gradients that were reduced before.
    """

    mesh: Mesh
    transport: Transport
    shards: Shards
    _device: Device
    _units: Sequence[LiveUnit]
    _scheduler: Scheduler
    _report: Report
    take_part: dict[CollectiveKind, TakePart] = field(default_factory=dict)
    """How this rank takes part in collectives that only others want."""
    awaited: bool = False
    """Whether compute waits for a collective, so that it queues nothing until that has ended."""
    _part: ProgramPart | None = None
    """The part of compute's program that it is in."""
    _part_is_new: bool = False
    """Whether the part has had no collective yet."""
    _section: Section = FIRST
    """The section of compute's program."""
    _backward: int | None = None
    """The backward whose end will be noticed."""
    _left: bool = False

    def __post_init__(self) -> None:
        mesh, transport, shards, units = self.mesh, self.transport, self.shards, self._units
        plan = self._scheduler.plan
        self.lane = Lane(LaneName.COLLECTIVE, report=self._report)
        self.order = CollectiveOrder(
            transport,
            lambda kind, unit, version: self.take_part[kind](units[unit], version),
            lambda unit: shards.family(units[unit].spec),
            lambda unit: shards.sharers(units[unit].spec),
            # Each rank uses its own experts, in its own order. Updates during backward change weights within a step, so
            # a rank that leaves a list may not have the version that the rest of the list needs.
            listed=not (plan.during_backward or any(unit.routed for unit in plan.units)),
        )
        members = [lambda rank: mesh.sharers(False, rank), mesh.copies]
        if mesh.ranks.expert_parallel > 1:
            members.append(lambda rank: mesh.sharers(True, rank))
        self.groups = {group.ranks: group for group in (Group(transport, each) for each in members)}
        """By their ranks: the ranks that have the slices of a unit, and the ranks that have the same slices."""
        mesh.lane = lambda what, work: self.on_all_ranks(what, work)

    def sharers(self, unit: UnitSpec) -> Group:
        """The ranks that have the slices of a unit."""
        return self.groups[self.shards.sharers(unit)]

    def edition(self, unit: LiveUnit) -> int:
        """How often a unit's weights were changed."""
        return self._scheduler.weights(unit.index).edition

    def begin_access(self, recorded: bool) -> None:
        """Compute is about to access a unit, in a step if that is `recorded`, else to evaluate."""
        self.await_backward()
        wanted = _STEP if recorded else None
        if self._part is None or self._part.number not in (_STEP, wanted):
            self._begin(wanted)

    def begin_forward(self) -> None:
        """Compute begins a forward of the model for a step."""
        if torch._C._current_graph_task_id() == -1:  # else it is a part of a backward
            self._section, self._backward = Section(self._section.drops, self._section.forwards + 1), None

    def end_forward(self, recorded: bool) -> None:
        """Compute ends a forward of the model, for a step if that is `recorded`, else to evaluate."""
        section = self._section
        if torch._C._current_graph_task_id() != -1:
            return
        if recorded:
            self._begin_section(section._replace(ends=section.ends + 1, evaluations=0))
        elif self.mesh.ranks.shards_weights:  # else evaluations need no other rank
            self._begin_section(section._replace(evaluations=section.evaluations + 1))

    def await_backward(self) -> None:
        """Notice the end of the backward that runs, if one does. What other backwards inside it do is a part of it."""
        task = torch._C._current_graph_task_id()
        if task != -1 and self._backward is None:
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(task))

    def _end_backward(self, task: int) -> None:
        if self._backward == task:
            self._backward = None
            self._begin_section(self._section._replace(ends=self._section.ends + 1, evaluations=0))

    def _begin_section(self, section: Section) -> None:
        if self._left:  # the forward has been refused
            return
        self._section = section
        self._begin(None if self._part is None else self._part.number)
        part = self._come()
        assert part is not None
        self.lane.submit(lambda: self.order.begin(part), (), 0, "the end of a forward or backward")

    def _begin(self, number: int | None) -> None:
        self._part, self._part_is_new = ProgramPart(number, self._scheduler.trace, (), self._section), True

    def _come(self) -> ProgramPart | None:
        """The part of the next collective. Its versions are taken at its first one, since `step()` has changed them."""
        if self._part is not None and self._part_is_new:
            if self._part.number is not None:
                self._part = replace(self._part, versions=tuple(self.edition(unit) for unit in self._units))
            self._part_is_new = False
        return self._part

    def submit(
        self,
        kind: CollectiveKind,
        unit: LiveUnit,
        work: Callable[[bool], Any],
        after: Iterable[Handle],
        nbytes: int = 0,
        alike: bool = False,
    ) -> Handle:
        """Run `work`, which moves `nbytes` of a unit, once all earlier collectives and `after` have ended. Its argument
        says whether all ranks that share the unit run it now; if not, this rank asks their services.

        `alike` says that every rank submits it at this point of the same step, so ranks need not announce it.
        """
        part = self._part if alike else self._come()
        position, section = self._scheduler.position, self._section
        call = Call(kind, unit.index, version=self.edition(unit), position=position, section=section)

        def run() -> None:
            try:
                wait_all(after)
            except NonFiniteGradientError:  # which every rank has found
                raise
            except BaseException:
                with suppress(Exception):
                    self.order.fail(call, part, alike)
                raise
            with self._device.beside_compute():
                work(alike or self.order.come_to(call, part))

        sent = ring_bytes(nbytes, len(self.shards.sharers(unit.spec)))
        return self.lane.submit(run, (), sent, f"{kind.name.lower()} {unit.spec.name}")

    def on_all_ranks(self, what: str, work: Callable[[], T], step: bool = False) -> T:
        """Run `work` on all ranks, each of which asks for it at this point of its program; returns its result.

        `step`: a step ends with it. On a device, `work` goes into compute's queue."""
        self._device.computing()
        queue, part = self._device.as_compute(), self._come()
        call = Call(CollectiveKind.ON_ALL_RANKS, what=what, position=self._scheduler.position, section=self._section)
        results: list[T] = []

        def run() -> None:
            with self._device.beside_compute():
                self.order.come_together(call, part, step)
                with queue:
                    results.append(work())

        self._await(run, what)
        if step:
            self._section, self._backward = FIRST, None
            self._begin(_BETWEEN)
        return results[0]

    def announce(self, what: str, value: T) -> list[T]:
        """Every rank's value; all ranks call this at the same point of their programs."""
        return self.on_all_ranks(what, lambda: self.transport.announce(value))

    def of_each_forward(self, what: str, value: T) -> list[T]:
        """As `announce`, but only of the ranks that run every block together: all ranks if experts are divided, else
        those that divide tensors, else this one."""
        if self.mesh.ranks.expert_parallel > 1:
            return self.announce(what, value)
        said = [value] * self.mesh.ranks.tensor_parallel
        if len(said) > 1:
            dist.all_gather_object(said, value, group=self.mesh.tensor.get_group())
        return said

    def of_part(self, what: str, mine: torch.Tensor, part: int, receivers: Collection[int]) -> torch.Tensor:
        """A part's counterpart of `mine`, which is a tensor of this rank's part of the experts. The first rank of the
        part sends it to the `receivers`; on other ranks the result has no meaning. `what` names it in errors."""
        mesh, found = self.mesh, mine
        sender = mesh.ranks.tensor_parallel * part
        sends = [(rank, mine) for rank in receivers if mesh.rank == sender and mesh.ranks.expert_part(rank) != part]
        receives = []
        if mesh.expert_index != part and mesh.rank in receivers:
            found = torch.empty_like(mine)
            receives = [(sender, found)]
        self.on_all_ranks(what, lambda: self.transport.trade(sends, receives))
        return found

    def completed(self, spec: UnitSpec, state: str, start: int, mine: torch.Tensor) -> torch.Tensor:
        """A state's elements from `start` on, of which `mine` has those of this rank. If ranks have slices of the
        state, all of them call this at the same point."""
        if not self.shards.is_sliced(spec, state):
            return mine
        out, group = mine.cpu(), self.sharers(spec)
        stop, by_place = start + out.numel(), [self.shards.held(spec, state, rank) for rank in group.ranks]

        def work() -> None:
            for spans in zip_longest(*by_place, fillvalue=Span(start, start)):
                parts = [span.within(start, stop) or Span(start, start) for span in spans]
                group.gather(out, [(part.start - start, part.stop - start) for part in parts])

        self.on_all_ranks(f"reading {state} of unit {spec.index} from element {start}", work)
        return out

    def drop_gradients(self, made: bool) -> None:
        """Compute drops the gradients of this step. If it has `made` some, return once all ranks drop them."""
        call = Call(CollectiveKind.DROP, section=self._section)
        self._section, self._backward = Section(self._section.drops + 1), None
        if made:
            self._device.computing()
            self._await(lambda: self.order.drop(call), call.place)
        elif self._part is not None and self._part.number == _STEP:
            self.lane.submit(lambda: self.order.leave(whole=False), (), 0, "optimizer.zero_grad()")
        else:
            return
        self._begin(_BETWEEN)

    def _await(self, work: Callable[[], None], what: str) -> None:
        """Run `work` after all earlier collectives, and wait for it."""
        self.awaited = True
        try:
            self.lane.submit(work, (), 0, what).wait()
        finally:
            self.awaited = False

    def agree_to_change(self, what: str) -> None:
        """Return when all ranks are about to change weights, by something other than the updates of a step.

        What follows has no list, because entries of a list count a unit's updates since the part began."""
        self.on_all_ranks(what, lambda: None)
        self._begin(None)

    def close(self) -> None:
        """Tell the others that this rank leaves, and join the thread."""
        if not self._left:
            self._left = True
            self.mesh.lane = None
            self.awaited = True
            self.lane.submit(self.order.close, (), 0, "").wait_until_done()
            self.lane.close()
