"""The agreement: which collective runs next, on every rank the same, whatever each of them asks for."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from pagoda.errors import UsageError
from pagoda.parallel.wire import Wire


class Asks(IntEnum):
    """What a rank asks the others for."""

    REDUCE = 0
    """The mean of every rank's gradient of a unit, in slices."""
    SHARE = 1
    """A unit's updated weights, where every rank has all of them and updated a slice (stages 1 and 2)."""
    JOINTLY = 2
    """A collective that all ranks must ask for: others cannot take part in it unasked."""


SERVED = (Asks.REDUCE, Asks.SHARE)
"""What a rank can take part in without asking for it, as soon as it asks for anything."""


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's wish. Calls of one kind about the same thing are answered together."""

    asks: Asks
    about: int = 0
    """The unit; of what is done jointly, a number that stands for it."""
    version: int = 0
    """How often the unit has been updated; of what is done jointly, anything that ranks tell each other."""

    def is_with(self, other: "Call") -> bool:
        """Whether both are answered at once."""
        return (self.asks, self.about) == (other.asks, other.about)


class Agreement:
    """Finds out what every rank wants next, and has all of them do one of it.

    Ranks that run the same program ask for the same in the same order, and go on at once. Where they have parted (one
    was faster to fetch, left out a batch, or used other units), the first rank that asks for what others can take part
    in without asking is served by them, and they ask again. So ranks may ask in any order, and none waits for ever:
    a rank that asks for nothing is computing, or waits for what it has asked.

    Raises UsageError, on every rank, where ranks want different things that need all of them.
    """

    def __init__(self, wire: Wire, serve: Callable[[Call, Sequence[Call]], None]) -> None:
        """`serve` takes part in a call of others, given every rank's."""
        self._wire = wire
        self._serve = serve
        self._names: dict[int, str] = {}
        """What has been done jointly, by its number."""
        self._broken: BaseException | None = None
        """Why nobody can be talked to any more."""
        self.served = 0
        """Calls of others that this rank took part in unasked."""

    def joint(self, what: str, told: int = 0) -> Call:
        """The call for something that all ranks must ask for, named `what` in errors; `told` is for the others."""
        number = zlib.crc32(what.encode())
        self._names[number] = what
        return Call(Asks.JOINTLY, number, told)

    def settle(self, call: Call) -> Sequence[Call]:
        """Take part in what others ask for until `call` is what all do now; returns every rank's call."""
        if self._broken is not None:
            raise self._broken
        try:
            while True:
                said = self._wire.announce([call.asks, call.about, call.version])
                calls = [Call(Asks(asks), about, version) for asks, about, version in said]
                chosen = self._choose(call, calls)
                if chosen.is_with(call):
                    return calls
                self.served += 1
                self._serve(chosen, calls)
        except BaseException as error:
            self._broken = error
            raise

    def _choose(self, mine: Call, calls: Sequence[Call]) -> Call:
        chosen = next((call for call in calls if call.asks in SERVED), calls[0])
        if chosen.asks not in SERVED and not all(chosen.is_with(call) for call in calls):
            said = self._wire.announce_bytes(self._describe(mine).encode())
            wanted = ", ".join(f"rank {rank} is at {text.decode()}" for rank, text in enumerate(said))
            raise UsageError(f"Ranks are at different points, each of which needs all of them: {wanted}.")
        return chosen

    def _describe(self, call: Call) -> str:
        if call.asks is Asks.JOINTLY:
            return self._names.get(call.about, "something else")
        return "a backward" if call.asks is Asks.REDUCE else "optimizer.step()"
