"""Adapters of peft on a model whose weights are on meta: their first values, which moving them there has lost.

peft moves an adapter to where the layer it adapts is, after having initialised it. On a model from `pagoda.load` or
`pagoda.init` that is meta. Neither the model's `_init_weights` nor a module's `reset_parameters` would do instead: an
adapter must start as zero beside its layer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from pagoda.errors import ConfigError

Initialise = Callable[[], Any]

_INITIALISER = "reset_lora_parameters"
_REPEATABLE = (True, "gaussian")
"""What peft's configuration may ask for that needs nothing of the base weights."""


def adapter_initialiser(name: str, around: Sequence[tuple[str, nn.Module]]) -> tuple[nn.Module, Initialise] | None:
    """The adapted layer that a parameter belongs to, and what gives its adapter its first values; None for any other.

    around: names and modules from the parameter's own up to the model. Raises ConfigError for values that only the base
    weights would give.
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
            f"The first values of {name!r} (init_lora_weights={asked!r}) follow from the base weights, which wait on "
            "meta, where peft has moved it and lost them: use init_lora_weights=True or 'gaussian', or build the base "
            "model outside pagoda.init() and pagoda.load()."
        )
    return layer, partial(getattr(layer, _INITIALISER), adapter, asked)
