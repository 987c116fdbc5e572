"""Scratch: pages for data that lives within one step, allocated from a tier's budget when needed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pagoda.memory.arena import Arena
from pagoda.memory.page import Run, pages_for
from pagoda.memory.pool import PagePool
from pagoda.memory.region import Region
from pagoda.memory.ssd.file import PageFile
from pagoda.memory.ssd.slots import Hashes, PageTable
from pagoda.memory.ssd.striped import StripedFile, portion_of
from pagoda.memory.ssd.xxh3 import hashes_of

_GROWTH_BYTES = 64 << 20
"""The minimum size of a bank, so that there are few banks."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive pages of one bank."""

    bank: int
    run: Run


class Scratch(ABC):
    """Pages whose number is unknown before a step runs. The scratch grows by one bank when it needs more pages.

    Invariant: `in_use_bytes <= peak_bytes <= capacity_bytes <= room_bytes`. An allocation may consist of several
    pieces, so nothing is lost to fragmentation. NOT thread-safe, but transfers of pieces are.
    """

    def __init__(self, room_bytes: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.room_bytes = max(0, room_bytes) // page_bytes * page_bytes
        """The most bytes that it may ever hold."""
        self.in_use_bytes = 0
        self.peak_bytes = 0
        """The most bytes in use at once since creation or the last `restart_peak`."""
        self._pools: list[PagePool] = []
        """By bank, which pages are free."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes taken from the system so far."""
        return sum(pool.frames for pool in self._pools) * self.page_bytes

    def restart_peak(self) -> None:
        """Reset the peak to what is in use now."""
        self.peak_bytes = self.in_use_bytes

    def alloc(self, nbytes: int) -> tuple[Piece, ...] | None:
        """Allocate pages for `nbytes`. None if there is no room. May raise the errors of opening a bank."""
        left = pages_for(nbytes, self.page_bytes)
        after = self.in_use_bytes + left * self.page_bytes
        if after > self.room_bytes or not self._grow_to(after):
            return None
        pieces = []
        for bank, pool in enumerate(self._pools):
            while left and pool.largest_free:
                run = pool.alloc(min(left, pool.largest_free))
                assert run is not None, "the longest free run is free"
                pieces.append(Piece(bank, run))
                left -= run.count
        self.in_use_bytes = after
        self.peak_bytes = max(self.peak_bytes, after)
        return tuple(pieces)

    def free(self, pieces: tuple[Piece, ...]) -> None:
        """Free what `alloc` returned."""
        for piece in pieces:
            self._pools[piece.bank].free(piece.run)
            self.in_use_bytes -= piece.run.count * self.page_bytes

    @abstractmethod
    def close(self) -> None:
        """Return everything to the system."""

    @abstractmethod
    def _open(self, pages: int) -> bool:
        """Add a bank. Returns False if a limit other than `room_bytes` forbids it."""

    def _grow_to(self, nbytes: int) -> bool:
        """Grow to a capacity of at least `nbytes` by one bank at most. Returns False if a limit forbids it."""
        have = self.capacity_bytes
        if nbytes <= have:
            return True
        usual = min(self.room_bytes - have, max(nbytes - have, have // 2, _GROWTH_BYTES))
        for pages in (usual // self.page_bytes, (nbytes - have) // self.page_bytes):
            if self._open(pages):
                self._pools.append(PagePool(pages))
                return True
        return False


class MemoryScratch(Scratch):
    """Scratch pages in RAM."""

    def __init__(self, room_bytes: int, page_bytes: int, arena: Callable[[int], Arena], poison: bool = False) -> None:
        """`arena` creates an arena of a given size. With `poison`, free pages are filled with NaN."""
        super().__init__(room_bytes, page_bytes)
        self._arena = arena
        self._poison = poison
        self._banks: list[Region] = []

    def tensor(self, piece: Piece) -> torch.Tensor:
        """The bytes of a piece, uint8, shape [bytes]."""
        return self._banks[piece.bank].part(piece.run).tensor(torch.uint8)

    def free(self, pieces: tuple[Piece, ...]) -> None:
        super().free(pieces)
        for piece in pieces:
            self._banks[piece.bank].part(piece.run).poison()

    def close(self) -> None:
        for bank in self._banks:
            bank.arena.close()

    def _open(self, pages: int) -> bool:
        arena = self._arena(pages * self.page_bytes)
        self._banks.append(Region.of("scratch", arena, self.page_bytes, poison=self._poison))
        return True


class SSDScratch(Scratch):
    """Scratch pages in unnamed files, striped over the drives. The files vanish with the process.

    Every write hashes each page, and every read compares, like `SSDTier`.
    """

    def __init__(self, room_bytes: int, page_bytes: int, directories: Mapping[Path, int | None]) -> None:
        """`directories` maps each directory to its limit in bytes; None means no limit."""
        super().__init__(room_bytes, page_bytes)
        self._directories = tuple(directories)
        self._left = [None if limit is None else limit // page_bytes for limit in directories.values()]
        self._files: list[StripedFile] = []

    def write(self, piece: Piece, first_page: int, data: memoryview) -> Hashes:
        """Write whole pages to a piece, starting at its page `first_page`. Raises StorageError."""
        hashes = hashes_of(data, self.page_bytes)
        start = piece.run.start + first_page
        self._files[piece.bank].write(np.arange(start, start + len(hashes)), data)
        return hashes

    def read(self, piece: Piece, first_page: int, hashes: Hashes, into: memoryview) -> None:
        """Read whole pages of a piece, starting at its page `first_page`. Raises CorruptPageError and StorageError."""
        start = piece.run.start + first_page
        self._files[piece.bank].read(PageTable(np.arange(start, start + len(hashes)), hashes), into)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _open(self, pages: int) -> bool:
        portion = portion_of(pages, self._left)
        if portion is None:
            return False
        used = [(directory, count) for directory, count in zip(self._directories, portion, strict=True) if count]
        files = (PageFile(directory, count, self.page_bytes) for directory, count in used)
        self._files.append(StripedFile(files, [[count for _, count in used]]))
        self._left = [None if left is None else left - count for left, count in zip(self._left, portion, strict=True)]
        return True
