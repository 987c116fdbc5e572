"""The primitives of `arithmetic` for the CPU: strict Numba on single elements.

Strict means no fast-math: each operation rounds once, in the order that the rules define. A multiplication and an
addition are fused where a rule says so (`fused`), and nowhere else.

Integers are unsigned 32-bit integers that wrap. Numba would compute in 64 bits, and a vector would hold half as many.
So each operation is LLVM's 32-bit instruction.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from pagoda.jit import part


def _operation(name: str) -> Any:
    """LLVM's operation of this name on two words."""

    def typed(_context: Any, _a: Any, _b: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return getattr(builder, name)(*args)

        return types.uint32(types.uint32, types.uint32), codegen

    return intrinsic(typed)


add, subtract, multiply = map(_operation, ("add", "sub", "mul"))
bit_and, bit_or, bit_xor = map(_operation, ("and_", "or_", "xor"))
shift_left, shift_right = map(_operation, ("shl", "lshr"))


def _conversion(source: Any, target: Any, emit: Callable[[Any, Any], Any]) -> Any:
    """A function from one type to another. `emit(builder, value)` emits LLVM's instructions."""

    def typed(_context: Any, _value: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return emit(builder, args[0])

        return target(source), codegen

    return intrinsic(typed)


_HALF, _SINGLE, _I16, _I32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)
float_of = _conversion(types.uint32, types.float32, lambda b, word: b.bitcast(word, _SINGLE))
bits_of = _conversion(types.float32, types.uint32, lambda b, value: b.bitcast(value, _I32))
quiet_bits = bits_of
"""The bits of a value that will be rounded. On a CPU, a NaN stays a NaN when rounded."""


@part
def word(value: Any) -> Any:
    return np.uint32(value)


@part
def fp32(value: Any) -> Any:
    return np.float32(value)


@part
def number(word: Any) -> Any:
    """The fp32 value of a word taken as a signed integer."""
    return np.float32(np.int32(word))


@part
def where(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


@part
def divide(a: Any, b: Any) -> Any:
    return a / b


@part
def square_root(value: Any) -> Any:
    return np.sqrt(value)


def _fused_intrinsic(_context: Any, _a: Any, _b: Any, _c: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(*[types.float32] * 3), codegen


fused = intrinsic(_fused_intrinsic)
"""(a, b, c): a * b + c, rounded once. A CPU without such an instruction calls libm's fmaf, which is exact and slow."""


# fp16. Numba has none on the CPU; most CPUs have instructions that convert it (F16C), to nearest, ties to even.


extended = _conversion(types.uint16, types.float32, lambda b, half: b.fpext(b.bitcast(half, _HALF), _SINGLE))
rounded_to_half = _conversion(
    types.float32, types.uint32, lambda b, value: b.zext(b.bitcast(b.fptrunc(value, _HALF), _I16), _I32)
)

_TRIPLE, _, _FEATURES = cpu_target.target_context.codegen().magic_tuple()
HAS_CONVERSIONS: bool = "+f16c" in _FEATURES.split(",") or _TRIPLE.startswith(("aarch64", "arm64"))
"""Whether the CPU that Numba compiles for converts between fp16 and fp32."""


# Memory, and scalars.


LINE = 64
"""Bytes of a cache line."""


def _pointer_intrinsic(_context: Any, address: Any, dtype: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(address, dtype), codegen


def _stack_intrinsic(_context: Any, dtype: Any, count: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        # No allocation per call, and LLVM knows that nothing else points there.
        return cgutils.alloca_once(builder, context.get_value_type(dtype.dtype), size=count.literal_value)

    return types.CPointer(dtype.dtype)(dtype, count), codegen


_LINE = ir.VectorType(_I32, 16)


def _room_intrinsic(_context: Any, nbytes: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, _args: Any) -> Any:
        place = cgutils.alloca_once(builder, ir.IntType(8), size=nbytes.literal_value)
        place.align = LINE
        return builder.ptrtoint(place, context.get_value_type(signature.return_type))

    return types.int64(nbytes), codegen


def _stream_line_intrinsic(_context: Any, _source: Any, _target: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, target = (builder.inttoptr(address, ir.PointerType(_LINE)) for address in args)
        store = builder.store(builder.load(source, align=LINE), target, align=LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _fence_intrinsic(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _rounded_intrinsic(_context: Any, scalars: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[0], signature.args[0], signature.return_type)

    return types.UniTuple(types.float32, scalars.count)(scalars), codegen


pointer = intrinsic(_pointer_intrinsic)
"""(address, dtype): a pointer to elements of a dtype."""
on_stack = intrinsic(prefer_literal=True)(_stack_intrinsic)
"""(dtype, count): a pointer to `count` elements that live until the call ends."""
room = intrinsic(prefer_literal=True)(_room_intrinsic)
"""(nbytes): the address of so many bytes that live until the call ends, at the start of a cache line."""
stream_line = intrinsic(_stream_line_intrinsic)
"""(source, target): copy a cache line without reading the target into the cache. Both addresses are multiples of
`LINE`. Other threads may not see the copy before a `fence`."""
fence = intrinsic(_fence_intrinsic)
"""(): what the thread has written is seen by other threads before what it writes later."""
rounded = intrinsic(_rounded_intrinsic)
"""A tuple of floats in fp32."""
