"""How tensor-parallel ranks divide the layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from math import gcd
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from pagoda.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Division = Literal["column", "row"]
COLUMN: Division = "column"
"""Each rank computes a part of the output."""
ROW: Division = "row"
"""Each rank has a part of the input, and the outputs are added up."""
OF_PAPERS: Mapping[str, Division] = {"*.qkv": COLUMN, "*.out": ROW, "*.up": COLUMN, "*.down": ROW}
"""How the matrices of the papers' shapes are divided."""
_STYLES: Mapping[str, Division] = {"colwise": COLUMN, "rowwise": ROW}
"""The words that transformers uses."""


def divisions_of(config: Any) -> Mapping[str, Division]:
    """How transformers divides a model's layers over tensor-parallel ranks, by name pattern. Empty if the model has no
    such plan, or if the plan uses other divisions."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    styles = {name: style for name, style in plan.items() if not style.startswith("replicated")}
    if not set(styles.values()) <= _STYLES.keys():
        return {}
    return {f"*{name}": _STYLES[style] for name, style in styles.items()}


def heads_of(config: Any) -> int:
    """Number of equal parts into which the attention of a transformers model can be divided. Each part has equally many
    query heads and equally many key heads."""
    heads: int = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None) or 1
    return gcd(heads, getattr(config, "num_key_value_heads", None) or heads)


def divided(
    model: str, names: Iterable[str], divisions: Mapping[str, Division], heads: int, ranks: int
) -> dict[str, Division]:
    """Those of a model's modules that `ranks` ranks divide. Raises ConfigError if nothing says how, or if its attention
    heads cannot be divided."""
    asked = f"--tensor-parallel is {ranks}"
    found = {name: division for name in names for pattern, division in divisions.items() if fnmatchcase(name, pattern)}
    if not found:
        raise ConfigError(f"{asked}, but nothing says how the layers of {model!r} are divided: leave it out")
    if heads % ranks:
        raise ConfigError(f"{asked}, which does not divide the {heads} heads of {model!r}")
    return found


def divide(model: nn.Module, name: str, tensor: DeviceMesh) -> None:
    """Divide the layers of a transformers model over tensor-parallel ranks, as transformers says.

    Raises ConfigError if transformers does not say how, or if the attention heads cannot be divided.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    config = model.config
    layers = [layer for layer, module in model.named_modules() if isinstance(module, nn.Linear)]
    styles = {COLUMN: ColwiseParallel, ROW: RowwiseParallel}
    found = divided(name, layers, divisions_of(config), heads_of(config), tensor.size())
    parallelize_module(model, tensor, {layer: styles[division]() for layer, division in found.items()})
