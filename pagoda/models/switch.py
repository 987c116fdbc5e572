"""Parts of transformers' Switch Transformers, by the names of their classes: transformers need not be imported."""

from torch import nn


def is_switch(module: nn.Module, part: str) -> bool:
    """Whether a module is a part of transformers' Switch Transformers: "Experts" or "Top1Router"."""
    kind = type(module)
    return kind.__name__ == f"SwitchTransformers{part}" and kind.__module__.startswith("transformers.")
