"""Adapters of peft: initial values for a model with weights on meta, and checks before merging.

peft initialises an adapter, then moves it to the device of the layer that it adapts, which is meta for a model from
`pagoda.load` or `pagoda.init`. The model's `_init_weights` and the modules' `reset_parameters` cannot replace peft's
initialisation, because an adapter must start by adding zero to its layer.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from pagoda.checkpoint.state import state_of
from pagoda.errors import ConfigError, UsageError

Initialise = Callable[[], Any]

_INITIALISER = "reset_lora_parameters"
_REPEATABLE = (True, "gaussian")
"""Initialisations in peft's configuration that do not need the base weights."""


def adapter_initialiser(name: str, around: Sequence[tuple[str, nn.Module]]) -> tuple[nn.Module, Initialise] | None:
    """The adapted layer of a parameter, and a function that initialises its adapter. None for a parameter outside
    adapters.

    `around`: names and modules from the parameter's own up to the model. Raises ConfigError for initial values that
    depend on the base weights.
    """
    adapted = next(((prefix, m) for prefix, m in around if callable(getattr(m, _INITIALISER, None))), None)
    if adapted is None:
        return None
    prefix, layer = adapted
    part, _, rest = name.removeprefix(f"{prefix}.").partition(".")
    if part == "base_layer":
        return None
    adapter = rest.partition(".")[0]
    configs: Any = next((module.peft_config for _, module in around if hasattr(module, "peft_config")), {})
    asked = getattr(configs.get(adapter), "init_lora_weights", None)
    if not part.startswith(("lora_A", "lora_B", "lora_embedding_")) or asked not in _REPEATABLE:
        raise ConfigError(
            f"The initial values of {name!r} (init_lora_weights={asked!r}) depend on the base weights, which are still "
            "on meta, so peft has lost them: use init_lora_weights=True or 'gaussian', or build the base model outside "
            "pagoda.init() and pagoda.load()."
        )
    return layer, partial(getattr(layer, _INITIALISER), adapter, asked)


def guard_merging(model: nn.Module) -> None:
    """Make peft's layers raise UsageError if they merge while their weights are not in memory."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, peft.BaseTunerLayer):
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
