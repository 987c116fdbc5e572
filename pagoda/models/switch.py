"""Recognises parts of transformers' Switch Transformers by class name, without importing transformers."""

from torch import nn


def is_switch(module: nn.Module, part: str) -> bool:
    """Whether a module is the given part of transformers' Switch Transformers: "Experts" or "Top1Router"."""
    kind = type(module)
    return kind.__name__ == f"SwitchTransformers{part}" and kind.__module__.startswith("transformers.")
