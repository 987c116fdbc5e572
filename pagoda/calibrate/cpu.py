"""Measures the CPU and RAM: matrix products, memory bandwidth, and the kernels and copies of the runtime's lanes."""

import time
from collections.abc import Callable
from contextlib import closing

import torch

from pagoda.calibrate.bookkeeping import measure_bookkeeping
from pagoda.calibrate.matmul import matmul_rate
from pagoda.calibrate.meter import Meter, cpu_cores
from pagoda.calibrate.streams import Sweeper, by_address, filled, roof_bf16, states_of
from pagoda.memory.ram import ram_bytes
from pagoda.optim import AdamW
from pagoda.optim.gradient_kernels import gradient_kernels
from pagoda.optim.kernels import update_kernel, warm_up
from pagoda.plan.layout import BLOCK_ELEMENTS
from pagoda.plan.placement import BOUNCE_ELEMENTS
from pagoda.runtime.device import PAST, Device
from pagoda.runtime.lanes import Lane
from pagoda.simulate.hardware import Cpu, Figure

SCALARS = AdamW().scalars(100, 0.9)
"""The scalars of some step of AdamW. Its time does not depend on them."""
_UNIT_BYTES = 32 << 20
"""Bytes of weights copied at a time."""
_HANDOVER_SIZE = 256
"""Size of products that take a few tenths of a millisecond, as the operators of a small model do."""
_HANDOVER_NUMEL = 1 << 12
_HANDOVERS = 128


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

    return _on_lane(meter, "h2d", nbytes, copy)


def _gradient_rate(meter: Meter) -> Figure:
    meter.report("storing of gradients")
    numel = meter.effort.copy_bytes // 2
    target, source = (filled(numel, torch.bfloat16, 1.0) for _ in range(2))
    block = by_address(gradient_kernels(torch.bfloat16).store_gradient, [target, source])

    def take() -> None:
        for start in range(0, numel, BOUNCE_ELEMENTS):
            block(start, min(BOUNCE_ELEMENTS, numel - start))

    return _on_lane(meter, "d2h", numel * source.element_size(), take)


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

    with closing(Lane("d2h")) as lane:
        seconds(handing=True)
        note = f"beside products of {_HANDOVER_SIZE} x {_HANDOVER_SIZE} fp32"
        return meter.difference(lambda: seconds(handing=False), lambda: seconds(handing=True), note)


def _on_lane(meter: Meter, name: str, nbytes: int, work: Callable[[], None]) -> Figure:
    """Bytes per second of `work` on one thread of a lane."""
    with closing(Lane(name)) as lane:
        return meter.rate(nbytes, lambda: lane.submit(work).wait(), "one lane thread")
