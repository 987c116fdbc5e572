"""`pagoda generate`: continues a prompt with a trained model."""

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pagoda.config.commands import GenerateConfig
from pagoda.config.training import Precision, Tiles
from pagoda.console import say
from pagoda.errors import ConfigError
from pagoda.train.config import TrainConfig
from pagoda.train.records import Message

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

    from pagoda.checkpoint.reader import SavedCheckpoint


def run(config: GenerateConfig, console: Console) -> int:
    """Print what the model writes after the prompt. Returns the exit code."""
    from pagoda.api import wrap
    from pagoda.optim import AdamW
    from pagoda.train.generate import continued
    from pagoda.train.run_dir import known_as
    from pagoda.train.tokenizer import BYTES, has_tokenizer, open_tokenizer

    weights, directory = _places(config)
    tokenizer = open_tokenizer(directory, None if has_tokenizer(directory) else BYTES)
    source = _opened(weights, config)
    computes = source.precision or "the dtypes of the weights"
    with suppress(OSError):  # the text is what was asked for
        print(f"pagoda: reading {known_as(weights)}, computing in {computes}", file=sys.stderr, flush=True)
    frozen = source.model.requires_grad_(False)
    model, optimizer = wrap(frozen, AdamW(), memory=config.memory, precision=source.precision, tiles=source.tiles)
    try:
        chat = next(said for said in (config.chat, source.chat, tokenizer.chats) if said is not None)
        seed = config.seed if config.do_sample else None
        prompt = _messages(config) if chat else config.prompt[0]
        if not chat and (config.system is not None or len(config.prompt) > 1):
            raise ConfigError("--system and several turns are for a chat, and this is none: give one --prompt")
        text = continued(
            model,
            tokenizer,
            prompt,
            chat=chat,
            tokens=config.max_new_tokens,
            seed=seed,
            temperature=config.temperature,
            top_p=config.top_p,
        )
    finally:
        optimizer.close()
    say(console, text if chat else config.prompt[0] + text)
    return 0


def _messages(config: GenerateConfig) -> list[Message]:
    """The conversation that an assistant continues."""
    system = [] if config.system is None else [("system", config.system)]
    said = zip(cycle(("user", "assistant")), config.prompt, strict=False)
    return [{"role": role, "content": content} for role, content in (*system, *said)]


@dataclass(frozen=True)
class _Source:
    """What to generate with, as a run left it or a directory has it."""

    model: "nn.Module"
    precision: Precision | None
    """None: each parameter computes in its own dtype."""
    tiles: Tiles
    chat: bool | None
    """Whether the run's data were conversations. None if that is not known."""


def _opened(weights: Path, config: GenerateConfig) -> _Source:
    """The model of a directory or of a run's checkpoint. It computes as in the run, so that it writes the same."""
    from pagoda.api import load
    from pagoda.checkpoint.model_config import ADAPTER, QUANTIZED
    from pagoda.checkpoint.reader import SavedCheckpoint
    from pagoda.memory.identity import MANIFEST
    from pagoda.plan.layout import WEIGHT
    from pagoda.train.resume import CHAT, CONFIG

    limit: dict[str, Any] = {} if config.tile_limit is None else {"tile_limit": config.tile_limit}
    if not (weights / MANIFEST).is_file():
        model = load(weights)
        return _Source(model, _precision_of(param.dtype for param in model.parameters()), Tiles(**limit), None)
    checkpoint = SavedCheckpoint(weights)
    extra, record = checkpoint.manifest["extra"], checkpoint.manifest.get("model")
    trained = TrainConfig.from_settings(extra[CONFIG]) if isinstance(extra, dict) and CONFIG in extra else None
    tiles = Tiles() if trained is None else replace(trained.part(Tiles), batch_tiles=None)
    if isinstance(record, dict) and ADAPTER in record and (record.get(QUANTIZED) or not limit):
        model = _with_adapter(checkpoint, trained, config)
    else:
        model = load(weights)  # adapters are merged, because only layers without them are cut into tiles
    chat = None if trained is None else extra.get(CHAT)
    precision = _precision_of(tensor.dtype for tensor in checkpoint.tensors[WEIGHT].values())
    return _Source(model, precision, replace(tiles, **limit), chat if isinstance(chat, bool) else None)


def _precision_of(dtypes: "Iterable[torch.dtype]") -> Precision | None:
    """The precision of weights that have these dtypes. None if it is not one."""
    from pagoda.optim.rule import DTYPES

    found = set(dtypes)
    return next((name for name, dtype in DTYPES.items() if found == {dtype}), None)


def _with_adapter(checkpoint: "SavedCheckpoint", trained: TrainConfig | None, config: GenerateConfig) -> "nn.Module":
    """The model of a checkpoint with its adapter beside the weights. Weights that a run has quantized are in no
    checkpoint, so they are quantized again."""
    from pagoda.checkpoint.export import give_values
    from pagoda.checkpoint.model_config import ADAPTER, QUANTIZED, model_of
    from pagoda.models.build import build_model
    from pagoda.models.lora import adapted_as
    from pagoda.prepare.construct import deferred_init
    from pagoda.train.model import ready

    record = checkpoint.manifest["model"]
    if record.get(QUANTIZED):
        if trained is None:
            raise ConfigError(f"{checkpoint.directory} has quantized weights, and is not of `pagoda train`")
        trained = replace(trained, memory=config.memory)
        with deferred_init():
            model = build_model(trained.model, seq_len=trained.max_length)
        model = ready(trained, model, Console(quiet=True), from_files=False)
    else:
        with deferred_init():
            model = model_of(record)
        model = adapted_as(model, record[ADAPTER])
    give_values(model, checkpoint)
    return model


def _places(config: GenerateConfig) -> tuple[Path, Path]:
    """The directories of the weights and of the tokenizer."""
    from pagoda.models.build import model_directory
    from pagoda.models.gguf import gguf_in
    from pagoda.models.hub import is_hub_name
    from pagoda.train.run_dir import RunDir

    if (file := gguf_in(config.source)) is not None:
        return file, file
    weights = RunDir(config.source).named_or_itself(config.checkpoint)
    if weights != config.source:
        return weights, RunDir(weights.parent.parent).tokenizer
    if is_hub_name(str(config.source)) and (directory := model_directory(str(config.source))) is not None:
        return directory, directory
    if (config.source / "config.json").is_file():
        return config.source, config.source
    raise ConfigError(
        f"{config.source} is neither a run nor a Hugging Face directory: name the --output-dir of `pagoda train`, or a "
        "directory with a config.json"
    )
