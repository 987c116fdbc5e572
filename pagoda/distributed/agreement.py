"""The agreement: which collective runs next, on every rank the same, whatever each of them asks for."""

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from pagoda.distributed.transport import Transport
from pagoda.errors import RankError, UsageError


class CollectiveKind(IntEnum):
    """What a rank asks the others for."""

    GATHER = 0
    """A unit's weights, of every rank's slice."""
    REDUCE = 1
    """The mean of every rank's gradient of a unit, in slices."""
    SHARE = 2
    """A unit's updated weights, where every rank has all of them and updated a slice (stages 1 and 2)."""
    ON_ALL_RANKS = 3
    """A collective that all ranks must ask for: others cannot take part in it unasked."""
    START = 4
    """To follow a list of collectives that all ranks foresee."""
    LEAVE = 5
    """Nothing any more."""
    FAIL = 6
    """Nothing any more, as something failed here."""


SERVED = (CollectiveKind.REDUCE, CollectiveKind.SHARE)
"""What a rank can take part in without asking for it, as soon as it asks for anything."""
_ORDER = ((CollectiveKind.GATHER,), (CollectiveKind.START,), SERVED)
"""What is answered before all else: it brings ranks that have fallen behind to where the others are."""


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's wish. Calls of one kind about the same thing are answered together."""

    kind: CollectiveKind
    about: int = 0
    """The unit; of what is done by all ranks at once, a number that stands for it."""
    version: int = 0
    """How often the unit has been updated; of START, what stands for the list of the step before."""
    other: int = 0
    """Of START, what stands for another list that would do."""

    def is_with(self, other: "Call") -> bool:
        """Whether both are answered at once."""
        return (self.kind, self.about) == (other.kind, other.about)


class Agreement:
    """Finds out what every rank wants next, and has all of them do one of it.

    Ranks that run the same program ask for the same in the same order, and go on at once. Where they have parted (one
    left out a batch, or used other units), all that want weights are answered first: each gets its own. A rank that
    asks to START is answered next, then the first rank that asks for what others can take part in without asking: they
    serve it, and ask again. So ranks may ask in any order, and none waits for ever: a rank that asks for nothing is
    computing, or waits for what it has asked.

    Raises UsageError, on every rank, where ranks want different things that need all of them, RankError where one has
    left or failed.
    """

    def __init__(self, transport: Transport, serve: Callable[[Call, Sequence[Call]], None]) -> None:
        """`serve` takes part in a call of others, given every rank's."""
        self._transport = transport
        self._serve = serve
        self._names: dict[int, str] = {}
        """What has been done by all ranks at once, by its number."""
        self._broken: BaseException | None = None
        """Why nobody can be talked to any more."""
        self.served = 0
        """Calls of others that this rank took part in unasked."""

    def joint(self, what: str) -> Call:
        """The call for something that all ranks must ask for, named `what` in errors."""
        number = zlib.crc32(what.encode())
        self._names[number] = what
        return Call(CollectiveKind.ON_ALL_RANKS, number)

    @property
    def is_broken(self) -> bool:
        """Whether nobody can be talked to any more."""
        return self._broken is not None

    def settle(self, call: Call) -> Sequence[Call]:
        """Take part in what others ask for until `call` is what all do now; returns every rank's call."""
        if self._broken is not None:
            raise self._broken
        try:
            while True:
                said = self._transport.announce([call.kind, call.about, call.version, call.other])
                calls = [Call(CollectiveKind(kind), *of_what) for kind, *of_what in said]
                chosen = self._choose(call, calls)
                if chosen.is_with(call) or chosen.kind is call.kind is CollectiveKind.GATHER:
                    return calls
                if chosen.kind in SERVED:
                    self.served += 1
                    self._serve(chosen, calls)
        except BaseException as error:
            self._broken = error
            raise

    def fail(self) -> None:
        """Tell the others that something has failed here, unless nobody can be told any more."""
        with suppress(BaseException):
            self.settle(Call(CollectiveKind.FAIL))
        self._broken = self._broken or RankError(f"Rank {self._transport.rank} has failed: see its first error.")

    def _choose(self, mine: Call, calls: Sequence[Call]) -> Call:
        if mine.kind in (CollectiveKind.LEAVE, CollectiveKind.FAIL):
            return mine
        for rank, call in enumerate(calls):
            if call.kind is CollectiveKind.FAIL:
                raise RankError(f"Rank {rank} has failed, so rank {self._transport.rank} stops: see its own error.")
        for rank, call in enumerate(calls):
            if call.kind is CollectiveKind.LEAVE:
                raise RankError(
                    f"Rank {rank} has closed its optimizer, but rank {self._transport.rank} is at "
                    f"{self._describe(mine)}: run the same number of steps on every rank."
                )
        chosen = next((call for wanted in _ORDER for call in calls if call.kind in wanted), calls[0])
        if chosen.kind is CollectiveKind.ON_ALL_RANKS and not all(chosen.is_with(call) for call in calls):
            said = self._transport.announce_bytes(self._describe(mine).encode())
            wanted = ", ".join(f"rank {rank} is at {text.decode()}" for rank, text in enumerate(said))
            raise UsageError(f"Ranks are at different points, each of which needs all of them: {wanted}.")
        return chosen

    def _describe(self, call: Call) -> str:
        if call.kind is CollectiveKind.ON_ALL_RANKS:
            return self._names.get(call.about, "something else")
        forward = "a forward or backward"
        return {CollectiveKind.GATHER: forward, CollectiveKind.START: forward, CollectiveKind.REDUCE: "a backward"}.get(
            call.kind, "optimizer.step()"
        )
