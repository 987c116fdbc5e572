"""Hashes of pages are those of the xxhash package."""

import numpy as np
import pytest
import xxhash

from pagoda.memory.ssd import xxh3
from pagoda.memory.ssd.xxh3 import hashes_of


@pytest.mark.parametrize("page_bytes", [241, 1024, 1025, 1088, 4096, 5184, 131072])
def test_each_page_has_the_hash_that_xxhash_gives(page_bytes: int) -> None:
    data = np.random.default_rng(page_bytes).integers(0, 256, 3 * page_bytes, np.uint8)
    pages = [data[n * page_bytes : (n + 1) * page_bytes].tobytes() for n in range(3)]

    found = hashes_of(memoryview(data), page_bytes)

    assert found.dtype == np.uint64
    assert found.tolist() == [xxhash.xxh3_64_intdigest(page) for page in pages]


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_extreme_bytes(byte: int) -> None:
    data = np.full(8192, byte, np.uint8)

    assert hashes_of(memoryview(data), 4096).tolist() == 2 * [xxhash.xxh3_64_intdigest(data[:4096].tobytes())]


def test_bytes_at_any_address_and_read_only() -> None:
    data = np.random.default_rng(0).bytes(4099)

    assert hashes_of(memoryview(data)[3:], 4096).tolist() == [xxhash.xxh3_64_intdigest(data[3:])]


def test_no_pages_have_no_hashes() -> None:
    assert hashes_of(memoryview(b""), 4096).shape == (0,)


def test_an_extension_that_exports_no_function_gives_the_same_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = memoryview(np.random.default_rng(0).bytes(8192))
    expected = hashes_of(data, 4096).tolist()
    monkeypatch.setattr(xxh3, "_XXH3", None)
    assert hashes_of(data, 4096).tolist() == expected
