"""Guards peft's layers: they merge only where their weights are in memory."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from pagoda.checkpoint.state import state_of
from pagoda.errors import UsageError
from pagoda.optim.param_groups import made_anew


def guard_merging(model: nn.Module) -> None:
    """Make peft's layers raise UsageError if they merge while their weights are not in memory."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return
    anew = made_anew(model)
    for name, module in model.named_modules():
        if isinstance(module, peft.BaseTunerLayer) and not any(each.startswith(f"{name}.") for each in anew):
            for method in ("merge", "unmerge"):
                module.__dict__[method] = partial(_where_gathered, getattr(module, method), module, f"{name}.{method}")


def _where_gathered(merge: Callable[..., Any], module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    for state in map(state_of, module.parameters()):
        if state is not None and state.is_quantized:
            raise UsageError(
                f"{name}() cannot change weights that are quantized and in pages. Save the adapter, load it on the "
                "base model in 16 bits with peft.PeftModel.from_pretrained, and merge there."
            )
        if state is not None and state.slot not in state.unit.gathered:
            raise UsageError(
                f"{name}() needs weights that are not in memory. Call merge_and_unload, merge_adapter or merge inside "
                "`with pagoda.gathered(model, modify=True):`, or merge one layer at a time, each inside "
                "`with pagoda.gathered(layer, modify=True):`, which takes less RAM."
            )
    return merge(*args, **kwargs)
