"""The order of collectives, which is the same on every rank although ranks may want different collectives."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from pagoda.errors import RankError, UsageError
from pagoda.ranks.transport import Transport


class CollectiveKind(IntEnum):
    """A kind of collective, or of message, that a rank wants."""

    GATHER = 0
    """Collect a unit's whole weights from every rank's slice."""
    REDUCE = 1
    """Compute the mean of every rank's gradient of a unit, in slices."""
    SHARE = 2
    """Collect a unit's updated weights, if every rank has all of them and has updated a slice (ZeRO 1 and 2)."""
    ON_ALL_RANKS = 3
    """A collective that runs only once all ranks want it."""
    BEGIN = 4
    """Begin a section of the program, and follow a list of collectives that all ranks have run in it before."""
    LEAVE = 5
    """Leave: the rank has closed its optimizer."""
    FAIL = 6
    """Stop all ranks: something has failed on this rank."""
    DROP = 7
    """Drop the gradients of this step. Ranks that have dropped theirs take part without wanting it."""


_SERVED = (CollectiveKind.REDUCE, CollectiveKind.SHARE)
"""A rank that waits for anything takes part in these without wanting them."""
_IN_STEP = {CollectiveKind.REDUCE: 0, CollectiveKind.SHARE: 0, CollectiveKind.BEGIN: 1, CollectiveKind.DROP: 2}
"""These come after GATHER, in this order. Ranks that have dropped their gradients less often are first."""


class Section(NamedTuple):
    """A section of a step's program: a forward, a backward, or what comes after one. Later ones are larger."""

    drops: int = 0
    """How often the program has dropped the gradients of this step before."""
    forwards: int = 0
    """The forwards of the model for this step that it has begun since then."""
    ends: int = 0
    """The ends since then: of that forward, and of backwards."""
    evaluations: int = 0
    """The evaluations that have ended since then."""


FIRST = Section()


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that a rank wants. Calls of the same kind about the same thing are answered together."""

    kind: CollectiveKind
    about: int = 0
    """The unit. For BEGIN, the part of the program."""
    what: str = ""
    """For ON_ALL_RANKS: the name of the collective, for errors."""
    version: int = 0
    """The unit's number of updates. 0 in a list: no weights change within a part that has one."""
    position: int = field(default=0, compare=False)
    """Compute's position in the trace when the rank wanted it. A GATHER of a list waits until compute is there."""
    section: Section = field(default=FIRST, compare=False)
    """The section of the rank's program. For BEGIN, the one that begins."""
    lists: tuple[int, ...] = ()
    """For BEGIN: a hash of each list that the rank can follow. 0 for none."""

    def is_with(self, other: "Call") -> bool:
        """Whether one collective answers both calls."""
        alike = (self.kind, self.about, self.what) == (other.kind, other.about, other.what)
        if self.kind is CollectiveKind.BEGIN:
            return alike and self.section == other.section
        return alike and (self.section.drops == other.section.drops or self.kind not in _IN_STEP)

    @property
    def turn(self) -> tuple[object, ...]:
        """Of the kinds `_IN_STEP`, the least is next."""
        section = self.section if self.kind is CollectiveKind.BEGIN else FIRST
        return self.section.drops, _IN_STEP[self.kind], section

    @property
    def place(self) -> str:
        """The rank's point in its program, in words."""
        if self.kind in (CollectiveKind.GATHER, CollectiveKind.BEGIN):
            return "a forward or backward"
        if self.kind is CollectiveKind.DROP:
            return "optimizer.zero_grad() with gradients to drop"
        return self.what or ("a backward" if self.kind is CollectiveKind.REDUCE else "optimizer.step()")


@dataclass(frozen=True, eq=False, slots=True)
class ProgramPart:
    """A part of compute's program: a section of a step, from its first access to its end, or what comes after it."""

    number: int | None
    """0 between steps, 1 in a step. None for evaluation between steps, which has no list."""
    trace: object
    """The expected trace of steps."""
    versions: tuple[int, ...]
    """Each unit's number of updates when the part began. Empty if the part has no list."""
    section: Section = FIRST


class CollectiveOrder:
    """Decides with the other ranks which collective comes next. One thread calls all methods, in compute's order.

    *With a list.* When a section of a step begins, each rank announces hashes of two lists of collectives: the list
    that it wanted the last time, and the last list that all ranks had in common. If all ranks share one of them, they
    follow it until the section ends, and announce nothing before its collectives. A rank that reaches an entry has
    taken part in all earlier entries, including those that it does not want. It reaches an entry for weights only once
    compute has reached the entry's place in the trace, and it never skips an entry that needs all ranks. A collective
    that is not in the list, or not due yet, does not advance the list. A rank requests such weights directly from the
    other ranks. Before any other such collective, it skips the rest of the list.

    *Without a list.* Before each collective, every rank announces what it wants. Ranks that want weights are answered
    first: together if all want the same weights, otherwise each separately. Next comes a collective in which ranks that
    do not want it can take part, of the last unit first. They do so, and announce again what they want. So ranks may
    want things in any order, and none waits forever: a rank that announces nothing is computing, in a collective, or
    in one of the program's own. Backward has the gradients of the last unit first. So ranks with other experts still
    reduce each unit once, with all gradients of a backward.

    *Sections.* A rank announces BEGIN where a forward of the model or a backward has ended. Its compute goes on, but
    its next collective waits until no other rank is in an earlier section. Meanwhile it takes part in what others need.

    *Collectives of the program*, such as a mean of metrics, are not known here. A rank that waits in one announces
    nothing. None does so forever if all ranks run equally many forwards and backwards between two such collectives,
    whichever units they use, and none of these collectives is inside a forward or backward. For let rank A wait here
    for rank B, while B's compute waits in the program's collective C. B announces nothing, so its last BEGIN before C
    is over, and all ranks have come to that section. What A wants is about the forward or backward that comes next. In
    A's program, C is before that, so A has passed C. Compute of a rank that has not is between that BEGIN and C, where
    it waits for no other rank. So all ranks come to C, and B goes on.

    *Dropped gradients.* Programs call `zero_grad()` equally often in a step, and a call here carries how often. At
    `zero_grad()`, a rank leaves its list. If it has made gradients, it waits in a DROP until every other rank has
    called it as often. Calls with a lower number come first. So a rank without gradients, such as one whose
    forward has failed, does not wait, and the gradients that it makes next come after the DROP of the others.

    *The end.* A rank on which something has failed takes part in the rest of its list, so that no rank waits for it,
    and then announces the failure. Once a rank has failed or left, all others raise RankError at their next
    announcement. If ranks want different collectives that need all ranks, all raise UsageError.
    """

    def __init__(
        self,
        transport: Transport,
        take_part: Callable[[CollectiveKind, int, int | None], None],
        family: Callable[[int], Collection[int]],
        sharers: Callable[[int], Collection[int]],
        listed: bool = True,
    ) -> None:
        """`take_part` takes part in a collective that this rank does not want. Its arguments are the kind, the unit and
        the unit's number of updates (None if only ranks with other parts of the unit take part). `family` returns the
        ranks that have a part of a unit that is also on this rank, and `sharers` the ranks that have the slices of one
        copy of it. `listed`: ranks may follow lists. Then no weights change within a part."""
        self._transport = transport
        self._do_take_part = take_part
        self._family = family
        self._sharers = sharers
        self._listed = listed
        self._part: ProgramPart | None = None
        """The current part of this rank's program."""
        self._known: dict[tuple[int | None, ...], list[Sequence[Call]]] = defaultdict(lambda: [(), ()])
        """By part: the list of the last time, and the last list that all ranks had in common."""
        self._trace: object = None
        """The trace to which the entries of known lists refer."""
        self._list: Sequence[Call] = ()
        """The list that all ranks follow. Empty if there is none."""
        self._next = 0
        self._wanted: list[Call] | None = None
        """What this rank has wanted in this part, if it may become a list."""
        self._broken: BaseException | None = None
        """The error that has ended all communication."""
        self.failed = False
        """Whether something has failed here, so that other ranks cannot use this rank's data."""
        self._stops = False
        """Whether to stop the others at the next announcement."""
        self.asked = 0
        """The number of units that this rank had to request by itself."""
        self.served = 0
        """The number of collectives in which this rank took part without wanting them."""

    def come_to(self, call: Call, part: ProgramPart | None) -> bool:
        """Reach a collective about a unit. Returns True if all ranks that share the unit take part now, and False if
        this rank must request the weights from their `Service`."""
        if part is not self._part:
            self._enter(part)
        if self._wanted is not None and self._broken is None:
            if self._claim(call):
                return True
            if self._list and call.kind is CollectiveKind.GATHER:
                self.asked += 1
                return False
            self._pass_over_rest()
        asking = self._askers(call, self._settle(call))
        together = {*self._sharers(call.about)}.issubset(asking)
        self.asked += call.kind is CollectiveKind.GATHER and not together
        return together

    def come_together(self, call: Call, part: ProgramPart | None, step: bool) -> None:
        """Reach a collective that needs all ranks. `step`: a step ends with it."""
        if part is not self._part or step:
            self.leave(whole=True)
        elif self._wanted is not None and not self._claim(call):
            self._pass_over_rest()
        self._settle(call)

    def drop(self, call: Call) -> None:
        """Reach a DROP of gradients that this rank has made."""
        self.leave(whole=False)
        self._settle(call)

    def leave(self, whole: bool) -> None:
        """End the part: take part in the rest of its list. If the part was `whole`, remember its list."""
        if self._wanted is not None:
            assert self._part is not None
            self._pass_over_rest()
            self._known_of(self._part)[0] = tuple(self._wanted) if whole else ()
        self._part, self._list, self._wanted = None, (), None

    def close(self) -> None:
        """Tell the others that this rank leaves."""
        self.leave(whole=False)
        self._settle(Call(CollectiveKind.LEAVE))

    def fail(self, call: Call, part: ProgramPart | None, alike: bool) -> None:
        """Take part in a collective whose input has failed here, and stop the others. If all ranks run this collective
        `alike`, stop them only at the next announcement, because more such collectives may follow."""
        self.failed = True
        if alike or self.come_to(call, part) or call.kind is not CollectiveKind.GATHER:
            self._take_part(call.kind, call.about, call.version)
        self._stops = alike
        if not alike:
            self._stop()

    def begin(self, part: ProgramPart) -> None:
        """Begin another part of compute's program. Returns once no other rank is in an earlier section."""
        self.leave(whole=True)
        self._part = part
        mine = Call(CollectiveKind.BEGIN, part.number or 0, section=part.section)
        if not self._has_list(part):
            self._settle(mine)
            return
        if part.trace is not self._trace:
            self._known.clear()
            self._trace = part.trace
        known = self._known_of(part)
        mine = replace(mine, lists=tuple(_hash(calls, sum(part.versions)) for calls in known))
        said = self._settle(mine)
        self._wanted = []
        if all(call.is_with(mine) for call in said):
            for number, of_ranks in enumerate(zip(*(call.lists for call in said), strict=True)):
                if len({*of_ranks}) == 1 and of_ranks[0]:
                    known[1] = self._list = known[number]
                    break
        self._next = 0

    def _enter(self, part: ProgramPart | None) -> None:
        """Compute is in another part of its program."""
        if part is not None and self._has_list(part):
            self.begin(part)
        else:
            self.leave(whole=True)
            self._part = part

    def _has_list(self, part: ProgramPart) -> bool:
        return self._listed and part.number is not None

    def _known_of(self, part: ProgramPart) -> list[Sequence[Call]]:
        _, *section = part.section
        return self._known[part.number, *section]

    def _claim(self, call: Call) -> bool:
        """Advance to an entry of the list. Returns False if the list does not have it, or it is not due yet."""
        entry = call
        if call.kind is not CollectiveKind.ON_ALL_RANKS:
            entry = replace(call, version=0)
        assert self._wanted is not None
        self._wanted.append(entry)
        for place in range(self._next, len(self._list)):
            found = self._list[place]
            if found == entry and (found.position <= entry.position or entry.kind in _SERVED):
                self._pass_over(place)
                self._next = place + 1
                return True
            if found.kind is CollectiveKind.ON_ALL_RANKS:
                break
        return False

    def _pass_over_rest(self) -> None:
        """Skip to the next entry that needs all ranks."""
        stop = self._next
        while stop < len(self._list) and self._list[stop].kind is not CollectiveKind.ON_ALL_RANKS:
            stop += 1
        self._pass_over(stop)

    def _pass_over(self, stop: int) -> None:
        """Take part in the entries before `stop`. If that fails, `_next` is the first one that is left."""
        while self._next < stop and self._broken is None and not self._transport.broken:
            entry = self._list[self._next]
            self._next += 1
            self.served += 1
            self._take_part(entry.kind, entry.about, self._version(entry.about))
        self._next = max(self._next, stop)  # no rank takes part any more if the connection is broken

    def _take_part(self, kind: CollectiveKind, unit: int, version: int | None) -> None:
        try:
            self._do_take_part(kind, unit, version)
        except BaseException:
            if not self.failed and not self._transport.broken:  # the others wait until this rank takes part
                self.failed = True
                self._do_take_part(kind, unit, version)
                self._stop()
            raise

    def _stop(self) -> None:
        """Tell the others that something has failed here, if they can still be reached."""
        with suppress(Exception):
            self.leave(whole=False)
        with suppress(BaseException):
            self._settle(Call(CollectiveKind.FAIL))
        self._broken = self._broken or RankError(f"Rank {self._transport.rank} has failed: see its first error.")

    def _settle(self, call: Call) -> Sequence[Call]:
        """Take part in collectives of other ranks until it is the turn of `call`. Returns every rank's call."""
        if self._stops:
            self._stops = False
            self._stop()
        if self._broken is not None:
            raise self._broken
        try:
            while True:
                calls = self._transport.announce(call)
                chosen = self._choose(call, calls)
                if chosen.is_with(call) or chosen.kind is call.kind is CollectiveKind.GATHER:
                    return calls
                if chosen.kind in (*_SERVED, CollectiveKind.DROP):
                    self.served += chosen.kind in _SERVED
                    asking = self._askers(chosen, calls)
                    self._take_part(chosen.kind, chosen.about, calls[asking[0]].version if asking else None)
        except BaseException as error:
            self._broken = error
            raise

    def _choose(self, mine: Call, calls: Sequence[Call]) -> Call:
        """The call that is next."""
        if mine.kind in (CollectiveKind.LEAVE, CollectiveKind.FAIL):
            return mine
        me = f"rank {self._transport.rank}"
        for rank, call in enumerate(calls):
            if call.kind is CollectiveKind.FAIL:
                raise RankError(f"Rank {rank} has failed, so {me} stops: see the error of rank {rank}.")
        for rank, call in enumerate(calls):
            if call.kind is CollectiveKind.LEAVE:
                raise RankError(
                    f"Rank {rank} has closed its optimizer, but {me} is at {mine.place}: run the same number of steps "
                    "on every rank."
                )
        last_first = sorted(calls, key=lambda call: -call.about)  # the order in which backward has units' gradients
        gather = next((call for call in last_first if call.kind is CollectiveKind.GATHER), None)
        if gather is not None:
            return gather
        in_step = [call for call in last_first if call.kind in _IN_STEP]
        chosen = min(in_step, key=lambda call: call.turn, default=calls[0])
        if chosen.kind in (*_SERVED, CollectiveKind.BEGIN):
            return chosen
        drops = chosen.kind is CollectiveKind.DROP
        if not all(chosen.is_with(call) or (drops and chosen.section.drops < call.section.drops) for call in calls):
            wanted = ", ".join(f"rank {rank} is at {call.place}" for rank, call in enumerate(calls))
            raise UsageError(f"Ranks are at different points, but each of these needs all ranks: {wanted}.")
        return chosen

    def _askers(self, call: Call, calls: Sequence[Call]) -> tuple[int, ...]:
        """The ranks that have a part of the unit that is also here, and want the same as `call`.

        Raises RankError if they want different versions of the weights.
        """
        family = self._family(call.about)
        found = tuple(rank for rank, other in enumerate(calls) if rank in family and other.is_with(call))
        if len({calls[rank].version for rank in found}) > 1:
            raise RankError(
                f"Ranks {', '.join(map(str, found))} ask for the weights of unit {call.about} after different numbers "
                "of updates: run the same steps, and the same evaluations, on every rank."
            )
        return found

    def _version(self, unit: int) -> int:
        """A unit's number of updates when this part began."""
        assert self._part is not None
        return self._part.versions[unit]


def _hash(calls: Sequence[Call], updates: int) -> int:
    """The hash of a list in a part that begins after `updates` updates. 0 for an empty list."""
    if not calls:
        return 0
    said = repr([updates, *((call.kind.value, call.about, call.what, call.position) for call in calls)])
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=7).digest()) or 1
