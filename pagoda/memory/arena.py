"""The bytes of a RAM tier: one mapping of exactly the size asked for."""

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Any

import torch

from pagoda.errors import BudgetError, ConfigError
from pagoda.memory.sizes import format_bytes

HUGE_PAGES_FROM_BYTES = 4 * 1024 * 1024
"""Arenas of at least this many bytes ask the kernel for huge pages. Direct I/O needs them: the kernel pins and lists
the memory of a transfer page by page, and reads and writes of 4 MiB that reached 3.8 GB/s in huge pages reached only
1.2 GB/s in pages of 4 KiB (two threads each way, 2 vCPU, a virtual drive)."""


class Arena:
    """`nbytes` of private anonymous memory, page-aligned, never rounded up, handed out as tensors and views.

    torch rounds pinned allocations up to a power of two (pytorch issue 95823) and aligns `torch.empty` to
    64 bytes only. This mapping is exact, fits direct I/O, and can be registered with CUDA (`address`).

    Physical memory is taken at first touch. With huge pages that happens 2 MiB at a time, inside the mapping
    only: first touch is several times faster, the resident size never passes `nbytes`, and a page of 4 MiB
    whose first byte alone is written costs 2 MiB instead of 4 KiB. Frames are filled whole, so that is cheap.

    Forked children do not get the mapping (reading it there crashes). Else every write after a fork (say, of
    a DataLoader worker) would copy its page, so training state could double, and direct I/O in flight during
    the fork could be corrupted (open(2)).

    Thread-safe, as far as callers keep to their own bytes.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises ConfigError when `nbytes` is below 1, BudgetError when the system will not map that much."""
        if nbytes < 1:
            raise ConfigError(f"an arena needs at least 1 byte, not {nbytes}")
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise BudgetError(
                f"the system refused to map {format_bytes(nbytes)} of memory: {error}; "
                "give this tier less, or raise the limit (ulimit -v, vm.overcommit_memory)"
            ) from error
        mapping.madvise(mmap.MADV_DONTFORK)
        if nbytes >= HUGE_PAGES_FROM_BYTES:
            # A kernel built without huge pages refuses: slower first touch, nothing else.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
        """Where the first byte is, for cudaHostRegister and alignment checks."""
        self._memory: Any = mapping
        """What tensors and views are made of; None once the arena is closed."""
        _mappings.add(mapping)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements of `dtype` at byte `offset`, shape [numel], with a storage object of their OWN.

        Two tensors over the same bytes share memory but not a storage, so `storage_use_count` of one tells
        who holds that one. Raises ValueError when `offset` is not a multiple of the element size, or the
        elements do not lie inside the arena, or the arena is closed.
        """
        memory = self._memory_with(offset, numel * dtype.itemsize, dtype)
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes [offset, offset + nbytes), writable, for `preadv` and `pwritev`.

        Raises ValueError when they do not lie inside the arena, or the arena is closed.
        """
        return memoryview(self._memory_with(offset, nbytes))[offset : offset + nbytes]

    def poison(self, offset: int, nbytes: int) -> None:
        """Fill [offset, offset + nbytes) with 0xFF: NaN in fp16, bf16, fp32 and fp64, -1 in signed ints.

        Releases the GIL. Raises ValueError as `view` does.
        """
        self._memory_with(offset, nbytes)
        ctypes.memset(self.address + offset, 0xFF, nbytes)

    def close(self) -> None:
        """Give the memory back as soon as no tensor or view of it is alive. Idempotent.

        Not before: torch does not pin the mapping it reads, so unmapping under a live tensor would crash the
        process. Each tensor and view holds a reference to the mapping instead, and the last one unmaps it.
        """
        self._memory = None

    def _memory_with(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> Any:
        """All the memory. Raises ValueError unless these bytes lie in it, aligned to the dtype."""
        if self._memory is None:
            raise ValueError("the arena is closed")
        if offset < 0 or nbytes < 1 or offset + nbytes > self.nbytes:
            raise ValueError(f"asked for {nbytes} bytes at offset {offset} of an arena of {self.nbytes} bytes")
        if offset % dtype.itemsize:
            raise ValueError(f"offset {offset} is not aligned to {dtype}, which has {dtype.itemsize} bytes")
        return self._memory


_mappings: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()


def _keep_mappings() -> None:
    """In a forked child: never unmap arenas. The child has none, and other memory may lie at their addresses."""
    for mapping in _mappings:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_keep_mappings)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, in its own layout's order of elements."""
    flat: memoryview = tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return flat


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many references keep `tensor`'s storage alive, including the one that this call takes.

    A tensor that nobody else holds reads `FRESH_USE_COUNT`. Each further live tensor over the same storage
    (a view, a `detach()`, a `Parameter`, a `param.data`) adds one, whether Python or the autograd graph holds
    it. Views by `Arena.view` are no tensors and add nothing.

    It counts tensors, not names: another holder of the SAME tensor adds nothing, and neither does autograd when
    it saves that very tensor. So keep the lease's own tensor private and hand out views of it only; then a
    count of `FRESH_USE_COUNT` proves that no tensor elsewhere reads the frames.
    """
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


FRESH_USE_COUNT = storage_use_count(torch.frombuffer(bytearray(8), dtype=torch.uint8))
"""What `storage_use_count` reads for a tensor that nobody else holds; measured: torch promises no value."""
