"""Layers of bitsandbytes, whose weights must keep the format in which `wrap` finds them."""

from typing import Any

from torch import nn

from pagoda.errors import ConfigError

_REPACKS = "support_avx512bf16_for_cpu"
"""Attribute of a layer that repacks its weights in place when it is first evaluated on a CPU with bf16 kernels."""


def keep_packing(model: nn.Module) -> None:
    """Let no layer repack its weights. Raises ConfigError where one has done so already."""
    for name, module in model.named_modules():
        if not hasattr(module, _REPACKS):
            continue
        state: Any = getattr(module, "quant_state", None) or getattr(module.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ConfigError(
                f"{name!r} has been evaluated, and bitsandbytes has packed its weights for that: call "
                "model.state_dict(), which unpacks them, before wrap."
            )
        setattr(module, _REPACKS, False)
