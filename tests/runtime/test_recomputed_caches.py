"""Key-value caches in blocks that are recomputed: a layer finds in one what it found there the first time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import FlaubertConfig, FlaubertWithLMHeadModel, XLMConfig, XLMWithLMHeadModel
from zoo import VOCABULARY, batch, llama

import pagoda

from .conftest import Wrap

XLM: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "emb_dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "bos_index": 0,
    "eos_index": 1,
    "pad_index": 2,
}


def prefixed() -> Any:
    """A trained prefix comes to each layer in a cache, which is to be attended to."""
    return get_peft_model(llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "xlm": lambda: XLMWithLMHeadModel(XLMConfig(**XLM)),
    "flaubert": lambda: FlaubertWithLMHeadModel(FlaubertConfig(**XLM)),
    "prefix-tuning": prefixed,
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_add_to_a_cache_are_recomputed_to_the_bit(name: str, wrap: Wrap) -> None:
    outcomes = []
    for activations in ("keep", "recompute", "auto"):
        torch.manual_seed(0)
        memory = pagoda.Memory(host="64MiB", unit_limit="16KiB")
        model, optimizer = wrap(MODELS[name]().train(), memory, precision="fp32", activations=activations)
        generator = torch.Generator().manual_seed(1)
        outcome = []
        for _ in range(2):
            loss = model(**batch("llama", generator)).loss
            loss.backward()
            optimizer.step()
            outcome += [loss.item(), optimizer.stats.grad_norm]
        assert all(outcome)
        outcomes.append(outcome)
    assert outcomes[0] == outcomes[1] == outcomes[2]
