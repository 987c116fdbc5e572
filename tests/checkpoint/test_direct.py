"""A direct file holds what was written to it, wherever that lay in memory and whatever the file system refuses."""

import errno
import itertools
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from pagoda.checkpoint import direct
from pagoda.checkpoint.direct import DirectFile
from pagoda.memory.arena import Arena
from pagoda.memory.ssd.page_file import PageFile

SIZE = 3 << 20
in_a_folder = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def tmp_path(on_drive: Path) -> Path:
    return on_drive


@pytest.fixture(scope="module")
def memory() -> Arena:
    """Random bytes, from a multiple of 4096 on, with room to begin elsewhere."""
    arena = Arena(SIZE + 4096)
    np.frombuffer(arena.view(0, arena.nbytes), np.uint8)[:] = np.random.default_rng(0).integers(0, 256, arena.nbytes)
    return arena


def written(path: Path, memory: Arena, shift: int, cuts: list[int]) -> bytes:
    """What is read of a file that was written in parts, from both ends by two threads, from memory that is shifted."""
    path.unlink(missing_ok=True)
    file = DirectFile(path, create=True)
    file.reserve(SIZE)
    places = sorted({0, SIZE, *cuts})
    parts = list(itertools.pairwise(places))

    def write(share: list[tuple[int, int]]) -> None:
        for start, stop in share:
            file.pwrite(memory.view(shift + start, stop - start), start)

    other = threading.Thread(target=write, args=(parts[1::2],))
    other.start()
    write(parts[::2])
    other.join()
    file.sync()
    file.close()
    return path.read_bytes()


@in_a_folder
@given(st.sampled_from([0, 2, 8, 512, 4095]), st.lists(st.integers(1, SIZE - 1), max_size=8))
def test_parts_of_any_length_come_from_any_address(tmp_path: Path, memory: Arena, shift: int, cuts: list[int]) -> None:
    assert written(tmp_path / "file", memory, shift, cuts) == bytes(memory.view(shift, SIZE))


def refusing(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], int]) -> list[int]:
    """Direct writes get `answer(nbytes)`, the bytes to move or 0 for a refusal; lists the lengths of all the others."""
    write, through_cache = os.pwrite, []

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("file") or not _is_direct(descriptor):
            through_cache.append(len(data))
            return write(descriptor, data, offset)
        most = answer(len(data))
        if not most:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, data[:most], offset)

    monkeypatch.setattr(direct.os, "pwrite", pwrite)
    return through_cache


def needs_direct_io(folder: Path) -> None:
    with closing(PageFile(folder, 1, 4096)) as file:
        if not file.direct:
            pytest.skip(f"the temporary folder has no direct I/O: {file.fallback_reason}")


def _is_direct(descriptor: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


def test_a_file_system_that_refuses_direct_writes_gets_all_through_its_cache(
    tmp_path: Path, memory: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_UNSYNCED_BYTES", 1 << 20)  # so that it is synced meanwhile
    through_cache = refusing(monkeypatch, lambda nbytes: 0)
    assert written(tmp_path / "file", memory, 0, [100, 1 << 20]) == bytes(memory.view(0, SIZE))
    assert sum(through_cache) == SIZE


def test_direct_writes_that_move_less_than_asked_are_gone_on_with(
    tmp_path: Path, memory: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_direct_io(tmp_path)
    through_cache = refusing(monkeypatch, lambda nbytes: min(nbytes, 40960))
    assert written(tmp_path / "file", memory, 0, [1 << 20]) == bytes(memory.view(0, SIZE))
    assert not through_cache


def test_only_the_ends_of_a_write_go_through_the_page_cache(
    tmp_path: Path, memory: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_direct_io(tmp_path)
    through_cache = refusing(monkeypatch, lambda nbytes: nbytes)
    assert written(tmp_path / "file", memory, 0, [4096, 1 << 20]) == bytes(memory.view(0, SIZE))
    assert not through_cache
    assert written(tmp_path / "file", memory, 0, [4097]) == bytes(memory.view(0, SIZE))
    assert sorted(through_cache) == [1, 4095]


def test_an_error_of_the_disk_is_raised(tmp_path: Path, memory: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = DirectFile(tmp_path / "file", create=True)
    monkeypatch.setattr(direct.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        file.pwrite(memory.view(0, 8192), 0)
    file.close()
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file", create=True)
