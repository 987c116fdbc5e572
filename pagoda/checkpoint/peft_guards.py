"""Guards peft's layers: what they do to weights and gradients that are not in memory is refused in words."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from pagoda.checkpoint.state import state_of
from pagoda.errors import UsageError
from pagoda.optim.param_groups import made_anew


def guard_peft(model: nn.Module) -> None:
    """Make peft's layers raise UsageError if they merge while their weights are not in memory, and AdaLoRA if it reads
    gradients that a step has used."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return
    anew = made_anew(model)
    for name, module in model.named_modules():
        if isinstance(module, peft.BaseTunerLayer) and not any(each.startswith(f"{name}.") for each in anew):
            for method in ("merge", "unmerge"):
                module.__dict__[method] = partial(_where_gathered, getattr(module, method), module, f"{name}.{method}")
        if (allocate := getattr(module, "update_and_allocate", None)) is not None:
            module.__dict__["update_and_allocate"] = partial(_with_gradients, allocate, module)


def _with_gradients(allocate: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    try:
        return allocate(*args, **kwargs)
    except TypeError as error:
        if any(param.grad is not None for param in module.parameters()):
            raise
        raise UsageError(
            "update_and_allocate() reads the gradients of the step, but optimizer.step() has used them and keeps none. "
            "Call it between backward() and optimizer.step(), or use LoRA with a fixed rank."
        ) from error


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
