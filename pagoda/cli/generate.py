"""`pagoda generate`: continues a prompt with a trained model."""

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pagoda.config.commands import GenerateConfig
from pagoda.config.training import Tiles
from pagoda.errors import ConfigError
from pagoda.train.progress import say
from pagoda.train.records import Message

if TYPE_CHECKING:
    from torch import nn

    from pagoda.optimizer import PagedOptimizer


def run(config: GenerateConfig, console: Console) -> int:
    """Print what the model writes after the prompt. Returns the exit code."""
    from pagoda.models.gguf import gguf_in
    from pagoda.train.generate import continued
    from pagoda.train.tokenizer import BYTES, open_tokenizer, tokenizer_files

    weights, directory = _places(config)
    has_tokenizer = gguf_in(directory) is not None or (directory.is_dir() and tokenizer_files(directory))
    tokenizer = open_tokenizer(directory, None if has_tokenizer else BYTES)
    model, optimizer = _opened(weights, config)
    try:
        chat = tokenizer.chats if config.chat is None else config.chat
        seed = config.seed if config.draw else None
        prompt = _messages(config) if chat else config.prompt[0]
        if not chat and (config.system is not None or len(config.prompt) > 1):
            raise ConfigError("--system and several turns are for a chat, and this is none: give one --prompt")
        text = continued(model, tokenizer, prompt, chat=chat, tokens=config.tokens, seed=seed)
    finally:
        optimizer.close()
    say(console, text if chat else config.prompt[0] + text)
    return 0


def _messages(config: GenerateConfig) -> list[Message]:
    """The conversation that an assistant continues."""
    system = [] if config.system is None else [("system", config.system)]
    said = zip(cycle(("user", "assistant")), config.prompt, strict=False)
    return [{"role": role, "content": content} for role, content in (*system, *said)]


def _opened(weights: Path, config: GenerateConfig) -> "tuple[nn.Module, PagedOptimizer]":
    """The wrapped model of a directory or of a run's checkpoint."""
    from pagoda.api import load, wrap
    from pagoda.budgets import compute_device
    from pagoda.calibrate.matmul import usual_precision
    from pagoda.checkpoint.directory import read_manifest
    from pagoda.checkpoint.model_config import QUANTIZED
    from pagoda.config.training import MixedPrecision
    from pagoda.memory.identity import MANIFEST
    from pagoda.models.build import build_model
    from pagoda.optim import AdamW
    from pagoda.prepare.construct import init
    from pagoda.train.model import ready
    from pagoda.train.run_dir import RunDir

    record = read_manifest(weights).get("model") if (weights / MANIFEST).is_file() else None
    if not isinstance(record, dict) or not record.get(QUANTIZED):
        model = load(weights).requires_grad_(False)
        tiles, (precision, _) = Tiles(tile_limit=config.tile_limit), usual_precision(compute_device(config.memory))
        return wrap(model, AdamW(), memory=config.memory, precision=precision, tiles=tiles)
    # Quantized weights cannot be exported, so the run's own model is built again. It refuses tiles.
    trained = replace(RunDir(config.source).started_config(), memory=config.memory, tile_limit=config.tile_limit)
    with init():
        model = build_model(trained.model, seq_len=trained.seq_len)
    model = ready(trained, model, Console(quiet=True), from_files=False)
    rule = trained.optim.build(trained.seed, trained.optimizer)
    model, optimizer = wrap(model, rule, memory=config.memory, precision=trained.part(MixedPrecision))
    optimizer.load_checkpoint(weights)
    return model, optimizer


def _places(config: GenerateConfig) -> tuple[Path, Path]:
    """The directories of the weights and of the tokenizer."""
    from pagoda.models.build import model_directory
    from pagoda.models.gguf import gguf_in
    from pagoda.models.hub import is_hub_name
    from pagoda.train.run_dir import RunDir

    if (file := gguf_in(config.source)) is not None:
        return file, file
    run_dir = RunDir(config.source)
    weights = run_dir.named_or_itself(config.checkpoint)
    if weights != config.source:
        return weights, run_dir.tokenizer
    if is_hub_name(str(config.source)) and (directory := model_directory(str(config.source))) is not None:
        return directory, directory
    if (config.source / "config.json").is_file():
        return config.source, config.source
    raise ConfigError(
        f"{config.source} is neither a run nor a Hugging Face directory: name the --out of `pagoda train`, or a "
        "directory with a config.json"
    )
