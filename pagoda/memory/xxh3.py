"""XXH3-64 of many pages in one call that holds no GIL.

The xxhash package takes a call a page, and each gives the GIL up and waits for it again. Beside busy threads that took
a tenth of a millisecond, as long as hashing 1 MiB; a transfer of 4 MiB may have 32 pages.

The algorithm is that of https://github.com/Cyan4973/xxHash (inputs above 240 bytes, default secret, seed 0): eight
accumulators of 64 bits take stripes of 64 bytes, and are scrambled after each block of 16 stripes. The two steps are
LLVM vectors, which Numba's loops would not become.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagoda.jit import kernel, part

_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
        "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
        "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8f"
        "f8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
).copy()
_SECRET_ADDRESS = int(_SECRET.ctypes.data)
_STRIPE, _STRIPES = 64, 16
"""Bytes of a stripe, and stripes of a block."""
_BLOCK = _STRIPE * _STRIPES
_SCRAMBLE_KEY = len(_SECRET) - _STRIPE
_LAST_KEY = _SCRAMBLE_KEY - 7
_MERGE_KEY = 11

_START = np.array(
    [
        0x00000000C2B2AE3D,
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x0000000085EBCA77,
        0x27D4EB2F165667C5,
        0x000000009E3779B1,
    ],
    np.uint64,
)
_PRIME32_1, _PRIME64_1, _AVALANCHE = np.uint64(0x9E3779B1), _START[1], np.uint64(0x165667919E3779F9)
_LOW32 = np.uint64(0xFFFFFFFF)

_LANES = ir.VectorType(ir.IntType(64), 8)


def _each(value: int) -> ir.Constant:
    return ir.Constant(_LANES, [value] * 8)


def _vector(builder: Any, address: Any) -> Any:
    """Where a vector lies, at any address."""
    return builder.inttoptr(address, _LANES.as_pointer())


def _accumulators_intrinsic(_context: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        # On the stack: LLVM keeps it in registers.
        return builder.ptrtoint(cgutils.alloca_once(builder, _LANES), ir.IntType(64))

    return types.uint64(), codegen


def _add_stripe_intrinsic(_context: Any, _accumulators: Any, _data: Any, _key: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        accumulators = _vector(builder, args[0])
        data = builder.load(_vector(builder, args[1]), align=1)
        keyed = builder.xor(data, builder.load(_vector(builder, args[2]), align=1))
        product = builder.mul(builder.and_(keyed, _each(0xFFFFFFFF)), builder.lshr(keyed, _each(32)))
        pairs = ir.Constant(ir.VectorType(ir.IntType(32), 8), [i ^ 1 for i in range(8)])
        swapped = builder.shuffle_vector(data, data, pairs)
        total = builder.add(builder.load(accumulators, align=8), builder.add(product, swapped))
        builder.store(total, accumulators, align=8)

    return types.void(types.uint64, types.uint64, types.uint64), codegen


def _scramble_intrinsic(_context: Any, _accumulators: Any, _key: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        accumulators = _vector(builder, args[0])
        value = builder.load(accumulators, align=8)
        value = builder.xor(value, builder.lshr(value, _each(47)))
        value = builder.xor(value, builder.load(_vector(builder, args[1]), align=1))
        builder.store(builder.mul(value, _each(int(_PRIME32_1))), accumulators, align=8)

    return types.void(types.uint64, types.uint64), codegen


def _word_intrinsic(_context: Any, _address: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)

    return types.uint64(types.uint64), codegen


def _set_word_intrinsic(_context: Any, _address: Any, _value: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)

    return types.void(types.uint64, types.uint64), codegen


_accumulators = intrinsic(_accumulators_intrinsic)
_add_stripe = intrinsic(_add_stripe_intrinsic)
_scramble = intrinsic(_scramble_intrinsic)
_word = intrinsic(_word_intrinsic)
_set_word = intrinsic(_set_word_intrinsic)


@part
def _folded_product(a: Any, b: Any) -> Any:
    """The low 64 bits of a product of 128, xor its high ones."""
    low, cross = (a & _LOW32) * (b & _LOW32), (a >> np.uint64(32)) * (b & _LOW32)
    middle = (a & _LOW32) * (b >> np.uint64(32)) + (cross & _LOW32) + (low >> np.uint64(32))
    high = (a >> np.uint64(32)) * (b >> np.uint64(32)) + (cross >> np.uint64(32)) + (middle >> np.uint64(32))
    return ((middle << np.uint64(32)) | (low & _LOW32)) ^ high


@kernel
def _hash_pages(address: int, page_bytes: int, secret: int, hashes: Any) -> None:
    first, step, key = np.uint64(address), np.uint64(page_bytes), np.uint64(secret)
    sums = _accumulators()
    for page in range(len(hashes)):
        at = first + np.uint64(page) * step
        for i in range(8):
            _set_word(sums + np.uint64(8 * i), _START[i])
        blocks = (page_bytes - 1) // _BLOCK
        for _ in range(blocks):
            for n in range(_STRIPES):
                _add_stripe(sums, at + np.uint64(_STRIPE * n), key + np.uint64(8 * n))
            _scramble(sums, key + np.uint64(_SCRAMBLE_KEY))
            at += np.uint64(_BLOCK)
        for n in range((page_bytes - 1 - blocks * _BLOCK) // _STRIPE):
            _add_stripe(sums, at + np.uint64(_STRIPE * n), key + np.uint64(8 * n))
        end = first + np.uint64(page + 1) * step
        _add_stripe(sums, end - np.uint64(_STRIPE), key + np.uint64(_LAST_KEY))

        total = step * _PRIME64_1
        for i in range(4):
            pair = sums + np.uint64(16 * i)
            its_key = key + np.uint64(_MERGE_KEY + 16 * i)
            total += _folded_product(
                _word(pair) ^ _word(its_key), _word(pair + np.uint64(8)) ^ _word(its_key + np.uint64(8))
            )
        total = (total ^ (total >> np.uint64(37))) * _AVALANCHE
        hashes[page] = total ^ (total >> np.uint64(32))


def hashes_of(data: memoryview, page_bytes: int) -> npt.NDArray[np.uint64]:
    """XXH3-64 of each page of `data`, shape [pages]; pages are of more than 240 bytes, and whole."""
    hashes = np.empty(data.nbytes // page_bytes, np.uint64)
    if len(hashes):
        address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        _hash_pages(address, page_bytes, _SECRET_ADDRESS, hashes)
    return hashes
