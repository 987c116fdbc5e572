"""What a checkpoint stores to rebuild a transformers model, in addition to its tensors."""

import json
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from pagoda.errors import CheckpointError
from pagoda.models.build import USE_CACHE, check_sizes, import_transformers
from pagoda.models.lora import adapter_settings
from pagoda.parameters.quantized import is_quantized

ADAPTER = "adapter"
"""Key of peft's settings in a record."""
QUANTIZED = "quantized"
"""Key in a record: whether the model has quantized parameters."""
TIES = "ties"
"""Key in a record: each further name of a parameter -> its first name."""


def model_record(model: nn.Module) -> dict[str, Any] | None:
    """The class and configurations of a transformers model and of its adapter, if any, and which names its tied
    parameters have, as JSON. None for other models. The key-value cache, which training turns off, is as the files of
    the model say, or on."""
    if (adapter := adapter_settings(model)) is not None:
        base = model_record(model.get_base_model())  # type: ignore[operator]
        return None if base is None else {**base, TIES: _ties(model), ADAPTER: adapter}
    config = getattr(model, "config", None)
    if config is None or not type(model).__module__.startswith("transformers."):
        return None
    generation = getattr(model, "generation_config", None)
    config = deepcopy(config)
    if hasattr(text := config.get_text_config(), "use_cache"):
        text.use_cache = getattr(model, USE_CACHE, True)
    return {
        "class": type(model).__name__,
        TIES: _ties(model),
        QUANTIZED: any(map(is_quantized, model.parameters())),
        "config": json.loads(config.to_json_string(use_diff=True)),
        "generation_config": None if generation is None else json.loads(generation.to_json_string(use_diff=True)),
    }


def _ties(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    named = [(name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: under for name, under in named if name != under}


def untied(record: dict[str, Any]) -> dict[str, Any]:
    """The record of the same model with a head that is not tied to the embedding."""
    key = "tie_word_embeddings"
    return {**record, "config": {**with_everywhere(record["config"], key, False), key: False}}


def with_everywhere(settings: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Settings with another value of a key, wherever it is in them."""
    kept = {k: with_everywhere(v, key, value) if isinstance(v, dict) else v for k, v in settings.items()}
    return {**kept, key: value} if key in kept else kept


def model_of(record: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """The model of a record, without its adapter, in training mode, with parameters in `dtype`.

    Raises CheckpointError if transformers cannot build it.
    """
    transformers = import_transformers()
    try:
        settings = dict(record["config"])
        check_sizes(settings)
        kind = transformers.CONFIG_MAPPING[settings["model_type"]]
        config = kind.from_dict(kind._decode_special_floats(settings))
        model = getattr(transformers, record["class"])._from_config(config, dtype=dtype)
        give_generation_config(model, record)
        return model
    except Exception as error:  # transformers validates with many exception types
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot build this checkpoint's {record.get('class')}: {error}"
        ) from error


def give_generation_config(model: Any, record: dict[str, Any]) -> None:
    """Let a model, or the base of an adapter, generate text with the settings of a record."""
    if record.get("generation_config"):
        base = model if adapter_settings(model) is None else model.get_base_model()
        base.generation_config = import_transformers().GenerationConfig.from_dict(record["generation_config"])


def skeleton(record: dict[str, Any]) -> Any:
    """Like `model_of`, on the meta device."""
    with torch.device("meta"):
        return model_of(record)
