"""Built-in shapes as data: a name and its settings in a transformers configuration.

Every shape is a class of transformers, so models trained here load elsewhere. The small Llama shapes keep a
32,000-entry vocabulary and tie the output projection to the embedding. Byte-level text uses the first 256 entries.
Sizes are counted by building a shape, so none is written down here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pagoda.errors import ConfigError, unknown_name
from pagoda.models.papers import GPT_VOCAB, PAPER_SHAPES, T5_VOCAB

Family = Literal[
    "llama", "gpt2", "mistral", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss", "switch_transformers"
]
_SMALL_VOCAB = 512
"""Byte-level text uses 256 entries. With a larger vocabulary, the embedding would be most of a small mixture of
experts."""

HOW_TO_NAME = (
    "Name a directory with a Hugging Face config.json, ORG/NAME of the Hugging Face Hub, or a built-in shape, such as "
    "smollm2-135m, llama3.1-8b, qwen3-4b or gpt-<layers>x<hidden> (docs/plan.md has more)"
)
"""The way out of a wrong name."""

Setting = int | float | bool | str | dict[str, float | str] | None
Sizes = tuple[int, int, int, int, int]
"""Hidden, layers, query heads, key heads, width of the MLP."""


@dataclass(frozen=True)
class ModelShape:
    """A named model size: a transformers family and the settings that differ from its defaults."""

    name: str
    family: Family
    settings: Mapping[str, Setting]
    hub_names: tuple[str, ...] = ()
    """Names on the Hugging Face Hub of published models that have this shape."""


def _published(
    family: Family,
    name: str,
    hub_names: str,
    sizes: Sizes,
    vocab: int,
    positions: int,
    **others: Setting,
) -> ModelShape:
    """The shape of a published model, without the scaling of its positions. `hub_names` has spaces between."""
    hidden, layers, heads, kv_heads, intermediate = sizes
    settings: dict[str, Setting] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
    }
    return ModelShape(name, family, {**settings, **others}, tuple(hub_names.split()))


def _llama(name: str, sizes: Sizes, vocab: int = 32_000, theta: float = 10_000.0, tied: bool = True) -> ModelShape:
    rope: Setting = {"rope_type": "default", "rope_theta": theta}
    return _published("llama", name, "", sizes, vocab, 8_192, rope_parameters=rope, tie_word_embeddings=tied)


def _llama3(name: str, hub_names: str, sizes: Sizes, **others: Setting) -> ModelShape:
    rope: Setting = {"rope_type": "default", "rope_theta": 500_000.0}
    return _published("llama", name, hub_names, sizes, 128_256, 131_072, rope_parameters=rope, **others)


def _qwen3(name: str, sizes: Sizes, **others: Setting) -> ModelShape:
    size = name.removeprefix("qwen3-").upper()
    hub_names = f"Qwen/Qwen3-{size} Qwen/Qwen3-{size}-Base"
    return _published("qwen3", name, hub_names, sizes, 151_936, 40_960, head_dim=128, **others)


def _gpt_oss(size: str, layers: int, experts: int) -> ModelShape:
    sizes = 2_880, layers, 64, 8, 2_880
    mixture: dict[str, Setting] = {"head_dim": 64, "num_local_experts": experts, "num_experts_per_tok": 4}
    name = f"gpt-oss-{size}"
    return _published("gpt_oss", name, f"openai/{name}", sizes, 201_088, 131_072, **mixture)


def _gemma3(size: str, sizes: Sizes, **others: Setting) -> ModelShape:
    """The language model of a Gemma 3, without the encoder of images that the larger ones have."""
    hub_names = f"google/gemma-3-{size}-it google/gemma-3-{size}-pt"
    settings: dict[str, Setting] = {"head_dim": 256, "sliding_window": 1_024, "tie_word_embeddings": True, **others}
    return _published("gemma3_text", f"gemma3-{size}", hub_names, sizes, 262_208, 131_072, **settings)


def _smollm2(size: str, sizes: Sizes) -> ModelShape:
    hub_names = f"HuggingFaceTB/SmolLM2-{size} HuggingFaceTB/SmolLM2-{size}-Instruct"
    return _published("llama", f"smollm2-{size.lower()}", hub_names, sizes, 49_152, 8_192, tie_word_embeddings=True)


def _gpt2(name: str, hidden: int, layers: int, heads: int, **others: Setting) -> ModelShape:
    return ModelShape(name, "gpt2", {"n_embd": hidden, "n_layer": layers, "n_head": heads, **others})


def _mixture(
    family: Family,
    name: str,
    sizes: Sizes,
    experts: tuple[int, int, int],
    vocab: int = _SMALL_VOCAB,
    positions: int = 8_192,
    hub_names: str = "",
    **others: Setting,
) -> ModelShape:
    """A Mixtral or a Qwen3-MoE. `experts`: number of experts, experts for each token, width of an expert."""
    count, chosen, width = experts
    if family == "mixtral":  # it has no layers without experts
        sizes = (*sizes[:4], width)
    named: dict[str, dict[str, Setting]] = {
        "mixtral": {"num_local_experts": count},
        "qwen3_moe": {"num_experts": count, "moe_intermediate_size": width, "norm_topk_prob": True},
    }
    usual: dict[str, Setting] = {
        "num_experts_per_tok": chosen,
        "tie_word_embeddings": True,
        "output_router_logits": True,  # the loss then has the load-balancing loss
    }
    return _published(family, name, hub_names, sizes, vocab, positions, **{**usual, **named[family], **others})


def _switch(
    name: str, hidden: int, layers: int, heads: int, ffn: int, experts: int, vocab: int = _SMALL_VOCAB, every: int = 2
) -> ModelShape:
    """A T5 with `layers` blocks in the encoder and as many in the decoder. Every `every`th block has experts."""
    settings: dict[str, Setting] = {
        "vocab_size": vocab,
        "d_model": hidden,
        "d_kv": hidden // heads,
        "d_ff": ffn,
        "num_heads": heads,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_sparse_encoder_layers": layers // every,
        "num_sparse_decoder_layers": layers // every,
        "num_experts": experts,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
        "router_jitter_noise": 0.0,
        "router_aux_loss_coef": 0.01,
    }
    return ModelShape(name, "switch_transformers", settings)


def _hub_llama(*versions: str) -> str:
    return " ".join(f"meta-llama/Llama-{version}{kind}" for version in versions for kind in ("", "-Instruct"))


_UNTIED: dict[str, Setting] = {
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
"""The settings in which published mixtures differ from the small ones."""
_MISTRAL_SMALL = "mistralai/Mistral-Small-24B-Base-2501 mistralai/Mistral-Small-24B-Instruct-2501"
_BUILT_IN = (
    #      name          hidden layers heads kv intermediate
    _llama("llama-15m", (288, 6, 6, 6, 768)),
    _llama("llama-110m", (768, 12, 12, 12, 2_048)),
    _llama("llama-215m", (1_024, 14, 16, 16, 2_880)),
    _llama("llama-1b", (2_048, 16, 32, 8, 8_192)),
    _llama("llama-3b", (3_072, 28, 24, 8, 8_192)),
    _llama("llama-5b", (4_096, 28, 32, 8, 11_008)),
    _llama("llama-8b", (4_096, 32, 32, 8, 14_336), 128_256, 500_000.0, tied=False),
    #                                              hidden layers heads kv intermediate
    _smollm2("135M", (576, 30, 9, 3, 1_536)),
    _smollm2("360M", (960, 32, 15, 5, 2_560)),
    _smollm2("1.7B", (2_048, 24, 32, 32, 8_192)),
    _llama3("llama3.2-1b", _hub_llama("3.2-1B"), (2_048, 16, 32, 8, 8_192), tie_word_embeddings=True),
    _llama3("llama3.2-3b", _hub_llama("3.2-3B"), (3_072, 28, 24, 8, 8_192), tie_word_embeddings=True),
    _llama3("llama3.1-8b", _hub_llama("3.1-8B"), (4_096, 32, 32, 8, 14_336)),
    _llama3("llama3.1-70b", _hub_llama("3.1-70B", "3.3-70B"), (8_192, 80, 64, 8, 28_672)),
    _qwen3("qwen3-0.6b", (1_024, 28, 16, 8, 3_072), tie_word_embeddings=True),
    _qwen3("qwen3-1.7b", (2_048, 28, 16, 8, 6_144), tie_word_embeddings=True),
    _qwen3("qwen3-4b", (2_560, 36, 32, 8, 9_728), tie_word_embeddings=True),
    _qwen3("qwen3-8b", (4_096, 36, 32, 8, 12_288)),
    _qwen3("qwen3-14b", (5_120, 40, 40, 8, 17_408)),
    _qwen3("qwen3-32b", (5_120, 64, 64, 8, 25_600)),
    _gemma3("1b", (1_152, 26, 4, 1, 6_912), vocab_size=262_144, max_position_embeddings=32_768, sliding_window=512),
    _gemma3("4b", (2_560, 34, 8, 4, 10_240)),
    _gemma3("12b", (3_840, 48, 16, 8, 15_360)),
    _gemma3("27b", (5_376, 62, 32, 16, 21_504), head_dim=128),
    _published(
        "mistral",
        "mistral-small-24b",
        _MISTRAL_SMALL,
        (5_120, 40, 32, 8, 32_768),
        131_072,
        32_768,
        head_dim=128,
        sliding_window=None,
    ),
    _gpt2("gpt2", 768, 12, 12),
    _gpt2("gpt2-medium", 1_024, 24, 16),
    _gpt2("gpt2-large", 1_280, 36, 20),
    _gpt2("gpt2-xl", 1_600, 48, 25),
    _mixture("mixtral", "mixtral-15m", (192, 6, 6, 2, 512), (8, 2, 512)),
    _mixture("mixtral", "mixtral-120m", (384, 6, 6, 2, 1_024), (16, 2, 1_024)),
    _mixture("mixtral", "mixtral-1b", (768, 12, 12, 4, 2_048), (16, 2, 2_048), 32_000),
    _mixture("mixtral", "mixtral-8x7b", (4_096, 32, 32, 8, 14_336), (8, 2, 14_336), 32_000, 32_768, "", **_UNTIED),
    _mixture("qwen3_moe", "qwen3-moe-15m", (192, 6, 6, 2, 6_144), (32, 4, 128), head_dim=32),
    _mixture(
        "qwen3_moe",
        "qwen3-moe-30b",
        (2_048, 48, 32, 4, 6_144),
        (128, 8, 768),
        151_936,
        40_960,
        "Qwen/Qwen3-30B-A3B Qwen/Qwen3-30B-A3B-Base",
        head_dim=128,
        **_UNTIED,
    ),
    _gpt_oss("20b", 24, 32),
    _gpt_oss("120b", 36, 128),
    _switch("t5-moe-15m", 192, 4, 6, 896, 8),
    _switch("t5-moe-120m", 384, 4, 6, 2_048, 16),
    _switch("t5-moe-1b", 768, 6, 12, 3_072, 32, vocab=T5_VOCAB),
)
SHAPES: Mapping[str, ModelShape] = {shape.name: shape for shape in _BUILT_IN}
"""Every built-in shape by name, smallest first within its family."""
_ON_HUB: Mapping[str, ModelShape] = {name.lower(): shape for shape in _BUILT_IN for name in shape.hub_names}


def shape_on_hub(name: str) -> ModelShape | None:
    """The built-in shape of a model that the Hugging Face Hub has under this name (ORG/NAME), or None."""
    return _ON_HUB.get(name.lower())


_GPT = re.compile(r"gpt-([1-9][0-9]*)x([1-9][0-9]*)")
_HEAD_WIDTH = 64


def is_built_in(name: str) -> bool:
    """Whether `find_shape` knows this name."""
    paper = PAPER_SHAPES.get(name)
    return name in SHAPES or is_sized_gpt(name) or (paper is not None and paper.experts > 0)


def is_sized_gpt(name: str) -> bool:
    """Whether `name` is of the form `gpt-<layers>x<hidden>`."""
    return _GPT.fullmatch(name) is not None


def find_shape(name: str) -> ModelShape:
    """The shape with the built-in name `name`, a paper's shape with experts, or the GPT that `gpt-<layers>x<hidden>`
    describes.

    Such a GPT is a GPT-2 with heads of 64 and the vocabulary of `models.papers`. `gpt_of_step` gives the same number
    of parameters under the same name.

    Raises ConfigError if there is no such shape. The message has the closest name.
    """
    if name in SHAPES:
        return SHAPES[name]
    if (paper := PAPER_SHAPES.get(name)) is not None and paper.experts:
        sizes = (paper.hidden, paper.layers, paper.heads, paper.ffn, paper.experts)
        return _switch(name, *sizes, vocab=paper.vocab, every=1)
    if (sized := _GPT.fullmatch(name)) is not None:
        layers, hidden = int(sized[1]), int(sized[2])
        if hidden % _HEAD_WIDTH:
            raise ConfigError(f"model {name!r}: {hidden} is not a multiple of {_HEAD_WIDTH}, the width of a head")
        return _gpt2(name, hidden, layers, hidden // _HEAD_WIDTH, vocab_size=GPT_VOCAB)
    raise unknown_name(name, SHAPES, f"unknown model {name!r}: no directory has this name.", HOW_TO_NAME)
