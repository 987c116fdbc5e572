"""What ranks foresee: the collectives of a step, in the order in which all of them had them in an earlier one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagoda.distributed.agreement import CollectiveKind


@dataclass(frozen=True, slots=True)
class Entry:
    """A collective of a list."""

    kind: CollectiveKind
    about: int
    """The unit; of what is done by all ranks at once, a number that stands for it."""
    changes: int
    """Updates of the unit that the step had asked for by then."""
    due: int = field(compare=False)
    """Where in the trace compute was."""


class Foreseen:
    """A list that all ranks have alike, and how far this rank has come in it.

    A rank that comes to an entry has taken part in all entries before it: in those that it has no use for, it passes
    over. It does not come to an entry before compute has reached the place in the trace that the entry is due at, and
    it never passes over what is done by all ranks at once. So what the list does not have, or not yet, moves nothing.
    """

    def __init__(self) -> None:
        self._list: Sequence[Entry] = ()
        """What this rank follows."""
        self._next = 0
        self._latest: list[Entry] = []
        """What this rank has asked for since it began to follow a list, or to find one."""
        self._known: list[Sequence[Entry]] = [(), ()]
        """What it asked for in the step before, and the list that all ranks last had alike."""
        self._trace: object = None
        """By which the known lists say when an entry is due."""

    def hashes(self, trace: object, updates: int) -> list[int]:
        """What stands for each of the lists that can be followed in a step with this trace, which begins after so many
        updates; 0 for none."""
        if trace is not self._trace:
            self._known, self._trace = [(), ()], trace
        return [_hash(entries, updates) for entries in self._known]

    def follow(self, which: int | None) -> None:
        """A step begins, in which all ranks follow one of the lists, or none."""
        self._list, self._next, self._latest = () if which is None else self._known[which], 0, []
        if which is not None:
            self._known[1] = self._list

    def end(self, whole: bool) -> None:
        """The step ends, and it is a model for others if it was `whole`."""
        self._known[0] = tuple(self._latest) if whole else ()
        self._list, self._next, self._latest = (), 0, []

    def claim(self, entry: Entry) -> Sequence[Entry] | None:
        """Come to an entry: returns those that are passed over on the way, None if the list does not have it."""
        self._latest.append(entry)
        for place in range(self._next, len(self._list)):
            found = self._list[place]
            if found == entry and found.due <= entry.due:
                passed, self._next = self._list[self._next : place], place + 1
                return passed
            if found.kind is CollectiveKind.ON_ALL_RANKS:
                break
        return None

    def rest(self) -> Sequence[Entry]:
        """Pass over what is left before ranks do something together."""
        first = self._next
        while self._next < len(self._list) and self._list[self._next].kind is not CollectiveKind.ON_ALL_RANKS:
            self._next += 1
        return self._list[first : self._next]


def _hash(entries: Sequence[Entry], updates: int) -> int:
    if not entries:
        return 0
    said = repr([updates, *((entry.kind.value, entry.about, entry.changes, entry.due) for entry in entries)])
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=7).digest()) or 1
