"""Builds language models from built-in names or local Hugging Face directories."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagoda.errors import ConfigError, PagodaError, needed
from pagoda.memory.files import read_regular
from pagoda.models.gguf import gguf_in, settings_of
from pagoda.models.hub import cached, how_to_download, is_hub_name
from pagoda.models.shapes import HOW_TO_NAME, find_shape, is_built_in, is_sized_gpt, shape_on_hub

if TYPE_CHECKING:
    import torch
    from torch import nn


_CAPACITY_FACTOR = 1.25
"""Most tokens of an expert, relative to an equal share, as in Switch Transformer (arXiv 2101.03961)."""
USE_CACHE = "_pagoda_use_cache"
"""Attribute of a model that was built here: what its config.json says of the key-value cache, which may be turned off
while the model trains."""
_MOST_LAYERS = 10_000
"""More layers than any model has. A configuration with more is wrong, and its model would take hours to build."""
_OF_LAYERS = re.compile(r"layer|depth|blocks$|experts$")
"""Settings that say how many modules a model has."""


def build_model(
    name_or_dir: str,
    *,
    seq_len: int,
    gradient_checkpointing: bool = False,
    layers: int | None = None,
) -> "nn.Module":
    """Build a language model of transformers, with fp32 parameters, in training mode.

    Call it inside `pagoda.deferred_init()` to keep parameters out of memory. Nothing is downloaded and no code from the
    directory runs. The key-value cache is off.

    Args:
        name_or_dir: a name in `SHAPES`, a paper's shape with experts, `gpt-<layers>x<hidden>`, a directory with a
            Hugging Face `config.json`, a GGUF file, or ORG/NAME, the name of a model in the Hugging Face cache.
        seq_len: tokens per sequence that the model must accept. It sets a minimum for the positions of
            `gpt-<layers>x<hidden>`, and an expert of a built-in T5-MoE takes at most 1.25 times its share of them.
        gradient_checkpointing: recompute each layer in backward with the model's own (non-reentrant) checkpointing
            instead of saving its activations. This is for plain PyTorch; with `wrap`, use `activations`.
        layers: number of decoder layers, instead of the model's own. If layers are of several kinds, the kinds are
            those of the first layers, repeated as necessary.

    Raises ConfigError for an unknown name, an unusable `config.json`, a `seq_len` above the model's positions or a
    model without gradient checkpointing, and if transformers is not installed.
    """
    config = configuration(name_or_dir)
    text = config.get_text_config()
    if is_sized_gpt(name_or_dir):
        config.n_positions = max(config.n_positions, seq_len)
    if is_built_in(name_or_dir) and hasattr(config, "expert_capacity"):
        config.expert_capacity = ceil(_CAPACITY_FACTOR * seq_len / config.num_experts)
    check_positions(name_or_dir, seq_len)
    if layers is not None:
        layer_count(name_or_dir)  # raises ConfigError for a model without it
        text.num_hidden_layers = layers
        if kinds := getattr(text, "layer_types", None):
            text.layer_types = [kinds[index % len(kinds)] for index in range(layers)]
    transformers = import_transformers()
    pairs = getattr(config, "is_encoder_decoder", False)
    kind = transformers.AutoModelForSeq2SeqLM if pairs else transformers.AutoModelForCausalLM
    import torch

    model = _built(f"model {name_or_dir!r}", kind.from_config, config, torch.float32, model_directory(name_or_dir))
    if getattr(model, USE_CACHE):
        model.config.get_text_config().use_cache = False  # type: ignore[union-attr, operator]
    if gradient_checkpointing:
        _enable_checkpointing(name_or_dir, model)
    return model


def build_from_directory(
    directory: Path, model_class: Any = None, dtype: "torch.dtype | None" = None, of_files: "torch.dtype | None" = None
) -> "nn.Module":
    """Build the model that a directory's config.json or a GGUF file describes, in training mode. Its parameters have
    the dtypes that `from_pretrained(dtype=dtype)` gives them. Without `dtype`, that is the one of config.json, or else
    `of_files`.

    `model_class` is a class of transformers: an Auto class or a model class. By default it is the first of the
    config.json's `architectures`, or `AutoModelForCausalLM` if there is none.

    Raises ConfigError for an unusable `config.json`, and if transformers is not installed.
    """
    if gguf_in(directory) is None and not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} is neither a directory with a Hugging Face config.json nor a GGUF file")
    config = _read_configuration(directory)
    if model_class is None:
        transformers = import_transformers()
        named = config.architectures or [""]
        if not isinstance(named, list) or not isinstance(named[0], str):
            raise ConfigError(
                f"{directory / 'config.json'} has architectures {named!r:.80}: correct it to a list of names"
            )
        model_class = getattr(transformers, named[0], transformers.AutoModelForCausalLM)
    build = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config", None)
    if build is None:
        raise ConfigError(
            f"{directory}: {model_class!r:.80} is not a model class. Correct architectures in config.json"
        )
    import torch

    dtype = dtype or getattr(config, "dtype", None) or of_files or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model = _built(str(directory), build, config, dtype, directory)
    keep_in_fp32(model, dtype)
    return model


def keep_in_fp32(model: "nn.Module", dtype: "torch.dtype") -> None:
    """Cast to fp32 the tensors of a model in `dtype` that `from_pretrained` would leave in fp32."""
    kept = {*kept_in_fp32(model, dtype)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in kept:
            tensor.data = tensor.data.float()


def kept_in_fp32(model: "nn.Module", dtype: "torch.dtype") -> list[str]:
    """Names of the parameters and buffers that `from_pretrained(dtype=dtype)` leaves in fp32."""
    found: list[str] = []
    roots: list[str] = []
    for prefix, module in model.named_modules():
        plan: Any = getattr(module, "_get_dtype_plan", None)
        if plan is None or any(prefix.startswith(root) for root in roots):  # an outer model's plan has the inner ones
            continue
        roots.append(f"{prefix}." if prefix else "")
        if patterns := [pattern.replace("*", ".*") for pattern in plan(dtype)]:
            kept = re.compile("|".join(patterns))
            tensors = (*module.named_parameters(), *module.named_buffers())
            found += [roots[-1] + name for name, _ in tensors if kept.search(name)]
    return found


def is_encoder_decoder(name_or_dir: str) -> bool:
    """Whether a model is an encoder-decoder.

    Raises ConfigError like `build_model`.
    """
    return bool(getattr(configuration(name_or_dir), "is_encoder_decoder", False))


def check_positions(name_or_dir: str, seq_len: int) -> None:
    """Raises ConfigError like `build_model`, also if a model has fewer positions than `seq_len`."""
    positions = positions_of(name_or_dir)
    if positions is not None and seq_len > positions:
        raise ConfigError(
            f"max_length {seq_len} is above the {positions} positions of model {name_or_dir!r}:"
            f" use --max-length {positions} or less, or a directory whose config.json has more max_position_embeddings"
        )


def positions_of(name_or_dir: str) -> int | None:
    """Maximum number of tokens of a sequence, or None if the configuration does not say.

    Raises ConfigError like `build_model`.
    """
    if is_sized_gpt(name_or_dir):
        return None
    return getattr(configuration(name_or_dir).get_text_config(), "max_position_embeddings", None)


def layer_count(name_or_dir: str) -> int:
    """Number of decoder layers of a transformers model.

    Raises ConfigError like `build_model`, and if the configuration does not give the number.
    """
    config = configuration(name_or_dir)
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(layers, int):
        raise ConfigError(
            f"model {name_or_dir!r} (model_type {config.model_type!r}) does not say how many layers it has"
        )
    return layers


def configuration_text(name_or_dir: str) -> str:
    """A built-in name itself, or the configuration of a directory as JSON, which is the same wherever it lies.

    Raises ConfigError like `build_model`.
    """
    if is_built_in(name_or_dir):
        return name_or_dir
    config = configuration(name_or_dir)
    config.name_or_path = ""
    text: str = config.to_json_string(use_diff=False)
    return text


def model_directory(name_or_dir: str) -> Path | None:
    """The Hugging Face directory or GGUF file that `name_or_dir` names, or None for a built-in name, which takes
    precedence. A name on the Hub (ORG/NAME) stands for its directory in the cache of huggingface_hub.

    Raises ConfigError if it is none of these, with what to do for a model on the Hub that is not in the cache.
    """
    directory = Path(name_or_dir)
    if is_built_in(name_or_dir):
        return None
    if is_hub_name(name_or_dir):
        if (found := cached(name_or_dir)) is None:
            what = f"model {name_or_dir!r} is neither a directory nor in the Hugging Face cache"
            raise ConfigError(f"{what}: {how_to_download(name_or_dir)}")
        return found
    if not directory.exists():
        find_shape(name_or_dir)
    if (file := gguf_in(directory)) is not None:
        return file
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model {name_or_dir!r} is neither a directory with a config.json nor a GGUF file. {HOW_TO_NAME}"
        )
    return directory


@contextmanager
def first_forward(name_or_dir: str) -> Iterator[None]:
    """Inside, a model computes for the first time, or its forward pass is counted. Sizes in config.json that do not
    match first show here: raises ConfigError for any error of a model that comes from a directory."""
    import torch

    try:
        yield
    except (PagodaError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if model_directory(name_or_dir) is None:
            raise
        raise ConfigError(
            f"model {name_or_dir!r} fails in its first forward pass: {type(error).__name__}: {error}. Check "
            "its config.json"
        ) from error


def planned_name(name_or_dir: str) -> str:
    """The model to plan: the built-in shape of a model on the Hub that is not in the Hugging Face cache, or the name
    itself.

    Raises ConfigError for a model on the Hub that is neither in the cache nor built in.
    """
    if not is_hub_name(name_or_dir) or is_built_in(name_or_dir) or cached(name_or_dir) is not None:
        return name_or_dir
    if (shape := shape_on_hub(name_or_dir)) is not None:
        return shape.name
    raise ConfigError(
        f"model {name_or_dir!r} is neither a built-in shape nor in the Hugging Face cache: run `hf download "
        f"{name_or_dir} config.json`, which is enough for a plan"
    )


def configuration(name_or_dir: str) -> Any:
    """The transformers configuration. A built-in name takes precedence over a directory of the same name.

    Raises ConfigError like `build_model`.
    """
    directory = model_directory(name_or_dir)
    if directory is not None:
        return _read_configuration(directory)
    shape = find_shape(name_or_dir)
    return import_transformers().AutoConfig.for_model(shape.family, **shape.settings)


def _read_configuration(directory: Path) -> Any:
    transformers = import_transformers()
    file, kind = gguf_in(directory), transformers.AutoConfig
    path, settings = file or directory / "config.json", {} if file is None else settings_of(file)
    try:
        if file is None:
            check_sizes(json.loads(read_regular(path)))
            config = kind.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        else:
            check_sizes(settings)
            config = kind.for_model(**settings)
        text = config.get_text_config()
    except Exception as error:  # transformers validates a bad file with many exception types
        raise ConfigError(f"transformers {transformers.__version__} cannot read {path}: {error}") from error
    if not isinstance(text, transformers.PretrainedConfig):
        raise ConfigError(f"{path} has a text_config that is not a configuration: {text!r:.80}")
    if getattr(text, "num_hidden_layers", 1) == 0:
        raise ConfigError(f"{path} has 0 layers, but a model has 1 to {_MOST_LAYERS}: correct it")
    for described in (config, text):  # the model is built without it, as its weights are dequantized
        described.__dict__.pop("quantization_config", None)
    return config


def check_sizes(settings: Any) -> None:
    """Raises ValueError if a configuration, as its JSON has it, has more layers or experts than any model: transformers
    would build it for hours."""
    for name, value in settings.items() if isinstance(settings, dict) else ():
        check_sizes(value)
        if type(value) is int and value > _MOST_LAYERS and _OF_LAYERS.search(name):
            raise ValueError(f"{name} is {value:.3g}, and no model has more than {_MOST_LAYERS}")


def _built(
    what: str, build: Callable[..., Any], config: Any, dtype: "torch.dtype", directory: Path | None
) -> "nn.Module":
    """Build a model of a transformers class from a configuration, in training mode. It generates text as the
    `directory` says."""
    try:
        model: nn.Module = build(config, dtype=dtype).train()
    except Exception as error:  # impossible sizes fail at their first use, with any exception type
        said = next(iter(str(error).splitlines()), "")
        if not isinstance(error, ValueError):  # other messages, such as a KeyError's, need their type
            said = f"{type(error).__name__}: {said}"
        raise ConfigError(f"{what} (model_type {config.model_type!r}) cannot be built: {said}") from error
    setattr(model, USE_CACHE, getattr(config.get_text_config(), "use_cache", None))
    if directory is not None:
        _read_generation_config(model, directory)
    return model


def _read_generation_config(model: "nn.Module", directory: Path) -> None:
    if (directory / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        try:
            model.generation_config = found = import_transformers().GenerationConfig.from_pretrained(directory)
            found.to_json_string()  # as checkpoints and exports write it
        except Exception as error:  # transformers validates with many exception types
            raise ConfigError(
                f"{directory / 'generation_config.json'} cannot be read: {error}. Correct it, or move it away"
            ) from error


def _enable_checkpointing(name_or_dir: str, model: Any) -> None:
    arguments = {"use_reentrant": False}
    try:
        if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers renamed it in 5.x
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    except ValueError as error:
        raise ConfigError(f"model {name_or_dir!r} has no gradient checkpointing ({error}): leave it out") from error


def import_transformers() -> Any:
    """Import transformers. Raises ConfigError if it is not installed."""
    return needed("transformers", "the built-in models need transformers: pip install 'pagoda-train[transformers]'")
