"""Generates text with a model, whose weights may be in pages."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from pagoda.train.tokenizer import Tokenizer


def continued(
    model: nn.Module, tokenizer: Tokenizer, prompt: str, *, chat: bool, tokens: int, seed: int | None = None
) -> str:
    """Continue a prompt with the most likely tokens, or with sampled ones if there is a seed.

    `model` is a language model of transformers, wrapped or not. With `chat`, the prompt is a user's message, which the
    tokenizer's chat template formats. `tokens` is the most tokens to generate. The sampling temperature is 0.8, and
    sampling does not change the random numbers of training.

    Raises ConfigError for a chat if the tokenizer has no chat template.
    """
    device = next(model.parameters()).device
    ids = torch.tensor([tokenizer.prompt(prompt, chat)], device=device)
    draws: dict[str, Any] = {"do_sample": False}
    if seed is not None:
        draws = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
    was_training = model.training
    model.eval()
    devices = [device.index or 0] if device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices) if seed is not None else nullcontext():
            if seed is not None:
                torch.manual_seed(seed)
            found = model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                use_cache=True,
                pad_token_id=0,
                eos_token_id=tokenizer.end,
                **draws,
            )
    finally:
        model.train(was_training)
    return tokenizer.decode(found[0, ids.shape[1] :].tolist())
