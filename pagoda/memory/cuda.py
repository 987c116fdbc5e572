"""CUDA memory: an arena on a GPU, and page-locked RAM, which a GPU copies without the CPU."""

import ctypes
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import torch

from pagoda.errors import BudgetError, ConfigError
from pagoda.memory.arena import FRESH_USE_COUNT, Arena, storage_use_count
from pagoda.memory.sizes import format_bytes
from pagoda.process import forks

REGISTERED_BYTES = 64 << 30
"""The most bytes that one call page-locks. Drivers of the 580 series fail from 512 GiB on."""


class CudaArena(Arena):
    """`nbytes` of a GPU's memory, allocated at once, with the contract of `Arena`, except that it has no views.

    `close` returns the memory to torch at once. A tensor does not keep the arena alive, and must not outlive it.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises ConfigError if `nbytes` is below 1, and BudgetError if the GPU has too little free memory."""
        if nbytes < 1:
            raise ConfigError(f"an arena needs at least 1 byte, not {nbytes}")
        try:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise BudgetError(
                f"{device} cannot hold an arena of {format_bytes(nbytes)}: {format_bytes(free)} of "
                f"{format_bytes(total)} are free. Lower memory.device, which also leaves room for activations.",
                tier="device",
                needed_bytes=nbytes,
            ) from error
        self.nbytes = nbytes
        self.address = self._memory.data_ptr()
        if storage_use_count(self.tensor(0, 1, torch.uint8)) != FRESH_USE_COUNT:
            raise ConfigError(
                f"torch {torch.__version__} counts references to storages on {device} differently than on the CPU, so "
                "Pagoda cannot tell when weights there are no longer used. Use a tested version of torch."
            )

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        device = self._memory_with(offset, nbytes, dtype).device
        storage = torch._C._construct_storage_from_data_pointer(self.address + offset, device, nbytes)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))

    @property
    def resident_bytes(self) -> int:
        return 0

    def poison(self, offset: int, nbytes: int) -> None:
        """Fill with 0xFF, after all work that is queued on the current stream."""
        self._memory_with(offset, nbytes)[offset : offset + nbytes].fill_(0xFF)


class PinnedArena(Arena):
    """An `Arena` of exactly this size that can be page-locked, so that a GPU copies from and to it at the link's rate.

    torch rounds its own pinned allocations up to a power of two (pytorch issue 95823).
    """

    def __init__(self, nbytes: int, locked: bool = True) -> None:
        """Raises like `Arena`, and like `lock` if it is `locked` at once."""
        super().__init__(nbytes)
        self._unlock: Callable[[], object] = lambda: None
        if locked:
            try:
                self.lock()
            except BudgetError:
                self.close()
                raise

    def lock(self) -> None:
        """Page-lock all of it. Raises BudgetError if the system refuses to lock that much."""
        self.populate()
        nbytes, cudart = self.nbytes, torch.cuda.cudart()  # type: ignore[no-untyped-call]
        locked: list[int] = []
        self._unlock = unlock = weakref.finalize(self, _unlock, cudart, locked, forks())
        """CUDA must let go of memory before it is unmapped, also if nobody closes the arena after an error."""
        unlock.atexit = False
        for start in range(0, nbytes, REGISTERED_BYTES):
            address = self.address + start
            error = int(cudart.cudaHostRegister(address, min(REGISTERED_BYTES, nbytes - start), 0))
            if error:
                # Without this call, the next launch of any kernel would raise the error. torch does not name the
                # function, but its usual builds load CUDA's symbols for the whole process.
                with suppress(AttributeError):
                    ctypes.CDLL(None).cudaGetLastError()
                self.unlock()
                raise BudgetError(
                    f"CUDA could not page-lock {format_bytes(nbytes)} of RAM (error {error}). Lower memory.host, or "
                    "raise the limit on locked memory (ulimit -l).",
                    tier="host",
                    needed_bytes=nbytes,
                )
            locked.append(address)
            if start:
                _seams.add(address)

    def unlock(self) -> None:
        self._unlock()

    def close(self) -> None:
        """Unlock the memory, and free it as soon as no tensor or view of it is alive. Idempotent."""
        self.unlock()
        super().close()


_seams: set[int] = set()
"""Addresses at which one registration ends and the next one of the same arena begins."""


def _unlock(cudart: object, locked: list[int], since: int) -> None:
    """Unlock memory, except in a forked child, which has neither the memory nor CUDA. `since`: `forks()` when it was
    locked."""
    if since == forks():
        for address in locked:
            _seams.discard(address)
            cudart.cudaHostUnregister(address)  # type: ignore[attr-defined]


def copy_async(target: torch.Tensor, source: torch.Tensor) -> None:
    """Start a copy between contiguous tensors on the current stream.

    CUDA refuses a copy across two registrations of page-locked memory. So it becomes one copy for each.
    """
    if not _seams:
        target.copy_(source, non_blocking=True)
        return
    host = source if target.is_cuda else target
    first, end = host.data_ptr(), host.data_ptr() + host.nbytes
    cuts = sorted((seam - first) // host.itemsize for seam in tuple(_seams) if first < seam < end)
    for start, stop in pairwise((0, *cuts, host.numel())):
        target.view(-1)[start:stop].copy_(source.view(-1)[start:stop], non_blocking=True)
