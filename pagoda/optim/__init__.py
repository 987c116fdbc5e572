"""Update rules as math on flat blocks.

``adamw`` is the rule: settings, states, and the scalars of one step; ``codecs`` says how it keeps its moments.
``kernels`` is its machine code, called by address from lane threads; ``flat`` is the checked front of the same code
for tensors; ``reference`` is the same math in plain torch. The last three are imported by name, so that reading a
config does not load Numba.
"""

from pagoda.optim.adamw import (
    MOMENT_NAMES,
    AdamW,
    Hyper,
    Precision,
    Scalars,
    StateSpec,
    check_precision,
    gradient_dtype,
    step_scalars,
)
from pagoda.optim.codecs import Key, Moments

__all__ = [
    "MOMENT_NAMES",
    "AdamW",
    "Hyper",
    "Key",
    "Moments",
    "Precision",
    "Scalars",
    "StateSpec",
    "check_precision",
    "gradient_dtype",
    "step_scalars",
]
