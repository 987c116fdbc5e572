"""GPU Direct Storage: a page file whose bytes go between the drive and a GPU's memory without passing through RAM."""

from types import TracebackType
from typing import Any

import torch

from pagoda.errors import ConfigError
from pagoda.memory.page import PAGE_ALIGN
from pagoda.memory.ssd import PageFile


class GpuPageFile:
    """The slots of a `PageFile`, read into and written from tensors in a GPU's memory, by kvikio.

    The contract is the page file's: the same slots, ranges, alignment and errors. It stays the owner of space and name,
    and has to be closed after this. kvikio starts several transfers for a large tensor, and falls back to copies
    through RAM where the system has no GPU Direct Storage.

    Thread-safe. Content is not hashed: the hashes of pages are computed in RAM.
    """

    def __init__(self, file: PageFile) -> None:
        """Raises ConfigError where there is no GPU or no kvikio, StorageError where kvikio cannot open the file."""
        if not torch.cuda.is_available():
            raise ConfigError("GPU Direct Storage needs a CUDA GPU, and torch finds none here: use RAM (PageFile).")
        try:
            import kvikio
        except ImportError as error:
            raise ConfigError(
                f"GPU Direct Storage needs kvikio, which cannot be imported ({error}): pip install 'pagoda-train[gds]'."
            ) from error
        self._file = file
        try:
            self._handle: Any = kvikio.CuFile(file.system_path, "r+")
        except (OSError, RuntimeError) as error:
            raise file.failed("open for a GPU", 0, file.nbytes, str(error)) from error

    def pread(self, page: int, into: torch.Tensor, offset: int = 0) -> None:
        """Fill `into` (uint8, contiguous) from byte `offset` of slot `page` on; returns when the bytes are there.

        Raises as `PageFile.pread` does.
        """
        self._transfer("read", self._handle.pread, page, into, offset)

    def pwrite(self, page: int, data: torch.Tensor, offset: int = 0) -> None:
        """Write `data` (uint8, contiguous) at byte `offset` of slot `page` on, once the current stream has made it.

        Raises as `PageFile.pwrite` does; safe from a loss of power after the page file's `sync`.
        """
        self._transfer("write", self._handle.pwrite, page, data, offset)

    def close(self) -> None:
        """Have done with kvikio; the page file stays open. Idempotent."""
        self._handle.close()

    def __enter__(self) -> "GpuPageFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _transfer(self, verb: str, call: Any, page: int, tensor: torch.Tensor, offset: int) -> None:
        if tensor.dtype is not torch.uint8 or not tensor.is_contiguous():
            raise ValueError(f"asked to {verb} a tensor of {tensor.dtype}: give contiguous bytes (uint8)")
        bytes_ = tensor.view(-1)
        position = page * self._file.page_bytes + offset
        self._file.check_transfer(verb, position, [(bytes_.data_ptr(), bytes_.nbytes)])
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()  # kvikio knows nothing of torch's streams
        done = 0
        while done < bytes_.nbytes:
            left = bytes_.nbytes - done
            try:
                moved = call(bytes_[done:], size=left, file_offset=position + done).get()
            except (OSError, RuntimeError) as error:
                raise self._file.failed(verb, position + done, left, str(error)) from error
            moved -= 0 if moved == left else moved % PAGE_ALIGN  # go on from the last whole block
            if moved <= 0:
                cause = "end of file" if verb == "read" else "the disk took no more"
                raise self._file.failed(verb, position + done, left, f"{cause} after {done} bytes")
            done += moved
