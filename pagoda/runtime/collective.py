"""The lane `collective`: what all ranks do together, one thing after another."""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from pagoda.errors import NonFiniteGradientError, RankError, UsageError
from pagoda.parallel.agreement import Agreement, Asks, Call
from pagoda.parallel.foreseen import Foreseen
from pagoda.parallel.groups import Group
from pagoda.parallel.mesh import Mesh
from pagoda.parallel.shards import Shards
from pagoda.parallel.wire import Wire
from pagoda.plan.ops import COLLECTIVE
from pagoda.plan.units import UnitSpec
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import Handle, Lane, wait_all

Work = Callable[[Sequence[Call]], Any]
"""What is done once every rank's call is known."""


class Collectives:
    """One thread that runs reductions and whatever all ranks do together, strictly in the order in which compute asks.

    Reductions that are foreseen run with nothing said before. Before anything else ranks say what they want, and the
    `Agreement` decides what comes first; a rank takes part in all that is foreseen before it says that a step ends, or
    that it wants a reduction which the list does not have. What a collective waits for never waits for a later one:
    loads, copies, updates and gathers are on lanes of their own, and updates need gradients that were reduced before.
    """

    def __init__(self, mesh: Mesh, wire: Wire, shards: Shards, device: Device, listed: bool = True) -> None:
        """`listed` says that reductions are foreseen where all ranks have made the same ones."""
        self.mesh = mesh
        self.wire = wire
        self.shards = shards
        self.lane = Lane(COLLECTIVE)
        self.foreseen = Foreseen()
        """The reductions of a step."""
        self._listed = listed
        self._device = device
        self._servers: dict[Asks, Callable[[Call, Sequence[Call]], None]] = {}
        self.take_part: Callable[[int], None]
        """Takes part in the reduction of a unit without a gradient; set by whoever reduces."""
        self.pass_gathers: Callable[[], None] = lambda: None
        """Takes part in all gathers that are foreseen; set by whoever gathers."""
        self._helping = threading.Lock()
        self._says = False
        """Whether the lane waits for all ranks to say that they want something joint."""
        self._agreement = Agreement(wire, lambda call, calls: self._servers[call.asks](call, calls))
        self._left = False
        self.awaited = False
        """Whether compute waits for a collective, so that it queues nothing more before that has ended."""
        dense = self.new_group(expert=False)
        self._sharing = dense, self.new_group(expert=True) if mesh.ranks.expert_parallel > 1 else dense
        self.copying = Group(wire, lambda rank: mesh.copies(False, rank))
        """The ranks that have the same slices as this one, one a replica."""
        mesh.lane = lambda what, work: self.jointly(what, lambda _: work())

    def new_group(self, expert: bool) -> Group:
        """A group of the ranks that share the state of a unit, of experts or not; every rank makes it."""
        return Group(self.wire, lambda rank: self.mesh.sharers(expert, rank))

    def sharing(self, unit: UnitSpec) -> Group:
        """The ranks that have the slices of a unit."""
        return self._sharing[self.shards.is_expert(unit)]

    @property
    def groups(self) -> Sequence[Group]:
        return (*{id(group): group for group in (*self._sharing, self.copying)}.values(),)

    @property
    def served(self) -> int:
        """Collectives of other ranks that this one took part in without asking for them."""
        return self._agreement.served + self.foreseen.passed

    def serve(self, asks: Asks, server: Callable[[Call, Sequence[Call]], None]) -> None:
        """Let `server` take part in what others ask for and this rank does not."""
        self._servers[asks] = server

    def in_turn(self, work: Callable[[], None], after: Iterable[Handle]) -> Callable[[], None]:
        """What a lane does that must do one thing after another: `work`, once `after` have ended. If that fails, the
        other ranks are told."""

        def run() -> None:
            try:
                wait_all(after)
                with self._device.beside_compute():
                    work()
            except (NonFiniteGradientError, UsageError):  # which every rank has found
                raise
            except BaseException:
                self.wire.watcher.fail()
                raise

        return run

    def run(self, work: Callable[[], None], after: Iterable[Handle], nbytes: int, label: str) -> Handle:
        """Do `work`, which sends `nbytes` and which all ranks do at this point, once everything submitted before and
        `after` have ended."""
        return self.lane.submit(self.in_turn(work, after), (), nbytes, label)

    def submit(
        self, call: Callable[[], Call], work: Work, after: Iterable[Handle], nbytes: int = 0, label: str = ""
    ) -> Handle:
        """The same, once ranks agree on a call."""
        return self.run(lambda: work(self._agreement.settle(call())), after, nbytes, label)

    def reduce(self, call: Call, work: Callable[[], None], after: Iterable[Handle], nbytes: int, label: str) -> Handle:
        """Reduce the gradient of the unit that `call` is about: `work`, in its turn."""

        def settle() -> None:
            passed = self.foreseen.claim(call.about) if self._listed else None
            self._take_part_in(self.foreseen.overdue() if passed is None else passed)
            if passed is None:
                calls = self._agreement.settle(call)
                askers(call, calls, self.shards.family_of(call.about))
            work()

        return self.run(settle, after, nbytes, label)

    def jointly(self, what: str, work: Work, ends: Callable[[], int] | None = None) -> None:
        """Have all ranks do what each of them asks for at this point of its program; returns when it is done.

        `ends` is given where nothing more of this step comes: what is foreseen and left is taken part in, and then it
        gives what ranks tell each other. On a device `work` is a part of what compute is told, as if it were done here.
        """
        queue = self._device.as_compute()

        def call() -> Call:
            if ends is not None:
                self._take_part_in(self.foreseen.overdue())
            self._says = True
            return self._agreement.joint(what, ends() if ends is not None else 0)

        def here(calls: Sequence[Call]) -> None:
            with self._helping, queue:
                self._says = False
                work(calls)

        self.awaited = True
        self.wire.watcher.when_stuck = lambda: threading.Thread(target=self._help, daemon=True).start()
        try:
            self.submit(call, here, (), label=what).wait()
        finally:
            self.wire.watcher.when_stuck = None
            self.awaited = False

    def _help(self) -> None:
        """This rank's compute waits for the others, and one of them waits for it: take part in what is foreseen."""
        with self._helping, suppress(RankError):
            if self.awaited:
                self.pass_gathers()
            if self._says:  # else the lane itself is at a reduction
                self._take_part_in(self.foreseen.overdue())

    def _take_part_in(self, units: Iterable[int]) -> None:
        for unit in units:
            self.take_part(unit)

    def close(self) -> None:
        """End what was asked for, and join the thread."""
        if not self._left:
            self._left = True
            self.mesh.lane = None
            self.awaited = True
            self.lane.close()


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
