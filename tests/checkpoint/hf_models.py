"""Small models of transformers, each laid out in files in a way of its own, and the memory to train them in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from zoo import SIZES, VOCABULARY, losses_of

import pagoda

_COMMON: dict[str, Any] = {**SIZES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_COMMON["max_position_embeddings"] = 64


def llama(tied: bool) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_COMMON, tie_word_embeddings=tied))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2)
    )


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **_COMMON, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=2,
        mlp_only_layers=[],
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama-tied": lambda: llama(True),
    "llama-untied": lambda: llama(False),
    "gpt2": gpt2,
    "mixtral": mixtral,
    "qwen3-moe": qwen3_moe,
}


def build(name: str, seed: int = 0) -> nn.Module:
    """A model in training mode. Weights are random, also where transformers starts them at zero or one."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn_like(param))
    return model.train()


def ids(step: int = 0) -> torch.Tensor:
    """A batch of tokens, shape [2, 16]."""
    return torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(step))


def wrapped(model: nn.Module, place: str, ssd: Path, precision: str = "bf16") -> tuple[nn.Module, Any]:
    """The model, wrapped: all in "ram", or on "ssd" with the least RAM that it trains in."""

    def wrap(host: str | int) -> tuple[nn.Module, Any]:
        memory = pagoda.Memory(
            host=host, ssd=None if place == "ram" else f"{ssd}:64MiB", unit_limit="16KiB", page_size=4096
        )
        return pagoda.wrap(model, pagoda.AdamW(lr=1e-2), memory=memory, precision=precision)

    if place == "ram":
        return wrap("64MiB")
    with pytest.raises(pagoda.BudgetError) as refused:
        wrap(4096)
    model, optimizer = wrap(refused.value.needed_bytes)
    assert any(pagoda.plan_of(model).bytes["ssd"].values())
    return model, optimizer


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """Steps [first, last); returns the losses."""
    return losses_of(
        lambda step: model(input_ids=ids(first + step), labels=ids(first + step)).loss, optimizer, last - first
    )


def logits(model: nn.Module) -> torch.Tensor:
    """Of one batch, without dropout."""
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids()).logits
    model.train()
    return found
