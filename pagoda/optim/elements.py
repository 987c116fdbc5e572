"""Elements as kernels meet them: fp32 values of the formats that weights and gradients are kept in.

A form is a constant of a compiled kernel, so what other forms would need is not in it. A master is either whole or a
16-bit weight and 16 bits beside it; a kernel has views of either kind, and only reads and writes those of its form.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numba import carray

from pagoda.jit import part
from pagoda.optim.fp16 import fp16_to_fp32, fp32_to_fp16, joined_fp16, low_half_fp16
from pagoda.optim.jit import bf16_to_fp32, high_half, joined, low_half, pointer, round_to_bf16

FP32, BF16, FP16 = 0, 1, 2
"""The forms."""
FORMS: Mapping[torch.dtype, int] = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


@part
def views(address: Any, n: Any) -> Any:
    """``n`` elements, as fp32 and as 16 bits."""
    return carray(pointer(address, np.float32), n), carray(pointer(address, np.uint16), n)


@part
def low_view(address: Any, n: Any) -> Any:
    """What is kept beside ``n`` weights of 16 bits."""
    return carray(pointer(address, np.int16), n)


@part
def value_of(form: Any, whole: Any, half: Any) -> Any:
    """An element's value: of its fp32, or of its 16 bits."""
    if form == FP32:
        return whole
    return fp16_to_fp32(half) if form == FP16 else bf16_to_fp32(half)


@part
def half_of(form: Any, value: Any) -> Any:
    """The 16 bits of a value that is not NaN, rounded to nearest, ties to even, as torch rounds."""
    return fp32_to_fp16(value) if form == FP16 else np.uint16(round_to_bf16(value) >> 16)


@part
def master_of(form: Any, whole: Any, high: Any, low: Any) -> Any:
    """A master: itself, or of its two halves."""
    if form == FP32:
        return whole
    return joined_fp16(high, low) if form == FP16 else joined(high, low)


@part
def halves_of(form: Any, master: Any) -> Any:
    """Both halves of a master that is kept in such."""
    if form == FP16:
        half = fp32_to_fp16(master)
        return half, low_half_fp16(master, half)
    return high_half(master), low_half(master)
