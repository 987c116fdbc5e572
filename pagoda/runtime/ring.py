"""The ring: buffers of equal size through which bytes stream, each lent to one transfer at a time."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Slot = TypeVar("Slot")


class Ring(Generic[Slot]):
    """Slots that any thread may take, and any thread gives back.

    The holder of a slot must be able to go on without another one, else two such holders could wait for each other.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._free: SimpleQueue[Slot] = SimpleQueue()
        self.take = self._free.get
        """A free slot, once there is one."""
        self.give_back = self._free.put
        """Nothing reads or writes a slot any more."""
        for slot in slots:
            self.give_back(slot)

    def take_if_free(self) -> Slot | None:
        """A free slot, if there is one now."""
        try:
            return self._free.get_nowait()
        except Empty:
            return None

    @contextmanager
    def one(self) -> Iterator[Slot]:
        """A slot for a while."""
        slot = self.take()
        try:
            yield slot
        finally:
            self.give_back(slot)
