"""The model of a run before it is wrapped: its weights, its loss, its quantized layers and its adapters."""

from dataclasses import replace

from rich.console import Console
from torch import nn

from pagoda.budgets import compute_device
from pagoda.checkpoint.pretrained import attach_weights, weight_files
from pagoda.console import say
from pagoda.errors import ConfigError
from pagoda.memory.sizes import format_bytes
from pagoda.models.build import model_directory
from pagoda.models.hub import is_hub_name
from pagoda.models.lora import LoraConfig, add_adapters
from pagoda.optim.rule import DTYPES
from pagoda.prepare.deferred_logits import chunked_loss
from pagoda.prepare.quantize import quantize_experts, quantize_layers, targets_of
from pagoda.train.choice import chunks_loss
from pagoda.train.config import TrainConfig


def ready(config: TrainConfig, model: nn.Module, console: Console, *, from_files: bool) -> nn.Module:
    """The model of a run, made from one that was built in `pagoda.deferred_init()`, ready for `wrap`. Prints what is
    done.

    `from_files`: it starts from the weights in its directory, if there are any. Otherwise a checkpoint will be loaded,
    and the files are read only for weights that are quantized, because these cannot wait.

    Raises ConfigError if files are missing, or if layers cannot be quantized or adapted.
    """
    if from_files or config.quantized_format is not None:
        _give_weights(config, model, console)
    if chunks_loss(config, model):
        chunked_loss(model)
        say(console, "Loss: in chunks, so that logits are never whole")
    lora, quantized = config.part(LoraConfig), 0
    form = DTYPES[config.chosen_precision], compute_device(config.memory)
    if config.quantized_format is not None:
        lora = replace(lora, lora_target_modules=targets_of(model, lora.lora_target_modules))
        quantized = quantize_layers(model, config.quantized_format, *form)
    if lora.lora_r is not None:
        model = add_adapters(model, lora)
    if config.quantized_format is not None:
        quantized += quantize_experts(model, config.quantized_format, *form)
        say(console, f"Quantized: {quantized:,} parameters in {config.quantized_format.removesuffix('bit')} bits")
    if lora.lora_r is not None:
        trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
        say(console, f"Adapters: rank {lora.lora_r}, {trained:,} parameters train, and the model's own are frozen")
    return model


def check_weights(config: TrainConfig) -> None:
    """Raises ConfigError if the model's directory has no weights to quantize, lacks some of its weights' files, or was
    downloaded without any."""
    directory = model_directory(config.model)
    files = [] if directory is None else weight_files(directory)
    from_hub = directory is not None and (is_hub_name(config.model) or (directory / ".cache" / "huggingface").is_dir())
    if from_hub and not files:
        raise ConfigError(
            f"{directory} was downloaded without weights: download it again (of a gated model, accept its terms and "
            "log in first). To start from random weights, copy config.json alone to another directory"
        )
    if config.quantized_format is not None and not files:
        raise ConfigError(
            f"--load-in-{config.quantized_format} is for pretrained weights, which {config.model!r} lacks: leave it out"
        )
    if missing := [path.name for path in files if not path.exists()]:
        raise ConfigError(f"{directory} lacks {len(missing)} of its {len(files)} files of weights ({missing[0]})")


def _give_weights(config: TrainConfig, model: nn.Module, console: Console) -> None:
    """Let the model start from the weights next to its config.json, if there are any. Prints which weights it starts
    from.

    Raises ConfigError if they do not fit the model.
    """
    directory = model_directory(config.model)
    if directory is None or not weight_files(directory):
        say(console, f"Weights: random, seed {config.seed}")
        return
    found = attach_weights(model, directory)
    line = f"Weights: {directory}, {format_bytes(found.nbytes)} in {found.files} file{'s' * (found.files > 1)}"
    say(console, line, *found.warnings())
