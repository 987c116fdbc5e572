"""Built-in shapes, as data: what each name means in the settings of a transformers configuration.

Every shape is one of transformers' own classes, so what trains here is what users load elsewhere. The small
Llama shapes keep a 32,000-entry vocabulary and tie the output projection to the embedding; byte-level text
uses the first 256 entries. `parameter_count` counts a shape by building it, so no size is written down here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from pagoda.errors import ConfigError, unknown_name
from pagoda.models.mixture_shapes import MIXTURE_SHAPES
from pagoda.models.papers import GPT_VOCAB

Family = Literal["llama", "gpt2"]
Setting = int | float | bool | str | dict[str, float | str]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A named model size: a transformers family and the settings that differ from its defaults."""

    name: str
    family: Family
    settings: Mapping[str, Setting]


def _llama(
    name: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    *,
    vocab: int = 32_000,
    tied: bool = True,
    max_positions: int = 8_192,
    rope_theta: float = 10_000.0,
) -> Shape:
    settings: dict[str, Setting] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": tied,
    }
    return Shape(name=name, family="llama", settings=MappingProxyType(settings))


def _gpt2(name: str, hidden: int, layers: int, heads: int) -> Shape:
    settings: dict[str, Setting] = {"n_embd": hidden, "n_layer": layers, "n_head": heads}
    return Shape(name=name, family="gpt2", settings=MappingProxyType(settings))


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            #      name          hidden layers heads kv intermediate
            _llama("llama-15m", 288, 6, 6, 6, 768),
            _llama("llama-110m", 768, 12, 12, 12, 2_048),
            _llama("llama-215m", 1_024, 14, 16, 16, 2_880),
            _llama("llama-1b", 2_048, 16, 32, 8, 8_192),
            _llama("llama-3b", 3_072, 28, 24, 8, 8_192),
            _llama("llama-5b", 4_096, 28, 32, 8, 11_008),
            _llama("llama-8b", 4_096, 32, 32, 8, 14_336, vocab=128_256, tied=False, rope_theta=500_000.0),
            _gpt2("gpt2", 768, 12, 12),
            _gpt2("gpt2-medium", 1_024, 24, 16),
            _gpt2("gpt2-large", 1_280, 36, 20),
            _gpt2("gpt2-xl", 1_600, 48, 25),
        )
    }
)
"""Every built-in shape by name, smallest first within its family."""


_GPT = re.compile(r"gpt-([1-9][0-9]*)x([1-9][0-9]*)")
_HEAD_WIDTH = 64


def is_sized_gpt(name: str) -> bool:
    """Whether `name` is of the form `gpt-<layers>x<hidden>`."""
    return _GPT.fullmatch(name) is not None


def find_shape(name: str) -> Shape:
    """The built-in shape called `name`, or the GPT that `gpt-<layers>x<hidden>` describes.

    Such a GPT is a GPT-2 with heads of 64 and the vocabulary of `models.papers`, whose `gpt_shape` has the same
    parameters under the same name.

    Raises:
        ConfigError: no such shape; the message lists the names and the closest one.
    """
    if name in SHAPES:
        return SHAPES[name]
    if (sized := _GPT.fullmatch(name)) is not None:
        layers, hidden = int(sized[1]), int(sized[2])
        if hidden % _HEAD_WIDTH:
            raise ConfigError(f"model {name!r}: {hidden} is not a multiple of {_HEAD_WIDTH}, the width of a head")
        gpt = _gpt2(name, hidden, layers, hidden // _HEAD_WIDTH)
        return replace(gpt, settings=MappingProxyType({**gpt.settings, "vocab_size": GPT_VOCAB}))
    refusal = f"unknown model {name!r}: neither a built-in shape nor a directory with a config.json."
    known = (*SHAPES, *MIXTURE_SHAPES)
    raise unknown_name(name, known, refusal, f"Built-in shapes: {', '.join(known)}, and gpt-<layers>x<hidden>.")
