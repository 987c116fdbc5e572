"""Markers: what `param.grad` and `optimizer.state` show for values that lie in pages.

A marker is a hidden tensor (`parameters/hidden.py`). That of a gradient stays until `zero_grad`, as the gradient does
in plain PyTorch. After `step()` it has no values.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagoda.autograd.gradient_values import GradientValues, is_power_of_two
from pagoda.autograd.uses import EXPORTS, hidden_again, one_by_one, replaced
from pagoda.errors import UsageError
from pagoda.mesh.dtensors import DTensorForm
from pagoda.parameters.hidden import (
    MARKED,
    MOVED,
    READS_FIRST,
    Hidden,
    hidden_in,
    hide,
    hide_part,
    name_of,
    root_of,
    undetached,
    viewed,
    without_graph,
)
from pagoda.parameters.unit import LiveUnit

if TYPE_CHECKING:
    from pagoda.autograd.stepper import Stepper

_NORMS: dict[str, tuple[Any, ...]] = {"linalg_vector_norm": (2,), "_foreach_norm": (2,)}
"""Functions by which torch clips -> the orders for which they return the 2-norm of all elements, the default first."""
_QUOTIENTS = frozenset({"div_", "_foreach_div_"})
_PRODUCTS = frozenset({"mul_", "_foreach_mul_"}) | _QUOTIENTS


class Marked(ABC):
    """What a marker stands for."""

    @abstractmethod
    def open(self, marker: object, asked_by: str) -> tuple[Any, ...]:
        """What reads and writes the values, like `GradientValues`, and the arguments that tell it which. Raises
        UsageError if the marker no longer stands for anything."""

    @property
    @abstractmethod
    def is_alone(self) -> bool:
        """Whether the values can be read without other ranks."""

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function that uses values of markers, which may be of several models.

        Parameters among the arguments are still hidden. They get their values when `func` is called with those of the
        markers.
        """
        if name == "__set__":  # of `data`
            if args[1].shape != args[0].shape:
                raise UsageError(f"{name_of(args[0])!r} has shape {tuple(args[0].shape)}: its data keeps that shape.")
            name, func, args = "copy_", torch.Tensor.copy_, (args[0], args[1].detach())
        if "_foreach_" in name and len(args[0]) > 1:
            return one_by_one(func, args, kwargs)
        return _call_on_copies(func, name, args, kwargs)


class MarkedGradient(Marked):
    """The gradient behind a marker. It keeps nothing alive, because Python's garbage collector does not see
    `param.grad`."""

    def __init__(self, unit: LiveUnit, slot: int, stepper: "Stepper") -> None:
        self._unit, self._slot, self._stepper = weakref.ref(unit), slot, weakref.ref(stepper)

    def open(self, marker: object, asked_by: str, to_write: bool = False) -> tuple[GradientValues, LiveUnit, int]:
        """The values, unit and slot of the gradient. Raises UsageError unless it is still the gradient of this step or,
        with `to_write`, what `param.grad` shows."""
        unit, stepper = self._unit(), self._stepper()
        if unit is not None and stepper is not None and unit.markers[self._slot] is marker:
            exists = self._slot in unit.marked or (to_write and unit.params[self._slot].grad is marker)
            if exists:
                return stepper.values, unit, self._slot
        raise UsageError(
            f"{asked_by}() was called on a gradient that is gone: optimizer.step() has used it, or it was set to None. "
            "Read, change and clip gradients between backward and optimizer.step() (peft's AdaLoRA: call "
            "update_and_allocate() there), read param.grad anew each time, and clone() what you keep."
        )

    @property
    def is_alone(self) -> bool:
        stepper = self._stepper()
        return stepper is not None and stepper.rank_group.mesh.size == 1

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Like `Marked.call`. A norm, and a product with a number, need no values."""
        if name in _NORMS and _is_whole_norm(name, args, kwargs):
            return _norms(args[0], name)
        if name in _PRODUCTS and len(args) == 2 and not kwargs and _is_known(args[0]) and _is_number(args[1], name):
            return _multiply(args[0], args[1], name)
        if name == "zero_" and _is_whole(args[0]):
            return _zero(args[0])
        return super().call(func, name, args, kwargs)


def marker(made: torch.Tensor, form: Any, name: str, marked: Marked) -> Any:
    """Make `made` a marker. `form`: that of its parameter, if it has the parameter's shape."""
    if isinstance(form, DTensorForm):
        hide_part(form.held(made), made, name)
    hide(made, name)
    setattr(made, MARKED, marked)
    return made


def _call_on_copies(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with copies of what markers stand for. What it has changed is written back."""
    used = args[:1] if name in READS_FIRST else (args, kwargs)
    leaves = [leaf for leaf in hidden_in(used) if _marked(leaf) is not None]
    for leaf in leaves if torch.is_grad_enabled() else ():
        if leaf.requires_grad:
            raise UsageError(without_graph(name_of(leaf)))
    opened = {root: _marked(root).open(root, name) for root in map(root_of, leaves)}
    readings = {root: values.read(*which, f"{name}()") for root, (values, *which) in opened.items()}
    given = {id(leaf): viewed(leaf, readings[root_of(leaf)].values) for leaf in leaves}
    versions = {key: value._version for key, value in given.items()}
    result = func(*replaced(args, given), **replaced(kwargs, given))
    written = {root_of(leaf) for leaf in leaves if given[id(leaf)]._version != versions[id(leaf)]}
    for root, (values, *which) in opened.items():
        if root in written or name.startswith("_amp_foreach_"):  # which changes no version
            values.write(*which, readings[root].values, f"{name}()", readings[root])
    if name in EXPORTS:
        result.setflags(write=False)
    return result if name in EXPORTS or name in MOVED else hidden_again(result, name, func, args, kwargs, given)


def _marked(tensor: Any) -> Any:
    """What a hidden tensor stands for, or that of which it is a view. None for a parameter's values."""
    return vars(root_of(tensor)).get(MARKED)


def _is_whole(tensor: Any) -> bool:
    """Whether a tensor is the marker of a gradient, and not a view of a part of one."""
    return isinstance(tensor, Hidden) and isinstance(vars(undetached(tensor)).get(MARKED), MarkedGradient)


def _is_known(of: Any) -> bool:
    """Whether a tensor, or each in a list, is the marker of a gradient or has values."""
    each = of if isinstance(of, list | tuple) else [of]
    return all(_is_whole(tensor) or not isinstance(tensor, Hidden) for tensor in each)


def _is_whole_norm(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    order = args[1] if len(args) > 1 else kwargs.get("ord", _NORMS[name][0])
    rest = [value for key, value in kwargs.items() if key != "ord" and value is not None and value is not False]
    return len(args) <= 2 and order in _NORMS[name] and not rest and _is_known(args[0])


def _norms(of: Any, asked_by: str) -> Any:
    """The norm of a marker, or of each tensor in a list, in float64, because it is known with that precision."""
    if not isinstance(of, torch.Tensor):
        return [_norms(each, asked_by) if _is_whole(each) else each.norm() for each in of]
    values, unit, slot = _marked(of).open(root_of(of), asked_by)
    return torch.tensor(values.norm(unit, slot), dtype=torch.float64, device=unit.blanks[slot].device)


def _is_number(by: Any, asked_by: str) -> bool:
    """Whether a function multiplies by one number. Updates do not divide: x / 3 has other bits than x * (1 / 3)."""
    if not isinstance(by, int | float) and not (type(by) is torch.Tensor and by.dim() == 0 and not by.is_complex()):
        return False
    return asked_by not in _QUOTIENTS or is_power_of_two(float(by))


def _multiply(what: Any, by: Any, asked_by: str) -> Any:
    factor = 1 / float(by) if asked_by in _QUOTIENTS else float(by)
    for each in [what] if isinstance(what, torch.Tensor) else what:
        if not _is_whole(each):
            each.mul_(factor)
            continue
        values, unit, slot = _marked(each).open(root_of(each), asked_by)
        if not values.scale(unit, slot, factor):
            _call_on_copies(torch.Tensor.mul_, asked_by, (each, factor), {})
    return what


def _zero(whole: Any) -> Any:
    """Let a gradient be zero, also one that a step has used: then the next step applies a gradient of zeros."""
    values, unit, slot = _marked(whole).open(root_of(whole), "zero_", to_write=True)
    zeros = torch.zeros(unit.spec.slots[slot].param.shape, dtype=unit.blanks[slot].dtype)
    values.write(unit, slot, unit.as_param(slot, unit.shown(slot, zeros)), "zero_()")
    unit.mark(slot)
    return whole
