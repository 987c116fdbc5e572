"""Builds a language model from a built-in name or a local Hugging Face directory."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagoda.errors import ConfigError
from pagoda.models.mixture_shapes import MIXTURE_SHAPES, mixture_shape
from pagoda.models.shapes import SHAPES, Shape, find_shape, is_sized_gpt

if TYPE_CHECKING:
    from torch import nn

    from pagoda.models.mixture import TokenExchange
    from pagoda.models.mixture_shapes import RoutingConfig


_MOST_LAYERS = 10_000
"""More than any model has: a configuration that says more is broken, and would be built for hours."""


def build_model(
    name_or_dir: str,
    *,
    seq_len: int,
    gradient_checkpointing: bool = False,
    layers: int | None = None,
    routing: "RoutingConfig | None" = None,
    exchange: "TokenExchange | None" = None,
) -> "nn.Module":
    """Builds a language model in training mode, its parameters fp32: one of transformers, or a mixture of experts.

    Call it inside `pagoda.init()` to keep parameters on the meta device. Nothing is downloaded and no code
    from the directory runs. Built-in shapes attend with torch's `scaled_dot_product_attention`; the key-value
    cache is off.

    Args:
        name_or_dir: a name in `SHAPES` or `MIXTURE_SHAPES`, a paper's shape with experts, `gpt-<layers>x<hidden>`, or
            a directory that holds a Hugging Face `config.json`.
        seq_len: tokens per sequence the model must accept; the positions of `gpt-<layers>x<hidden>` grow with it.
        gradient_checkpointing: let the model itself recompute each layer in backward (non-reentrant) instead of
            saving its activations, for plain PyTorch; under `wrap`, that is `activations`.
        layers: layers of the decoder, instead of the model's own; the kinds of its first ones, over again if
            need be, where it mixes kinds. Not of a mixture of experts.
        routing: how a mixture of experts routes, instead of its own way.
        exchange: of a mixture of experts, how its experts are divided over ranks; it then has this rank's.

    Raises:
        ConfigError: unknown name, unusable `config.json`, `seq_len` above the model's positions, a model
            without gradient checkpointing, `routing` or `exchange` for a model that is no built-in mixture of experts
            or has too few of them, or transformers is not installed.
    """
    import torch

    if is_mixture(name_or_dir):
        if layers is not None:
            raise ConfigError(f"model {name_or_dir!r} is a mixture of experts, whose number of layers is its own")
        return _build_mixture(name_or_dir, seq_len, gradient_checkpointing, routing, exchange)
    if routing is not None or exchange is not None:
        raise ConfigError(
            f"model {name_or_dir!r} is no built-in mixture of experts, so it has no routing to set and no experts to "
            f"divide; these are: {', '.join(MIXTURE_SHAPES)}"
        )
    config = _configuration(name_or_dir)
    if is_sized_gpt(name_or_dir):
        config.n_positions = max(config.n_positions, seq_len)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        raise ConfigError(
            f"seq_len {seq_len} is above the {positions} positions of model {name_or_dir!r}:"
            f" use --seq-len {positions} or less"
        )
    config.get_text_config().use_cache = False
    if layers is not None:
        _set_layers(name_or_dir, config, layers)
    model = _instantiate(name_or_dir, config, dtype=torch.float32)
    if gradient_checkpointing:
        _enable_checkpointing(name_or_dir, model)
    trained: nn.Module = model.train()
    return trained


def is_mixture(name_or_dir: str) -> bool:
    """Whether a name is that of a mixture of experts that is built here."""
    return mixture_shape(name_or_dir) is not None


def is_encoder_decoder(name_or_dir: str) -> bool:
    """Whether a name is that of a model whose decoder continues what its encoder has read."""
    shape = mixture_shape(name_or_dir)
    return shape is not None and shape.family == "t5"


def _build_mixture(
    name: str,
    seq_len: int,
    gradient_checkpointing: bool,
    routing: "RoutingConfig | None",
    exchange: "TokenExchange | None",
) -> "nn.Module":
    from pagoda.models.moe import build_mixture

    shape = mixture_shape(name)
    assert shape is not None
    if shape.family == "gpt" and seq_len > shape.seq_len:
        raise ConfigError(
            f"seq_len {seq_len} is above the {shape.seq_len} positions of model {name!r}:"
            f" use --seq-len {shape.seq_len} or less"
        )
    return build_mixture(shape, routing, gradient_checkpointing=gradient_checkpointing, exchange=exchange)


def layer_count(name_or_dir: str) -> int:
    """Layers of the decoder of a transformers model.

    Raises:
        ConfigError: as `build_model`, or the configuration does not say.
    """
    return _layers(name_or_dir, _configuration(name_or_dir))


def parameter_count(name_or_dir: str) -> int:
    """Parameters of the model, tied ones counted once. Builds it on the meta device, so it needs no memory.

    Raises:
        ConfigError: as `build_model`.
    """
    import torch

    if (shape := mixture_shape(name_or_dir)) is not None:
        return shape.params
    with torch.device("meta"):
        model = _instantiate(name_or_dir, _configuration(name_or_dir), dtype=torch.float32)
    return sum(parameter.numel() for parameter in model.parameters())


def _layers(name_or_dir: str, config: Any) -> int:
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(layers, int):
        raise ConfigError(
            f"model {name_or_dir!r} (model_type {config.model_type!r}) does not say how many layers it has"
        )
    return layers


def _set_layers(name_or_dir: str, config: Any, layers: int) -> None:
    _layers(name_or_dir, config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    kinds = getattr(text, "layer_types", None)
    if kinds:
        text.layer_types = [kinds[index % len(kinds)] for index in range(layers)]


def model_directory(name_or_dir: str) -> Path | None:
    """The Hugging Face directory that `name_or_dir` means, or None for a built-in name, which wins.

    Raises:
        ConfigError: neither a built-in name nor a directory with a config.json.
    """
    directory = Path(name_or_dir)
    if is_mixture(name_or_dir):
        return None
    if name_or_dir in SHAPES or is_sized_gpt(name_or_dir) or not directory.exists():
        find_shape(name_or_dir)
        return None
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model {name_or_dir!r} is not a directory with a Hugging Face config.json:"
            f" give such a directory or one of {', '.join((*SHAPES, *MIXTURE_SHAPES))}"
        )
    return directory


def build_from_directory(directory: Path, model_class: Any = None) -> "nn.Module":
    """Builds the model of a Hugging Face directory as it says itself, in training mode, its parameters fp32.

    Args:
        directory: holds a config.json.
        model_class: a class of transformers, an Auto class or a model's own; by default the first of the
            config.json's `architectures`, or else `AutoModelForCausalLM`.

    Raises:
        ConfigError: unusable `config.json`, or transformers is not installed.
    """
    import torch

    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} is not a directory with a Hugging Face config.json")
    config = _read_configuration(directory)
    transformers = import_transformers()
    if model_class is None:
        model_class = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
    build = getattr(model_class, "from_config", None) or model_class._from_config
    try:
        model: nn.Module = build(config, dtype=torch.float32).train()
    except Exception as error:  # as in `_instantiate`
        raise ConfigError(
            f"{directory} (model_type {config.model_type!r}) cannot be built as {model_class.__name__}:"
            f" {_first_line(error)}"
        ) from error
    return model


def _configuration(name_or_dir: str) -> Any:
    """The transformers configuration: a built-in name wins over a directory of the same name."""
    directory = model_directory(name_or_dir)
    return _shape_configuration(find_shape(name_or_dir)) if directory is None else _read_configuration(directory)


def _read_configuration(directory: Path) -> Any:
    transformers = import_transformers()
    path = directory / "config.json"
    try:
        config = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
    except Exception as error:  # transformers validates a bad file with many exception types
        raise ConfigError(f"transformers {transformers.__version__} cannot read {path}: {error}") from error
    if not isinstance(text, transformers.PretrainedConfig):
        raise ConfigError(f"{path} has a text_config that is no configuration: {text!r:.80}")
    layers = getattr(text, "num_hidden_layers", 1)
    if isinstance(layers, int) and not 1 <= layers <= _MOST_LAYERS:
        raise ConfigError(f"{path} says {layers:.3g} layers, and a model has 1 to {_MOST_LAYERS}: correct it")
    return config


def _shape_configuration(shape: Shape) -> Any:
    transformers = import_transformers()
    family = {"llama": transformers.LlamaConfig, "gpt2": transformers.GPT2Config}[shape.family]
    config = family(**shape.settings)
    config._attn_implementation = "sdpa"
    return config


def _instantiate(name_or_dir: str, config: Any, **options: Any) -> Any:
    try:
        return import_transformers().AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    except Exception as error:  # sizes that make no model fail wherever they are used first
        raise ConfigError(
            f"model {name_or_dir!r} (model_type {config.model_type!r}) cannot be built as a causal language"
            f" model: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    """What an error of a library says, with its type where that alone tells what is meant."""
    said = next(iter(str(error).splitlines()), "")
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"


def _enable_checkpointing(name_or_dir: str, model: Any) -> None:
    arguments = {"use_reentrant": False}
    try:
        if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers renamed it in 5.x
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    except ValueError as error:
        raise ConfigError(f"model {name_or_dir!r} has no gradient checkpointing ({error}): do without") from error


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("the built-in models need transformers: pip install 'pagoda-train[transformers]'") from error
    return transformers
