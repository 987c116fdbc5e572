"""Measures a GPU and its link to RAM."""

import torch

from pagoda.calibrate.matmul import matmul_rate
from pagoda.calibrate.meter import Meter
from pagoda.memory.cuda import CudaArena, PinnedArena
from pagoda.optim import AdamW
from pagoda.runtime.device import PAST, CudaDevice
from pagoda.simulate.hardware import Device, Figure, Link

_TOKENS = 8192
_WIDTH = 4096
_UPDATED = 64 << 20
"""Number of updated parameters, of 14 bytes each."""
_COPIED = 1 << 30


def measure_gpu(meter: Meter) -> Device:
    """All figures of the meter's GPU."""
    properties = torch.cuda.get_device_properties(meter.device)
    bf16 = matmul_rate(meter, torch.bfloat16, _TOKENS, _WIDTH)
    fp32 = matmul_rate(meter, torch.float32, _TOKENS // 4, _WIDTH)
    meter.report("memory of the GPU, and updates on it")
    return Device(
        memory_bytes=meter.reading(properties.total_memory, "all of the GPU's memory, as CUDA reports it"),
        memory_bytes_per_s=_memory_rate(meter),
        bf16=bf16,
        fp32=fp32,
        update_params_per_s=_update_rate(meter),
    )


def _memory_rate(meter: Meter) -> Figure:
    source, target = (torch.ones(_COPIED, dtype=torch.uint8, device=meter.device) for _ in range(2))
    return meter.rate(2.0 * _COPIED, lambda: target.copy_(source), "a copy, read and written")


def _update_rate(meter: Meter) -> Figure:
    rule, device = AdamW(), meter.device
    states = [torch.zeros(_UPDATED, dtype=state.dtype, device=device) for state in rule.states("bf16")]
    gradient = torch.ones(_UPDATED, dtype=torch.bfloat16, device=device)
    kernel = CudaDevice(device).update_kernel(rule, "bf16")
    note = "AdamW on the split master, Pagoda's kernel"
    return meter.rate(_UPDATED, lambda: kernel(states, gradient, rule.scalars(1)), note)


def measure_link(meter: Meter) -> Link:
    """Rates of copies from and to page-locked RAM, as the runtime copies, with one GPU."""
    meter.report("copies between RAM and the GPU")
    nbytes = meter.effort.copy_bytes
    device = CudaDevice(meter.device)
    host, gpu = PinnedArena(2 * nbytes), CudaArena(2 * nbytes, meter.device)
    down_from, up_to = (host.tensor(i * nbytes, nbytes, torch.uint8) for i in range(2))
    down_to, up_from = (gpu.tensor(i * nbytes, nbytes, torch.uint8) for i in range(2))

    def both() -> None:
        device.copy_in(down_to, down_from, PAST)
        device.copy_out(up_to, up_from, PAST)

    try:
        return Link(
            h2d_bytes_per_s=meter.rate(nbytes, lambda: device.copy_in(down_to, down_from, PAST)),
            d2h_bytes_per_s=meter.rate(nbytes, lambda: device.copy_out(up_to, up_from, PAST)),
            both_bytes_per_s=meter.rate(2.0 * nbytes, both),
        )
    finally:
        host.close()
        gpu.close()
