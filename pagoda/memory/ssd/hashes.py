"""The hashes of pages: XXH3-64 of many pages in one call that runs without the GIL.

`CheckedFile` takes the hash of each page that it writes, and compares it when it reads the page.

The xxhash package needs one call per page, and each call releases the GIL and waits for it again. With other busy
threads, that took a tenth of a millisecond, as long as hashing 1 MiB, and a transfer of 4 MiB may have 32 pages. So a
Numba loop calls the function of the C library that the package's extension contains and exports.
"""

import ctypes
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from llvmlite.binding import add_symbol
from numba import types

from pagoda.jit import kernel
from pagoda.memory.page import pages_for


def _address_of_xxh3() -> int | None:
    """The address of XXH3_64bits(data, bytes) in the extension. Prefers the version that picks the widest vectors of
    this CPU."""
    library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
    for name in ("XXH3_64bits_dispatch", "XXH3_64bits"):
        if hasattr(library, name):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    return None


_XXH3 = _address_of_xxh3()
if _XXH3 is not None:
    add_symbol("pagoda_xxh3", _XXH3)
_xxh3 = types.ExternalFunction("pagoda_xxh3", types.uint64(types.uint64, types.uint64))


@kernel
def _hash_pages(address: int, nbytes: int, page_bytes: int, hashes: Any) -> None:
    for page in range(len(hashes)):
        at = page * page_bytes
        hashes[page] = _xxh3(address + at, min(page_bytes, nbytes - at))


def hashes_of(data: memoryview, page_bytes: int) -> npt.NDArray[np.uint64]:
    """XXH3-64 of each page of `data`, shape [pages]. The last page may be a part of one."""
    hashes = np.empty(pages_for(data.nbytes, page_bytes), np.uint64)
    if _XXH3 is None:  # the extension exports nothing: slower with other busy threads
        hashes[:] = [xxhash.xxh3_64_intdigest(data[at : at + page_bytes]) for at in range(0, data.nbytes, page_bytes)]
    elif len(hashes):
        address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        _hash_pages(address, data.nbytes, page_bytes, hashes)
    return hashes
