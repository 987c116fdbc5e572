"""The states that an update streams through memory, and plain kernels that touch the same bytes but compute nothing.

The rate of these kernels is what the memory gives. No update can be faster.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numba
import numpy as np
import torch

from pagoda.config.training import Precision
from pagoda.memory.arena import Arena
from pagoda.optim import AdamW
from pagoda.runtime.lanes import Lane, wait_all

_PATTERN = 1 << 20


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def roof_bf16(high: Any, low: Any, avg: Any, avg_sq: Any, gradient: Any, mask: Any) -> None:
    """Read five streams and write four. The mask is zero, so values stay the same, but LLVM cannot know that."""
    for i in range(len(gradient)):
        x = gradient[i] & mask
        high[i] ^= x
        low[i] ^= x
        avg[i] ^= np.int32(x)
        avg_sq[i] ^= np.int32(x)


class Sweeper:
    """Runs a kernel over all parameters, block by block, on a lane like the one for updates."""

    def __init__(self, params: int, block: int, threads: int) -> None:
        self.params, self.block = params, block
        self._lane = Lane("update", threads)

    def __call__(self, block_fn: Callable[[int, int], object]) -> Callable[[], None]:
        """A function that runs `block_fn(first element, elements)` over all blocks and returns when they have ended."""

        def run(start: int) -> None:
            block_fn(start, min(self.block, self.params - start))

        def sweep() -> None:
            wait_all([self._lane.submit(partial(run, start)) for start in range(0, self.params, self.block)])

        return sweep

    def arrays(self, kernel: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """A sweep of a plain kernel that takes each tensor's block as integers, and a mask of zero."""
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
        views = [tensor.view(integers[tensor.element_size()]).numpy() for tensor in tensors]
        mask = views[-1].dtype.type(0)
        return self(lambda start, n: kernel(*(view[start : start + n] for view in views), mask))

    def close(self) -> None:
        """Join the lane's threads."""
        self._lane.close()


def by_address(kernel: Callable[..., Any], tensors: Sequence[torch.Tensor], *scalars: float) -> Callable[..., None]:
    """`block(first element, elements)`, which calls a kernel with the address of each tensor's block, the number of
    elements, and scalars."""

    def block(start: int, n: int) -> None:
        kernel(*(tensor.data_ptr() + start * tensor.element_size() for tensor in tensors), n, *scalars)

    return block


def filled(numel: int, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """A tensor of shape [numel] from an arena, filled with repeated random values. Ordinary numbers suffice for
    timing."""
    tensor = Arena(numel * dtype.itemsize).tensor(0, numel, dtype)
    generator = torch.Generator().manual_seed(0)
    pattern = (torch.randn(min(numel, _PATTERN), generator=generator) * scale).to(dtype)
    for start in range(0, numel, _PATTERN):
        tensor[start : start + _PATTERN] = pattern[: numel - start]
    return tensor


def states_of(precision: Precision, params: int) -> list[torch.Tensor]:
    """AdamW's states, each of shape [params], in the order in which its kernel takes them."""
    scales = {"weight": 0.02, "weight_low": 1e4, "exp_avg": 1e-3, "exp_avg_sq": 1e-3}
    tensors = [filled(params, spec.dtype, scales[spec.name]) for spec in AdamW().states(precision)]
    tensors[-1].abs_()
    return tensors
