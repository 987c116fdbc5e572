"""How a model is trained: precision, updates, activations, tiles, and the contents of a step."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal, get_args

import tyro

from pagoda.config.settings import Settings, are_texts, is_finite, require, require_bool, require_count
from pagoda.errors import ConfigError
from pagoda.memory.page import PAGE_ALIGN
from pagoda.memory.sizes import parse_bytes

Precision = Literal["bf16", "fp16", "fp32"]
Gradients = Literal["bf16", "fp32"]
UpdateMode = Literal["sync", "async"]
ActivationMode = Literal["auto", "keep", "recompute", "offload", "recompute+offload"]
TileCount = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling, with the defaults of `torch.amp.GradScaler`.

    A step whose gradients are not finite is skipped: every state stays unchanged, and the scale is multiplied by
    `backoff_factor`. After `growth_interval` consecutive steps that were not skipped, it is multiplied by
    `growth_factor`. All three must be powers of two. So scaling changes no bit, except for gradients that are too small
    or large for fp16.

    Raises ConfigError with the field's name for other values.
    """

    init_scale: float = 65536.0
    """Scale of the first step."""
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    """Steps without a skip before the scale grows."""

    def __post_init__(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor"):
            check_power_of_two(f"loss_scale {name}", getattr(self, name))
        require(self.growth_factor >= 1, "loss_scale growth_factor", self.growth_factor, "at least 1")
        require(self.backoff_factor < 1, "loss_scale backoff_factor", self.backoff_factor, "below 1")
        require_count("loss_scale growth_interval", self.growth_interval, 1)


@dataclass(frozen=True)
class MixedPrecision(Settings):
    """Number formats of weights and gradients."""

    precision: Precision | None = None
    """Precision of weights and gradients in forward and backward. The master weights, which the optimizer updates, are
    always fp32. fp16 scales the loss, and skips steps whose gradients are not finite. By default, `pagoda.wrap` keeps
    the dtypes of the model; the commands use bf16 on a GPU, and on a CPU that multiplies it as fast as fp32, otherwise
    fp32. `pagoda plan` assumes that fp16 is as fast as bf16."""
    gradients: Gradients | None = None
    """Precision in which gradients are accumulated. By default that of the weights."""
    loss_scale: Annotated[LossScale | float | Literal["dynamic"] | None, tyro.conf.Suppress] = None
    """With fp16: "dynamic" (the default), a `LossScale` for dynamic scaling with other settings, or a power of two as a
    constant scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision is not None:
            require_choice("precision", self.precision, Precision)
        if self.gradients is not None:
            require_choice("gradients", self.gradients, Gradients)
        scale = self.loss_scale
        if scale is not None and self.precision not in ("fp16", None):
            raise ConfigError(
                f"loss_scale is for precision='fp16'; it is {self.precision!r} here. Leave loss_scale out."
            )
        if isinstance(scale, str):
            if scale != "dynamic":
                raise ConfigError(f"loss_scale is {scale!r}; use 'dynamic', a power of two, or a pagoda.LossScale.")
        elif scale is not None and not isinstance(scale, LossScale):
            check_power_of_two("loss_scale", scale)

    @property
    def chosen_precision(self) -> Precision:
        """The precision, once it is chosen."""
        if self.precision is None:
            raise ConfigError("precision is None; a forecast needs one of bf16, fp16, fp32.")
        return self.precision

    @property
    def scaling(self) -> LossScale | float | None:
        """The loss scaling: a `LossScale` if it is dynamic, a number if it is constant, or None."""
        if self.precision != "fp16":
            return None
        return LossScale() if self.loss_scale is None or isinstance(self.loss_scale, str) else self.loss_scale

    @property
    def may_skip(self) -> bool:
        """Whether a step is skipped if a gradient is not finite."""
        return isinstance(self.scaling, LossScale)


@dataclass(frozen=True)
class Updates(Settings):
    """When weights are updated.

    Asynchronous updates keep the gradients of two steps in memory, and a second copy of every weight.
    """

    update: UpdateMode = "sync"
    """sync: forward reads weights with all earlier updates. async: weights lack the last step's update, which has the
    time of a step to run. This is for state on an SSD that is slower than compute. It changes the algorithm."""
    _: KW_ONLY
    sync_steps: int = 0
    """With async: the first steps that wait for their updates, as with sync."""
    predict: bool = False
    """With async: forward and backward read weights as they will probably be when the gradient is applied: one step
    further on, if it changes them as the last one did.
    Evaluations read them too. `state_dict`, `gathered` and exports have the true weights. The fp32 master is then
    stored whole: 4 bytes for each parameter in place of 2, or in fp32 in place of none. For element-wise optimizers
    with momentum."""
    speculate: bool = True
    """With clipping or fp16: update during backward as if nothing would be clipped or overflow, and redo the update if
    that was wrong. The bits are the same. Old and new states need room until that is known. This applies to units with
    state on SSD, and with a GPU to units in RAM, as far as there is room."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("update", self.update, UpdateMode)
        require_count("sync_steps", self.sync_steps, 0)
        require_bool("predict", self.predict)
        require_bool("speculate", self.speculate)
        if self.sync_steps and self.update == "sync":
            raise ConfigError(f"sync_steps is {self.sync_steps}, which needs update='async'.")
        if self.predict and self.update == "sync":
            raise ConfigError("predict=True needs update='async': with sync, no weights are late.")

    @property
    def asynchronous(self) -> bool:
        """Whether weights lack the last step's update."""
        return self.update == "async"

    @property
    def ahead(self) -> float | None:
        """Number of steps by which weights are predicted. None if they are not."""
        return 1.0 if self.predict else None


@dataclass(frozen=True)
class Activations(Settings):
    """What happens to activations, the tensors that autograd keeps between forward and backward."""

    activations: ActivationMode | None = None
    """What happens to the activations of each block, a module that the model repeats, such as a decoder layer. keep:
    they stay in memory. recompute: only the block's inputs stay, and backward runs the block's forward again (gradient
    checkpointing). offload: large ones go to RAM (from a GPU) or to SSD, and come back before backward needs them.
    recompute+offload: the block is recomputed, and its inputs are offloaded. auto: keep as many as memory has room for,
    offload as many as transfers can move in time, and recompute the rest. By default recompute, or recompute+offload
    where that does not fit. The bits are the same."""
    partition_activations: Annotated[bool, tyro.conf.Suppress] = False
    """If all tensor-parallel ranks have the same block input, each rank keeps or offloads an equal part of it. They
    gather the whole input before they recompute the block. The bits are the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activations is not None:
            require_choice("activations", self.activations, ActivationMode)
        require_bool("partition_activations", self.partition_activations)
        if self.partition_activations and self.activations in ("keep", "offload"):
            raise ConfigError(
                "partition_activations is for blocks that are recomputed, but activations is "
                f"{self.activations!r}: use 'recompute', 'recompute+offload' or 'auto'."
            )


@dataclass(frozen=True, kw_only=True)
class Tiles(Settings):
    """Which computations run in pieces: each layer's batch, MLPs on long sequences, and large layers."""

    batch_tiles: TileCount | None = None
    """Number of micro-batches in which each layer runs its batch ("auto" chooses it), so that its weights are fetched
    once for the whole batch. Use one large batch instead of accumulation. With this setting you state that layers treat
    the samples of a batch independently in training. Gradients then have the bits of accumulation over the same
    micro-batches. Layers that mix samples are refused where Pagoda detects it."""
    sequence_tiles: TileCount | None = None
    """Number of pieces in which MLPs and norms process the tokens of a long sequence ("auto" chooses it). Their
    activations then take the memory of one piece. Backward computes each piece again. Gradients of their weights are
    sums over pieces, rounded after each."""
    per_token: tuple[str, ...] = ()
    """Names of classes of modules, in addition to MLPs and norms of transformers, that sequence_tiles applies to. You
    state that they take one tensor and work on each token alone."""
    tile_limit: Annotated[str | int | None, tyro.conf.arg(metavar="SIZE")] = None
    """Linear layers and embeddings whose weights take more bytes than this (such as 256MiB) are cut into tiles, which
    are fetched, used and dropped one after another. The gradient of such a layer's input is a sum over tiles, so it is
    rounded in another order. In a layer with experts, as many experts as fit the limit are fetched together. Without a
    limit, they are fetched one at a time. If all of them fit, transformers' own kernel runs the layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_tiles", "sequence_tiles"):
            tiles = getattr(self, name)
            if tiles is not None and tiles != "auto":
                whole = type(tiles) is int and tiles >= 1
                require(whole, name, tiles, "a whole number, at least 1, or 'auto'")
        require(are_texts(self.per_token), "per_token", self.per_token, "a tuple of names")
        if self.per_token and self.sequence_tiles is None:
            raise ConfigError(f"per_token is {self.per_token!r}, which needs sequence_tiles: set it to 'auto'.")
        if (nbytes := self.tile_bytes) is not None:
            require(nbytes >= PAGE_ALIGN, "tile_limit", self.tile_limit, f"at least {PAGE_ALIGN} bytes")

    @property
    def tile_bytes(self) -> int | None:
        """Most bytes of the weights of a layer without tiles. None if no layer is cut."""
        return None if self.tile_limit is None else parse_bytes(self.tile_limit, "tile_limit")


@dataclass(frozen=True, kw_only=True)
class Step(Settings):
    """The contents of one optimizer step."""

    gradient_accumulation_steps: int | None = 1
    """Forward and backward passes per optimizer step."""
    max_grad_norm: float = 1.0
    """Largest global norm of the gradients. 0: no clipping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_accumulation_steps is not None:
            require_count("gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        norm: Any = self.max_grad_norm
        require(isinstance(norm, int | float) and norm >= 0, "max_grad_norm", norm, "above 0, or 0 for no clipping")

    @property
    def clipping_norm(self) -> float | None:
        """The largest global norm of the gradients. None: no clipping."""
        return self.max_grad_norm or None


@dataclass(frozen=True, kw_only=True)
class Training(Tiles, Activations, Updates, MixedPrecision, Step):
    """All settings of training, except optimizer, memory and ranks."""


def training_of(
    *,
    precision: Precision | MixedPrecision | None,
    max_grad_norm: float | None,
    gradient_accumulation_steps: int | None,
    update: UpdateMode | Updates,
    activations: ActivationMode | Activations,
    tiles: Tiles | None,
) -> Training:
    """The settings for the arguments of `wrap`. Raises ConfigError for values that are not allowed."""
    if not isinstance(tiles, Tiles | None):
        raise ConfigError(f"tiles is {tiles!r}; give a pagoda.Tiles, such as pagoda.Tiles(batch_tiles=4).")
    groups: tuple[Settings, ...] = (
        precision if isinstance(precision, MixedPrecision) else MixedPrecision(precision),
        update if isinstance(update, Updates) else Updates(update),
        activations if isinstance(activations, Activations) else Activations(activations),
        Tiles() if tiles is None else tiles,
    )
    given: dict[str, Any] = {}
    for group in groups:
        given |= group.shared(type(group))
    norm = 0.0 if max_grad_norm is None else max_grad_norm
    return Training(**given, max_grad_norm=norm, gradient_accumulation_steps=gradient_accumulation_steps)


def require_choice(name: str, value: object, choices: Any) -> None:
    """Raises ConfigError unless `value` is one of the values of a `Literal`."""
    if value not in get_args(choices):
        raise ConfigError(f"{name} is {value!r}; use one of {', '.join(map(str, get_args(choices)))}.")


def check_power_of_two(name: str, value: float) -> None:
    """Raises ConfigError unless `value` is a power of two."""
    require(is_finite(value) and math.frexp(value)[0] == 0.5, name, value, "a power of two")
