"""Low-rank adapters (LoRA) with peft. They are trained instead of a model's own weights, which stay frozen.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagoda.config.settings import Settings, require
from pagoda.errors import ConfigError, needed

if TYPE_CHECKING:
    from torch import nn

ALL_LINEAR = "all-linear"
"""As a target: every linear layer except the output layer."""
_NAMES, MERGED = "adapter_names", "merged"
NO_PEFT = "adapters need peft: pip install 'pagoda-train[peft]'"


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Settings):
    """Adapters that are trained instead of the model's weights, which stay frozen and take no optimizer state."""

    lora_r: int | None = None
    """Rank of the adapters. By default there are none, and the whole model is trained."""
    lora_alpha: int | None = None
    """The output of an adapter is multiplied by this / --lora-r. By default twice --lora-r."""
    lora_dropout: float = 0.0
    """Share of an adapter's inputs that are dropped."""
    lora_target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the modules that get adapters, as peft matches them, such as q_proj v_proj, and of parameters of
    experts, such as experts.down_proj; all-linear: every linear layer except the output layer, and, without
    --load-in-4bit and --load-in-8bit, what is like them in experts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_r is None:
            if (self.lora_alpha, self.lora_dropout, self.lora_target_modules) != (None, 0.0, (ALL_LINEAR,)):
                raise ConfigError("--lora-r is missing: adapters with these settings need a rank, such as 16")
            return
        require(self.lora_r >= 1, "--lora-r", self.lora_r, "at least 1")
        require(self.lora_alpha is None or self.lora_alpha >= 1, "--lora-alpha", self.lora_alpha, "at least 1")
        require(0 <= self.lora_dropout < 1, "--lora-dropout", self.lora_dropout, "in [0, 1)")
        require(bool(self.lora_target_modules), "--lora-target-modules", self.lora_target_modules, "at least one name")


def peft() -> Any:
    """The package. Raises ConfigError if it is not installed."""
    return needed("peft", NO_PEFT)


def add_adapters(model: "nn.Module", lora: LoraConfig) -> "nn.Module":
    """Freeze a transformers model and add adapters, in training mode. Its weights may wait.

    Raises ConfigError if peft is not installed, if it finds none of the targets or cannot adapt them so, or if it would
    adapt the routers of a Switch Transformer.
    """
    from pagoda.models.switch import is_switch

    assert lora.lora_r is not None
    package, named = peft(), " ".join(lora.lora_target_modules)
    held = [name for name, _ in model.named_parameters()]
    params = [target for target in lora.lora_target_modules if any(f".{name}".endswith(f".{target}") for name in held)]
    settings = package.LoraConfig(
        r=lora.lora_r,
        lora_alpha=2 * lora.lora_r if lora.lora_alpha is None else lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=ALL_LINEAR
        if named == ALL_LINEAR
        else [each for each in lora.lora_target_modules if each not in params],
        target_parameters=params or None,
        task_type="CAUSAL_LM",
    )
    try:
        adapted: nn.Module = package.get_peft_model(model, settings)
    except ValueError as error:  # peft raises it for modules that it cannot adapt
        raise ConfigError(f"--lora-target-modules is {named}: {str(error).splitlines()[0]}") from error
    if any(is_switch(module, "Top1Router") and hasattr(module.classifier, "lora_A") for module in adapted.modules()):
        raise ConfigError(
            f"--lora-target-modules is {named}: transformers casts the linear layer of a router in place, so it cannot "
            "have "
            "an adapter. Name other layers, such as q k v o wi wo"
        )
    return adapted.train()


def adapter_settings(model: "nn.Module") -> dict[str, Any] | None:
    """peft's settings of a model's only adapter, with JSON types, the adapter's name, and whether it is merged in
    place. Of several adapters, the names. None for a model without `get_peft_model`."""
    configs = getattr(model, "peft_config", None)
    if not callable(getattr(model, "get_base_model", None)) or not configs:
        return None
    if len(configs) > 1:
        return {_NAMES: list(configs)}
    ((name, config),) = configs.items()
    merged = any(getattr(module, "merged_adapters", None) for module in model.modules())
    settings = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    return {**settings, _NAMES: [name], MERGED: merged}


def adapter_name(settings: dict[str, Any]) -> str:
    """The name of the adapter with these `adapter_settings`. Raises ConfigError if there are several, or none, as in
    checkpoints of earlier versions."""
    names = settings.get(_NAMES) or ()
    if not names:
        raise ConfigError(
            "The checkpoint does not name its adapter: an earlier version of Pagoda wrote it. Export it with that "
            "version, or resume it here and save it again."
        )
    if len(names) > 1:
        raise ConfigError(
            f"The model has the adapters {', '.join(names)}, and only a single one can be exported or merged. "
            "save_pretrained of the wrapped model saves each, and export(own_names=True) everything."
        )
    return str(names[0])


def adapted_as(model: Any, settings: dict[str, Any]) -> Any:
    """Add an adapter to `model`, with settings from `adapter_settings`. Its initial values do not depend on the
    weights."""
    package = peft()
    if settings.get("megatron_config"):  # peft would import the module that `megatron_core` names
        raise ConfigError("adapters of Megatron-Core's layers cannot be exported or merged: use save_pretrained.")
    own = {key: value for key, value in settings.items() if key not in (_NAMES, MERGED)}
    initial = {"init_lora_weights": True} if "init_lora_weights" in own else {}
    config = package.PeftConfig.from_peft_type(**{**own, **initial, "base_model_name_or_path": None})
    adapted = package.get_peft_model(model, config, adapter_name=adapter_name(settings))
    for name in ("base_model_name_or_path", *initial):  # peft takes the first from `model`
        setattr(config, name, settings.get(name))
    return adapted
