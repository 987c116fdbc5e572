"""How close the CPU updates of element-wise rules are to the memory roof.

Each kernel runs over all parameters, block by block, on plain Python threads, beside a plain kernel that
reads and writes the same streams and computes next to nothing (its roof). Repeats are interleaved, so that a
noisy neighbour slows both; the ratio is the median over repeats of kernel to roof. State lies far outside the
caches. AdamW is also measured as speculative updates need it: new states are written elsewhere, or old ones are
copied before an update in place. Beside it is the rate at which each kernel updates a block that stays in the cache,
times the number of threads: what its arithmetic allows, whatever the memory.

    python benchmarks/cpu_update.py --out benchmarks/results/cpu_update.json

With `--only WORD ...`, kernels are measured whose names have one of the words; the file keeps the others' figures.
"""

import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from pagoda.calibrate.cpu import SCALARS, Sweeper, by_address, filled, roof_bf16, states_of
from pagoda.config.run import Moments
from pagoda.config.training import Precision
from pagoda.optim import SGD, Adam, AdamW, Lion, kernels
from pagoda.optim.flat import encode_moment
from pagoda.optim.gradient_kernels import arriving_dtype, gradient_kernels
from pagoda.optim.kernels import update_kernel
from pagoda.optim.rule import DTYPES, ElementwiseRule
from pagoda.optim.warm import warm_up
from script import machine, write

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
    "adamw": AdamW(),
    "adam": Adam(weight_decay=0.1),
    "sgd": SGD(weight_decay=0.1),
    "sgd momentum": SGD(momentum=0.9, nesterov=True, weight_decay=0.1),
    "lion": Lion(weight_decay=0.1),
}
ROOFS: dict[int, tuple[Callable[..., None], ...]] = {
    16: (roof_bf16_none, roof_bf16_one, roof_bf16),
    32: (roof_add, roof_fp32_one, roof_fp32),
}
"""Bits of a weight -> plain kernels over the streams of a rule, by the number of its states beside the weights."""


@dataclass
class Row:
    """One kernel: per repeat the ``seconds`` of a sweep over all parameters; ``roof`` names the row it is beside."""

    name: str
    bytes_per_parameter: int
    sweep: Callable[[], None]
    roof: str | None = None
    block: Callable[[int, int], None] | None = None
    """What updates elements from the first one given on, as many as given."""
    in_cache: float = 0.0
    """Parameters a second of one thread, of a block that stays in the cache."""
    seconds: list[float] = field(default_factory=list)


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
    precisions: tuple[Precision, ...] = ("bf16", "fp32")
    for precision in precisions:
        states = states_of(precision, params)
        gradient = filled(params, states[0].dtype, 1.0)
        for name, rule in RULES.items():
            made += rule_rows(f"{name} {precision}", rule, precision, states, gradient, sweeper)
        if precision == "fp32":
            moved = 7 * gradient.element_size()
            made.append(Row("torch fused fp32", moved, fused_sweep(params, gradient, states)))
        for moments in ("bf16", "8bit"):
            made += compressed_rows(precision, moments, states, gradient, sweeper)
        made += gradient_rows(precision, gradient.dtype, gradient.dtype, params, sweeper)
    pairs: tuple[tuple[Precision, Precision], ...] = (("fp16", "fp16"), ("bf16", "fp32"), ("fp32", "bf16"))
    for weights, gradients in pairs:
        kept, states = DTYPES[gradients], states_of(weights, params)
        gradient, name = filled(params, kept, 1.0), f"adamw {weights}, gradients {gradients}"
        made += rule_rows(name, AdamW(), weights, states, gradient, sweeper)
        arriving = arriving_dtype(kept, states[0].dtype)
        if (kept, arriving) in ((torch.float32, torch.bfloat16), (torch.float16, torch.float16)):
            made += gradient_rows(f"{weights} to {gradients}", kept, arriving, params, sweeper)
    return made


def beside_roof(
    name: str,
    moved: int,
    block: Callable[[int, int], None],
    roof: Callable[..., None],
    streams: Sequence[torch.Tensor],
    sweeper: Sweeper,
) -> list[Row]:
    """A kernel that moves so many bytes of a parameter, and a plain kernel over its streams."""
    plain = Row(f"roof {name}", moved, sweeper.arrays(roof, streams))
    return [Row(name, moved, sweeper(block), plain.name, block), plain]


def gradient_rows(name: str, kept: torch.dtype, arriving: torch.dtype, params: int, sweeper: Sweeper) -> list[Row]:
    """What stores gradients in a dtype, or adds them up in it."""
    pair, made = [filled(params, kept, 1.0), filled(params, arriving, 1.0)], []
    for verb, roof, touched in (("store", roof_store, kept.itemsize), ("add", roof_add, 2 * kept.itemsize)):
        block = by_address(getattr(gradient_kernels(kept, arriving), f"{verb}_gradient"), pair)
        made += beside_roof(f"{verb} gradient {name}", touched + arriving.itemsize, block, roof, pair, sweeper)
    return made


def rule_rows(
    name: str,
    rule: ElementwiseRule,
    precision: Precision,
    states: list[torch.Tensor],
    gradient: torch.Tensor,
    sweeper: Sweeper,
) -> list[Row]:
    """A rule's update with gradients of some dtype."""
    warm_up(rule, precision, gradient.dtype)
    streams = [*states[: len(rule.states(precision))], gradient]
    moved = 2 * sum(stream.element_size() for stream in streams[:-1]) + gradient.element_size()
    kernel = kernels.update_kernel(rule, precision, gradient.dtype)
    update = by_address(kernel, streams, *rule.scalars(100, 0.9))
    roof = ROOFS[8 * states[0].element_size()][len(rule.own_states())]
    made = beside_roof(name, moved, update, roof, streams, sweeper)
    if name == "adamw bf16":
        made += elsewhere_rows(made[0], rule, precision, streams[:-1], gradient, sweeper)
    return made


def elsewhere_rows(
    in_place: Row,
    rule: ElementwiseRule,
    precision: Precision,
    states: list[torch.Tensor],
    gradient: torch.Tensor,
    sweeper: Sweeper,
) -> list[Row]:
    """The same update into other memory, and after a copy of the old states to it."""
    kernel, specs, noise = update_kernel(rule, precision, elsewhere=True), rule.states(precision), rule.noise("", 100)
    warm_up(rule, precision, elsewhere=True)
    others = [filled(len(state), state.dtype, 0.0) for state in states]

    def addresses(tensors: list[torch.Tensor], start: int) -> list[int]:
        return [tensor.data_ptr() + spec.nbytes(start) for tensor, spec in zip(tensors, specs, strict=True)]

    def elsewhere(start: int, n: int) -> None:
        rounding = () if noise is None else (start, *noise)
        at = gradient.data_ptr() + start * gradient.element_size()
        kernel(*addresses(states, start), at, n, *addresses(others, start), *rounding, *SCALARS)

    def copied(start: int, n: int) -> None:
        for target, source, spec in zip(addresses(others, start), addresses(states, start), specs, strict=True):
            ctypes.memmove(target, source, spec.nbytes(n))
        assert in_place.block is not None
        in_place.block(start, n)

    return [
        Row(f"{in_place.name}, {how}", in_place.bytes_per_parameter, sweeper(block), in_place.roof, block)
        for how, block in (("elsewhere", elsewhere), ("after a copy", copied))
    ]


def compressed_rows(
    precision: Precision, moments: Moments, states: list[torch.Tensor], gradient: torch.Tensor, sweeper: Sweeper
) -> list[Row]:
    """The update with compressed moments. Of its streams, floors (1/32 byte) are left out."""
    rule = AdamW(moments=moments)
    *weights, exp_avg, exp_avg_sq = states
    kept: dict[str, torch.Tensor] = {}
    for name, values in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        kept |= zip((s.name for s in rule.states_of(name)), encode_moment(name, values, moments), strict=True)
    specs = rule.states(precision)
    tensors = [*weights, *(kept[spec.name] for spec in specs[len(weights) :])]
    kernel = kernels.update_kernel(rule, precision)
    warm_up(rule, precision)
    noise = rule.noise("weight", 100)

    def block(start: int, n: int) -> None:
        addresses = [t.data_ptr() + spec.nbytes(start) for t, spec in zip(tensors, specs, strict=True)]
        rounding = () if noise is None else (start, *noise)
        kernel(*addresses, gradient.data_ptr() + start * gradient.element_size(), n, *rounding, *SCALARS)

    streams = [tensor for tensor, spec in zip(tensors, specs, strict=True) if spec.per == 1]
    moved = 2 * sum(tensor.element_size() for tensor in streams) + gradient.element_size()
    roof = roof_bf16 if precision == "bf16" else roof_fp32
    made = beside_roof(f"adamw {precision}, moments {moments}", moved, block, roof, [*streams, gradient], sweeper)
    if precision == "bf16":
        made += elsewhere_rows(made[0], rule, precision, tensors, gradient, sweeper)
    return made


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


def main(
    params: int = 64 << 20,
    repeats: int = 11,
    threads: int = min(os.cpu_count() or 1, 8),
    block: int = 1 << 20,
    only: tuple[str, ...] = (),
    out: Path | None = None,
) -> None:
    """Print the rates.

    Args:
        params: parameters, of about 60 bytes each.
        block: elements of one kernel call.
        only: words. Only kernels are measured whose names have one of them.
    """
    torch.set_num_threads(threads)
    made = rows(params, Sweeper(params, block, threads))
    if only:
        chosen = {row.name for row in made if any(word in row.name for word in only)}
        made = [row for row in made if row.name in chosen or any(r.roof == row.name and r.name in chosen for r in made)]
    measure(made, repeats)
    measure_in_cache(made)
    result = figures(made, params, threads)

    table = Table(title=f"{params / 2**20:.0f} Mi parameters, {machine()['machine']}, median of {repeats}")
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

    kept = json.loads(out.read_text())["figures"] if only and out is not None and out.exists() else []
    of_before = {figure["name"]: figure for figure in kept}
    report = {
        **machine(),
        "versions": {"numba": numba.__version__, "python": platform.python_version()},
        "settings": {"params": params, "repeats": repeats, "threads": threads, "block": block},
        "call_us": call_us,
        "figures": list((of_before | {figure.name: asdict(figure) for figure in result}).values()),
    }
    write(out, report)


if __name__ == "__main__":
    tyro.cli(main)
