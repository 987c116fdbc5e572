"""The lane `collective`: what all ranks do together, one thing after another."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from pagoda.errors import NonFiniteGradientError, RankError
from pagoda.parallel.agreement import Agreement, Asks, Call
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
    """One thread that talks to the other ranks, strictly in the order in which compute asks.

    Compute's thread alone submits, at points of its program, so ranks that run the same program ask in the same order;
    where they do not, the `Agreement` decides what comes first. What a collective waits for never waits for a later
    one: loads, copies and updates are on lanes of their own, and updates need gradients that were reduced before.
    """

    def __init__(self, mesh: Mesh, wire: Wire, shards: Shards, device: Device) -> None:
        self.mesh = mesh
        self.wire = wire
        self.shards = shards
        self.lane = Lane(COLLECTIVE)
        self._device = device
        self._servers: dict[Asks, Callable[[Call, Sequence[Call]], None]] = {}
        self._agreement = Agreement(wire, lambda call, calls: self._servers[call.asks](call, calls))
        self._left = False
        self.awaited = False
        """Whether compute waits for a collective, so that it queues nothing more before that has ended."""
        dense = Group(wire, lambda rank: mesh.sharers(False, rank))
        divided = mesh.ranks.expert_parallel > 1
        self._sharing = dense, Group(wire, lambda rank: mesh.sharers(True, rank)) if divided else dense
        self.copying = Group(wire, lambda rank: mesh.copies(False, rank))
        """The ranks that have the same slices as this one, one a replica."""
        mesh.lane = lambda what, work: self.jointly(what, lambda _: work())

    def sharing(self, unit: UnitSpec) -> Group:
        """The ranks that have the slices of a unit."""
        return self._sharing[self.shards.is_expert(unit)]

    @property
    def served(self) -> int:
        """Collectives of other ranks that this one took part in without asking for them."""
        return self._agreement.served

    def serve(self, asks: Asks, server: Callable[[Call, Sequence[Call]], None]) -> None:
        """Let `server` take part in what others ask for and this rank does not."""
        self._servers[asks] = server

    def submit(self, call: Call, work: Work, after: Iterable[Handle], nbytes: int = 0, label: str = "") -> Handle:
        """Do `work`, which sends `nbytes`, once everything submitted before and `after` have ended and ranks agree."""

        def run() -> None:
            try:
                wait_all(after)
            except NonFiniteGradientError:  # which every rank has found
                raise
            except BaseException:
                self._agreement.fail()
                raise
            with self._device.beside_compute():
                work(self._agreement.settle(call))

        return self.lane.submit(run, (), nbytes, label)

    def jointly(self, what: str, work: Work) -> None:
        """Have all ranks do what each of them asks for at this point of its program; returns when it is done.

        On a device `work` is a part of what compute is told, as if it were done here."""
        queue = self._device.as_compute()

        def here(calls: Sequence[Call]) -> None:
            with queue:
                work(calls)

        self.awaited = True
        try:
            self.submit(self._agreement.joint(what), here, (), label=what).wait()
        finally:
            self.awaited = False

    def close(self) -> None:
        """Tell the others that nothing more is asked for here, and join the thread."""
        if not self._left:
            self._left = True
            self.mesh.lane = None
            self.awaited = True
            leaving = self.submit(Call(Asks.LEAVE), lambda _: None, ())
            leaving.wait_until_done()
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
