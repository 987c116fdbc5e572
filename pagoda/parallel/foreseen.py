"""What is foreseen: the collectives of a step that all ranks run in one order, with nothing said before each."""

import hashlib
import threading
from collections.abc import Sequence
from math import inf

SIGNATURE_BITS = 31


class Foreseen:
    """The list of one kind of collectives, each about a unit, that every rank runs in every step.

    It is what all ranks came to in the steps before, and changes for all of them at once, when a step has ended. Where
    a rank is in it depends on its compute alone. Of what a rank does not come to, it passes over its entry: it takes
    part, and has no use for it. What the list does not have never moves the place in it.
    """

    def __init__(self) -> None:
        self._entries: Sequence[tuple[int, float]] = ()
        """(unit, when): events of compute since the step began."""
        self._next = 0
        self._made: list[tuple[int, float]] = []
        """What this rank has come to in this step."""
        self._before: Sequence[tuple[int, float]] | None = None
        """The same of the step before, if all ranks came to the same."""
        self._lock = threading.Lock()
        self.passed = 0
        """Entries passed over so far."""

    def claim(self, unit: int, now: float = inf) -> Sequence[int] | None:
        """This rank comes to a unit, after `now` events: the units whose entries it passes over, before its own. None
        where the list does not have it."""
        with self._lock:
            self._made.append((unit, now if now < inf else 0))
            for at in range(self._next, len(self._entries)):
                listed, when = self._entries[at]
                if when > now:
                    break
                if listed == unit:
                    passed = self._pass(at)
                    self._next = at + 1
                    return passed
            return None

    def overdue(self, now: float = inf) -> Sequence[int]:
        """The units whose entries compute has passed by after `now` events, all that are left by default."""
        with self._lock:
            at = self._next
            while at < len(self._entries) and self._entries[at][1] <= now:
                at += 1
            return self._pass(at)

    def _pass(self, stop: int) -> Sequence[int]:
        passed = [unit for unit, _ in self._entries[self._next : stop]]
        self.passed += len(passed)
        self._next = stop
        return passed

    def signature(self) -> int:
        """Stands for what this rank has come to in this step: equal where that is, non-negative, of so many bits."""
        digest = hashlib.blake2b(repr(self._made).encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> (64 - SIGNATURE_BITS)

    def end_step(self, agreed: bool) -> None:
        """A step has ended; `agreed`: all ranks came to the same. What they did twice, or first, is the list now."""
        with self._lock:
            if agreed and self._made and (self._made == self._before or not self._entries):
                self._entries = self._made
            if self._made:
                self._before = self._made if agreed else None
            self._restart()

    def restart(self) -> None:
        """A step has begun anew."""
        with self._lock:
            self._restart()

    def _restart(self) -> None:
        self._made, self._next = [], 0
