"""CUDA memory: an arena on a GPU, and host RAM from and to which a GPU can copy by itself."""

import torch

from pagoda.errors import BudgetError, ConfigError
from pagoda.memory.arena import FRESH_USE_COUNT, Arena, storage_use_count
from pagoda.memory.sizes import format_bytes


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

    def poison(self, offset: int, nbytes: int) -> None:
        """Fill with 0xFF, after all work that is queued on the current stream."""
        self._memory_with(offset, nbytes)[offset : offset + nbytes].fill_(0xFF)


class PinnedArena(Arena):
    """An `Arena` with page-locked RAM of exactly this size, so that a GPU copies from and to it at the link's rate.

    torch rounds its own pinned allocations up to a power of two (pytorch issue 95823).
    """

    def __init__(self, nbytes: int) -> None:
        """Raises like `Arena`, and BudgetError if the system refuses to lock that much."""
        super().__init__(nbytes)
        error = torch.cuda.cudart().cudaHostRegister(self.address, nbytes, 0)  # type: ignore[no-untyped-call]
        self._pinned = int(error) == 0
        if not self._pinned:
            raise BudgetError(
                f"CUDA could not page-lock {format_bytes(nbytes)} of RAM (error {int(error)}). Lower memory.host, or "
                "raise the limit on locked memory (ulimit -l).",
                tier="host",
                needed_bytes=nbytes,
            )

    def close(self) -> None:
        """Unlock the memory, and free it as soon as no tensor or view of it is alive. Idempotent."""
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]
        super().close()
