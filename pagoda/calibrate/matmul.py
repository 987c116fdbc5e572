"""Measures matrix products: the peak rate, and the rate that a transformer block reaches."""

import math
import time
from functools import cache

import torch
from torch.nn import functional

from pagoda.calibrate.meter import Meter, repeated
from pagoda.config.training import Precision
from pagoda.simulate.hardware import Figure, MatmulRate

_HEAD_WIDTH = 64
_LAYER_TOKENS, _LAYER_WIDTH = 64, 256
_LAYER_S = 0.1
_LEAST_REPEATS = 3
_LEAST_TOKENS = 16

FAR_SLOWER = 2.0
"""From this slowdown on, users should consider training in fp32."""


def matmul_rate(meter: Meter, dtype: torch.dtype, tokens: int, width: int) -> MatmulRate:
    """The peak is the rate of the fastest product of a block. The reached rate is that of forward and backward of one
    block of `width` on `tokens` tokens, or on fewer if the CPU has no instructions for `dtype`: products then take up
    to fifty times longer, at the same rate."""
    meter.report(f"{str(dtype).removeprefix('torch.')} matrix products on {meter.device.type}")
    if meter.device.type == "cpu" and (slowdown := cpu_slowdown(dtype)) >= FAR_SLOWER:
        tokens = max(min(tokens, _LEAST_TOKENS), int(tokens / slowdown))
    shapes = [(tokens, width, width), (tokens, width, 4 * width), (2 * tokens, 4 * width, width)]
    products = [_product(meter, dtype, *shape) for shape in shapes]
    return MatmulRate(
        peak_flop_per_s=max(products, key=lambda figure: figure.value),
        reached_flop_per_s=_block(meter, dtype, tokens, width),
    )


@cache
def cpu_slowdown(dtype: torch.dtype) -> float:
    """How many times longer the matrix products of a linear layer take in `dtype` than in fp32 on this CPU.

    It is far above 1 if the CPU has no instructions for `dtype`. Takes at most a few tenths of a second.
    """
    return _layer_seconds(dtype) / _layer_seconds(torch.float32)


def usual_precision(device: torch.device) -> tuple[Precision, str]:
    """The precision in which a command computes on a device unless the user gives one, and why. A CPU is measured as by
    `cpu_slowdown`."""
    if device.type != "cpu":
        return "bf16", "a GPU computes"
    return precision_for(cpu_slowdown(torch.bfloat16))


def precision_for(slowdown: float) -> tuple[Precision, str]:
    """The same for a CPU whose products take `slowdown` times as long in bf16 as in fp32."""
    if slowdown <= 1:
        return "bf16", f"this CPU multiplies it {1 / slowdown:.1f} times as fast as fp32"
    return "fp32", f"this CPU multiplies bf16 in {slowdown:.2f} times the time of fp32"


def _layer_seconds(dtype: torch.dtype) -> float:
    """Shortest time of the three products of a linear layer: forward, gradient of the input, gradient of the weight."""
    x = torch.ones(_LAYER_TOKENS, _LAYER_WIDTH, dtype=dtype)
    weight = torch.ones(4 * _LAYER_WIDTH, _LAYER_WIDTH, dtype=dtype)
    grad = torch.ones(_LAYER_TOKENS, 4 * _LAYER_WIDTH, dtype=dtype)

    def seconds() -> float:
        start = time.perf_counter()
        _ = x @ weight.T, grad @ weight, grad.T @ x
        return time.perf_counter() - start

    return min(repeated(seconds, _LEAST_REPEATS, math.inf, _LAYER_S))


def _product(meter: Meter, dtype: torch.dtype, rows: int, inner: int, columns: int) -> Figure:
    generator = torch.Generator(meter.device).manual_seed(0)
    left = torch.randn(rows, inner, generator=generator, device=meter.device).to(dtype)
    right = torch.randn(columns, inner, generator=generator, device=meter.device).to(dtype)
    note = f"[{rows}, {inner}] times [{inner}, {columns}]"
    return meter.rate(2.0 * rows * inner * columns, lambda: left @ right.T, note)


def _block(meter: Meter, dtype: torch.dtype, tokens: int, width: int) -> Figure:
    """Rate of a transformer block. The FLOPs are those of its products and of the full square of attention, as in
    `forecast.describe`."""
    seq_len = min(tokens, 512)
    ffn = width * 11 // 4
    generator = torch.Generator(meter.device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=meter.device) * 0.02
        return values.to(dtype).requires_grad_()

    x = matrix(tokens, width)
    qkv, out, up, gate, down = (
        matrix(*shape) for shape in ((3 * width, width), (width, width), (ffn, width), (ffn, width), (width, ffn))
    )

    def norm(values: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(values, (width,))

    def step() -> None:
        # [tokens, 3 * width] -> three of [sequences, heads, seq_len, _HEAD_WIDTH]
        parts = functional.linear(norm(x), qkv).view(-1, seq_len, 3, width // _HEAD_WIDTH, _HEAD_WIDTH)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = x + functional.linear(attended.transpose(1, 2).reshape(tokens, width), out)
        inner = norm(hidden)
        expanded = functional.silu(functional.linear(inner, gate)) * functional.linear(inner, up)
        y = hidden + functional.linear(expanded, down)
        torch.autograd.grad(y.sum(), (x, qkv, out, up, gate, down))

    elements = 4 * width**2 + 3 * width * ffn
    flops = 3.0 * tokens * (2.0 * elements + 4.0 * seq_len * width)
    note = f"forward and backward of a block of width {width} on {tokens} tokens"
    with torch.enable_grad():
        return meter.rate(flops, step, note)
