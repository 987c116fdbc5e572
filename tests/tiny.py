"""A model directory that trains in milliseconds: a Llama's `config.json`, for tests that start runs."""

import json
from pathlib import Path

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def write_model(directory: Path, **changes: object) -> str:
    """Write `LLAMA`, with these changes, into a directory, made if need be; returns what `--model` takes."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return str(directory)
