"""The bytes of a RAM tier: one mapping of exactly the requested size."""

import contextlib
import ctypes
import errno
import mmap
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from pagoda.errors import BudgetError, ConfigError
from pagoda.memory.ram import free_ram
from pagoda.memory.sizes import format_bytes

HUGE_PAGES_FROM_BYTES = 4 * 1024 * 1024
"""Arenas of at least this size request huge pages from the kernel. Direct I/O needs them, because the kernel pins and
lists the memory of a transfer page by page. Reads and writes of 4 MiB reached 3.8 GB/s with huge pages, but only 1.2
GB/s with pages of 4 KiB (two threads each way, 2 vCPU, a virtual drive)."""
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""mmap(2). Python names it from 3.13 on; this is its value on x86 and ARM."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), from Linux 5.14 on."""
_NO_SUCH_ADVICE = (errno.EINVAL, errno.ENOSYS, errno.EPERM)
_PIECE_BYTES = 64 * 1024 * 1024
"""Memory that one thread populates at once."""
_GROWTH_S = 10.0
"""How long to wait for RAM for the next pieces, on a machine whose RAM grows on demand."""


class Arena:
    """`nbytes` of private anonymous memory, page-aligned and never rounded up, provided as tensors and views.

    torch rounds pinned allocations up to a power of two (pytorch issue 95823) and aligns `torch.empty` to only 64
    bytes. This mapping is exact, suits direct I/O, and can be registered with CUDA (`address`).

    Physical memory is allocated at first touch. With huge pages that happens 2 MiB at a time, inside the mapping only.
    First touch is then several times faster, and the resident size never exceeds `nbytes`. A page of 4 MiB of which
    only the first byte is written costs 2 MiB instead of 4 KiB, but frames are filled completely, so this costs little.

    Forked children do not get the mapping, and reading it there crashes. Otherwise every write after a fork (for
    example of a DataLoader worker) would copy its page. Training state could double, and direct I/O in flight during
    the fork could be corrupted (open(2)).

    Thread-safe if callers use disjoint bytes.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises ConfigError if `nbytes` is below 1, and BudgetError if the system refuses to map that much."""
        if nbytes < 1:
            raise ConfigError(f"an arena needs at least 1 byte, not {nbytes}")
        mapping, within_ram = _mapped(nbytes)
        mapping.madvise(mmap.MADV_DONTFORK)
        if nbytes >= HUGE_PAGES_FROM_BYTES:
            # A kernel built without huge pages refuses. That only makes the first touch slower.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
        """The address of the first byte, for cudaHostRegister and alignment checks."""
        self._memory: Any = mapping
        """The memory behind tensors and views. None once the arena is closed."""
        _mappings.add(mapping)
        if not within_ram:
            self.populate(growing=True)

    def populate(self, growing: bool = False) -> None:
        """Take all the memory from the system now, in pieces, on all cores. Its contents stay.

        First touch by one thread is slow on virtual machines: 0.1 to 0.3 GB/s where the host has no free memory ready.
        `growing`: wait before each round of pieces until that much RAM is free. Otherwise a machine without it would
        kill the process. Raises BudgetError if there is not enough.
        """
        cores = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(cores) as pool:
            for start in range(0, self.nbytes, cores * _PIECE_BYTES):
                stop = min(self.nbytes, start + cores * _PIECE_BYTES)
                if growing:
                    _wait_for_ram(start, stop, self.nbytes)
                pieces = range(start, stop, _PIECE_BYTES)
                list(pool.map(lambda at, stop=stop: _touch(self.address + at, min(_PIECE_BYTES, stop - at)), pieces))

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements of `dtype` at byte `offset`, shape [numel], with a storage object of their own.

        Two tensors over the same bytes share memory but not a storage, so the `storage_use_count` of one tells who
        holds that one. Raises ValueError if `offset` is not a multiple of the element size, the elements are not inside
        the arena, or the arena is closed.
        """
        memory = self._memory_with(offset, numel * dtype.itemsize, dtype)
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes [offset, offset + nbytes), writable, for `preadv` and `pwritev`.

        Raises ValueError if they are not inside the arena, or the arena is closed.
        """
        return memoryview(self._memory_with(offset, nbytes))[offset : offset + nbytes]

    def poison(self, offset: int, nbytes: int) -> None:
        """Fill [offset, offset + nbytes) with 0xFF: NaN in fp16, bf16, fp32 and fp64, -1 in signed ints.

        Releases the GIL. Raises ValueError like `view`.
        """
        self._memory_with(offset, nbytes)
        ctypes.memset(self.address + offset, 0xFF, nbytes)

    def lock(self) -> None:
        """Page-lock the memory, if copies to a device need that. Its contents stay."""

    def unlock(self) -> None:
        """Undo `lock`."""

    def discard(self, offset: int, nbytes: int) -> None:
        """Return the memory of [offset, offset + nbytes), whose contents are lost, to the system. Both are multiples of
        4096. The arena must not be locked. Raises ValueError like `view`."""
        self._memory_with(offset, nbytes).madvise(mmap.MADV_DONTNEED, offset, nbytes)

    @property
    def resident_bytes(self) -> int:
        """Bytes of it that are in RAM now. 0 once it is closed."""
        if self._memory is None:
            return 0
        pages = np.zeros(-(-self.nbytes // mmap.PAGESIZE), np.uint8)
        address, size = ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes)
        if _libc.mincore(address, size, ctypes.c_void_p(pages.ctypes.data)) != 0:
            return self.nbytes
        return min(self.nbytes, int((pages & 1).sum(dtype=np.int64)) * mmap.PAGESIZE)

    def close(self) -> None:
        """Free the memory as soon as no tensor or view of it is alive. Idempotent.

        It cannot be freed earlier: torch does not pin the mapping that it reads, so unmapping under a live tensor would
        crash the process. Instead, each tensor and view holds a reference to the mapping, and the last one unmaps it.
        """
        self._memory = None

    def _memory_with(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> Any:
        """The whole memory. Raises ValueError unless these bytes are inside it and aligned to the dtype."""
        if self._memory is None:
            raise ValueError("the arena is closed")
        if offset < 0 or nbytes < 1 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at offset {offset} are not inside an arena of {self.nbytes} bytes")
        if offset % dtype.itemsize:
            raise ValueError(f"offset {offset} is not a multiple of the {dtype.itemsize} bytes of {dtype}")
        return self._memory


def _mapped(nbytes: int) -> tuple[mmap.mmap, bool]:
    """A new mapping, and whether the system's RAM is large enough for it now.

    Linux refuses a mapping that is larger than all RAM and swap. A machine whose RAM grows on demand can get more: it
    maps it with MAP_NORESERVE. Raises BudgetError.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with contextlib.suppress(OSError, OverflowError):
        return mmap.mmap(-1, nbytes, flags=flags), True
    try:
        return mmap.mmap(-1, nbytes, flags=flags | _MAP_NORESERVE), False
    except (OSError, OverflowError) as error:
        raise BudgetError(
            f"the system refused to map {format_bytes(nbytes)} of memory: {error}; "
            "give this tier less, or raise the limit (ulimit -v, vm.overcommit_memory)"
        ) from error


def _wait_for_ram(start: int, stop: int, nbytes: int) -> None:
    """Wait until there is RAM for bytes [start, stop) of an arena. Raises BudgetError if it does not come."""
    end = time.monotonic() + _GROWTH_S
    while (free := free_ram()) < stop - start:
        if time.monotonic() > end:
            raise BudgetError(
                f"{format_bytes(nbytes)} of memory is more than this machine has: {format_bytes(start)} are taken, and "
                f"{format_bytes(free)} are free. Give this tier less."
            )
        time.sleep(0.05)


def _touch(address: int, nbytes: int) -> None:
    """Take memory from the system, and keep its contents. Releases the GIL."""
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code not in _NO_SUCH_ADVICE:
        raise BudgetError(
            f"the system could not provide {format_bytes(nbytes)} of memory that it had mapped: {os.strerror(code)}; "
            "give this tier less"
        )
    first_bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))[:: mmap.PAGESIZE]
    np.bitwise_or(first_bytes, 0, out=first_bytes)


_libc = ctypes.CDLL(None, use_errno=True)
_mappings: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()


def _keep_mappings() -> None:
    """In a forked child, never unmap arenas. The child has no mapping, and other memory may be at these addresses."""
    for mapping in _mappings:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_keep_mappings)


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """One memcpy, without the GIL, between contiguous CPU tensors of as many bytes. torch's copy_ would start threads
    that then spin while compute runs."""
    assert target.nbytes == source.nbytes
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, in the element order of its layout."""
    flat: memoryview = tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return flat


def storage_use_count(tensor: torch.Tensor) -> int:
    """The number of references that keep `tensor`'s storage alive, including the one that this call takes.

    For a tensor without other holders it is `FRESH_USE_COUNT`. Each further live tensor over the same storage (a view,
    a `detach()`, a `Parameter`, a `param.data`) adds one, whether Python or the autograd graph holds it. Views from
    `Arena.view` are not tensors and add nothing.

    It counts tensors, not names: another holder of the SAME tensor adds nothing, and neither does autograd when it
    saves that tensor itself. So keep the lease's own tensor private and give out only views of it. Then a count of
    `FRESH_USE_COUNT` proves that no tensor elsewhere reads the frames.
    """
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


FRESH_USE_COUNT = storage_use_count(torch.frombuffer(bytearray(8), dtype=torch.uint8))
"""The `storage_use_count` of a tensor without other holders. Measured, because torch promises no value."""
