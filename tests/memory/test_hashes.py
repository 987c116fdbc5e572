"""Hashes of pages are those of the xxhash package."""

import numpy as np
import pytest
import xxhash
from pairwise import each_once

from pagoda.memory.ssd import hashes


@each_once(page_bytes=[241, 1024, 1025, 1088, 4096, 5184, 131072], exported=[True, False])
def test_each_page_has_the_hash_of_xxhash(page_bytes: int, exported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any address, of read-only bytes, of a part of a page, and of none; also where the extension exports no
    function."""
    if not exported:
        monkeypatch.setattr(hashes, "_XXH3", None)
    random = np.random.default_rng(page_bytes).bytes(3 * page_bytes)
    for data in (random, b"\0" + random[1:], b"\xff" * len(random), b""):
        for start in (0, 3):
            view = memoryview(data)[start:]
            found = hashes.hashes_of(view, page_bytes)
            expected = [xxhash.xxh3_64_intdigest(view[at:][:page_bytes]) for at in range(0, len(view), page_bytes)]
            assert found.dtype == np.uint64
            assert found.tolist() == expected
