"""Update rules: the interface between the math of an optimizer and the code that moves its state.

A rule is a frozen dataclass of settings, with the names and defaults of torch's class where torch has one. It defines

- which states a parameter has beside its gradient (`states`), weights first,
- which of its settings a param group can change (`defaults`), and the rule with a group's settings (`with_group`),
- how its states appear in a torch ``state_dict`` (`torch_state`, `kept_states`),

and how an update is computed. An `ElementwiseRule` has a kernel that updates flat blocks of any size. A `TensorRule`
has a function that updates a parameter's whole tensors.

**Split master.** In precision "bf16" the fp32 master weight is stored as two halves. With ``bits`` its 32
bits as an unsigned integer, modulo 2**32::

    weight     = (bits + 0x8000) >> 16      bf16: the master rounded to nearest, ties away from zero
    weight_low = bits - (weight << 16)      int16
    bits       = (weight << 16) + weight_low

This is lossless for every bit pattern. (Ties to even is not: int16 holds -0x8000 but not 0x8000.) In precision "fp16"::

    weight     = fp16(master)                            to nearest, ties to even; 65,520 and more become infinity
    unit       = 2 ** (max(E, 1) - 40)                   E: the biased exponent of weight
    weight_low = int16(rint((master - weight) / unit))   at most 2 ** 14 in magnitude
    master     = weight + weight_low * unit

fp16 has fewer exponents than fp32, so the bits of the master cannot be cut in two. Instead, weight_low is the
difference between master and weight, in units of 2 ** -15 of the weight's last place. This is exact for magnitudes of
at least 2 ** -16 (1.5e-5). Smaller masters are rounded to a multiple of 2 ** -39 (1.8e-12). Splitting a joined master
again changes nothing.

**Predicted weights.** Where weights are late, an element-wise rule can write weights that are `ahead` steps further on,
if each step changes the master as the last one did. The master is then a state of its own, in fp32::

    weight = rounded(master - (before - master) * ahead)      before: the master before the update

rounded as a split master is, in fp32 not at all.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch

from pagoda.config.settings import is_finite, require, require_bool
from pagoda.config.training import Precision, require_choice
from pagoda.errors import ConfigError

DTYPES: Mapping[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRECISIONS: Mapping[torch.dtype, Precision] = {dtype: precision for precision, dtype in DTYPES.items()}


Shape = tuple[int, ...]


@dataclass(frozen=True)
class StateSpec:
    """One state of a parameter. Pages store it flat.

    It has one element of ``dtype`` for every ``per`` elements of the parameter; the last one covers the rest if ``per``
    does not divide their number. With ``shape_of``, a function of the parameter's name and shape returns the state's
    own shape, or None if the parameter does not have the state.

    ``whole`` is a function of a parameter's name and shape. It returns whether the update needs the whole state. None:
    no update does, so any block of elements can be updated by itself. ``copied``: whether an update of the whole state
    computes on fp32 copies (`TensorRule.copies`).
    """

    name: str
    dtype: torch.dtype
    per: int = 1
    shape_of: Callable[[str, Shape], Shape | None] | None = None
    whole: Callable[[str, Shape], bool] | None = None
    copied: bool = False

    def elements(self, numel: int) -> int:
        """Number of elements of the state for ``numel`` elements of the parameter. Also converts an index in the
        parameter to an index in the state, if ``per`` divides it."""
        return -(-numel // self.per)

    def shape(self, parameter: str, shape: Shape) -> Shape | None:
        """Shape of the state of a parameter of this name and shape. None if it does not have the state."""
        if self.shape_of is not None:
            return self.shape_of(parameter, shape)
        return shape if self.per == 1 else (self.elements(math.prod(shape)),)

    def nbytes(self, numel: int) -> int:
        """Bytes of the state for ``numel`` elements of the parameter."""
        return self.elements(numel) * self.dtype.itemsize


class UpdateWork(NamedTuple):
    """What it takes to update a parameter."""

    elements: float
    """Elements that AdamW with fp32 moments updates in the time of the element-wise part."""
    flops: float = 0.0
    """Floating-point operations of products of 16-bit matrices."""


_WEIGHTS: Mapping[Precision, tuple[StateSpec, ...]] = {
    "bf16": (StateSpec("weight", torch.bfloat16), StateSpec("weight_low", torch.int16)),
    "fp16": (StateSpec("weight", torch.float16), StateSpec("weight_low", torch.int16)),
    "fp32": (StateSpec("weight", torch.float32),),
}
"""The states that store a parameter's fp32 master."""
LOW = "weight_low"
"""What else stores the master of a weight in 16 bits."""
MASTER = "master"
"""The state that stores it where weights are predicted."""


def states_in(states: tuple[StateSpec, ...], dtype: torch.dtype | None) -> tuple[StateSpec, ...]:
    """The states of a parameter with weights in another dtype than the first of `states`, which are in 16 bits. None:
    they are in the same dtype."""
    weight, *others = states
    if dtype is None or dtype is weight.dtype:
        return states
    kept = (state for state in others if state.name != LOW or dtype is not torch.float32)
    return (replace(weight, dtype=dtype), *kept)


@dataclass(frozen=True)
class Rule(ABC):
    """An update rule with its settings.

    Raises ConfigError, naming the setting, for a value outside its range.
    """

    name: ClassVar[str]
    """Its name in messages."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Settings that must be equal in all param groups."""
    only: ClassVar[Mapping[str, Any]] = {}
    """Settings of torch's class that have just this value here."""
    counts_steps: ClassVar[bool] = True
    """Whether torch's class keeps a count of a parameter's updates."""

    def predicting(self, ahead: float | None) -> Self:
        """The rule that predicts weights, `ahead` steps further on. None: the rule itself.

        Raises ConfigError if it cannot, or if its steps say nothing of those that follow.
        """
        if ahead is not None:
            raise ConfigError(f"predict=True is for element-wise optimizers, not {self.name}: leave it out.")
        return self

    def on_time(self) -> Self:
        """The rule with the same states for an update whose weights are not late, so that none is predicted."""
        return self

    @property
    def element_work(self) -> float:
        """Time of the update of an element, divided by AdamW's with fp32 moments. Forecasts use it. It is measured on a
        CPU core with all states in RAM, on the split master (`benchmarks/update_work.py`)."""
        return 1.0

    def work(self, parameter: str, shape: Shape) -> UpdateWork:
        """What it takes to update a parameter of this name and shape."""
        return UpdateWork(self.element_work * math.prod(shape))

    def states(self, precision: Precision) -> tuple[StateSpec, ...]:
        """States of a parameter: the weights', then the rule's own. The gradient is not one."""
        require_choice("precision", precision, Precision)
        return _WEIGHTS[precision] + self.own_states()

    def new_states(self, precision: Precision, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        """The states of some parameter of this shape, by name."""
        return {
            state.name: torch.zeros(own, dtype=state.dtype, device=device)
            for state in self.states(precision)
            if (own := state.shape("", shape)) is not None
        }

    def _require(self, setting: str, holds: bool, wanted: str) -> None:
        """Raises ConfigError, naming the setting, unless ``holds``."""
        require(holds, f"{self.name} {setting}", getattr(self, setting), wanted)

    def _require_not_negative(self, *settings: str) -> None:
        for setting in settings:
            value = getattr(self, setting)
            self._require(setting, is_number(value) and value >= 0, "a finite number >= 0")

    def _require_bools(self, *settings: str) -> None:
        for setting in settings:
            require_bool(f"{self.name} {setting}", getattr(self, setting))

    def _require_betas(self, betas: tuple[float, float]) -> None:
        self._require("betas", are_values(betas, 2), "two numbers")
        for index, beta in enumerate(betas):
            require(is_number(beta) and 0 <= beta < 1, f"{self.name} betas[{index}]", beta, "in [0, 1)")

    @abstractmethod
    def own_states(self) -> tuple[StateSpec, ...]:
        """States in addition to the weights. They are zero for a new parameter."""

    @classmethod
    def setting_names(cls) -> list[str]:
        """The settings that users give, in their order."""
        return [setting.name for setting in fields(cls) if "internal" not in setting.metadata]

    def defaults(self) -> dict[str, Any]:
        """Per-group settings for ``torch.optim.Optimizer``; users and schedulers change them in ``param_groups``."""
        return {name: getattr(self, name) for name in self.setting_names() if name not in self.fixed}

    def with_group(self, group: Mapping[str, Any]) -> Self:
        """The rule with the present settings of a torch ``param_groups`` entry.

        Numbers may be one-element tensors. Raises ConfigError for values with which no step can be taken, for values
        that would change which states parameters have, and for settings of torch's classes that this rule lacks.
        """
        for key, value in self.only.items():
            which = f"{value} (pagoda.Optim runs torch's own class)"
            require(group.get(key, value) == value, f"{self.name} {key}", group.get(key), which)
        rule = replace(self, **{key: plain_setting(group[key], old) for key, old in self.defaults().items()})
        kept, wanted = ([state.name for state in each.own_states()] for each in (self, rule))
        if kept != wanted:
            mine = self.defaults()
            changed = {key: value for key, value in rule.defaults().items() if value != mine[key]}
            raise ConfigError(
                f"{self.name} keeps {kept or 'no states'}, and a param group with {changed} needs {wanted or 'none'}: "
                "these settings determine which states exist, so give them to the rule, for all groups"
            )
        return rule

    def after_step(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What a step changes in a param group. Nothing, except for classes of `Optim` that count their steps there.

        Raises UsageError if no step can be taken with the group.
        """
        return {}

    def torch_state(self, step: int, kept: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """A parameter's entry in a torch ``state_dict``.

        step: number of updates that the parameter has had. kept: its `own_states`, each in the shape of its spec.
        """
        return {"step": torch.tensor(float(step)), **kept} if self.counts_steps else dict(kept)

    def states_of(self, key: str) -> tuple[StateSpec, ...]:
        """The `own_states` that store what a torch ``state_dict`` has under a key."""
        return tuple(spec for spec in self.own_states() if spec.name == key)

    def steps_in(self, state: Mapping[str, Any]) -> int:
        """Number of updates that the parameter of such an entry has had. 0 for an empty entry.

        If the rule does not count updates, this is 1 after one or more: only the first update differs from the others.
        """
        if self.counts_steps:
            return int(state.get("step", 0))
        return int(any(state.get(spec.name) is not None for spec in self.own_states()))

    def kept_states(self, state: Mapping[str, Any], parameter: str, shape: Shape) -> dict[str, torch.Tensor]:
        """A parameter's states from an entry of a ``state_dict``, in the dtypes and shapes of its specs.

        States that the entry lacks are zero. So an empty entry gives the states of a new parameter.
        """
        kept: dict[str, torch.Tensor] = {}
        for spec in self.own_states():
            own, value = spec.shape(parameter, shape), state.get(spec.name)
            if own is None:
                continue
            if value is None:
                kept[spec.name] = torch.zeros(own, dtype=spec.dtype)
            else:
                kept[spec.name] = value.detach().to("cpu", spec.dtype).reshape(own)
        return kept


class Key(NamedTuple):
    """The seed of the noise of one parameter at one step: two unsigned 32-bit integers."""

    low: int
    high: int

    @classmethod
    def of(cls, seed: int, name: str, step: int) -> "Key":
        """The first 8 bytes, little-endian, of BLAKE2b (digest of 8) over "seed/step/name" in UTF-8.

        ``name`` is the first one that the parameter has in the model; ``step`` counts its updates from 1.
        """
        digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))


@dataclass(frozen=True)
class ElementwiseRule(Rule):
    """A rule whose new states are a function, element by element, of the old ones, the gradient and a few scalars.

    Its kernel computes in fp32 on blocks of any size. Each operation is rounded once, in an order that the rule
    defines. So blocks, threads, tiers and ranks do not change a bit. `kernels.update_kernel` finds the kernel by
    `kernel_name`.
    """

    ahead: float | None = field(default=None, kw_only=True, metadata={"internal": True})
    """Number of steps by which weights are predicted, as `Updates(predict=True)` sets it. None: weights are the master,
    rounded."""

    def states(self, precision: Precision) -> tuple[StateSpec, ...]:
        """Like `Rule.states`, with the whole master if weights are predicted."""
        weight, *others = super().states(precision)
        if self.ahead is None:
            return (weight, *others)
        return (weight, StateSpec(MASTER, torch.float32), *self.own_states())

    @property
    @abstractmethod
    def kernel_name(self) -> str:
        """Name of the kernel that updates its states, in any precision."""

    @abstractmethod
    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """The kernel's arguments in addition to blocks, each exactly an fp32 value: computed in float64 and rounded
        once.

        step: number of this update of the parameter, from 1. grad_scale: the factor of the gradient.
        """

    def noise(self, parameter: str, step: int) -> Key | None:
        """The key of the rounding noise for a parameter's update number ``step``. None if nothing is rounded
        stochastically."""
        return None

    def predicting(self, ahead: float | None) -> Self:
        if ahead is not None and not self.own_states():
            raise ConfigError(
                f"predict=True extrapolates the last step of each weight, but without momentum, a step of {self.name} "
                "is that of one batch: use an optimizer with momentum, or leave predict out."
            )
        return replace(self, ahead=ahead)

    def on_time(self) -> Self:
        return self if self.ahead is None else replace(self, ahead=0.0)

    @property
    def arguments(self) -> tuple[float, ...]:
        """What the kernel takes before `scalars`: `ahead`, if weights are predicted."""
        return () if self.ahead is None else (fp32(self.ahead),)


@dataclass(frozen=True)
class TensorRule(Rule):
    """A rule that takes whole parameters, as tensors in their shapes, in RAM or on a GPU.

    With `copies`, it computes on fp32 copies of gradient and master, one parameter after another. A GPU may then give
    other bits than the CPU. Without `copies`, it takes them as they are stored, and gives the same bits everywhere.
    """

    copies: ClassVar[bool] = True

    def states(self, precision: Precision) -> tuple[StateSpec, ...]:
        """Like `Rule.states`. Each spec tells which parameters are taken whole."""
        states = super().states(precision)
        return tuple(replace(state, whole=self.takes_whole, copied=self.copies) for state in states)

    def takes_whole(self, parameter: str, shape: Shape) -> bool:
        """Whether a parameter must not be cut. Then `update` gets all of it, in its shape. Otherwise it gets flat
        pieces."""
        return True

    @abstractmethod
    def update(
        self, step: int, weight: torch.Tensor, gradient: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> None:
        """Do one step of a parameter in place.

        step: number of this update of the parameter, from 1. weight: its fp32 master. gradient: in fp32; may be
        overwritten. Both have the parameter's shape. states: those of `own_states` that it has, each in the shape of
        its spec. All are zero before the first update.
        """


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyperparameters of one parameter at one step, as the user set them (float64).

    rule: with the settings of the parameter's group. step: number of this update of the parameter, from 1. grad_scale:
    the factor of the gradient: the clip coefficient, or 1.

    Raises ConfigError for values with which no step can be taken.
    """

    rule: Rule
    step: int
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        require(self.step >= 1, "step", self.step, ">= 1: count the update before taking it")
        require(is_number(self.grad_scale), "grad_scale", self.grad_scale, "a finite number")


def plain_setting(value: Any, like: Any) -> Any:
    """A group's setting in the rule's types: one-element tensors become numbers, lists become tuples, and numbers
    become floats if ``like``, the rule's own value, is a float."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return tuple(plain_setting(each, like[0] if isinstance(like, tuple) and like else None) for each in value)
    if isinstance(like, float) and not isinstance(value, str):
        with suppress(TypeError, ValueError, RuntimeError):  # else the rule refuses the value, by the setting's name
            return float(value)
    return value


def are_values(value: object, count: int) -> bool:
    """Whether a setting has `count` values."""
    return isinstance(value, tuple | list) and len(value) == count


def is_number(value: object) -> bool:
    """Whether a setting is a finite number, possibly in a one-element tensor."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and bool(torch.isfinite(value))
    return is_finite(value)


def fp32(value: float) -> float:
    """The fp32 value nearest to ``value``."""
    return float(np.float32(value))
