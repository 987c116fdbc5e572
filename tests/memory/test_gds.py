"""A page file seen from a GPU, through a stand-in for kvikio: the same bytes, ranges and errors as a page file's."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pagoda.errors import ConfigError, StorageError
from pagoda.memory import Arena, GpuPageFile, PageFile

PAGE = 8192


class Future:
    def __init__(self, moved: int) -> None:
        self._moved = moved

    def get(self) -> int:
        return self._moved


class CuFile:
    """kvikio's, for memory that the CPU can see: opens by path, returns futures, may move less than it was asked."""

    at_most = 1 << 30

    def __init__(self, path: Path, flags: str) -> None:
        assert flags == "r+"
        self._descriptor = os.open(path, os.O_RDWR)

    def pread(self, buf: torch.Tensor, size: int, file_offset: int) -> Future:
        return Future(os.preadv(self._descriptor, [self._part(buf, size)], file_offset))

    def pwrite(self, buf: torch.Tensor, size: int, file_offset: int) -> Future:
        return Future(os.pwritev(self._descriptor, [self._part(buf, size)], file_offset))

    def close(self) -> None:
        os.close(self._descriptor)

    def _part(self, buf: torch.Tensor, size: int) -> memoryview:
        return memoryview(buf.numpy())[: min(size, self.at_most)]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageFile]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace(CuFile=CuFile))
    with PageFile(tmp_path, 4, PAGE) as opened:
        yield opened


def random_pages(count: int) -> torch.Tensor:
    return Arena(count * PAGE).tensor(0, count * PAGE, torch.uint8).random_(0, 256)


@pytest.mark.parametrize("at_most", [1 << 30, 5000])
def test_a_gpu_and_the_cpu_see_the_same_pages(file: PageFile, at_most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuFile, "at_most", at_most)
    sent, arrived, seen = random_pages(2), random_pages(2), Arena(2 * PAGE)
    with GpuPageFile(file) as gpu:
        gpu.pwrite(1, sent)
        gpu.pread(1, arrived)
        file.preadv(1, [seen.view(0, 2 * PAGE)])
        assert torch.equal(arrived, sent)
        assert torch.equal(seen.tensor(0, 2 * PAGE, torch.uint8), sent)
        gpu.pread(2, arrived[:4096], offset=4096)
        assert torch.equal(arrived[:4096], sent[PAGE + 4096 :])


def test_what_a_page_file_refuses_is_refused(file: PageFile) -> None:
    with GpuPageFile(file) as gpu:
        with pytest.raises(ValueError, match="of a page file of 32768 bytes"):
            gpu.pread(3, random_pages(2))
        with pytest.raises(ValueError, match="multiples of 4096"):
            gpu.pwrite(0, random_pages(1)[1:])
        with pytest.raises(ValueError, match="contiguous bytes"):
            gpu.pread(0, random_pages(1).view(torch.int32))


def test_a_disk_that_fails_is_a_storage_error(file: PageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> Future:
        raise RuntimeError("cuFile: I/O error")

    with GpuPageFile(file) as gpu:
        monkeypatch.setattr(CuFile, "at_most", 100)
        with pytest.raises(StorageError, match="failed to read 8192 bytes at offset 0: end of file"):
            gpu.pread(0, random_pages(1))
        monkeypatch.setattr(gpu._handle, "pwrite", fails)
        with pytest.raises(StorageError, match="failed to write 8192 bytes at offset 8192: cuFile: I/O error"):
            gpu.pwrite(1, random_pages(1))
    file.close()
    with GpuPageFile.__new__(GpuPageFile) as gpu:
        gpu._file, gpu._handle = file, SimpleNamespace(pread=fails, close=lambda: None)
        with pytest.raises(StorageError, match="the page file is closed"):
            gpu.pread(0, random_pages(1))


def test_without_a_gpu_or_kvikio_it_says_what_is_missing(file: PageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ConfigError, match=r"needs kvikio.*pagoda-train\[gds\]"):
        GpuPageFile(file)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA GPU"):
        GpuPageFile(file)
