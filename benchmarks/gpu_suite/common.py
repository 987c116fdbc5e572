"""What every section measures with: the machine, the sizes, and how steps are timed."""

import gc
import gzip
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import nn

import pagoda
from pagoda.calibrate.meter import Effort
from pagoda.calibrate.model import drop_gradient
from pagoda.forecast.chrome_trace import chrome_trace
from training import Paged, Plain, Workload

Figures = dict[str, object]
Named = Iterator[tuple[str, object]]
"""Figures with their names, as they are measured."""
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
    batch_sizes: tuple[int, ...]
    """Batches of one model, one after another."""
    few: str
    """Device memory for pages in which few of the model's units fit."""
    homes: str
    """Device memory that is home to about half of the model."""
    homes_host: str
    """RAM for the other half."""
    layers_in_ram: int
    """Layers of the model of which RAM holds all states."""
    host: str
    """Most RAM for pages."""
    few_layers: int
    """Layers where a few suffice."""
    limited: str
    """Device memory for pages that holds fewer weights than the model has."""
    limited_parameters: float
    same_few: str
    """Device memory for pages in which few of two layers fit, that is home to some of them, and that holds all."""
    same_homes: str
    ample: str
    exact_parameters: float
    """Parameters of the largest model with exact moments, and with 8-bit ones."""
    compressed_parameters: float
    compared_elements: int
    updated_elements: tuple[int, ...]
    """Parameters of updates on the device that are timed."""
    piece_bytes: int
    pinned_gib: tuple[float, ...]
    """RAM that is page-locked, more and more."""
    effort: Effort | None
    plain_layers: int | None
    """Layers of the in-memory comparison; None: as many as the GPU's memory holds."""
    device_shares: tuple[float, ...]
    """Shares of the updates that are done on the device, each of which is tried."""


REAL = Sizes(
    model="llama-8b", batch_size=4, seq_len=2048, steps=5, batch_sizes=(8, 4, 2), few="6GiB", homes="52GiB",
    homes_host="60GiB", layers_in_ram=24, host="96GiB", few_layers=8, limited="22GiB", limited_parameters=12e9,
    same_few="2560MiB", same_homes="12GiB", ample="48GiB", exact_parameters=12e9, compressed_parameters=20e9,
    compared_elements=16_000_000, updated_elements=(1 << 20, 256 << 20), piece_bytes=256 << 20,
    pinned_gib=(1, 4, 16, 64), effort=None, plain_layers=None, device_shares=(0.0, 0.3, 0.6),
)  # fmt: skip
SMOKE = Sizes(
    model="gpt-2x64", batch_size=2, seq_len=16, steps=2, batch_sizes=(2, 1), few="24MiB", homes="60MiB",
    homes_host="256MiB", layers_in_ram=2, host="256MiB", few_layers=2, limited="28MiB", limited_parameters=3.4e6,
    same_few="24MiB", same_homes="40MiB", ample="40MiB", exact_parameters=3.4e6, compressed_parameters=3.4e6,
    compared_elements=5_000, updated_elements=(1 << 10,), piece_bytes=1 << 20, pinned_gib=(1 / 64, 1 / 32),
    effort=Effort(figure_s=0.01, params=1 << 18, copy_bytes=1 << 20, tokens=32, width=64, file_bytes=1 << 24),
    plain_layers=2, device_shares=(0.0, 0.5),
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Where the sections run."""

    sizes: Sizes
    device: torch.device
    host: str | None
    ssd: Path | None
    traces: Path | None = None
    """A directory for a timeline of each run."""

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def workload(self) -> Workload:
        return Workload(self.sizes.model, self.sizes.batch_size, self.sizes.seq_len)

    @property
    def in_ram(self) -> Workload:
        """The workload with as many layers as RAM holds."""
        return replace(self.workload, layers=self.sizes.layers_in_ram)

    def memory(self, device: str, host: str | None = None, **more: object) -> pagoda.Memory:
        """So much of the GPU for pages, or of an arena that stands in for one, and of RAM, unless the user set that."""
        size = device if self.gpu else f"cpu:{device}"
        return pagoda.Memory(device=size, host=self.host or host or self.sizes.host, **more)  # type: ignore[arg-type]

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
def deterministic() -> Iterator[None]:
    """Inside, torch's kernels repeat every bit. Nothing may have been multiplied before on the GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def drawn_quickly() -> Iterator[None]:
    """Initialisers repeat a block of random numbers inside: drawing billions takes torch's one thread minutes."""
    draw = torch.Tensor.normal_
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))

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


def bounds(machine: Machine, workload: Workload, batch_sizes: Iterable[int]) -> Named:
    """Forward and backward with all weights on the device, without any update, by tokens: no step is shorter."""
    yield from _bounds(machine, workload, batch_sizes)
    release(machine)


def _bounds(machine: Machine, workload: Workload, batch_sizes: Iterable[int]) -> Named:
    with machine.device:
        model = workload.build(workload.checkpointing).to(workload.dtype).train()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop_gradient)

    def backward(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    for size in batch_sizes:
        now = replace(workload, batch_size=size)
        try:
            yield f"bound, {now.tokens} tokens", throughput(now, statistics.median(timed(machine, backward, now)))
        except torch.OutOfMemoryError as error:
            yield f"bound, {now.tokens} tokens", {"out_of_memory": str(error)[:300]}


def paged_runs(
    machine: Machine,
    workload: Workload,
    memory: pagoda.Memory,
    batch_sizes: Iterable[int] = (),
    rule: pagoda.AdamW | None = None,
) -> Named:
    """A model under Pagoda: its plan, and for each batch the median step, what Pagoda says of the last one, and whether
    it kept to its plan."""
    start = time.perf_counter()
    with drawn_quickly():
        paged = Paged(workload, memory, rule=rule)
    plan = pagoda.plan_of(paged.model)
    try:
        yield (
            "plan",
            {
                "built_s": time.perf_counter() - start,
                "units": len(plan.units),
                "updated_on_device": len(plan.placement.on_device),
                "at_home": len(plan.placement.resident),
                "bytes": {tier: dict(lines) for tier, lines in plan.bytes.items()},
            },
        )
        for size in batch_sizes or (workload.batch_size,):
            now = replace(workload, batch_size=size)
            try:
                yield f"{now.tokens} tokens", _figures(machine, now, paged)
            except torch.OutOfMemoryError as error:
                yield f"{now.tokens} tokens", {"out_of_memory": str(error)[:300]}
                paged.optimizer.zero_grad()
                release(machine)
    finally:
        paged.close()
        del paged
        release(machine)


def _figures(machine: Machine, workload: Workload, paged: Paged) -> Figures:
    seconds = timed(machine, paged.step, workload)
    stats, plan = paged.optimizer.stats, pagoda.plan_of(paged.model)
    if machine.traces is not None:
        paged.optimizer.trace_next_step()
        paged.step(next(workload.batches(machine.device)))
        assert paged.optimizer.timeline is not None
        machine.traces.mkdir(parents=True, exist_ok=True)
        name = f"{workload.model}-{workload.tokens}-{time.time_ns()}"
        with gzip.open(machine.traces / f"{name}.trace.json.gz", "wt") as file:
            json.dump(chrome_trace(paged.optimizer.timeline, name), file)
    return throughput(workload, statistics.median(seconds)) | {
        "all_s": seconds,
        "stall_s": dict(stats.stall_s),
        "busy_s": dict(stats.busy_s),
        "bytes_moved": dict(stats.bytes_moved),
        "faults": stats.faults,
        "peak_bytes": dict(stats.peak_bytes),
        "within_plan": all(peak <= plan.peak_bytes[tier] for tier, peak in stats.peak_bytes.items()),
    }


def paged_figures(machine: Machine, workload: Workload, memory: pagoda.Memory) -> Figures:
    """The figures of one batch."""
    _, (_, figures) = paged_runs(machine, workload, memory)
    assert isinstance(figures, dict)
    if "step_s" not in figures:
        raise MemoryError(figures["out_of_memory"])
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
