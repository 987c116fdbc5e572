"""`arithmetic` on a GPU. Triton compiles its source with the primitives below in place of the CPU's.

Triton's `*`, `+` and `-` on fp32 round once each if the launch has `enable_fp_fusion=False`, and `tl.fma` rounds once.
`/` and `sqrt` do not, so division and square root are `tl.div_rn` and `tl.sqrt_rn`. Integers wrap if
`sanitize_overflow` is off.

Import this only if there is a GPU, or set TRITON_INTERPRET=1 before Triton is first imported. Then the kernels run on
the CPU, slowly, in Triton's interpreter, whose `tl.fma` rounds twice.
"""

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, cast

import triton
import triton.language as tl

from pagoda.optim import arithmetic

jit = cast(Callable[..., Callable[[Callable[..., Any]], Any]], triton.jit)
_FP32, _FP16 = tl.constexpr(arithmetic.FP32), tl.constexpr(arithmetic.FP16)
_NAN = tl.constexpr(0x7FC00000)


@jit()
def word(value):
    return tl.cast(value, tl.uint32)


@jit()
def fp32(value):
    return tl.cast(value, tl.float32)


@jit()
def number(word):
    return word.to(tl.int32).to(tl.float32)


@jit()
def add(a, b):
    return tl.add(word(a), word(b), sanitize_overflow=False)


@jit()
def subtract(a, b):
    return tl.sub(word(a), word(b), sanitize_overflow=False)


@jit()
def multiply(a, b):
    return tl.mul(word(a), word(b), sanitize_overflow=False)


@jit()
def bit_and(a, b):
    return word(a) & word(b)


@jit()
def bit_or(a, b):
    return word(a) | word(b)


@jit()
def bit_xor(a, b):
    return word(a) ^ word(b)


@jit()
def shift_left(a, by):
    return word(a) << by


@jit()
def shift_right(a, by):
    return word(a) >> by


@jit()
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@jit()
def bits_of(value):
    return value.to(tl.uint32, bitcast=True)


@jit()
def quiet_bits(value):
    """The bits of a value that will be rounded. Every NaN becomes the same NaN, because a GPU's own, 0x7FFFFFFF, would
    round to a high half of -0."""
    return tl.where(value == value, bits_of(value), _NAN)


@jit()
def where(condition, yes, no):
    return tl.where(condition, yes, no)


@jit()
def divide(a, b):
    return tl.div_rn(a, b)


@jit()
def square_root(value):
    return tl.sqrt_rn(value)


@jit()
def fused(a, b, c):
    return tl.fma(a, b, c)


def _on_gpu(primitives: dict[str, Any], source: ModuleType) -> dict[str, Any]:
    """The functions of `source`, by name. They see each other, the primitives, and the constants of `source`."""
    numbers = {name: tl.constexpr(value) for name, value in vars(source).items() if isinstance(value, int | float)}
    scope = {**primitives, **numbers, "tl": tl, "Any": tl.tensor, "__name__": __name__}
    for name, value in vars(source).items():
        plain = getattr(value, "py_func", None)
        if plain is not None and name not in scope:
            function = FunctionType(plain.__code__, scope, plain.__name__)
            function.__module__, function.__qualname__ = __name__, plain.__qualname__
            scope[name] = jit()(function)
    # The CPU's version may be an instruction.
    scope["fp16_to_fp32"], scope["fp32_to_fp16"] = scope["fp16_to_fp32_in_integers"], scope["fp32_to_fp16_in_integers"]
    return scope


_functions = _on_gpu({name: value for name, value in globals().items() if type(value) is type(word)}, arithmetic)
adam_element, sgd_element = _functions["adam_element"], _functions["sgd_element"]
sign_sgd_element, lion_element = _functions["sign_sgd_element"], _functions["lion_element"]
factored_update, adafactor_rate = _functions["factored_update"], _functions["adafactor_rate"]
adafactor_element = _functions["adafactor_element"]
noise_bits, noises, encode_bf16 = _functions["noise_bits"], _functions["noises"], _functions["encode_bf16"]
magnitude, floor_of = _functions["magnitude"], _functions["floor_of"]
decode_8bit, encode_8bit = _functions["decode_8bit"], _functions["encode_8bit"]
bf16_to_fp32, fp16_to_fp32 = _functions["bf16_to_fp32"], _functions["fp16_to_fp32"]
master_of, halves_of, predicted = _functions["master_of"], _functions["halves_of"], _functions["predicted"]


@jit()
def square(value):
    wide = value.to(tl.float64)
    return wide * wide


@jit()
def as_fp32(value, form: tl.constexpr):
    """The fp32 values of a form. 16-bit values are given as int16."""
    if form == _FP16:
        value = fp16_to_fp32(value)
    elif form != _FP32:
        value = bf16_to_fp32(value)
    return value


@jit()
def load_master(weight, weight_low, at, mask, form: tl.constexpr):
    """fp32 weights, joined from both halves if there are two. Otherwise `weight_low` is not used."""
    if form == _FP32:
        value = tl.load(weight + at, mask, 0.0)
    else:
        value = master_of(form, tl.load(weight + at, mask, 0), tl.load(weight_low + at, mask, 0))
    return value


@jit()
def store_master(weight, weight_low, at, value, mask, form: tl.constexpr):
    """The reverse of `load_master`."""
    if form == _FP32:
        tl.store(weight + at, value, mask)
    else:
        high, low = halves_of(form, value)
        tl.store(weight + at, high.to(tl.int16), mask)
        tl.store(weight_low + at, low.to(tl.int16), mask)


@jit()
def store(values, at, value, mask, form: tl.constexpr):
    """Round fp32 values to a form, as masters are split, and store them."""
    if form == _FP32:
        tl.store(values + at, value, mask)
    else:
        high, _ = halves_of(form, value)
        tl.store(values + at, high.to(tl.int16), mask)
