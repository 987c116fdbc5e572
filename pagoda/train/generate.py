"""Generates text with a model, whose weights may be in pages."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from pagoda.config.commands import TEMPERATURE
from pagoda.errors import ConfigError
from pagoda.prepare.lookups import device_of
from pagoda.train.records import Message
from pagoda.train.tokenizer import Tokenizer


def continued(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str | list[Message],
    *,
    chat: bool,
    tokens: int,
    seed: int | None = None,
    temperature: float = TEMPERATURE,
    top_p: float = 1.0,
) -> str:
    """Continue a prompt with the most likely tokens, or with sampled ones if there is a seed.

    `model` is a language model of transformers, wrapped or not. With `chat`, the prompt is a user's message, or
    messages, which the tokenizer's chat template formats. `tokens` is the most tokens to generate. Generation ends at
    the model's last position. Sampling takes the most likely tokens whose probabilities add up to `top_p`, and does not
    change the random numbers of training.

    Raises ConfigError like `prompt_ids`.
    """
    device = device_of(model)
    given = prompt_ids(model, tokenizer, prompt, chat)
    ids = torch.tensor([given], device=device)
    positions = _positions(model)
    draws: dict[str, Any] = {"do_sample": False}
    if seed is not None:
        draws = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}
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
                max_new_tokens=tokens if positions is None else min(tokens, positions - len(given)),
                use_cache=True,
                pad_token_id=0,
                eos_token_id=tokenizer.end,
                **draws,
            )
    finally:
        model.train(was_training)
    # A decoder of its own starts with one token, and does not repeat the prompt.
    start = 1 if model.config.is_encoder_decoder else len(given)  # type: ignore[union-attr]
    return tokenizer.decode(found[0, start:].tolist())


def prompt_ids(model: nn.Module, tokenizer: Tokenizer, prompt: str | list[Message], chat: bool) -> list[int]:
    """The ids of a prompt that the model can continue.

    Raises ConfigError if it is not Unicode text, has no tokens or leaves no position, and for a chat if the tokenizer
    has no chat template.
    """
    try:
        for text in [prompt] if isinstance(prompt, str) else (message["content"] for message in prompt):
            text.encode()
    except UnicodeEncodeError as error:  # the command line had bytes that are not UTF-8
        raise ConfigError(f"--prompt is not UTF-8 text: {error}") from error
    ids, positions = tokenizer.prompt(prompt, chat), _positions(model)
    if not ids:
        raise ConfigError("--prompt is empty, and the tokenizer puts no token before a text: give some text")
    if positions is not None and len(ids) >= positions:
        raise ConfigError(f"--prompt has {len(ids)} tokens, and the model has {positions} positions: shorten it")
    return ids


def _positions(model: nn.Module) -> int | None:
    """Most tokens of a sequence, or None if the model's configuration does not say."""
    found: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore
    return found
