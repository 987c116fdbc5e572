"""Hashes of pages are those of the xxhash package."""

import numpy as np
import pytest
import xxhash

from pagoda.memory.ssd import xxh3


@pytest.mark.parametrize("function", [xxh3._XXH3, None], ids=["exported", "an extension that exports no function"])
@pytest.mark.parametrize("page_bytes", [241, 1024, 1025, 1088, 4096, 5184, 131072])
def test_each_page_has_the_hash_that_xxhash_gives(
    page_bytes: int, function: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any address, of read-only bytes, and of none."""
    monkeypatch.setattr(xxh3, "_XXH3", function)
    random = np.random.default_rng(page_bytes).bytes(3 * page_bytes)
    for data in (random, b"\0" + random[1:], b"\xff" * len(random), b""):
        for start in (0, 3):
            view = memoryview(data)[start:]
            pages = len(view) // page_bytes
            found = xxh3.hashes_of(view[: pages * page_bytes], page_bytes)
            expected = [xxhash.xxh3_64_intdigest(view[n * page_bytes :][:page_bytes]) for n in range(pages)]
            assert found.dtype == np.uint64
            assert found.tolist() == expected
