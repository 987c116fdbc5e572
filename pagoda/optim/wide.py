"""The codec of 8-bit moments for CPUs that look bytes up in registers (AVX-512 VBMI): 64 elements at a time.

`arithmetic` computes the maps of `codecs` with instructions of every vector unit. Lookups in tables take a third of the
instructions, but compilers do not make lookups of a loop. So this file emits LLVM's vector instructions itself. It
fills the tables with the functions of `arithmetic`, so the bits are the same.

Decoding looks up each of the four bytes of a value by its code, and interleaves the bytes.

Encoding looks up the line of `codecs.LINES` on which x lies, where `arithmetic` computes all lines. The index of the
tables is the upper 8 of the 32 bits of x, modulo 16. From `_LEAST` to 1, at most one line begins among the values with
the same upper bits. The first table, `carries`, has a number to add to the bits of x: the sum carries into the upper
bits if x is at or past the beginning of that line. The upper bits of the sum are the index in the tables of slopes and
offsets. The last cell of a line extends into the next power of ten (see `codecs`), and there u is limited to `_TOPS`
times the line's offset.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagoda.jit import kernel, part
from pagoda.optim.arithmetic import decode, encode
from pagoda.optim.codecs import LINES
from pagoda.optim.jit import HAS_BYTE_LOOKUPS, float_of

WIDTH = 64
"""Elements that are encoded or decoded at a time."""
_LEAST = 2.0**-28
"""A smaller x has the code of this value, or of zero."""
_TOPS = {True: 2.22, False: 2.245}
"""By `signed`: a factor that gives u in the last cell of any line, if multiplied by the line's offset."""

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _WORDS = ir.VectorType(_I8, WIDTH), ir.VectorType(_I16, WIDTH // 2)
_INTS, _FLOATS = ir.VectorType(_I32, WIDTH // 4), ir.VectorType(_F32, WIDTH // 4)


@kernel
def _value_of(code: int, signed: bool) -> Any:
    return decode(np.uint8(code), signed)


@kernel
def _code_of(bits: int, signed: bool) -> Any:
    return encode(float_of(np.uint32(bits)), np.float32(1.0), signed)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def _first_with(code: int, signed: bool) -> int:
    """The bits of the least x with this code or a higher one."""
    low, high = 0, _bits(1.0)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _code_of(middle, signed) >= code else (middle + 1, high)
    return low


def _lines(signed: bool) -> tuple[list[int], list[float], list[float]]:
    """The tables (carries, slopes, offsets), by the lowest four bits of an index. For exp_avg_sq, slopes and offsets
    give its code plus 1, which begins with a power of two on each line, as exp_avg's code does."""
    by, extra = (1, 0) if signed else (2, 1)
    pieces = [(_first_with(by * 2**e - extra, signed), by * a, by * b) for e, (a, b) in enumerate(LINES)]
    top = 127 if signed else 255
    pieces = [(0, 0.0, 0.0), *pieces] if signed else [(0, *pieces[0][1:]), *pieces[1:]]
    pieces.append((_first_with(top, signed), 0.0, float(top + extra)))
    carries, slopes, offsets = [0] * 16, [0.0] * 16, [0.0] * 16
    for index in range(_bits(_LEAST) >> 24, (_bits(1.0) >> 24) + 1):
        end = (index + 1) << 24
        begin_here = [start for start, _, _ in pieces if start >> 24 == index]
        last = [line for start, *line in pieces if start < end][-1]
        carries[index % 16] = end - begin_here[0] if begin_here else 1 << 24
        slopes[(index + 1) % 16], offsets[(index + 1) % 16] = last
    return carries, slopes, offsets


# LLVM's vectors. `b` is the builder.


def _constant(element: ir.Type, values: Sequence[float]) -> ir.Constant:
    kind = float if element is _F32 else int
    return ir.Constant(ir.VectorType(element, len(values)), [ir.Constant(element, kind(value)) for value in values])


def _splat(element: ir.Type, value: float) -> ir.Constant:
    return _constant(element, [value] * (8 * WIDTH // element.width if element is not _F32 else WIDTH // 4))


def _call(b: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    name = f"llvm.x86.avx512.{name}.512"
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), arguments)


def _at(b: ir.IRBuilder, address: ir.Value, vector: ir.Type, index: int = 0) -> ir.Value:
    return b.inttoptr(b.add(address, ir.Constant(_I64, WIDTH * index)), ir.PointerType(vector))


def _shuffled(b: ir.IRBuilder, one: ir.Value, other: ir.Value, places: Sequence[int]) -> ir.Value:
    return b.shuffle_vector(one, other, _constant(_I32, places))


def _broadcast(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    first = b.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_I32, 0))
    return _shuffled(b, first, first, [0] * _FLOATS.count)


def _by_lanes(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Bytes as a transposed 4 x 4 matrix of 32-bit parts, whose rows are the 128-bit lanes."""
    parts = b.bitcast(value, _INTS)
    return b.bitcast(_shuffled(b, parts, parts, [4 * lane + part for part in range(4) for lane in range(4)]), _BYTES)


def _interleaved(b: ir.IRBuilder, low: ir.Value, high: ir.Value, vector: ir.Type) -> list[ir.Value]:
    """Join elements' low and high halves, within each 128-bit lane. Returns two vectors."""
    count = low.type.count
    lane, half = count // 4, count // 8
    places = [[lane * n + k + h for n in range(4) for k in range(half) for h in (0, count)]]
    places.append([place + half for place in places[0]])
    return [b.bitcast(_shuffled(b, low, high, of_half), vector) for of_half in places]


def _packed(b: ir.IRBuilder, name: str, vector: ir.Type, values: Sequence[ir.Value]) -> list[ir.Value]:
    """Pack each pair of vectors into one with elements of half the size, within each 128-bit lane."""
    return [_call(b, name, vector, *values[i : i + 2]) for i in range(0, len(values), 2)]


def _least(b: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed("<", one, other), one, other)


def _most(b: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed(">", one, other), one, other)


def _decode(b: ir.IRBuilder, codes: ir.Value, values: ir.Value, scale: ir.Value, signed: bool) -> None:
    """Emit the decoding of `WIDTH` codes at one address to values at another."""
    scales = _broadcast(b, scale)
    table = [_bits(_value_of(code, signed)) for code in range(256)]
    code = _by_lanes(b, b.load(_at(b, codes, _BYTES), align=1))
    is_high = b.icmp_signed("<", code, _splat(_I8, 0))
    planes = []
    for plane in range(4):
        quarters = [
            _constant(_I8, [bits >> 8 * plane & 0xFF for bits in table[at : at + WIDTH]]) for at in range(0, 256, WIDTH)
        ]
        byte = _call(b, "vpermi2var.qi", _BYTES, quarters[0], code, quarters[1])
        if not signed:
            byte = b.select(is_high, _call(b, "vpermi2var.qi", _BYTES, quarters[2], code, quarters[3]), byte)
        elif plane == 3:
            byte = b.or_(byte, b.and_(code, _splat(_I8, 0x80)))
        planes.append(byte)
    halves = [_interleaved(b, planes[i], planes[i + 1], _WORDS) for i in (0, 2)]
    whole = [value for low, high in zip(*halves, strict=True) for value in _interleaved(b, low, high, _FLOATS)]
    for index, value in enumerate(whole):
        b.store(b.fmul(value, scales), _at(b, values, _FLOATS, index), align=1)


def _encode(b: ir.IRBuilder, values: ir.Value, codes: ir.Value, inverse: ir.Value, signed: bool) -> None:
    """Emit the encoding of `WIDTH` values at one address to codes at another. `inverse` is 1 / scale."""
    steps, a, o = _lines(signed)
    carries, slopes, offsets = _constant(_I32, steps), _constant(_F32, a), _constant(_F32, o)
    inverses = _broadcast(b, inverse)
    to_top = _bits(_TOPS[signed] * LINES[0][1]) - _bits(LINES[0][1])
    shift, least = _splat(_I32, 24), _splat(_I32, _bits(_LEAST))
    # Each operation is emitted for all vectors, so that the CPU has other work while one waits for its operands.
    raw = [b.load(_at(b, values, _INTS, index), align=1) for index in range(4)]
    magnitudes = [b.and_(bits, _splat(_I32, 0x7FFFFFFF)) for bits in raw]
    x = [b.bitcast(b.fmul(b.bitcast(value, _FLOATS), inverses), _INTS) for value in magnitudes]
    bits = [_most(b, value, least) for value in x]
    carry = [_call(b, "permvar.si", _INTS, carries, b.lshr(value, shift)) for value in bits]
    line = [b.lshr(b.add(value, added), shift) for value, added in zip(bits, carry, strict=True)]
    offset = [_call(b, "permvar.sf", _FLOATS, offsets, index) for index in line]
    slope = [_call(b, "permvar.sf", _FLOATS, slopes, index) for index in line]
    rise = [b.fmul(b.bitcast(value, _FLOATS), by) for value, by in zip(bits, slope, strict=True)]
    u = [b.bitcast(b.fadd(value, start), _INTS) for value, start in zip(rise, offset, strict=True)]
    top = [b.add(b.bitcast(start, _INTS), _splat(_I32, to_top)) for start in offset]
    u = [_least(b, value, most) for value, most in zip(u, top, strict=True)]
    words = _packed(b, "packssdw", _WORDS, [b.fptosi(b.bitcast(value, _FLOATS), _INTS) for value in u])
    if not signed:
        one = _splat(_I16, 1)
        words = [_most(b, b.sub(value, one), one) for value in words]
        zeros = _packed(b, "packssdw", _WORDS, x)  # 0 only where x is
        words = [_least(b, value, zero) for value, zero in zip(words, zeros, strict=True)]
    (code,) = _packed(b, "packuswb", _BYTES, words)
    code = _by_lanes(b, code)
    if signed:
        negative = [b.icmp_signed("<", value, _splat(_I32, 0)) for value in raw]
        while len(negative) > 1:
            both = range(2 * negative[0].type.count)
            negative = [_shuffled(b, negative[i], negative[i + 1], both) for i in range(0, len(negative), 2)]
        code = b.select(negative[0], b.or_(code, _splat(_I8, 0x80)), code)
    b.store(code, _at(b, codes, _BYTES), align=1)


def _intrinsic(emit: Callable[..., None], signed: bool) -> Any:
    """A function of two addresses and a factor, for kernels. `emit` emits its instructions."""

    def typed(_context: Any, _source: Any, _target: Any, _factor: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            emit(builder, *args, signed)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32), codegen

    return intrinsic(typed)


@part
def _none(_source: Any, _target: Any, _n: Any, _factor: Any, _signed: Any) -> Any:
    return 0


def _groups(emit: Callable[..., None], source_bytes: int, target_bytes: int) -> Callable[..., Any]:
    """A function (source, target, n, factor, signed), for kernels. It converts elements at one address to elements at
    another, in groups of `WIDTH`: all of `n` except an incomplete last group. Returns their number. `signed`: of
    exp_avg, otherwise of exp_avg_sq."""
    of_signed, of_unsigned = _intrinsic(emit, True), _intrinsic(emit, False)

    @part
    def convert(source: Any, target: Any, n: Any, factor: Any, signed: Any) -> Any:
        done = n - n % WIDTH
        for i in range(0, done, WIDTH):
            if signed:
                of_signed(source + source_bytes * i, target + target_bytes * i, factor)
            else:
                of_unsigned(source + source_bytes * i, target + target_bytes * i, factor)
        return done

    return convert if HAS_BYTE_LOOKUPS else _none


decode_groups = _groups(_decode, 1, 4)
"""Codes to fp32. The factor is the scale."""
encode_groups = _groups(_encode, 4, 1)
"""fp32 to codes. The factor is 1 / scale."""
