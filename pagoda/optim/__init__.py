"""Update rules: the math of optimizers, on the states that Pagoda moves.

``rule`` is the contract. ``adamw``, ``adam``, ``sgd`` and ``lion`` are element-wise rules: settings, states, and the
scalars of one step; ``codecs`` says how AdamW keeps its moments. ``adafactor`` and ``muon`` take parameters whole;
``torch_optimizer`` runs any optimizer class of torch, which ``probe`` has looked at.

``arithmetic`` is the code of the contracts, for the CPU and the GPU. The ``kernels`` files loop over it on the CPU,
called by address from lane threads; ``flat`` is the same for tensors. The ``triton`` files loop over it on a GPU. All
these are imported by name, so that reading a config does not load Numba.
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
