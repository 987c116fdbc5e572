"""The model of a run: built, and given the weights that it starts from."""

import inspect
from pathlib import Path

from rich.console import Console
from torch import nn

from pagoda.checkpoint.pretrained import attach_weights, weight_files
from pagoda.construction.construct import init
from pagoda.errors import ConfigError
from pagoda.memory.sizes import format_bytes
from pagoda.models import build_model
from pagoda.models.build import model_directory
from pagoda.models.lora import LoraConfig
from pagoda.train.config import TrainConfig
from pagoda.train.progress import say
from pagoda.train.tokens import Tokens


def built_model(config: TrainConfig) -> nn.Module:
    """The model, its parameters on the meta device."""
    with init():
        return build_model(config.model, seq_len=config.seq_len)


def check_vocabulary(config: TrainConfig, model: nn.Module, tokens: Tokens) -> None:
    """Raises ConfigError where the model does not know all tokens."""
    known, about = model.get_input_embeddings().num_embeddings, tokens.about  # type: ignore[operator]
    if known < about.most:
        raise ConfigError(
            f"model {config.model!r} has a vocabulary of {known}, and data {about.source!r} has tokens up to "
            f"{about.most - 1} ({about.tokenizer}): give the model's own tokenizer with --tokenizer, or, to start from "
            f"random weights, set vocab_size in config.json to {about.most} or more"
        )


def takes_positions(model: nn.Module) -> bool:
    """Whether a model can be told where documents begin, and then keeps their attention apart."""
    return "position_ids" in inspect.signature(model.forward).parameters


def give_weights(config: TrainConfig, model: nn.Module, console: Console) -> None:
    """Lets the model start from the weights beside its config.json, if there are any, and says what it starts from.

    Raises ConfigError: the directory has not all of its files.
    """
    directory = model_directory(config.model)
    files = weight_files(directory) if directory is not None else []
    if directory is not None:
        _check_download(directory, files)
    if directory is None or not files:
        say(console, f"Weights: random, seed {config.seed}")
        return
    found = attach_weights(model, directory)
    line = f"Weights: {directory}, {format_bytes(found.nbytes)} in {found.files} file{'s' * (found.files > 1)}"
    say(console, line, *found.warnings())


def _check_download(directory: Path, files: list[Path]) -> None:
    """Raises ConfigError for a directory that seems to be a part of what is to be downloaded."""
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise ConfigError(
            f"{directory} lacks {len(missing)} of its {len(files)} files of weights ({missing[0]}), as if its download "
            "had been interrupted: run hf download again, which fetches what is missing"
        )
    if not files and (directory / ".cache" / "huggingface").is_dir():
        raise ConfigError(
            f"{directory} was downloaded without weights: run hf download again (of a gated model, accept its terms "
            "and run hf auth login first). To start from random weights, copy config.json alone to another directory"
        )


def show_adapters(console: Console, model: nn.Module, lora: LoraConfig) -> None:
    """Says how much of a model with adapters is trained."""
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    say(console, f"Adapters: rank {lora.rank}, {trained:,} parameters train, and the model's own are frozen")
