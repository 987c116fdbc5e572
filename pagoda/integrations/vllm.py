"""The weights that TRL sends to a vLLM server, read from pages one parameter at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.gathered import gathered
from pagoda.errors import ConfigError

_BASE = ".base_layer"
_KEPT = ["modules_to_save.default."]
"""What `rename` also removes from names: peft keeps the trained copy of a module below it."""


def stream_weights(generation: Any) -> None:
    """Make TRL's `VLLMGeneration` in server mode read paged weights, after each step that changed them."""
    rename: Callable[..., str] = generation._fix_param_name_to_vllm
    generation._iter_named_params = lambda: _weights(generation.model, rename)


def check_adapters(model: nn.Module) -> None:
    """Raises ConfigError if the adapters of a model cannot be merged one parameter at a time."""
    for name, layer in _adapted(model):
        base = layer.base_layer
        plain = isinstance(base, nn.Linear) and base.weight.is_floating_point() and hasattr(layer, "get_delta_weight")
        varied = getattr(layer, "lora_variant", None) or any(getattr(layer, "lora_bias", {}).values())
        if not plain or varied or len(layer.active_adapters) != 1:
            raise ConfigError(
                f"use_vllm cannot be used with the adapters of {name!r}: only a single LoRA without variants such as "
                "DoRA, on linear layers that are not quantized, is merged while it is sent. Leave out use_vllm."
            )


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that peft has adapted, with their names."""
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "merge"):
            yield name, module


@torch.no_grad()
def _weights(model: nn.Module, rename: Callable[..., str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter's name in vLLM, and a copy of its weights. Adapters are merged into the copy. Unlike peft's
    `merge_adapter`, this leaves the model's own weights unchanged."""
    adapted = {f"{name}{_BASE}.weight": layer for name, layer in _adapted(model)}
    prefix: str | None = getattr(model, "prefix", None)  # of a PeftModel
    for name, param in model.named_parameters():
        if prefix is not None and (prefix in name or "original_module" in name):
            continue
        layer = adapted.get(name)
        with gathered([param] if layer is None else [*layer.parameters()]):
            weights = param.detach().clone()
            if layer is not None:
                weights += layer.get_delta_weight(*layer.active_adapters).to(weights.dtype)
        yield rename(name.removeprefix("base_model.model.").replace(_BASE, ""), extra_prefixes=_KEPT), weights
