"""CPU kernels by address: strict Numba, compiled for this machine on first use.

This is the hot path. A kernel takes addresses (``Tensor.data_ptr()``, or a page's address plus an offset in bytes) and
an element count. It checks nothing and touches no Python object. So the runtime's threads run it in parallel
(``nogil``), block by block, and a call costs about a microsecond. `flat` calls kernels on tensors.

The caller must ensure: each address is the start of ``n`` elements of the stated type, which stay alive and which
nothing else uses during the call; regions do not overlap; scalars are Python floats; the thread does not flush
denormals (``torch.set_flush_denormal``), as that changes bits. Any alignment is correct; 64 bytes is best.

A kernel is compiled for the forms (`arithmetic`) of the master and of the gradient, once a process. It computes in
fp32, so the bits are those that the same values stored in fp32 would give. Its rule is a constant too, and not an
argument, because Numba does not cache kernels that take functions.

This file has the kernels of rules, those that split and join masters, and the conversion of 8-bit moments by itself.
`gradient_kernels` has the kernels that store and add gradients.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from pagoda.config.training import Precision
from pagoda.jit import kernel, part
from pagoda.optim.arithmetic import (
    ADAMW,
    BF16,
    FORMS,
    FP32,
    LION,
    PLAIN,
    SGD,
    SGD_MOMENTUM,
    SIGN_SGD,
    adam_element,
    decode_8bit,
    encode_8bit,
    encode_bf16,
    floor_of,
    lion_element,
    magnitude,
    noise_bits,
    noises,
    predicted,
    sgd_element,
    sign_sgd_element,
)
from pagoda.optim.elements import load, load_master, masters_at, store, store_master, stream, values_at
from pagoda.optim.jit import add, fence, fp32, on_stack, pointer, room, rounded, word
from pagoda.optim.moments import BLOCK, CUT
from pagoda.optim.rule import DTYPES, ElementwiseRule

UpdateKernel = Callable[..., None]
"""``(*addresses of the rule's states in their order, gradient address, n, *targets, *noise, *scalars)``. targets is
empty if states are updated in place. Otherwise it has the address of each new state. noise is empty unless states are
rounded stochastically. Then it is the first element's index in its parameter and both numbers of `Key`. If weights are
predicted, `ahead` follows."""
_ROOM = 4 * BLOCK
"""Most bytes of a block of a state."""


@part
def _noises(key: Any, i: Any, cut: Any) -> Any:
    """The noise of both moments of an element."""
    index, low, high = key
    return noises(noise_bits(add(index, i), low, high), cut)


def _masters(weights: int, predicts: bool) -> tuple[int, int, int]:
    """The form of masters, and the bytes of one at the first address of its halves and at the second."""
    if predicts:
        return FP32, 4, 4
    return (FP32, 4, 0) if weights == FP32 else (weights, 2, 2)


def _plain(rule: int, noisy: bool, weights: int, gradients: int, elsewhere: bool, predicts: bool) -> UpdateKernel:
    """The kernel of one of `PLAIN`. It ignores the addresses of states that its rule does not have.

    `predicts`: in place of the low half, it takes the whole master, and it does not read weights.

    With bf16 weights, AdamW moves 26 bytes per element (14 read, 12 written), or 18 (10, 8) with bf16 moments. Rules
    with one moment move 18 (10, 8), and rules without one 10 (6, 4).

    `elsewhere`: new states go to other addresses, or to the same ones. They are computed in a small `room` and leave it
    for RAM, so that RAM moves as many bytes as in place.
    """
    moments, decoupled = BF16 if noisy else FP32, rule == ADAMW
    weight_bytes, gradient_bytes, moment_bytes = (4 if form == FP32 else 2 for form in (weights, gradients, moments))
    form, master_bytes, low_bytes = _masters(weights, predicts)
    at_ahead, at_scalars = 3 * noisy, 3 * noisy + predicts
    first_bytes = 0 if rule in (SGD, SIGN_SGD) else moment_bytes
    second_bytes = 0 if rule in (SGD, SGD_MOMENTUM, SIGN_SGD, LION) else moment_bytes

    @kernel
    def update(weight: int, weight_low: int, first: int, second: int, gradient: int, n: int, *numbers: float) -> None:
        given = numbers[4:] if elsewhere else numbers
        scalars, ahead = rounded(given[at_scalars:]), fp32(given[at_ahead])
        master = weight_low if predicts else weight
        step = BLOCK if elsewhere else max(n, 1)
        new_weight, new_low, new_first, new_second = room(_ROOM), room(_ROOM), room(_ROOM), room(_ROOM)
        new_master = new_low if predicts else new_weight
        for start in range(0, n, step):
            count = min(step, n - start)
            masters = masters_at(master + master_bytes * start, weight_low + low_bytes * start, count)
            shown = values_at(weight + weight_bytes * start, count)
            grads = values_at(gradient + gradient_bytes * start, count)
            avg = values_at(first + first_bytes * start, count)
            avg_sq = values_at(second + second_bytes * start, count)
            if elsewhere:
                new_masters, shown = masters_at(new_master, new_low, count), values_at(new_weight, count)
                new_avg, new_avg_sq = values_at(new_first, count), values_at(new_second, count)
            else:
                new_masters, new_avg, new_avg_sq = masters, avg, avg_sq
            for i in range(count):
                w, g = load_master(form, masters, i), load(gradients, grads, i)
                before = w
                if rule == SGD:
                    w, _ = sgd_element(w, w, g, scalars, False)
                elif rule == SGD_MOMENTUM:
                    w, m = sgd_element(w, avg[0][i], g, scalars, True)
                    new_avg[0][i] = m
                elif rule == SIGN_SGD:
                    w = sign_sgd_element(w, g, scalars)
                elif rule == LION:
                    w, m = lion_element(w, avg[0][i], g, scalars)
                    new_avg[0][i] = m
                else:
                    m, v = load(moments, avg, i), load(moments, avg_sq, i)
                    w, m, v = adam_element(w, m, v, g, scalars, decoupled)
                    if noisy:
                        noise, noise_sq = _noises(given[:3], start + i, 16)
                        new_avg[1][i] = encode_bf16(m, noise)
                        new_avg_sq[1][i] = encode_bf16(v, noise_sq)
                    else:
                        new_avg[0][i] = m
                        new_avg_sq[0][i] = v
                store_master(form, new_masters, i, w)
                if predicts:
                    store(weights, shown, i, predicted(w, before, ahead))
            if elsewhere:
                stream(new_weight, numbers[0] + weight_bytes * start, weight_bytes * count)
                stream(new_low, numbers[1] + low_bytes * start, low_bytes * count)
                stream(new_first, numbers[2] + first_bytes * start, first_bytes * count)
                stream(new_second, numbers[3] + second_bytes * start, second_bytes * count)
        if elsewhere:
            fence()

    return update


def _adamw_8bit(weights: int, gradients: int, elsewhere: bool, predicts: bool) -> UpdateKernel:
    """AdamW with 8-bit moments, otherwise like `_plain`. The first element must be the first of a block.

    With bf16 weights it moves 14 bytes per element (8 read, 6 written) and 16 per block.
    """
    # Every block has arrays of its own, indexed from 0: where an index is a sum, Numba tests each for being below zero,
    # and LLVM reads and writes element by element.
    weight_bytes, gradient_bytes = (4 if form == FP32 else 2 for form in (weights, gradients))
    form, master_bytes, low_bytes = _masters(weights, predicts)
    at_scalars = 3 + predicts

    @kernel
    def update(
        weight: int,
        weight_low: int,
        exp_avg: int,
        exp_avg_sq: int,
        exp_avg_floor: int,
        exp_avg_sq_floor: int,
        gradient: int,
        n: int,
        *numbers: float,
    ) -> None:
        blocks = (n + BLOCK - 1) // BLOCK
        floors = carray(pointer(exp_avg_floor, np.float32), blocks)
        floors_sq = carray(pointer(exp_avg_sq_floor, np.float32), blocks)
        if elsewhere:
            new_floors = carray(pointer(numbers[4], np.float32), blocks)
            new_floors_sq = carray(pointer(numbers[5], np.float32), blocks)
        else:
            new_floors, new_floors_sq = floors, floors_sq
        given = numbers[6:] if elsewhere else numbers
        scalars, ahead = rounded(given[at_scalars:]), fp32(given[3])
        master = weight_low if predicts else weight
        avg, avg_sq = carray(on_stack(np.float32, BLOCK), BLOCK), carray(on_stack(np.float32, BLOCK), BLOCK)
        index, low, high = given[:3]
        new_weight, new_low, new_first, new_second = room(_ROOM), room(_ROOM), room(_ROOM), room(_ROOM)
        new_master = new_low if predicts else new_weight
        for block in range(blocks):
            first = block * BLOCK
            count, start = min(BLOCK, n - first), add(index, first)
            masters = masters_at(master + master_bytes * first, weight_low + low_bytes * first, count)
            shown = values_at(weight + weight_bytes * first, count)
            grads = values_at(gradient + gradient_bytes * first, count)
            codes = carray(pointer(exp_avg + first, np.uint8), count)
            codes_sq = carray(pointer(exp_avg_sq + first, np.uint8), count)
            if elsewhere:
                new_masters, shown = masters_at(new_master, new_low, count), values_at(new_weight, count)
                new_codes = carray(pointer(new_first, np.uint8), count)
                new_codes_sq = carray(pointer(new_second, np.uint8), count)
            else:
                new_masters, new_codes, new_codes_sq = masters, codes, codes_sq
            floor, floor_sq, top, top_sq = floors[block], floors_sq[block], np.uint32(0), np.uint32(0)
            for i in range(count):
                before, g = load_master(form, masters, i), load(gradients, grads, i)
                m, v = decode_8bit(codes[i], floor, True), decode_8bit(codes_sq[i], floor_sq, False)
                w, m, v = adam_element(before, m, v, g, scalars, True)
                avg[i], avg_sq[i] = m, v
                top, top_sq = max(top, magnitude(m)), max(top_sq, magnitude(v))
                store_master(form, new_masters, i, w)
                if predicts:
                    store(weights, shown, i, predicted(w, before, ahead))
            floor, floor_sq = floor_of(top, True), floor_of(top_sq, False)
            for i in range(count):
                noise, noise_sq = noises(noise_bits(add(start, i), low, high), CUT)
                new_codes[i] = encode_8bit(avg[i], floor, noise, True)
                new_codes_sq[i] = encode_8bit(avg_sq[i], floor_sq, noise_sq, False)
            new_floors[block], new_floors_sq[block] = floor, floor_sq
            if elsewhere:
                stream(new_weight, numbers[0] + weight_bytes * first, weight_bytes * count)
                stream(new_low, numbers[1] + low_bytes * first, low_bytes * count)
                stream(new_first, numbers[2] + first, count)
                stream(new_second, numbers[3] + first, count)
        if elsewhere:
            fence()

    return update


@cache
def compiled(kernel_name: str, weights: int, gradients: int, elsewhere: bool, predicts: bool) -> UpdateKernel:
    """The compiled kernel of a rule for weights and gradients in these forms. It takes all addresses."""
    plain = PLAIN.get(kernel_name)
    if plain is None:
        return _adamw_8bit(weights, gradients, elsewhere, predicts)
    return _plain(*plain, weights, gradients, elsewhere, predicts)


def update_kernel(
    rule: ElementwiseRule, precision: Precision, gradient: torch.dtype | None = None, elsewhere: bool = False
) -> UpdateKernel:
    """The kernel of a rule for weights in `precision`, and gradients in that precision or in another dtype.

    `elsewhere`: it takes targets, which may be the old states' addresses.
    """
    weight = DTYPES[precision]
    update = compiled(rule.kernel_name, FORMS[weight], FORMS[gradient or weight], elsewhere, rule.ahead is not None)
    states, own = len(rule.states(precision)), len(rule.own_states())
    no_low, no_moments = 2 - (states - own), max(0, 2 - own)
    if not no_low and not no_moments:
        return update

    def all_of(addresses: Sequence[float]) -> tuple[float, ...]:
        """The addresses of all states of the kernel, given those that the rule has."""
        weight, *others = addresses
        return (weight, *[weight] * no_low, *others, *[weight] * no_moments)

    def padded(*given: float) -> None:
        addresses, (at, n), rest = given[:states], given[states : states + 2], given[states + 2 :]
        if elsewhere:
            rest = (*all_of(rest[:states]), *rest[states:])
        update(*all_of(addresses), at, n, *rest)

    return padded


@cache
def halves(weight: torch.dtype, joining: bool) -> Callable[..., None]:
    """The kernel that splits masters into 16-bit weights and their low halves, or joins them: addresses of weights, low
    halves and masters, and their number."""
    form = FORMS[weight]

    @kernel
    def convert(weight: int, weight_low: int, master: int, n: int) -> None:
        whole, masters = carray(pointer(master, np.float32), n), masters_at(weight, weight_low, n)
        for i in range(n):
            if joining:
                whole[i] = load_master(form, masters, i)
            else:
                store_master(form, masters, i, whole[i])

    return convert


@kernel
def convert_moment(values: int, codes: int, floors: int, n: int, signed: bool, encoding: bool) -> None:
    """Encode ``n`` fp32 elements of exp_avg (`signed`), or of exp_avg_sq (never below zero), to 8-bit codes and a floor
    for each block, rounding to nearest, or decode them. The first element must be the first of a block."""
    floor = carray(pointer(floors, np.float32), (n + BLOCK - 1) // BLOCK)
    for block in range(len(floor)):
        first = block * BLOCK
        count = min(BLOCK, n - first)
        value = carray(pointer(values + 4 * first, np.float32), count)
        code = carray(pointer(codes + first, np.uint8), count)
        if encoding:
            top = np.uint32(0)
            for i in range(count):
                top = max(top, magnitude(value[i]))
            floor[block] = floor_of(top, signed)
            for i in range(count):
                code[i] = encode_8bit(value[i], floor[block], word(1 << (CUT - 1)), signed)
        else:
            for i in range(count):
                value[i] = decode_8bit(code[i], floor[block], signed)
