"""The ring: buffers of equal size through which bytes stream, each lent to one transfer at a time."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Slot = TypeVar("Slot")


class Ring(Generic[Slot]):
    """Slots that any thread may take, and any thread gives back.

    Whoever holds a slot must be able to go on without another one, else two such holders could wait for each other.
    """

    def __init__(self, slots: Iterable[Slot], lock: threading.Condition | None = None) -> None:
        """`lock` is told when a slot is given back; its owner may hold it when calling."""
        self._free = list(slots)
        self._lock = lock or threading.Condition()

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def take(self) -> Slot:
        """A free slot, once there is one."""
        with self._lock:
            while not self._free:
                self._lock.wait()
            return self._free.pop()

    def give_back(self, slot: Slot) -> None:
        """Nothing reads or writes a slot any more."""
        with self._lock:
            self._free.append(slot)
            self._lock.notify_all()

    @contextmanager
    def one(self) -> Iterator[Slot]:
        """A slot for a while."""
        slot = self.take()
        try:
            yield slot
        finally:
            self.give_back(slot)
