"""A page file keeps every byte, leaves nothing behind, and says what it asked for when it fails."""

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from pagoda.errors import ConfigError, StorageError
from pagoda.memory.arena import Arena
from pagoda.memory.page import PAGE_ALIGN
from pagoda.memory.ssd.page_file import PageFile

PAGE = 16 * PAGE_ALIGN


def raising(number: int) -> Callable[..., NoReturn]:
    def fail(*args: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def refuse_direct_flag(patch: pytest.MonkeyPatch) -> None:
    """A file system that refuses O_DIRECT when it is switched on."""
    real = fcntl.fcntl

    def fcntl_without_direct(fd: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, value)

    patch.setattr(fcntl, "fcntl", fcntl_without_direct)


def refuse_direct_transfer(patch: pytest.MonkeyPatch) -> None:
    """A file system that takes O_DIRECT and refuses the first transfer."""
    real = os.pwritev

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    patch.setattr(os, "pwritev", pwritev)


@pytest.fixture(params=["direct", "buffered"])
def page_file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageFile]:
    """Eight pages, once with direct I/O and once without."""
    if request.param == "buffered":
        refuse_direct_flag(monkeypatch)
    with closing(PageFile(tmp_path, 8, PAGE)) as file:
        if request.param == "direct" and not file.direct:
            pytest.skip(f"direct I/O refused here: {file.fallback_reason}")
        assert file.direct is (request.param == "direct")
        yield file


def random_arena(nbytes: int, seed: int) -> Arena:
    arena = Arena(nbytes)
    generator = torch.Generator().manual_seed(seed)
    arena.tensor(0, nbytes, torch.uint8).random_(1, 256, generator=generator)
    return arena


def test_short_transfers_go_on_from_the_last_whole_block(page_file: PageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets: list[int] = []

    def short(real: Callable[[int, Sequence[memoryview], int], int]) -> Callable[..., int]:
        def call(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            offsets.append(offset)
            return min(real(fd, buffers, offset), PAGE_ALIGN + 904)

        return call

    # One verb short at a time: the same mistake in both could cancel.
    for verb in ("pwritev", "preadv"):
        source, target = random_arena(PAGE, len(verb)), Arena(PAGE)
        with monkeypatch.context() as patch:
            patch.setattr(os, verb, short(getattr(os, verb)))
            page_file.pwrite(1, source.view(0, PAGE))
            page_file.pread(1, target.view(0, PAGE))
        assert target.view(0, PAGE) == source.view(0, PAGE)
    assert len(offsets) > 2 * PAGE // (PAGE_ALIGN + 904)
    if page_file.direct:
        assert all(offset % PAGE_ALIGN == 0 for offset in offsets)


def test_a_failing_disk_is_named_with_offset_and_cause(page_file: PageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", raising(errno.EIO))
    with pytest.raises(StorageError, match=rf"write {PAGE} bytes at offset {2 * PAGE}: Input/output error"):
        page_file.pwrite(2, Arena(PAGE).view(0, PAGE))


@pytest.mark.parametrize(("page", "nbytes"), [(8, PAGE), (-1, PAGE), (7, PAGE + PAGE_ALIGN)])
def test_bytes_outside_the_file_are_refused(page_file: PageFile, page: int, nbytes: int) -> None:
    view = Arena(nbytes).view(0, nbytes)
    with pytest.raises(ValueError, match=f"page file of {8 * PAGE} bytes"):
        page_file.pread(page, view)
    with pytest.raises(ValueError, match=f"page file of {8 * PAGE} bytes"):
        page_file.pwrite(page, view)


@pytest.mark.parametrize("refuse", [refuse_direct_flag, refuse_direct_transfer])
def test_refused_direct_io_falls_back_with_a_reason_and_one_warning(
    refuse: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse(monkeypatch)
    source, target = random_arena(PAGE, 5), Arena(PAGE)
    with caplog.at_level(logging.WARNING, logger="pagoda"), closing(PageFile(tmp_path, 2, PAGE)) as file:
        assert not file.direct
        assert "Invalid argument" in file.fallback_reason
        file.pwrite(1, source.view(0, PAGE))
        file.pread(1, target.view(0, PAGE))
    assert target.view(0, PAGE) == source.view(0, PAGE)
    assert [record.name for record in caplog.records] == ["pagoda"]
    assert str(tmp_path) in caplog.text


def test_a_disk_that_fails_the_probe_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", raising(errno.EIO))
    with pytest.raises(StorageError, match="Input/output error"):
        PageFile(tmp_path, 1, PAGE)


@pytest.mark.parametrize(("pages", "page_bytes"), [(0, PAGE), (1, 0), (1, PAGE_ALIGN + 1)])
def test_pages_that_direct_io_cannot_move_are_refused(tmp_path: Path, pages: int, page_bytes: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4096"):
        PageFile(tmp_path, pages, page_bytes)


def test_the_file_has_no_name_its_space_is_reserved_and_free_again_when_it_is_dropped(tmp_path: Path) -> None:
    file = PageFile(tmp_path, 8, PAGE)
    descriptor = file._fd
    assert os.listdir(tmp_path) == []
    assert os.fstat(descriptor).st_blocks * 512 >= 8 * PAGE
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_closed_page_file_refuses_transfers_and_closes_again(page_file: PageFile) -> None:
    for _ in range(2):
        page_file.close()
    with pytest.raises(StorageError, match="closed"):
        page_file.pread(0, Arena(PAGE).view(0, PAGE))


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("nowhere", None, r"nowhere.*No such file.*mkdir"),
        ("plain", None, r"plain cannot be used: Not a directory"),
        (".", errno.EACCES, r"Permission denied.*make it writable"),  # patched: the superuser may write anywhere
    ],
)
def test_a_directory_that_cannot_be_used_is_refused_naming_it_and_the_fix(
    name: str, error: int | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").touch()
    if error is not None:
        monkeypatch.setattr(os, "open", raising(error))
    with pytest.raises(StorageError, match=why):
        PageFile(tmp_path / name, 1, PAGE)


@pytest.mark.parametrize(
    ("free", "error", "why"),
    [
        ([3 * PAGE // 4], errno.EIO, r"128\.00 KiB \(2 pages\) are needed, 48\.00 KiB are free, 80\.00 KiB short"),
        ([2 * PAGE, PAGE], errno.ENOSPC, r"128\.00 KiB .* are needed.*64\.00 KiB short"),  # others took some meanwhile
        ([4 * PAGE, 4 * PAGE], errno.EDQUOT, "refused by a quota"),
    ],
)
def test_too_little_space_is_refused_with_the_shortfall_and_no_file_is_left(
    free: list[int], error: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(free)
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: SimpleNamespace(f_bavail=next(left), f_frsize=1))
    monkeypatch.setattr(os, "posix_fallocate", raising(error))
    with pytest.raises(StorageError, match=why) as caught:
        PageFile(tmp_path, 2, PAGE)
    assert os.listdir(tmp_path) == []
    # Nor an unnamed one that lives as long as the error is held.
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert caught.value.__traceback__ is not None
    assert not [link for link in links if link.startswith(str(tmp_path))]
