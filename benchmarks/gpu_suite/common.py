"""What every section measures with: the machine, the sizes, and how steps are timed."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import nn

import pagoda
from pagoda.calibrate import Effort
from training import Paged, Plain, Workload

Figures = dict[str, object]
_ACTIVATIONS = 12 << 30
_BLOCK = 1_048_573
"""Random numbers that are repeated: a prime, so that no two rows of a matrix are the same."""
WARM_UP = 3
"""Steps before any that count: one is traced, one planned for it, one finds its updates under way."""


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    model: str
    """A shape, of which sections take as many layers as they need."""
    batch_size: int
    seq_len: int
    steps: int
    few: str
    """Device memory for pages in which few of the model's units fit."""
    limited: str
    """The device's limit where the model is compared with itself unlimited."""
    ample: str
    exact_parameters: float
    """Parameters of the largest model with exact moments, and with 8-bit ones."""
    compressed_parameters: float
    compared_elements: int
    piece_bytes: int
    effort: Effort | None
    plain_layers: int | None
    """Layers of the in-memory comparison; None: as many as the GPU's memory holds."""
    predicted_layers: int
    """Layers where steps are predicted: eight models are built for that."""
    device_shares: tuple[float, ...]
    """Shares of the updates that are done on the device, each of which is tried."""


REAL = Sizes(
    model="llama-8b", batch_size=8, seq_len=2048, steps=5, few="8GiB", limited="24GiB", ample="48GiB",
    exact_parameters=24e9, compressed_parameters=40e9, compared_elements=100_000_000, piece_bytes=256 << 20,
    effort=None, plain_layers=None, predicted_layers=8, device_shares=(0.0, 0.3, 0.6),
)  # fmt: skip
SMOKE = Sizes(
    model="gpt-2x64", batch_size=1, seq_len=16, steps=2, few="24MiB", limited="28MiB", ample="40MiB",
    exact_parameters=3.4e6, compressed_parameters=3.4e6, compared_elements=5_000, piece_bytes=1 << 20,
    effort=Effort(figure_s=0.01, params=1 << 18, copy_bytes=1 << 20, tokens=32, width=64, file_bytes=1 << 24),
    plain_layers=2, predicted_layers=2, device_shares=(0.0, 0.5),
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Where the sections run."""

    sizes: Sizes
    device: torch.device
    host: str | None
    ssd: Path | None

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def workload(self) -> Workload:
        return Workload(self.sizes.model, self.sizes.batch_size, self.sizes.seq_len)

    def memory(self, device: str, **more: object) -> pagoda.Memory:
        """So much of the GPU for pages, or of an arena that stands in for one."""
        size = device if self.gpu else f"cpu:{device}"
        return pagoda.Memory(device=size, host=self.host, **more)  # type: ignore[arg-type]

    def now(self) -> float:
        """The time, once the device has done all it was given."""
        if self.gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def most_of_the_device(self) -> str:
        """All of it but what activations, and CUDA itself, need."""
        if not self.gpu:
            return self.sizes.ample
        return str(torch.cuda.get_device_properties(self.device).total_memory - _ACTIVATIONS)

    def layers_for(self, parameters: float) -> int:
        """Layers with which the model has at least so many parameters."""
        one, two = (parameters_of(replace(self.workload, layers=layers)) for layers in (1, 2))
        return max(1, -(-int(parameters - one) // (two - one)) + 1)

    def plain_layers(self) -> int:
        """Layers of the largest model that plain PyTorch trains in the GPU's memory, in which activations take a part.

        20 bytes a parameter: bf16 weight and gradient, fp32 master, its gradient and both moments.
        """
        if self.sizes.plain_layers is not None:
            return self.sizes.plain_layers
        usable = 0.8 * torch.cuda.get_device_properties(self.device).total_memory
        own = parameters_of(self.workload)
        if 20 * own <= usable:
            return self.layers_for(own)
        return self.layers_for(usable / 20) - 1


def meta(workload: Workload) -> nn.Module:
    """The model without memory."""
    with torch.device("meta"):
        return workload.build()


def parameters_of(workload: Workload) -> int:
    return sum(p.numel() for p in meta(workload).parameters())


@contextmanager
def drawn_quickly() -> Iterator[None]:
    """Initialisers repeat a block of random numbers inside: drawing billions takes torch's one thread minutes."""
    draw = torch.Tensor.normal_
    block = torch.randn(_BLOCK)

    def normal_(tensor: torch.Tensor, mean: float = 0, std: float = 1, *, generator: object = None) -> torch.Tensor:
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() <= _BLOCK:
            return draw(tensor, mean, std)
        scaled = (block * std + mean).to(tensor.dtype)
        for part in torch.split(tensor.view(-1), _BLOCK):
            part.copy_(scaled[: len(part)])
        return tensor

    torch.Tensor.normal_ = normal_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.normal_ = draw  # type: ignore[method-assign]


def timed(machine: Machine, step: Callable[[torch.Tensor], object], workload: Workload) -> list[float]:
    """Seconds of each step after those that warm up."""
    seconds = []
    for ids in islice(workload.batches(machine.device), WARM_UP + machine.sizes.steps):
        start = machine.now()
        step(ids)
        seconds.append(machine.now() - start)
    return seconds[WARM_UP:]


def plain_step_s(machine: Machine, workload: Workload) -> float:
    """Median step of plain PyTorch with everything in the device's memory."""
    with drawn_quickly():
        plain = Plain(workload, machine.device)
    seconds = timed(machine, plain.step, workload)
    del plain
    release(machine)
    return statistics.median(seconds)


def paged_figures(machine: Machine, workload: Workload, memory: pagoda.Memory) -> Figures:
    """The median step under Pagoda, what it says of itself, and whether it kept to its plan."""
    with drawn_quickly():
        paged = Paged(workload, memory)
    try:
        seconds = timed(machine, paged.step, workload)
        stats, plan = paged.optimizer.stats, pagoda.plan_of(paged.model)
        figures = throughput(workload, statistics.median(seconds)) | {
            "stall_s": dict(stats.stall_s),
            "faults": stats.faults,
            "peak_bytes": dict(stats.peak_bytes),
            "within_plan": all(peak <= plan.peak_bytes[tier] for tier, peak in stats.peak_bytes.items()),
        }
    finally:
        paged.close()
        del paged
        release(machine)
    return figures


def throughput(workload: Workload, step_s: float) -> Figures:
    """Tokens per second, and TFLOP/s at 6 N a token, which counts no recomputation."""
    parameters = parameters_of(workload)
    return {
        "parameters": parameters,
        "step_s": step_s,
        "tokens_per_s": workload.tokens / step_s,
        "tflop_per_s": 6 * parameters * workload.tokens / step_s / 1e12,
    }


def release(machine: Machine) -> None:
    """Give back what the last model had."""
    gc.collect()
    if machine.gpu:
        torch.cuda.empty_cache()
