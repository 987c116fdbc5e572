"""On an NVIDIA GPU: what Pagoda reaches of the machine, in one run.

    python benchmarks/gpu.py [--sections copies step ...] [--ssd DIR] [--host 110GiB] [--out FILE]
    python benchmarks/gpu.py --smoke

copies     copy bandwidth each way, alone and during matrix products; the share of it that a step's copies reach; the
           GPU's idle share
step       all states in RAM, few units on the device, and 0%, 30% and 60% of the updates there, compared with plain
           PyTorch with as many layers as the GPU's memory holds
whole      the whole shape, more than plain PyTorch holds
limited    24 GiB of device memory, compared with 48 GiB
largest    24B parameters with fp32 moments on device, RAM and SSD: five steps with updates during backward, or the
           plan's refusal
largest_8bit  the same with 40B parameters and 8-bit moments
bits       elements in which CPU and GPU differ after an update of 100M, by kernel: must be 0
predict    predicted and measured steps of eight configurations, calibrated now
baselines  DeepSpeed ZeRO-3 and FSDP2, states in RAM, where they are installed

Every section is meant to end well inside ten minutes, and its figures are in --out when it has ended. `--smoke` runs
the same code at tiny sizes on a CPU, with an arena in RAM that stands in for the GPU: a rehearsal, whose figures mean
nothing.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from gpu_suite.baselines import baselines
from gpu_suite.bits import bits
from gpu_suite.common import REAL, SMOKE, Figures, Machine
from gpu_suite.copies import copies
from gpu_suite.predict import predict
from gpu_suite.steps import largest, largest_8bit, limited, step, whole
from pagoda.errors import ConfigError
from script import write

_IN_ORDER = (copies, step, whole, limited, largest, largest_8bit, bits, predict, baselines)
SECTIONS: dict[str, Callable[[Machine], Figures]] = {section.__name__: section for section in _IN_ORDER}


def main(
    sections: tuple[str, ...] = tuple(SECTIONS),
    model: str | None = None,
    host: str | None = None,
    ssd: Path | None = None,
    steps: int | None = None,
    smoke: bool = False,
    out: Path | None = None,
) -> None:
    """Run the sections and print a table of their figures.

    Args:
        sections: which, in this order.
        model: a built-in shape instead of the 8B one.
        host: RAM for pages; by default 80% of what is free.
        ssd: a directory on an SSD, for the largest models.
        steps: measured steps of each variant.
        smoke: tiny sizes, on the CPU.
        out: where to write the figures as JSON, after each section.
    """
    if not smoke and not torch.cuda.is_available():
        raise ConfigError("torch finds no CUDA GPU here: --smoke rehearses on the CPU")
    sizes = SMOKE if smoke else REAL
    sizes = replace(sizes, model=model or sizes.model, steps=steps or sizes.steps)
    device = torch.device("cpu") if smoke else torch.device("cuda", torch.cuda.current_device())
    machine = Machine(sizes, device, host or ("256MiB" if smoke else None), ssd)
    name = "CPU arena" if smoke else torch.cuda.get_device_name(device)
    results: dict[str, object] = {"machine": name, "torch": torch.__version__, "model": sizes.model}
    table = Table("section", "figure", "value", title=name)
    for section in sections:
        start = time.perf_counter()
        figures = SECTIONS[section](machine)
        figures["took_s"] = time.perf_counter() - start
        results[section] = figures
        for figure, value in figures.items():
            table.add_row(section, figure, f"{value:.4g}" if isinstance(value, float) else json.dumps(value, indent=1))
        write(out, results)  # after each section: a later one may run out of time
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
