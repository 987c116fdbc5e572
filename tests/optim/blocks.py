"""Rules, random and extreme states for them, updates of these, and comparison by bits."""

import torch

from pagoda.config.training import Precision
from pagoda.optim import SGD, Adam, AdamW, Lion, SignSGD, flat
from pagoda.optim.gradient_kernels import gradient_kernels
from pagoda.optim.kernels import update_kernel
from pagoda.optim.rule import DTYPES, MASTER, ElementwiseRule, Key

States = dict[str, torch.Tensor]

RULES: dict[str, ElementwiseRule] = {
    "adamw": AdamW(lr=3e-3, weight_decay=0.1),
    "adamw-bf16": AdamW(lr=3e-3, weight_decay=0.1, moments="bf16"),
    "adamw-8bit": AdamW(lr=3e-3, weight_decay=0.1, moments="8bit"),
    "adam": Adam(lr=3e-3, weight_decay=0.1),
    "sgd": SGD(lr=3e-2, weight_decay=0.1),
    "momentum": SGD(lr=3e-2, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": SGD(lr=3e-2, momentum=0.9, nesterov=True),
    "signsgd": SignSGD(lr=3e-3, weight_decay=0.1),
    "lion": Lion(lr=3e-3, weight_decay=0.1),
}

PREDICTING = {
    f"{name}, predicting": RULES[name].predicting(1.5) for name in ("adamw", "adamw-8bit", "nesterov", "lion")
}
ALL_RULES = RULES | PREDICTING

CASES: tuple[tuple[str, Precision], ...] = (
    *((rule, "bf16" if half else "fp32") for rule in RULES for half in (True, False)),
    *((rule, "fp16") for rule in RULES),
)
KEY, INDEX = Key(0x9E3779B9, 0x7F4A7C15), (1 << 32) - 300
"""The noise of bf16 moments; the element's number wraps."""

_MAGNITUDES = [0.0, 1e-45, 1e-40, 1.1754942e-38, 1.1754944e-38, 1e-30, 1e-8, 0.5, 1.0, 1.00390625, 3.0]
_MAGNITUDES += [65504.0, 1e18, 1e19, 1e30, 3.3e38, 3.4028235e38]
EDGES = torch.tensor([sign * size for size in _MAGNITUDES for sign in (1.0, -1.0)], dtype=torch.float32)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bit patterns as integers, with every NaN made the same."""
    if not tensor.is_floating_point():
        return tensor
    patterns = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).clone()
    patterns[tensor.isnan()] = -1
    return patterns


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(bits(a), bits(b))


def assert_same_states(ours: States, theirs: States) -> None:
    different = [name for name in ours if not same_bits(ours[name].cpu(), theirs[name].cpu())]
    assert not different


def copy_of(states: States) -> States:
    return {name: tensor.clone() for name, tensor in states.items()}


def random_values(n: int, scale: float, generator: torch.Generator, edges: bool) -> torch.Tensor:
    """Values shape [n]; with ``edges`` half of the first half are from `EDGES`."""
    drawn = torch.randn(n, generator=generator) * scale
    if not edges:
        return drawn
    picked = EDGES[torch.randint(len(EDGES), (n,), generator=generator)]
    return torch.where((torch.rand(n, generator=generator) < 0.5) & (torch.arange(n) < n / 2), picked, drawn)


def random_states(
    rule: ElementwiseRule, precision: Precision, n: int, *, seed: int = 0, edges: bool = True
) -> tuple[States, torch.Tensor]:
    """States of ``n`` elements in the order of the rule's kernel, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    made = {"weight": random_values(n, 1e-1, generator, edges)}
    made[MASTER] = made["weight"].clone()
    if precision != "fp32":
        made.update(zip(("weight", "weight_low"), split(made["weight"], DTYPES[precision]), strict=True))
    if isinstance(rule, AdamW):
        for moment, scale in (("exp_avg", 1e-1), ("exp_avg_sq", 1e-3)):
            values = random_values(n, scale, generator, edges)
            values = values.abs() if moment == "exp_avg_sq" else values
            values = values / 4 if rule.moments == "8bit" else values  # the largest are not finite in this format
            kept = flat.encode_moment(moment, values, rule.moments)
            made.update(zip((state.name for state in rule.states_of(moment)), kept, strict=True))
    else:
        for state in rule.own_states():
            values = random_values(n, 1e-1, generator, edges)
            made[state.name] = values.abs() if state.name == "exp_avg_sq" else values
    gradient = random_values(n, 1.0, generator, edges).to(DTYPES[precision])
    return {state.name: made[state.name] for state in rule.states(precision)}, gradient


def update_part(
    rule: ElementwiseRule,
    precision: Precision,
    states: States,
    gradient: torch.Tensor,
    scalars: tuple[float, ...],
    noise: Key | None = None,
    part: slice = slice(None),
    index: int = 0,
) -> None:
    """Update a part of some elements by address, as lanes do; `index` is the first element's in its parameter."""
    start, stop, _ = part.indices(gradient.numel())
    addresses = [states[s.name].data_ptr() + s.nbytes(start) for s in rule.states(precision)]
    addresses.append(gradient.data_ptr() + start * gradient.itemsize)
    rounding = () if noise is None else (index + start, *noise)
    update_kernel(rule, precision, gradient.dtype)(*addresses, stop - start, *rounding, *rule.arguments, *scalars)


def arguments(rule: ElementwiseRule) -> tuple[float, ...]:
    """What a kernel takes after its number of elements."""
    noise = () if rule.noise("", 1) is None else (INDEX, *KEY)
    return (*noise, *rule.arguments, *rule.scalars(3, 0.37))


def update(name: str, precision: Precision, states: States, gradient: torch.Tensor) -> None:
    """One update of the gradient's elements by the CPU's kernel, with these arguments."""
    rule = ALL_RULES[name]
    noise = None if rule.noise("", 1) is None else KEY
    update_part(rule, precision, states, gradient, rule.scalars(3, 0.37), noise, index=INDEX)


def randn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def floats(seed: int, n: int, low: int = -12, high: int = 3) -> torch.Tensor:
    """Numbers of all magnitudes from 2**low to 2**high, and of both signs."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(low, high, (n,), generator=generator).float()
    signs = torch.randint(2, (n,), generator=generator) * 2 - 1
    return (1 + torch.rand(n, generator=generator)) * 2**exponents * signs


def store_gradient(dst: torch.Tensor, src: torch.Tensor) -> float:
    """Copy `src` to `dst`; the sum of squares."""
    return gradient_kernels(dst.dtype, src.dtype).store_gradient(dst.data_ptr(), src.data_ptr(), dst.numel())


def add_gradient(dst: torch.Tensor, src: torch.Tensor) -> float:
    """Add `src` to `dst`; the sum of squares of what is then there."""
    return gradient_kernels(dst.dtype, src.dtype).add_gradient(dst.data_ptr(), src.data_ptr(), dst.numel())


def split(master: torch.Tensor, weight: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The halves of fp32 `master`, shape [n]."""
    halves = torch.empty(len(master), dtype=weight), torch.empty(len(master), dtype=torch.int16)
    flat.split(master, *halves)
    return halves


def join(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    master = torch.empty(len(weight))
    flat.join(weight, low, master)
    return master
