"""The lane `collective`: what all ranks do together, one thing after another."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pagoda.distributed.agreement import Agreement, Call, CollectiveKind
from pagoda.distributed.foreseen import Entry, Foreseen
from pagoda.distributed.groups import Group
from pagoda.distributed.mesh import Mesh
from pagoda.distributed.shards import Shards
from pagoda.distributed.transport import Transport
from pagoda.errors import NonFiniteGradientError, RankError
from pagoda.plan.ops import COLLECTIVE
from pagoda.plan.units import UnitSpec
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import Handle, Lane, wait_all
from pagoda.runtime.unit import LiveUnit
from pagoda.schedule.scheduler import Scheduler

TakePart = Callable[[LiveUnit, int | None], None]
"""Takes part in a collective about a unit after so many updates, which this rank has no use for itself; None where only
ranks that have other parts of the unit take part. Once something has failed here, what this rank gives is of no use."""

_BETWEEN, _STEP = range(2)


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """A part of compute's program: a step from its first access to its end, or what follows it."""

    list: int | None
    """Which list of collectives it has; None for evaluation between steps, which has none."""
    trace: object
    """What steps are expected to be."""
    versions: tuple[int, ...]
    """By unit, when it began."""


class Collectives:
    """One thread that talks to the other ranks, strictly in the order in which compute asks.

    Compute's thread alone submits, at points of its program, so ranks that run the same program ask in the same order.
    When a step begins, each says what it had asked for in the step before. If that was the same on all, they follow it,
    and nothing is said before a collective that it has. A rank passes over what it has no use for: it takes part with
    what it has. What the list does not have, it asks the others' services for, if that is weights; before all else it
    passes over the rest of the list. Where there is no list, ranks say what they want before each collective, and the
    `Agreement` decides what comes first.

    What a collective waits for never waits for a later one: loads, copies and updates are on lanes of their own, and
    updates need gradients that were reduced before.
    """

    def __init__(
        self,
        mesh: Mesh,
        transport: Transport,
        shards: Shards,
        device: Device,
        units: Sequence[LiveUnit],
        scheduler: Scheduler,
        listed: bool = True,
    ) -> None:
        """`listed`: ranks may follow lists."""
        self.mesh = mesh
        self.transport = transport
        self.shards = shards
        self.lane = Lane(COLLECTIVE)
        self._device = device
        self._units = units
        self._scheduler = scheduler
        self._listed = listed
        self._agreement = Agreement(transport, self._serve)
        self._take_part: dict[CollectiveKind, TakePart] = {}
        self._part: _Part | None = None
        """Of compute's program, now."""
        self._lists = Foreseen(), Foreseen()
        self._reached: _Part | None = None
        """The part that the lane has come to."""
        self._list: Foreseen | None = None
        """That of this part, if it has one."""
        self._follows = False
        """Whether all ranks follow it."""
        self.failed = False
        """Whether something has failed here: this rank takes part in the rest of the list, so that none waits for it,
        and then stops the others."""
        self.asked = 0
        """Units that this rank asked the others for, as the list did not have them."""
        self._passed = 0
        self._left = False
        self.awaited = False
        """Whether compute waits for a collective, so that it queues nothing more before that has ended."""
        dense = Group(transport, lambda rank: mesh.sharers(False, rank))
        divided = mesh.ranks.expert_parallel > 1
        self._sharing = dense, Group(transport, lambda rank: mesh.sharers(True, rank)) if divided else dense
        self.copying = Group(transport, lambda rank: mesh.copies(False, rank))
        """The ranks that have the same slices as this one, one a replica."""
        mesh.lane = lambda what, work: self.on_all_ranks(what, lambda _: work())

    def sharing(self, unit: UnitSpec) -> Group:
        """The ranks that have the slices of a unit."""
        return self._sharing[self.shards.is_expert(unit)]

    @property
    def groups(self) -> tuple[Group, ...]:
        """All of them."""
        return tuple(dict.fromkeys((*self._sharing, self.copying)))

    @property
    def served(self) -> int:
        """Collectives of other ranks that this one took part in without asking for them."""
        return self._agreement.served + self._passed

    def serve(self, kind: CollectiveKind, take_part: TakePart) -> None:
        """Say how this rank takes part in what others ask for and it does not."""
        self._take_part[kind] = take_part

    # --- compute's program ---

    def begin_access(self, recorded: bool) -> None:
        """Compute is about to access a unit: in a step, if that is `recorded`, or to evaluate."""
        wanted = _STEP if recorded else None
        if self._part is None or (self._part.list != _STEP and self._part.list != wanted):
            self._begin(wanted)

    def _begin(self, which: int | None) -> None:
        self._part = _Part(which, self._scheduler.order.trace, tuple(unit.version for unit in self._units))

    def submit(
        self,
        call: Call,
        work: Callable[[bool], Any],
        after: Iterable[Handle],
        nbytes: int = 0,
        label: str = "",
        alike: bool = False,
    ) -> Handle:
        """Do `work`, which sends `nbytes`, in its turn, once everything submitted before and `after` have ended. It is
        told whether all ranks that share the unit do it; else this rank gets what it wants from their services.

        What is `alike` every rank submits at this point of the same step, whatever else it does: nothing need be said.
        """
        part, due = self._part, self._scheduler.order.position

        def run() -> None:
            try:
                wait_all(after)
            except NonFiniteGradientError:  # which every rank has found
                raise
            except BaseException:
                with suppress(Exception):
                    self._fail(call, lambda: alike or self._come_to(call, part, due))
                raise
            with self._device.beside_compute():
                work(alike or self._come_to(call, part, due))

        return self.lane.submit(run, (), nbytes, label)

    def on_all_ranks(self, what: str, work: Callable[[Sequence[Call]], Any], step: bool | None = None) -> None:
        """Have all ranks do what each of them asks for at this point of its program; returns when it is done.

        `step` is given where a step ends with it: whether the next one is to be like it. On a device `work` is a part
        of what compute is told, as if it were done here."""
        queue, part, due = self._device.as_compute(), self._part, self._scheduler.order.position
        call = self._agreement.joint(what)

        def run() -> None:
            if part is not self._reached or step is not None:
                self._leave(whole=step is not False)
            elif self._list is not None:
                passed = self._list.claim(Entry(call.kind, call.about, 0, due))
                self._pass_over(self._list.rest() if passed is None else passed)
            with self._device.beside_compute():
                calls = self._agreement.settle(call)
                with queue:
                    work(calls)

        self.awaited = True
        try:
            self.lane.submit(run, (), 0, what).wait()
        finally:
            self.awaited = False
        if step is not None:
            self._begin(_BETWEEN)

    def close(self) -> None:
        """Tell the others that nothing more is asked for here, and join the thread."""
        if not self._left:
            self._left = True
            self.mesh.lane = None
            self.awaited = True

            def leave() -> None:
                self._leave(whole=False)
                self._agreement.settle(Call(CollectiveKind.LEAVE))

            self.lane.submit(leave, (), 0, "").wait_until_done()
            self.lane.close()

    # --- on the lane ---

    def _come_to(self, call: Call, part: _Part | None, due: int) -> bool:
        """Come to a collective about a unit: returns whether all ranks that share it take part."""
        if part is not self._reached:
            self._enter(part)
        if self._list is not None and part is not None and not self._agreement.is_broken:
            passed = self._list.claim(Entry(call.kind, call.about, call.version - part.versions[call.about], due))
            if passed is not None:
                self._pass_over(passed)
                return True
            if self._follows and call.kind is CollectiveKind.GATHER:
                self.asked += 1
                return False
            self._pass_over(self._list.rest())
        asking = self._askers(call, self._agreement.settle(call))
        return set(self.shards.sharers(self._units[call.about].spec)).issubset(asking)

    def _enter(self, part: _Part | None) -> None:
        """Come to another part of compute's program."""
        self._leave(whole=True)
        self._reached = part
        if part is None or part.list is None or not self._listed:
            return
        found = self._lists[part.list]
        mine = Call(CollectiveKind.START, part.list, *found.hashes(part.trace, sum(part.versions)))
        calls = self._agreement.settle(mine)
        by_list = zip(*((each.version, each.other) for each in calls), strict=True)
        alike = [all(each.is_with(mine) for each in calls) and len({*said}) == 1 and said[0] for said in by_list]
        which = next((number for number, same in enumerate(alike) if same), None)
        found.follow(which)
        self._list, self._follows = found, which is not None

    def _leave(self, whole: bool) -> None:
        """The part is over: take part in what is left of its list, and keep what it was if it was `whole`."""
        if self._list is not None:
            self._pass_over(self._list.rest())
            self._list.end(whole)
        self._reached, self._list, self._follows = None, None, False

    def _pass_over(self, entries: Iterable[Entry]) -> None:
        part = self._reached
        assert part is not None
        if self._agreement.is_broken or self.transport.broken:
            return  # nobody takes part any more
        for entry in entries:
            self._passed += 1
            self._join(entry.kind, entry.about, part.versions[entry.about] + entry.changes)

    def _join(self, kind: CollectiveKind, about: int, version: int | None) -> None:
        unit = self._units[about]
        try:
            self._take_part[kind](unit, version)
        except BaseException:
            if not self.failed and not self.transport.broken:  # it has not taken part yet, and the others wait for it
                self.failed = True
                self._take_part[kind](unit, version)
                self._stop()
            raise

    def _serve(self, call: Call, calls: Sequence[Call]) -> None:
        """Take part in what others want and this rank does not."""
        asking = self._askers(call, calls)
        self._join(call.kind, call.about, calls[asking[0]].version if asking else None)

    def _askers(self, call: Call, calls: Sequence[Call]) -> tuple[int, ...]:
        """Of the ranks that have a unit, those that ask for what `call` does.

        Raises RankError where they mean other versions of the weights.
        """
        return askers(call, calls, self.shards.family(self._units[call.about].spec))

    def _fail(self, call: Call, come_to: Callable[[], bool]) -> None:
        """What a collective needs has failed here, so this rank cannot do its part, once it has come to it."""
        self.failed = True
        if come_to() or call.kind is not CollectiveKind.GATHER:
            self._join(call.kind, call.about, call.version)
        self._stop()

    def _stop(self) -> None:
        """Stop the others, once they have come to where they listen."""
        with suppress(Exception):
            self._leave(whole=False)
        self._agreement.fail()


def askers(call: Call, calls: Sequence[Call], family: Collection[int]) -> tuple[int, ...]:
    """Of the ranks that have a unit, those that ask for what `call` does.

    Raises RankError where they mean other versions of the weights.
    """
    found = tuple(rank for rank, other in enumerate(calls) if rank in family and other.is_with(call))
    if len({calls[rank].version for rank in found}) > 1:
        raise RankError(
            f"Ranks {', '.join(map(str, found))} ask for the weights of unit {call.about} after different numbers of "
            "updates: run the same steps, and the same evaluations, on every rank."
        )
    return found
