"""Compiles kernels, or loads them from their caches, so that no step waits for it."""

import torch

from pagoda.config.training import Precision
from pagoda.optim.adafactor import Adafactor
from pagoda.optim.flat import join, split, update
from pagoda.optim.gradient_kernels import arriving_dtype, gradient_kernels
from pagoda.optim.kernels import convert_moment, halves, update_kernel
from pagoda.optim.moments import BLOCK
from pagoda.optim.muon import Muon
from pagoda.optim.rule import DTYPES, ElementwiseRule, Rule


def warm_up(rule: Rule, precision: Precision, gradient: torch.dtype | None = None, elsewhere: bool = False) -> None:
    """Compile everything that these settings use on the CPU. `elsewhere`: also what writes new states elsewhere."""
    weight = DTYPES[precision]
    kept = gradient or weight
    # The argument types select the compiled version. So the kernels are called on no elements.
    for take in gradient_kernels(kept, arriving_dtype(kept, weight)):
        take(0, 0, 0)
    for joining in (False, True) if precision != "fp32" else ():
        halves(weight, joining)(0, 0, 0, 0)
    _update_zeros(rule, precision, kept, torch.device("cpu"))
    if elsewhere and isinstance(rule, ElementwiseRule):
        states, noise = len(rule.states(precision)), [0] * 3 * (rule.noise("", 1) is not None)
        update_kernel(rule, precision, kept, elsewhere)(
            *[0] * (states + 2), *[0] * states, *noise, *rule.arguments, *rule.scalars(1)
        )
    if any(state.dtype is torch.uint8 for state in rule.own_states()):
        convert_moment(0, 0, 0, 0, True, True)


def warm_up_gpu(rule: Rule, precision: Precision, gradient: torch.dtype, device: torch.device, piece: int) -> None:
    """Compile everything that these settings use on a GPU."""
    from pagoda.optim.triton_kernels import square_sums
    from pagoda.optim.triton_updates import LANES

    # Its tensors are aligned like every block of a unit. Triton compiles a kernel for the alignment of its arguments.
    _update_zeros(rule, precision, gradient, device)
    sums = torch.zeros(LANES.value, dtype=torch.float64, device=device)
    for dtype in {gradient, arriving_dtype(gradient, DTYPES[precision])}:
        square_sums(torch.zeros(BLOCK, dtype=dtype, device=device), sums, piece)
    torch.cuda.synchronize(device)


def _update_zeros(rule: Rule, precision: Precision, gradient: torch.dtype, device: torch.device) -> None:
    """Run the kernels of a rule on zeros."""
    shape = (4, 4) if isinstance(rule, Adafactor) else (BLOCK,)
    zeros = torch.zeros(shape, dtype=gradient, device=device)
    if isinstance(rule, ElementwiseRule):
        update(rule, rule.new_states(precision, shape, device), zeros, rule.scalars(1), rule.noise("", 1))
    elif isinstance(rule, Adafactor):
        states = rule.new_states(precision, shape, device)
        weight, low = states.pop("weight"), states.pop("weight_low", None)
        rule.update(1, weight, zeros, states, low)
    elif precision != "fp32":
        weight, low = (torch.zeros(shape, dtype=dtype, device=device) for dtype in (DTYPES[precision], torch.int16))
        master = torch.zeros(shape, device=device)
        split(master, weight, low)
        join(weight, low, master)
    if isinstance(rule, Muon):  # for parameters that are not matrices
        _update_zeros(rule.adamw(), "fp32", torch.float32, device)
