"""Update rules: the mathematics of optimizers, on the states that Pagoda moves.

``rule`` is the interface of rules. ``adamw``, ``adam``, ``sgd``, ``sign_sgd`` and ``lion`` are element-wise rules: each
defines its settings, its states, the scalars of one step, and every operation on an element. ``moments`` defines the
formats of AdamW's moments. ``adafactor`` and ``muon`` take whole parameters. ``torch_optimizer`` runs any optimizer
class of torch. ``probe`` finds out which states such a class keeps.

``arithmetic`` has the code of these definitions, for the CPU and the GPU. The ``kernels`` files run it in loops on the
CPU; the runtime's threads call them by address. ``flat`` calls them on tensors. The ``triton`` files run it on a GPU.
``warm`` compiles all of them before the first step. This file imports none of them, so that reading a configuration
does not load Numba.
"""

from pagoda.optim.adafactor import Adafactor
from pagoda.optim.adam import Adam
from pagoda.optim.adamw import AdamW
from pagoda.optim.lion import Lion
from pagoda.optim.muon import Muon
from pagoda.optim.rule import Rule
from pagoda.optim.sgd import SGD
from pagoda.optim.sign_sgd import SignSGD
from pagoda.optim.torch_optimizer import Optim

__all__ = ["SGD", "Adafactor", "Adam", "AdamW", "Lion", "Muon", "Optim", "Rule", "SignSGD"]
