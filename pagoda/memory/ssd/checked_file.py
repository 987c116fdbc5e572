"""Pages in the files of several drives, hashed when they are written and compared when they are read."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pagoda.errors import CorruptPageError
from pagoda.memory.ssd.hashes import hashes_of
from pagoda.memory.ssd.page_file import PageFile
from pagoda.memory.ssd.record import PAGES, StoreRecord
from pagoda.memory.ssd.slots import UNWRITTEN, Hashes, PageTable, Slots, stretches


class CheckedFile:
    """Slots [0, slots) in the page files of several drives. Adjacent slots are on different drives.

    Slots were laid out in `portions`, each a number of slots on every drive: round robin, without the drives whose
    share is full. A file that grows, also during transfers, gets one more portion, so no slot ever moves.

    Thread-safe like `PageFile`. A call makes its transfers one after another, one for each drive and stretch of slots
    that are adjacent there. Several threads are needed to keep several drives busy.
    """

    def __init__(self, files: Iterable[PageFile], portions: Iterable[Sequence[int]]) -> None:
        """Takes ownership of the files. An iterable that opens files lazily is allowed: if one fails to open, all are
        closed."""
        with contextlib.ExitStack() as opened:
            self.files = tuple(opened.enter_context(contextlib.closing(file)) for file in files)
            self._lay(portions)
            opened.pop_all()
        self.page_bytes = self.files[0].page_bytes

    def read(self, table: PageTable, into: memoryview) -> None:
        """Fill `into` with the pages of `table`, the last one as far as it was written. Pages that were never written
        are filled with zeros.

        Raises CorruptPageError for the first page whose bytes have a different hash, and StorageError if the disk
        fails.
        """
        page = self.page_bytes
        written = table.slots != UNWRITTEN
        for start, stop in stretches(written):
            for file, first, views in self._stretches(table.slots[start:stop], into[start * page : stop * page]):
                file.pread(first, *views)
        for start, stop in stretches(~written):
            np.frombuffer(into, np.uint8)[start * page : stop * page] = 0
        found = hashes_of(into, page)
        for index in np.flatnonzero(written & (found != table.hashes)).tolist():
            slot = int(table.slots[index])
            file = self.files[self._drive[slot]]
            raise CorruptPageError(
                f"{file.path or f'the page file in {file.directory}'} at offset {self._page[slot] * page} does not "
                f"hold what was written there: {page} bytes have the hash {int(found[index]):016x} instead "
                f"of {int(table.hashes[index]):016x}; check the disk (dmesg), then resume from another "
                "checkpoint"
            )

    def write(self, slots: Slots, data: memoryview) -> Hashes:
        """Write pages to these slots, the last one perhaps in part. Returns their hashes, for the tables from which
        they are read. Raises like `PageFile.pwrite`."""
        hashes = hashes_of(data, self.page_bytes)
        for file, first, views in self._stretches(slots, data):
            file.pwrite(first, *views)
        return hashes

    def grow(self, portion: Sequence[int]) -> None:
        """Add a portion. Raises StorageError if a disk has too little space."""
        for file, *counts in zip(self.files, *self.portions, portion, strict=True):
            file.grow(sum(counts))  # one that has grown already, before another was full, stays as it is
        self._lay([*self.portions, portion])

    def sync(self) -> None:
        """Make written bytes survive a loss of power, on every drive."""
        for file in self.files:
            file.sync()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _lay(self, portions: Iterable[Sequence[int]]) -> None:
        """Compute for every slot its drive and its page in that drive's file."""
        self.portions = tuple(map(tuple, portions))
        drives: list[npt.NDArray[np.int64]] = []
        for portion in self.portions:
            turns = np.concatenate([np.arange(count) for count in portion])
            drive = np.repeat(np.arange(len(portion)), portion)
            drives.append(drive[np.lexsort((drive, turns))])
        drive = np.concatenate(drives)
        page = np.empty_like(drive)
        for index in range(len(self.files)):
            page[drive == index] = np.arange(np.count_nonzero(drive == index))
        self._drive, self._page, self.slots = drive, page, len(drive)

    def _stretches(self, slots: Slots, data: memoryview) -> Iterator[tuple[PageFile, int, list[memoryview]]]:
        """(file, first page, buffers) of every stretch of pages that are adjacent on a drive."""
        size = self.page_bytes
        drives, pages = self._drive[slots].tolist(), self._page[slots].tolist()
        for index, file in enumerate(self.files):
            mine = [i for i, drive in enumerate(drives) if drive == index]
            start = stop = 0
            while start < len(mine):
                while stop < len(mine) and pages[mine[stop]] - pages[mine[start]] == stop - start:
                    stop += 1
                part, start = mine[start:stop], stop
                if part[-1] - part[0] == len(part) - 1:
                    views = [data[part[0] * size : (part[-1] + 1) * size]]
                else:
                    views = [data[i * size : (i + 1) * size] for i in part]
                yield file, pages[part[0]], views


def portion_of(slots: int, limits: Sequence[int | None]) -> tuple[int, ...] | None:
    """How many of `slots` go to each drive: as equal as `limits` allow (in slots; None for no limit). None if they do
    not fit."""
    most = [slots if limit is None else limit for limit in limits]
    if sum(most) < slots:
        return None
    counts = [0] * len(most)
    while left := slots - sum(counts):
        open_drives = [drive for drive, limit in enumerate(most) if counts[drive] < limit]
        share = -(-left // len(open_drives))
        for drive in open_drives:
            counts[drive] += min(share, most[drive] - counts[drive], slots - sum(counts))
    return tuple(counts)


def open_pages(store: StoreRecord, read_only: bool = False) -> CheckedFile:
    """The slots of a store on disk. Raises StorageError if a page file is missing or shorter than the record says."""
    stripes = zip(store.directories, store.pages_of_files, store.folders, strict=True)
    files = (
        PageFile(directory, pages, store.page_bytes, existing=folder / PAGES, read_only=read_only)
        for directory, pages, folder in stripes
    )
    return CheckedFile(files, store.portions)
