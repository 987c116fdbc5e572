"""Data for `pagoda train`: a tokenizer trained on the spot, with or without a chat template, and conversations."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from pagoda.config.reading import DataSettings
from pagoda.train.records import Document
from pagoda.train.seen import Seen
from pagoda.train.sources import documents, find
from pagoda.train.tokens import Tokens

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ message.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = (Path(torch.__file__).parent / "functional.py").read_text()[:60_000]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def _trained() -> str:
    """A byte-level BPE of 400 tokens, as JSON."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return str(raw.to_str())


def tokenizer(chat_template: str | None = None, **settings: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of its own for each call, of the same 400 tokens."""
    raw = Tokenizer.from_str(_trained())
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>", **settings)
    made.chat_template = chat_template
    return made


def write_pretrained(directory: Path, chat_template: str | None = MARKED, **changes: Any) -> Path:
    """A Llama of 60,000 parameters with weights and a tokenizer."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 400,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    AutoModelForCausalLM.from_config(LlamaConfig(**{**settings, **changes})).save_pretrained(directory)
    tokenizer(chat_template).save_pretrained(directory)
    return directory


def conversation(turns: int, number: int) -> list[dict[str, str]]:
    """Questions and answers, with a system message in every third."""
    found = [{"role": "system", "content": "Be brief."}] if number % 3 == 0 else []
    for turn in range(turns):
        found.append({"role": "user", "content": f"What is {number} plus {turn}?"})
        found.append({"role": "assistant", "content": f"It is {number + turn}, as anyone can count."})
    return found


def chats(count: int = 24) -> list[list[dict[str, str]]]:
    return [conversation(1 + number % 3, number) for number in range(count)]


def write_lines(path: Path, rows: list[Any]) -> Path:
    """A file of JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text_of(tokens: Tokens) -> str:
    """What tokens of bytes are of."""
    return bytes(tokens.ids.astype(np.uint8)).decode()


def read(name: Path | str, seen: Seen | None = None, **settings: Any) -> list[Document]:
    """The documents of data."""
    return [*documents(find(str(name), DataSettings(**settings), "train"), Seen() if seen is None else seen)]
