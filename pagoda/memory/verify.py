"""Pages that are what was written: a 64-bit hash of each, computed when stored and compared when loaded."""

import numpy as np

from pagoda.errors import CorruptPageError
from pagoda.memory.slots import UNWRITTEN, PageTable, stretches
from pagoda.memory.ssd import StripedFile
from pagoda.memory.xxh3 import hashes_of


def read_pages(file: StripedFile, table: PageTable, into: memoryview) -> None:
    """Fill `into` with the pages of `table`, those never written with zeros.

    Raises CorruptPageError for the first page whose bytes have another hash, StorageError when the disk fails.
    """
    page = file.page_bytes
    written = table.slots != UNWRITTEN
    for start, stop in stretches(written):
        file.read(table.slots[start:stop], into[start * page : stop * page])
    for start, stop in stretches(~written):
        np.frombuffer(into, np.uint8)[start * page : stop * page] = 0
    found = hashes_of(into, page)
    for index in np.flatnonzero(written & (found != table.hashes)).tolist():
        raise CorruptPageError(
            f"{file.where(int(table.slots[index]))} does not hold what was written there: {page} bytes have the hash "
            f"{int(found[index]):016x} where {int(table.hashes[index]):016x} was stored; check the disk (dmesg), then "
            "resume from another checkpoint"
        )
