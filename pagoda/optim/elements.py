"""Access to elements in the CPU's memory as fp32 values, for each form (`arithmetic`) of weights, moments and
gradients.

An address is viewed both as fp32 and as 16-bit elements. Only the view that the form needs is read or written.
"""

from typing import Any

import numpy as np
from numba import carray

from pagoda.jit import part
from pagoda.optim.arithmetic import FP16, FP32, bf16_to_fp32, fp16_to_fp32, halves_of, master_of
from pagoda.optim.jit import LINE, pointer, stream_line


@part
def values_at(address: Any, n: Any) -> Any:
    """``n`` values, as fp32 and as 16 bits."""
    return carray(pointer(address, np.float32), n), carray(pointer(address, np.uint16), n)


@part
def load(form: Any, values: Any, i: Any) -> Any:
    """A value of `values_at`."""
    whole, half = values
    if form == FP32:
        return whole[i]
    return fp16_to_fp32(half[i]) if form == FP16 else bf16_to_fp32(half[i])


@part
def store(form: Any, values: Any, i: Any, value: Any) -> None:
    """Round a value to a form, as masters are split, and store it."""
    whole, half = values
    if form == FP32:
        whole[i] = value
    else:
        half[i], _ = halves_of(form, value)


@part
def masters_at(weight: Any, weight_low: Any, n: Any) -> Any:
    """Views of ``n`` masters: the weights, and the low halves of 16-bit weights."""
    return values_at(weight, n), carray(pointer(weight_low, np.int16), n)


@part
def load_master(form: Any, masters: Any, i: Any) -> Any:
    """The value of a master of `masters_at`."""
    (whole, high), low = masters
    return whole[i] if form == FP32 else master_of(form, high[i], low[i])


@part
def store_master(form: Any, masters: Any, i: Any, value: Any) -> None:
    """The reverse of `load_master`."""
    (whole, high), low = masters
    if form == FP32:
        whole[i] = value
    else:
        high[i], low[i] = halves_of(form, value)


@part
def stream(source: Any, target: Any, nbytes: Any) -> None:
    """Copy bytes from a `room` to memory that will not be read soon. Only whole cache lines bypass the cache."""
    done = nbytes - nbytes % LINE if target % LINE == 0 else 0
    for at in range(0, done, LINE):
        stream_line(source + at, target + at)
    left = nbytes - done
    read, write = carray(pointer(source + done, np.uint8), left), carray(pointer(target + done, np.uint8), left)
    for i in range(left):
        write[i] = read[i]
