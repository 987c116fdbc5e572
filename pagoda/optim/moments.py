"""Formats of AdamW's moments between two updates. All but fp32 are lossy, so fp32 is the default.

An update decodes both moments to fp32, takes the step of `adamw` with them, and encodes the new ones. The new weight is
computed before encoding. A parameter's state, without its bf16 weight, takes 10 bytes with fp32 moments, 6 with "bf16"
moments, and 4 with "8bit" moments, whose floors take another 1/32. 2 of these bytes are the low half of the master.

`MOMENT_FORMATS` has a format's states. It also needs its arithmetic (`arithmetic.py`), kernels (`kernels.py`,
`triton_updates.py`), and the conversion of whole moments (`flat.py`).

**Stochastic rounding.** With beta2 = 0.999 a second moment may change by a thousandth of itself in a step, but
neighbouring bf16 values differ by at least 1/256, and neighbouring 8-bit values by 1/16. Rounding to nearest would
often leave it unchanged. So both formats cut off the lowest bits of the fp32 value, and round up with a probability
equal to the fraction that they cut off. The error is then zero on average. All arithmetic is on unsigned 32-bit
integers, modulo 2**32, and `bits` are those of an fp32 value::

    x = index ^ key.low             index: of the element inside its parameter, modulo 2**32
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) + key.high
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    noise = x & (2**cut - 1) for exp_avg, x >> (32 - cut) for exp_avg_sq
    code = (bits + noise) >> cut

Values that the format can represent are kept.

The noise is a pure function of seed, parameter, step and element. So block size, threads, tiers, layout and resuming
do not change it, and every kernel computes the same. The mixing function is lowbias32 (Wellons, "Prospecting for hash
functions", 2018). It has two multiplications, which vectorise, and the lowest bias of its size that a search found.
Generators for simulations (Philox has ten rounds) would cost more than the update itself, and rounding only needs bits
that are unbiased and independent of the values. The second half of the key is added between the rounds, so that two
keys do not give one sequence in another order. `Key.of` hashes all but the index on the CPU, once for each update.

**"bf16"**: cut = 16, and no noise where bits & 0x7FFFFFFF >= 0x7F7F0000. So infinity and NaN are kept, and no finite
value becomes infinite. The error is below 2**-7 of the value (of 2**-126, if the value is denormal).

**"8bit"**: cut = 20, which leaves 3 bits of the mantissa. A parameter is divided into blocks of `BLOCK` consecutive
elements; the last may be shorter. The exponents of a block are counted from its floor, a power of two that is stored
beside the codes. exp_avg has 14 octaves above the floor, and exp_avg_sq has 31::

    exponent = (top + 2**cut - 1) >> 23         top: the bits of the block's largest magnitude
    floor    = the value with the bits max(exponent - octaves, 0) << 23

exp_avg is a float of 8 bits, with a sign, 4 bits of exponent and 3 of the mantissa. As in IEEE 754, values below the
floor have equal steps, so zero is zero. exp_avg_sq has 5 bits of exponent and 3 of the mantissa. A smaller one becomes
the floor, because it must not become zero: the step would then be m / eps. With F the floor::

    exp_avg       code = (bits(|m| + max(|m|, F)) - bits(F) + noise) >> cut, and the sign of m as bit 7
                  |m|  = y - max(y / 2, F), where y = float((code << cut) + bits(F))
    exp_avg_sq    code = (bits(max(v, F)) - bits(F) + noise) >> cut
                  v    = float((code << cut) + bits(F))

An error is below 1/8 of the value, or of the floor if that is larger. Zero bytes are zeros, as new state needs. A block
with infinity, NaN, or a magnitude above 2**127 * 15/16 gets zeros as codes and the floor NaN, so all of it is decoded
as NaN.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from pagoda.config.run import Moments
from pagoda.optim.rule import StateSpec

BLOCK = 256
"""Elements that share a floor."""
CUT = 20
"""Number of bits of an fp32 value that an 8-bit code does not keep."""
CUT_OFF = 2**CUT - 1
"""These bits."""
MAX_NOISY = 0x7F7F0000
"""Bits of the largest finite bf16 value. Magnitudes from here on get no noise."""
NOT_FINITE = 254
"""The exponent from which on a block counts as not finite: twice its largest magnitude could be infinity."""
NAN = 0x7FC00000
"""Bits of NaN."""

MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
"""torch's names of the moments, for every format."""


class MomentFormat(NamedTuple):
    """A format of both moments."""

    states: tuple[StateSpec, ...]
    """Both moments, as values or codes, then their floors, in the order of the kernels' arguments. Those of different
    formats have different names, so that no checkpoint is loaded with a wrong format."""
    kernel_name: str
    """The kernel of AdamW with these moments."""
    element_work: float
    """As in `Rule.element_work`."""


MOMENT_FORMATS: Mapping[Moments, MomentFormat] = {
    "fp32": MomentFormat(tuple(StateSpec(name, torch.float32) for name in MOMENT_NAMES), "adamw", 1.0),
    "bf16": MomentFormat(
        tuple(StateSpec(f"{name}_bf16", torch.bfloat16) for name in MOMENT_NAMES), "adamw_moments_bf16", 1.4
    ),
    "8bit": MomentFormat(
        (
            *(StateSpec(f"{name}_fp8", torch.uint8) for name in MOMENT_NAMES),
            *(StateSpec(f"{name}_floor", torch.float32, per=BLOCK) for name in MOMENT_NAMES),
        ),
        "adamw_moments_8bit",
        1.8,
    ),
}
