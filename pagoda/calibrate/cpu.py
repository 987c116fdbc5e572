"""Measures the CPU and RAM: matrix products, memory bandwidth, and the kernels and copies of the runtime's lanes."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numba
import numpy as np
import torch

from pagoda.calibrate.bookkeeping import measure_bookkeeping
from pagoda.calibrate.matmul import matmul_rate
from pagoda.calibrate.meter import Meter, cpu_cores
from pagoda.config.training import Precision
from pagoda.memory.arena import Arena
from pagoda.memory.ram import ram_bytes
from pagoda.optim import AdamW
from pagoda.optim.gradient_kernels import gradient_kernels
from pagoda.optim.kernels import update_kernel
from pagoda.optim.warm import warm_up
from pagoda.plan.buffers import BLOCK_ELEMENTS, BOUNCE_ELEMENTS
from pagoda.plan.lanes import LaneName
from pagoda.runtime.device import PAST, Device
from pagoda.runtime.lanes import Lane, wait_all
from pagoda.simulate.hardware import Cpu, Figure

SCALARS = AdamW().scalars(100, 0.9)
"""The scalars of some step of AdamW. Its time does not depend on them."""
_UNIT_BYTES = 32 << 20
"""Bytes of weights copied at a time."""
_HANDOVER_SIZE = 256
"""Size of products that take a few tenths of a millisecond, as the operators of a small model do."""
_HANDOVER_NUMEL = 1 << 12
_HANDOVERS = 128
_PATTERN = 1 << 20


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def roof_bf16(high: Any, low: Any, avg: Any, avg_sq: Any, gradient: Any, mask: Any) -> None:
    """Read five streams and write four, as an update does. Its rate is what the memory gives.

    The mask is zero, so values stay the same, but LLVM cannot know that.
    """
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
        self._lane = Lane(LaneName.UPDATE, threads)

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


def measure_cpu(meter: Meter, threads: int) -> Cpu:
    """All figures of a CPU. `threads` is the number of threads that the runtime uses for updates."""
    effort = meter.effort
    memory, update = _update_rates(meter, threads)
    return Cpu(
        cores=cpu_cores(),
        memory_bytes=meter.reading(ram_bytes(), "all RAM, as the system reports it"),
        memory_bytes_per_s=memory,
        update_params_per_s=update,
        bf16=matmul_rate(meter, torch.bfloat16, effort.tokens, effort.width),
        fp32=matmul_rate(meter, torch.float32, effort.tokens, effort.width),
        copy_bytes_per_s=_copy_rate(meter),
        gradient_bytes_per_s=_gradient_rate(meter),
        task_switch_s=_handover(meter),
        parameter_s=measure_bookkeeping(meter),
    )


def _update_rates(meter: Meter, threads: int) -> tuple[Figure, Figure]:
    """Bytes per second of RAM, and parameters per second of AdamW on the split master."""
    meter.report("memory bandwidth and updates")
    warm_up(AdamW(), "bf16")
    params = meter.effort.params
    streams = [*states_of("bf16", params), filled(params, torch.bfloat16, 1.0)]
    # The kernel reads every stream, and writes all but the gradient.
    touched = params * (2 * sum(stream.element_size() for stream in streams) - streams[-1].element_size())
    with closing(Sweeper(params, BLOCK_ELEMENTS, threads)) as sweeper:
        return (
            meter.rate(touched, sweeper.arrays(roof_bf16, streams), "reads and writes of an update's streams"),
            meter.rate(
                params,
                sweeper(by_address(update_kernel(AdamW(), "bf16"), streams, *SCALARS)),
                f"AdamW on {params >> 20} Mi parameters, {threads} threads",
            ),
        )


def _copy_rate(meter: Meter) -> Figure:
    meter.report("copies to a device that is RAM")
    nbytes = meter.effort.copy_bytes
    source, target = (filled(nbytes // 4, torch.float32, 1.0).view(torch.uint8) for _ in range(2))
    device = Device()

    def copy() -> None:
        for into, out_of in zip(target.split(_UNIT_BYTES), source.split(_UNIT_BYTES), strict=True):  # type: ignore[no-untyped-call]
            device.copy_in(into, out_of, PAST).synchronize()

    return _on_lane(meter, LaneName.H2D, nbytes, copy)


def _gradient_rate(meter: Meter) -> Figure:
    meter.report("storing of gradients")
    numel = meter.effort.copy_bytes // 2
    target, source = (filled(numel, torch.bfloat16, 1.0) for _ in range(2))
    block = by_address(gradient_kernels(torch.bfloat16).store_gradient, [target, source])

    def take() -> None:
        for start in range(0, numel, BOUNCE_ELEMENTS):
            block(start, min(BOUNCE_ELEMENTS, numel - start))

    return _on_lane(meter, LaneName.D2H, numel * source.element_size(), take)


def _handover(meter: Meter) -> Figure:
    """Time that a product loses when a lane's thread does a small piece of work at the same time."""
    meter.report("work handed to other threads")
    left = torch.ones(_HANDOVER_SIZE, _HANDOVER_SIZE)
    into, gradient = (filled(_HANDOVER_NUMEL, torch.bfloat16, 1.0) for _ in range(2))
    store = gradient_kernels(torch.bfloat16).store_gradient

    def piece() -> None:
        store(into.data_ptr(), gradient.data_ptr(), _HANDOVER_NUMEL)

    def seconds(handing: bool) -> float:
        start = time.perf_counter()
        for _ in range(_HANDOVERS):
            left @ left
            if handing:
                lane.submit(piece)
        return (time.perf_counter() - start) / _HANDOVERS

    with closing(Lane(LaneName.D2H)) as lane:
        seconds(handing=True)
        note = f"beside products of {_HANDOVER_SIZE} x {_HANDOVER_SIZE} fp32"
        return meter.difference(lambda: seconds(handing=False), lambda: seconds(handing=True), note)


def _on_lane(meter: Meter, name: str, nbytes: int, work: Callable[[], None]) -> Figure:
    """Bytes per second of `work` on one thread of a lane."""
    with closing(Lane(name)) as lane:
        return meter.rate(nbytes, lambda: lane.submit(work).wait(), "one lane thread")
