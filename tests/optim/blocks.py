"""Random and extreme states for the tests of this folder, and comparison by bits."""

from collections.abc import Sequence

import reference
import torch

from pagoda.config.training import Precision
from pagoda.optim import MOMENT_NAMES, flat, gradient_dtype

_MAGNITUDES = [0.0, 1e-45, 1e-40, 1.1754942e-38, 1.1754944e-38, 1e-30, 1e-8, 0.5, 1.0, 1.00390625, 3.0]
_MAGNITUDES += [65504.0, 1e18, 1e19, 1e30, 3.3e38, 3.4028235e38]
EDGES = torch.tensor([sign * size for size in _MAGNITUDES for sign in (1.0, -1.0)], dtype=torch.float32)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bit patterns as integers, with every NaN made the same."""
    integer = torch.int16 if tensor.element_size() == 2 else torch.int32
    patterns = tensor.contiguous().view(integer).clone()
    if tensor.is_floating_point():
        patterns[tensor.isnan()] = -1
    return patterns


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(bits(a), bits(b))


def random_block(
    precision: Precision, n: int, *, seed: int = 0, edges: bool = False, moments: Sequence[str] = MOMENT_NAMES
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """States and gradient of ``n`` elements; with ``edges`` half of all values are from `EDGES`."""
    generator = torch.Generator().manual_seed(seed)

    def values(scale: float) -> torch.Tensor:
        drawn = torch.randn(n, generator=generator) * scale
        if not edges:
            return drawn
        picked = EDGES[torch.randint(len(EDGES), (n,), generator=generator)]
        return torch.where(torch.rand(n, generator=generator) < 0.5, picked, drawn)

    states = {"weight": values(1e-1)}
    if precision == "bf16":
        states["weight"], states["weight_low"] = reference.split(states["weight"])
    elif precision == "fp16":
        master = states["weight"]
        states["weight"], states["weight_low"] = master.to(torch.float16), torch.empty(n, dtype=torch.int16)
        flat.split(master, states["weight"], states["weight_low"])
    for name in moments:
        states[name] = values(1e-3).abs() if name == "exp_avg_sq" else values(1e-1)
    return states, values(1.0).to(gradient_dtype(precision))


def copy_of(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in states.items()}
