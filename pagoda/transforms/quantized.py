"""Support for bitsandbytes layers, whose weights must keep the format that `wrap` finds."""

from typing import Any

from torch import nn

from pagoda.errors import ConfigError

_REPACKS = "support_avx512bf16_for_cpu"
"""Attribute of layers that repack their weights in place in their first evaluation on a CPU with bf16 kernels."""


def keep_packing(model: nn.Module) -> None:
    """Prevent layers from repacking their weights. Raises ConfigError if one has done so already."""
    for name, module in model.named_modules():
        if not hasattr(module, _REPACKS):
            continue
        state: Any = getattr(module, "quant_state", None) or getattr(module.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ConfigError(
                f"{name!r} has been evaluated, so bitsandbytes has packed its weights. Call model.state_dict(), which "
                "unpacks them, before wrap."
            )
        setattr(module, _REPACKS, False)
