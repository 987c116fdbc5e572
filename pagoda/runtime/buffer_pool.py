"""A pool of equal buffers through which bytes pass. Each serves one transfer at a time.

Updates take no buffers from it: `schedule/stream.py` gives them the slots of their ring.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Generic, TypeVar

Slot = TypeVar("Slot")


class BufferPool(Generic[Slot]):
    """Slots that any thread may take, and any thread gives back.

    The holder of a slot must be able to continue without another slot. Otherwise two holders could wait for each other.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._free: SimpleQueue[Slot] = SimpleQueue()
        self.take = self._free.get
        """Wait for a free slot and take it."""
        self.give_back = self._free.put
        """Give back a slot that nothing reads or writes any more."""
        for slot in slots:
            self.give_back(slot)

    @contextmanager
    def one(self) -> Iterator[Slot]:
        """Take a slot, and give it back at the end of the context."""
        slot = self.take()
        try:
            yield slot
        finally:
            self.give_back(slot)
