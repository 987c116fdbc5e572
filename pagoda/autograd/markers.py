"""Markers: what `param.grad` shows for a gradient that lies in pages, and the few operations that it supports."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagoda.autograd.stepper import Stepper
from pagoda.errors import UsageError
from pagoda.parameters.unit import LiveUnit


@dataclass(eq=False)
class _Gradient:
    """The gradient behind a marker. It keeps nothing alive, because Python's garbage collector does not see
    `param.grad`."""

    _unit: "weakref.ref[LiveUnit]"
    _slot: int
    _stepper: "weakref.ref[Stepper]"

    def here(self, asked_by: str) -> tuple[Stepper, LiveUnit, int]:
        """Stepper, unit and slot of the gradient. Raises UsageError unless it is still the gradient of this step."""
        unit, stepper = self._unit(), self._stepper()
        if unit is not None and stepper is not None and unit.params[self._slot].grad is not None:
            current = unit.markers[self._slot]
            if self._slot in unit.marked and isinstance(current, GradientMarker) and current.gradient is self:
                return stepper, unit, self._slot
        raise UsageError(
            f"{asked_by}() was called on a gradient that is gone: optimizer.step() has used it, or it was set to None. "
            "Take norms and clip between backward and optimizer.step(), and read param.grad anew each time."
        )


class GradientMarker(torch.Tensor):
    """Stands in `param.grad` for a gradient that lies in pages.

    It exists as long as the gradient, and `zero_grad` removes it. Its shape, dtype and device are true. It supports two
    operations: its 2-norm, which is exact, and multiplication by a number in place, which the update applies.
    `torch.nn.utils.clip_grad_norm_` needs nothing else. Methods that move or cast a tensor return the marker itself.
    Every other use of the values raises UsageError.
    """

    gradient: _Gradient | None = None
    """None for a view, which has only a shape."""

    @classmethod
    def of(cls, blank: torch.Tensor, unit: LiveUnit, slot: int, stepper: Stepper) -> "GradientMarker":
        """A marker with the shape of `blank`, for the gradient of a unit's parameter that arrives now."""
        marker = blank.as_subclass(cls)
        marker.gradient = _Gradient(weakref.ref(unit), slot, weakref.ref(stepper))
        return marker

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in _SELF and isinstance(args[0], GradientMarker):
            return args[0]
        if name in _NORMS and _is_whole_norm(name, args, kwargs):
            return _norms(args[0], name)
        if name in _PRODUCTS and len(args) == 2 and not kwargs:
            return _multiply(args[0], args[1], name)
        if name == "__set__" and isinstance(args[1], GradientMarker):  # module.cpu() sets grad.data to what cpu() gave
            return None
        if name in _HARMLESS or (name == "__set__" and not isinstance(args[1], torch.Tensor)):
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            # `.data` and views would be plain tensors, whose NaN could be read without an error.
            if type(result) is torch.Tensor:
                result = result.as_subclass(cls)
                if func == _DATA:
                    result.gradient = args[0].gradient
            return result
        raise _refusal(name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient in Pagoda's pages, shape {tuple(self.shape)}>"

    def __format__(self, spec: str) -> str:
        return repr(self)


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SELF = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "detach", "detach_", "contiguous"})
_HARMLESS = frozenset(
    {"__get__", "__len__", "__hash__", "__repr__", "__dir__", "size", "stride", "dim", "ndimension", "numel"}
    | {"nelement", "element_size", "is_floating_point", "is_complex", "is_contiguous", "get_device", "data_ptr"}
    | {"untyped_storage", "requires_grad_", "_has_compatible_shallow_copy_type"}
)
_NORMS: dict[str, tuple[Any, ...]] = {
    "linalg_vector_norm": (2,),
    "norm": ("fro", 2),
    "linalg_norm": (None,),
    "_foreach_norm": (2,),
}
"""Function -> the orders that it may be given to return the 2-norm of all elements, the default first."""
_QUOTIENTS = frozenset({"div_", "_foreach_div_"})
_PRODUCTS = frozenset({"mul_", "_foreach_mul_"}) | _QUOTIENTS


def _is_whole_norm(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    orders = _NORMS[name]
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", orders[0]))
    rest = {key: value for key, value in kwargs.items() if key not in ("ord", "p")}
    return 1 <= len(args) <= 2 and order in orders and all(value is None or value is False for value in rest.values())


def _norms(of: Any, asked_by: str) -> Any:
    """The norm of a marker, or of each tensor in a list, in float64, because it is known with that precision."""
    if not isinstance(of, GradientMarker):
        return [_norms(each, asked_by) if isinstance(each, GradientMarker) else each.norm() for each in of]
    if of.gradient is None:
        raise _refusal(asked_by)
    stepper, unit, slot = of.gradient.here(asked_by)
    return torch.tensor(stepper.gradient_norm(unit, slot), dtype=torch.float64, device=of.device)


def _multiply(what: Any, by: Any, asked_by: str) -> Any:
    is_number = isinstance(by, int | float) or (type(by) is torch.Tensor and by.numel() == 1)
    if not is_number:
        raise _refusal(asked_by)
    factor = float(by)
    if asked_by in _QUOTIENTS:
        factor = 1 / factor if factor else math.inf
    for each in [what] if isinstance(what, torch.Tensor) else what:
        if not isinstance(each, GradientMarker):
            each.mul_(factor)
        elif each.gradient is None:
            raise _refusal(asked_by)
        else:
            stepper, unit, slot = each.gradient.here(asked_by)
            stepper.scale_gradient(unit, slot, factor)
    return what


def _refusal(name: str) -> UsageError:
    advice = next((text for parts, text in _ADVICE if any(part in name for part in parts)), _OTHERWISE)
    return UsageError(
        f"{name}() was called on param.grad, but the values of this gradient lie in Pagoda's pages. {advice}"
    )


_ADVICE = (
    (("norm",), "Only the 2-norm of all of its elements is known: call clip_grad_norm_ with norm_type=2."),
    (("clamp",), "It cannot be clipped by value: use torch.nn.utils.clip_grad_norm_ or wrap(clip_grad_norm=...)."),
    (("zero_",), "Call zero_grad() with set_to_none=True, its default."),
    (
        ("unscale",),
        "Do without torch's GradScaler, or pass it enabled=False: with wrap(precision='fp16'), call "
        "optimizer.scale(loss).backward().",
    ),
    (("copy__", "__reduce"), "It cannot be copied or saved: call optimizer.step() or zero_grad() first."),
)
"""Parts of function names, and what to do instead."""
_OTHERWISE = (
    "torch.nn.utils.clip_grad_norm_ works: its 2-norm can be asked for, and it can be multiplied by a number in place. "
    "To read or change a gradient in another way, use param.register_hook(...) before backward. Only the optimizer "
    "that wrap() returned can step it."
)
