"""Codecs: how AdamW stores a moment between two updates, if not in fp32. They are lossy, so fp32 is the default.

An update decodes both moments to fp32, takes the step of `adamw` with them, and encodes the new ones. The new weight is
computed before encoding. A parameter's state, without its bf16 weight, takes 10 bytes with fp32 moments, 6 with "bf16"
moments, and 4 with "8bit" moments, whose scales take another 1/32. 2 of these bytes are the low half of the master.

**"bf16": stochastic rounding.** With beta2 = 0.999 a second moment may change by a thousandth of itself in a step, but
neighbouring bf16 values differ by at least 1/256. Rounding to nearest would often leave it unchanged. So it is rounded
up with a probability equal to the fraction that truncation would cut off, so the error is zero on average. All
arithmetic is on unsigned 32-bit integers, modulo 2**32::

    x = index ^ key.low             index: of the element inside its parameter, modulo 2**32
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) + key.high
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    noise of exp_avg = x & 0xFFFF, of exp_avg_sq = x >> 16
    bf16 = (bits + noise) >> 16     bits: of the fp32 moment; noise is 0 where bits & 0x7FFFFFFF >= 0x7F7F0000

Infinity, NaN and values that bf16 can represent are kept. No finite value becomes infinite. The error is below 2**-7
of the value (of 2**-126, if the value is denormal), and its mean over the noise is zero.

The noise is a pure function of seed, parameter, step and element. So block size, threads, tiers, layout and resuming
do not change it, and every kernel computes the same. The mixing function is lowbias32 (Wellons, "Prospecting for hash
functions", 2018). It has two multiplications, which vectorise, and the lowest bias of its size that a search found.
Generators for simulations (Philox has ten rounds) would cost more than the update itself, and rounding only needs bits
that are unbiased and independent of the values. The second half of the key is added between the rounds, so that two
keys do not give one sequence in another order. `Key.of` hashes all but the index on the CPU, once for each update.

**"8bit": blockwise dynamic quantization** (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022).
A parameter is divided into blocks of `BLOCK` consecutive elements; the last may be shorter. A block stores one fp32
scale, its largest magnitude, and a byte for each element: the code of the value nearest to element / scale in a fixed
list of values, the map. The maps are the paper's. Between neighbouring powers of ten, from 1e-7 to 1, the map of
exp_avg_sq has 2, 4, 8, ... 128 values at equal distances, and that of exp_avg has 1, 2, 4, ... 64 of each sign. Both
also have 0 and 1. Three things differ from bitsandbytes:

- exp_avg has 1 and -1 in place of 0.993 and -0.993; bitsandbytes has 0.993, -0.993 and 1. The largest element of a
  block is then exact, and encoding what was decoded gives the same bytes.
- An exp_avg_sq above zero never becomes zero, because the step would then be m / eps.
- Code 0 is the value 0, because new state consists of zero bytes.

Every operation is in fp32 and rounds once. Decoding, with k the code of exp_avg_sq or the low 7 bits of exp_avg's::

    f = k + 1.5                     exp_avg_sq
    f = 2 * k + 1                   exp_avg
    p = 1
    if f < 16:   p = 1e-4,     f = f * 16
    if f < 64:   p = p * 1e-2, f = f * 4
    if f < 128:  p = p * 1e-1, f = f * 2
    value = p * (f * (0.9 / 128) - 0.8), but 0 for k = 0, and 1 for k = 255 (exp_avg: k = 127)
    moment = value * scale          exp_avg: bit 7 of its code is the sign of value

Encoding, with x = abs(moment) * (1 / scale). `u` is a concave, piecewise linear function of x with one line for each
power of ten. Line e maps 10**(e - 7) ... 10**(e - 6) to 2**e ... 2**(e + 1). A cell is the interval from one integer to
the next, of u for exp_avg and of 2 * u for exp_avg_sq. Each value of the map is in the middle of a cell, and the
integer is the number of the cell. But the first fifth of a line's first cell is nearer to the last value of the line
below::

    u = min(x * a + b for a, b in LINES)
    exp_avg:    u = max(u, 1)                     exp_avg_sq: u = max(2 * u, 2)
    n = the power of two at or below u
    if u - n < 0.2: u = u - 1
    k = int(min(max(u, 1), 126.5))                k = int(min(max(u - 1, 1), 254.5))
    k = 127 if x >= 0.98945314                    k = 255 if x >= 0.99824219
    k = 0 if x < 2.75e-7                          k = 0 if x = 0

A block whose largest magnitude is below 2**-126 gets zeros as codes and 0 as scale. A block with infinity or NaN gets
zeros and the scale NaN, so all of it is decoded as NaN.
"""

import hashlib
from typing import Literal, NamedTuple

Moments = Literal["fp32", "bf16", "8bit"]
"""The formats in which AdamW can store its moments."""

BLOCK = 256
"""Elements that share a scale."""

# Constants of these definitions. They are Python floats, rounded to fp32 where they are used.
LINES = tuple((2**e * 10 ** (6 - e) / 0.9, 2**e * 0.8 / 0.9) for e in range(7))
"""Slope and offset of u between 10**(e - 7) and 10**(e - 6)."""
TENTH_STEPS = 0.9 / 128
TOP_SIGNED, TOP_UNSIGNED = 0.98945314, 0.99824219
"""Halfway between 1 and the value below it."""
ZERO_SIGNED = 2.75e-7
"""Halfway between 0 and the value above it."""
MAX_NOISY = 0x7F7F0000
"""Bits of the largest finite bf16 value. Magnitudes from here on get no noise."""


class Key(NamedTuple):
    """The seed of the noise of one parameter at one step: two unsigned 32-bit integers."""

    low: int
    high: int

    @classmethod
    def of(cls, seed: int, name: str, step: int) -> "Key":
        """The first 8 bytes, little-endian, of BLAKE2b (digest of 8) over "seed/step/name" in UTF-8.

        ``name`` is the first one that the parameter has in the model; ``step`` counts its updates from 1.
        """
        digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))
