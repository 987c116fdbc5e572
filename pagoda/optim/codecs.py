"""Codecs: how a moment is stored between two updates, if not in fp32. They lose precision, so users must ask for them.

An update decodes both moments to fp32, takes the step of `adamw` with them, and encodes the new moments. The weight's
change is computed from the fp32 moments. In addition to the bf16 weight, the state of a parameter takes 10 bytes with
fp32 moments, 6 bytes with "bf16", and 4 bytes with "8bit" (and 1/32 byte for scales).

**Contract of "bf16": stochastic rounding.** With beta2 = 0.999 a second moment changes by a thousandth of itself in a
step, and bf16 has steps of 1/256: rounded to nearest, it would often stand still. Rounded up with the probability of
what is cut off, it is right on average. All arithmetic is on unsigned 32-bit integers, modulo 2**32::

    x = index ^ key.low             index: of the element inside its parameter, modulo 2**32
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) + key.high
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    noise of exp_avg = x & 0xFFFF, of exp_avg_sq = x >> 16
    bf16 = (bits + noise) >> 16     bits: of the fp32 moment; noise is 0 where bits & 0x7FFFFFFF >= 0x7F7F0000

So infinity and NaN stay what they are, and nothing finite becomes infinite. Values that bf16 has are kept. The error
is below 2**-7 of the value (of 2**-126, where it is denormal), and its mean over the noise is zero.

The bits are a pure function of seed, parameter, step and element: no block size, thread, tier, layout or resumed run
can change them, and any kernel can make them. The mix is lowbias32 (Wellons, "Prospecting for hash functions", 2018):
two multiplications, which vectorise, and the least biased of its size that a search found. Generators made for
simulations (Philox has ten rounds) would cost more than the update itself, and rounding asks only that the bits be
unbiased and independent of the values. The second half of the key comes in between the rounds, so that two keys do not
give one sequence in another order. `Key.of` hashes everything but the index on the host.

**Contract of "8bit": blockwise dynamic quantization** (Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
ICLR 2022). A block is `BLOCK` consecutive elements of one parameter, from its first element on; the last may be
shorter. It keeps one fp32 scale, the largest magnitude in it, and for each element a byte: the value of a map that is
nearest to element / scale. The maps are the paper's: between powers of ten, from 1e-7 up to 1, lie 2, 4, 8, ... 128
values at equal distances for exp_avg_sq, and 1, 2, 4, ... 64 with a sign for exp_avg; and there are 0 and 1. Three
things differ from bitsandbytes:

- exp_avg has 1 and -1 in place of 0.993 and -0.993, where bitsandbytes has 1 beside the two. The largest element of a
  block is then exact, and encoding what was decoded gives the same bytes.
- exp_avg_sq that is above zero never becomes zero: a first moment over a root of zero would be a step of m / eps.
- Codes are numbered such that zero bytes are zeros, which is what new state is.

Every operation is in fp32 and rounds once. Decoding, with k the code of exp_avg_sq or the low 7 bits of exp_avg's::

    f = k + 1.5                     exp_avg_sq
    f = 2 * k + 1                   exp_avg
    p = 1
    if f < 16:   p = 1e-4,     f = f * 16
    if f < 64:   p = p * 1e-2, f = f * 4
    if f < 128:  p = p * 1e-1, f = f * 2
    value = p * (f * (0.9 / 128) - 0.8), but 0 for k = 0, and 1 for k = 255 (exp_avg: k = 127)
    moment = value * scale          exp_avg: bit 7 of its code is the sign of value

Encoding, with x = abs(moment) * (1 / scale). `u` is a concave function of x, with one straight piece for each power of
ten. Its integer part is the number of the value of the map whose cell contains x. An exception is the first fifth of
the first cell of each piece, which is nearer to the last value of the piece below::

    u = min(x * a + b for a, b in LINES)
    exp_avg:    u = max(u, 1)                     exp_avg_sq: u = max(2 * u, 2)
    n = the power of two at or below u
    if u - n < 0.2: u = u - 1
    k = int(min(max(u, 1), 126.5))                k = int(min(max(u - 1, 1), 254.5))
    k = 127 if x >= 0.98945314                    k = 255 if x >= 0.99824219
    k = 0 if x < 2.75e-7                          k = 0 if x = 0

A block whose largest magnitude is below 2**-126 becomes zeros with scale 0. One with infinity or NaN in it becomes all
NaN: zeros with scale NaN.
"""

import hashlib
from typing import Literal, NamedTuple

Moments = Literal["fp32", "bf16", "8bit"]
"""The formats in which AdamW can store its moments."""

BLOCK = 256
"""Elements that share a scale."""

# Constants of the contract. They are Python floats, rounded to fp32 where they are used.
LINES = tuple((2**e * 10 ** (6 - e) / 0.9, 2**e * 0.8 / 0.9) for e in range(7))
"""Slope and offset of u between 10**(e - 7) and 10**(e - 6)."""
TENTH_STEPS = 0.9 / 128
TOP_SIGNED, TOP_UNSIGNED = 0.98945314, 0.99824219
"""Halfway between 1 and the value below it."""
ZERO_SIGNED = 2.75e-7
"""Halfway between 0 and the value above it."""
MAX_NOISY = 0x7F7F0000
"""Bits of the largest finite bf16 value. Magnitudes from here on are truncated."""


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
