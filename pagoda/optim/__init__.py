"""Update rules: the mathematics of optimizers, on the states that Pagoda moves.

``rule`` is their interface. ``adamw``, ``adam``, ``sgd`` and ``lion`` are element-wise rules: their settings, their
states, and the scalars of one step. ``codecs`` defines how AdamW stores its moments. ``adafactor`` and ``muon`` take
whole parameters. ``torch_optimizer`` runs any optimizer class of torch, after ``probe`` has found out which states it
keeps.

``arithmetic`` has the operations on one element, for the CPU and the GPU. The ``kernels`` files run them in loops on
the CPU; lane threads call these by address. ``flat`` does the same for tensors. The ``triton`` files run it on a GPU.
All of these are imported by name, so that reading a configuration does not load Numba.
"""

from pagoda.optim.adafactor import Adafactor
from pagoda.optim.adam import Adam, Scalars
from pagoda.optim.adamw import MOMENT_NAMES, AdamW
from pagoda.optim.codecs import Key, Moments
from pagoda.optim.lion import Lion
from pagoda.optim.muon import Muon
from pagoda.optim.rule import ElementwiseRule, Hyper, Rule, StateSpec, TensorRule, gradient_dtype
from pagoda.optim.sgd import SGD
from pagoda.optim.torch_optimizer import Optim

__all__ = [
    "MOMENT_NAMES",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "ElementwiseRule",
    "Hyper",
    "Key",
    "Lion",
    "Moments",
    "Muon",
    "Optim",
    "Rule",
    "Scalars",
    "StateSpec",
    "TensorRule",
    "gradient_dtype",
]
