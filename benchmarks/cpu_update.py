"""How close the CPU updates of element-wise rules are to the memory roof.

Each kernel runs over all parameters, block by block, on plain Python threads, beside a plain kernel that
reads and writes the same streams and computes next to nothing (its roof). Repeats are interleaved, so that a
noisy neighbour slows both; the ratio is the median over repeats of kernel to roof. State lies far outside the
caches. Beside it is the rate at which each kernel updates a block that stays in the cache, times the number of threads:
what its arithmetic allows, whatever the memory.

    python benchmarks/cpu_update.py --out benchmarks/results/cpu_update.json

With `--only WORD ...`, kernels are measured whose names have one of the words; the file keeps the others' figures.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from pagoda.calibrate.cpu import SCALARS, Sweeper, by_address, filled, roof_bf16, states_of
from pagoda.calibrate.meter import cpu_name
from pagoda.config.training import Precision
from pagoda.optim import SGD, Adam, AdamW, Lion, kernels
from pagoda.optim.codecs import Moments
from pagoda.optim.flat import encode_moment
from pagoda.optim.rule import ElementwiseRule, gradient_dtype

CACHED = 1 << 14
"""Elements of the block that stays in the cache."""
_IN_CACHE_S = 0.2
_REPEAT_S = 0.04
"""Sweeps of one repeat take at least this long together: one alone is as short as a hiccup of the machine."""


@numba.njit(nogil=True)
def roof_store(dst: Any, src: Any, mask: Any) -> None:
    for i in range(len(dst)):
        dst[i] = src[i] ^ mask


@numba.njit(nogil=True)
def roof_add(dst: Any, src: Any, mask: Any) -> None:
    for i in range(len(dst)):
        dst[i] ^= src[i] & mask


@numba.njit(nogil=True)
def roof_bf16_one(high: Any, low: Any, avg: Any, gradient: Any, mask: Any) -> None:
    for i in range(len(gradient)):
        x = gradient[i] & mask
        high[i] ^= x
        low[i] ^= x
        avg[i] ^= np.int32(x)


@numba.njit(nogil=True)
def roof_bf16_none(high: Any, low: Any, gradient: Any, mask: Any) -> None:
    for i in range(len(gradient)):
        x = gradient[i] & mask
        high[i] ^= x
        low[i] ^= x


@numba.njit(nogil=True)
def roof_fp32(weight: Any, avg: Any, avg_sq: Any, gradient: Any, mask: Any) -> None:
    for i in range(len(gradient)):
        x = gradient[i] & mask
        weight[i] ^= x
        avg[i] ^= x
        avg_sq[i] ^= x


@numba.njit(nogil=True)
def roof_fp32_one(weight: Any, avg: Any, gradient: Any, mask: Any) -> None:
    for i in range(len(gradient)):
        x = gradient[i] & mask
        weight[i] ^= x
        avg[i] ^= x


RULES: dict[str, ElementwiseRule] = {
    "adam": Adam(weight_decay=0.1),
    "sgd": SGD(weight_decay=0.1),
    "sgd momentum": SGD(momentum=0.9, nesterov=True, weight_decay=0.1),
    "lion": Lion(weight_decay=0.1),
}
ROOFS: dict[tuple[str, int], Callable[..., None]] = {
    ("bf16", 2): roof_bf16,
    ("bf16", 1): roof_bf16_one,
    ("bf16", 0): roof_bf16_none,
    ("fp32", 2): roof_fp32,
    ("fp32", 1): roof_fp32_one,
    ("fp32", 0): roof_add,
}
"""(precision, fp32 states beside the weights) -> plain kernel over the streams of a rule."""


@dataclass
class Row:
    """One kernel: per repeat the ``seconds`` of a sweep over all parameters; ``roof`` names the row it is beside."""

    name: str
    bytes_per_parameter: int
    sweep: Callable[[], None]
    seconds: list[float]
    roof: str | None = None
    block: Callable[[int, int], None] | None = None
    """What updates elements from the first one given on, as many as given."""
    in_cache: float = 0.0
    """Parameters a second of one thread, of a block that stays in the cache."""


@dataclass(frozen=True)
class Figure:
    """Rates: median over repeats, and lowest and highest."""

    name: str
    gparams_per_s: float
    lowest: float
    highest: float
    gb_per_s: float
    roof: str | None
    ratio: float | None
    in_cache: float | None
    """G parameters a second of all threads, each on a block that stays in its cache."""


def fused_sweep(params: int, gradient: torch.Tensor, states: list[torch.Tensor]) -> Callable[[], None]:
    """``torch.optim.AdamW(fused=True)`` over one fp32 parameter, on torch's own threads."""
    parameter = torch.nn.Parameter(states[0])
    parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.state[parameter] = {"step": torch.tensor(100.0), "exp_avg": states[1], "exp_avg_sq": states[2]}
    return lambda: optimizer.step() and None


def rows(params: int, sweeper: Sweeper) -> list[Row]:
    made: list[Row] = []
    for precision in ("bf16", "fp32"):
        kernels.warm_up(AdamW(), precision)
        states = states_of(precision, params)
        gradient = filled(params, states[0].dtype, 1.0)
        all_streams = [*states, gradient]
        width = gradient.element_size()
        moved = 12 + width + 12
        roof = roof_bf16 if precision == "bf16" else roof_fp32
        step = by_address(kernels.update_kernel(AdamW(), precision), all_streams, *SCALARS)
        made.append(Row(f"adamw {precision}", moved, sweeper(step), [], f"roof {precision}", step))
        made.append(Row(f"roof {precision}", moved, sweeper.arrays(roof, all_streams), []))
        if precision == "fp32":
            made.append(Row("torch fused fp32", moved, fused_sweep(params, gradient, states), []))
        for name, rule in RULES.items():
            made += rule_rows(name, rule, precision, states, gradient, sweeper)
        for moments in ("bf16", "8bit"):
            made += compressed_rows(precision, moments, states, gradient, sweeper)
        pair = [filled(params, gradient.dtype, 1.0), gradient]
        for verb, plain, streams in (("store", roof_store, 2), ("add", roof_add, 3)):
            block = by_address(getattr(kernels.gradient_kernels(gradient.dtype), f"{verb}_gradient"), pair)
            name = f"roof {verb} {precision}"
            made.append(Row(f"{verb} gradient {precision}", streams * width, sweeper(block), [], name, block))
            made.append(Row(name, streams * width, sweeper.arrays(plain, pair), []))
    for weights, gradients in (("fp16", "fp16"), ("bf16", "fp32"), ("fp32", "bf16")):
        made += format_rows(weights, gradients, params, sweeper)
    return made


def format_rows(weights: Precision, gradients: Precision, params: int, sweeper: Sweeper) -> list[Row]:
    """AdamW, and what takes gradients, where weights or gradients have a format without kernels of its own."""
    kept = gradient_dtype(gradients)
    kernels.warm_up(AdamW(), weights, kept)
    states = states_of(weights, params)
    streams = [*states, filled(params, kept, 1.0)]
    moved = 2 * sum(state.element_size() for state in states) + kept.itemsize
    name = f"adamw {weights}, gradients {gradients}"
    step = by_address(kernels.update_kernel(AdamW(), weights, kept), streams, *SCALARS)
    plain = roof_fp32 if weights == "fp32" else roof_bf16
    made = [
        Row(name, moved, sweeper(step), [], f"roof {name}", step),
        Row(f"roof {name}", moved, sweeper.arrays(plain, streams), []),
    ]
    arriving = kernels.arriving_dtype(kept, states[0].dtype)
    if (kept, arriving) in ((torch.float32, torch.bfloat16), (torch.float16, torch.float16)):
        pair = [filled(params, kept, 1.0), filled(params, arriving, 1.0)]
        for verb, roof, touched in (("store", roof_store, kept.itemsize), ("add", roof_add, 2 * kept.itemsize)):
            block = by_address(getattr(kernels.gradient_kernels(kept, arriving), f"{verb}_gradient"), pair)
            name, touched = f"{verb} gradient {weights} to {gradients}", touched + arriving.itemsize
            made.append(Row(name, touched, sweeper(block), [], f"roof {name}", block))
            made.append(Row(f"roof {name}", touched, sweeper.arrays(roof, pair), []))
    return made


def rule_rows(
    name: str,
    rule: ElementwiseRule,
    precision: Precision,
    states: list[torch.Tensor],
    gradient: torch.Tensor,
    sweeper: Sweeper,
) -> list[Row]:
    """A rule's update, and a plain kernel over its streams."""
    kernels.warm_up(rule, precision)
    streams = [*states[: len(rule.states(precision))], gradient]
    own = len(rule.own_states())
    moved = 2 * sum(stream.element_size() for stream in streams[:-1]) + gradient.element_size()
    update = by_address(kernels.update_kernel(rule, precision), streams, *rule.scalars(100, 0.9))
    roof = Row(f"roof {name} {precision}", moved, sweeper.arrays(ROOFS[precision, own], streams), [])
    return [Row(f"{name} {precision}", moved, sweeper(update), [], roof.name, update), roof]


def compressed_rows(
    precision: Precision, moments: Moments, states: list[torch.Tensor], gradient: torch.Tensor, sweeper: Sweeper
) -> list[Row]:
    """The update with compressed moments, and a plain kernel over its streams (scales, 1/32 byte, left out)."""
    rule = AdamW(moments=moments)
    *weights, exp_avg, exp_avg_sq = states
    kept = dict(
        zip((s.name for s in rule.states_of("exp_avg")), encode_moment("exp_avg", exp_avg, moments), strict=True)
    )
    kept |= zip(
        (s.name for s in rule.states_of("exp_avg_sq")), encode_moment("exp_avg_sq", exp_avg_sq, moments), strict=True
    )
    specs = rule.states(precision)
    tensors = [*weights, *(kept[spec.name] for spec in specs[len(weights) :])]
    kernel = kernels.update_kernel(rule, precision)
    kernels.warm_up(rule, precision)
    noise = rule.noise("weight", 100)

    def block(start: int, n: int) -> None:
        addresses = [t.data_ptr() + spec.nbytes(start) for t, spec in zip(tensors, specs, strict=True)]
        rounding = () if noise is None else (start, *noise)
        kernel(*addresses, gradient.data_ptr() + start * gradient.element_size(), n, *rounding, *SCALARS)

    streams = [tensor for tensor, spec in zip(tensors, specs, strict=True) if spec.per == 1]
    width = gradient.element_size()
    moved = 2 * sum(tensor.element_size() for tensor in streams) + width
    name = f"{precision}, moments {moments}"
    plain = roof_bf16 if precision == "bf16" else roof_fp32
    roof = Row(f"roof {name}", moved, sweeper.arrays(plain, [*streams, gradient]), [])
    return [Row(f"adamw {name}", moved, sweeper(block), [], roof.name, block), roof]


def measure(made: list[Row], repeats: int) -> None:
    sweeps: dict[str, int] = {}
    for row in made:
        row.sweep()  # compiles, and touches every page
        sweeps[row.name] = 1 + int(_REPEAT_S / _seconds(row, 1))
    for _ in range(repeats):
        for row in made:
            row.seconds.append(_seconds(row, sweeps[row.name]))


def _seconds(row: Row, sweeps: int) -> float:
    """Of one sweep, on average of so many."""
    start = time.perf_counter()
    for _ in range(sweeps):
        row.sweep()
    return (time.perf_counter() - start) / sweeps


def measure_in_cache(made: list[Row]) -> None:
    """One thread, over and over on one block."""
    for row in made:
        if row.block is not None:
            times, start = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - start) < _IN_CACHE_S:
                row.block(0, CACHED)
                times += 1
            row.in_cache = times * CACHED / elapsed


def figures(made: list[Row], params: int, threads: int) -> list[Figure]:
    by_name = {row.name: row for row in made}
    result = []
    for row in made:
        rates = [params / seconds / 1e9 for seconds in row.seconds]
        ratio = None
        if row.roof is not None:
            pairs = zip(by_name[row.roof].seconds, row.seconds, strict=True)
            ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        median = statistics.median(rates)
        in_cache = None if row.block is None else threads * row.in_cache / 1e9
        gb_per_s = median * row.bytes_per_parameter
        result.append(Figure(row.name, median, min(rates), max(rates), gb_per_s, row.roof, ratio, in_cache))
    return result


def dispatch_us() -> float:
    """Cost of one kernel call on nothing, in microseconds."""
    calls, kernel = 20_000, kernels.update_kernel(AdamW(), "bf16")
    start = time.perf_counter()
    for _ in range(calls):
        kernel(0, 0, 0, 0, 0, 0, *SCALARS)
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="updates on the CPU against the memory roof")
    parser.add_argument("--params", type=int, default=64 << 20, help="parameters (about 60 bytes each)")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--block", type=int, default=1 << 20, help="elements of one kernel call")
    parser.add_argument("--only", nargs="+", help="words: measure kernels alone whose names have one of them")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    made = rows(arguments.params, Sweeper(arguments.params, arguments.block, arguments.threads))
    if arguments.only:
        chosen = {row.name for row in made if any(word in row.name for word in arguments.only)}
        made = [row for row in made if row.name in chosen or any(r.roof == row.name and r.name in chosen for r in made)]
    measure(made, arguments.repeats)
    measure_in_cache(made)
    result = figures(made, arguments.params, arguments.threads)

    machine = f"{cpu_name()}, {os.cpu_count()} CPUs; {arguments.threads} threads"
    table = Table(title=f"{arguments.params / 2**20:.0f} Mi parameters, {machine}, median of {arguments.repeats}")
    for heading in ("kernel", "G parameters/s", "lowest - highest", "GB/s", "of roof", "in cache"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for figure in result:
        spread = f"{figure.lowest:.2f} - {figure.highest:.2f}"
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        cached = "" if figure.in_cache is None else f"{figure.in_cache:.2f}"
        table.add_row(figure.name, f"{figure.gparams_per_s:.2f}", spread, f"{figure.gb_per_s:.1f}", ratio, cached)
    Console(width=120).print(table)
    call_us = dispatch_us()
    print(f"one call on nothing: {call_us:.2f} us")

    if arguments.out is not None:
        settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "only")}
        kept = json.loads(arguments.out.read_text())["figures"] if arguments.only and arguments.out.exists() else []
        of_before = {figure["name"]: figure for figure in kept}
        versions = {
            "torch": torch.__version__,
            "numba": numba.__version__,
            "python": platform.python_version(),
        }
        report = {
            "machine": machine,
            "versions": versions,
            "settings": settings,
            "call_us": call_us,
            "figures": list((of_before | {figure.name: asdict(figure) for figure in result}).values()),
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
