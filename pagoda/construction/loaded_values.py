"""Keeps values that are loaded into parameters on the meta device, by making these parameters real."""

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pagoda.checkpoint.pretrained import forget_values
from pagoda.errors import UsageError
from pagoda.runtime.unit import successor

_INITIALISERS = frozenset({"reset_parameters", "_reset_parameters", "_init_weights"})
"""Functions that `wrap` runs again, so their writes may be lost now."""

_VERSION = "_pagoda_version"


class KeepCopiedValues(TorchFunctionMode):
    """Context in which a `copy_` of real values into a parameter on meta first makes the parameter real."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("copy_", "__setitem__") and args[0].is_meta:
            value = args[-1] if len(args) > 1 else (kwargs or {}).get("other")
            if isinstance(value, torch.Tensor) and not value.is_meta and not _initialising():
                target = args[0]
                if not isinstance(target, nn.Parameter) or func.__name__ != "copy_":
                    raise UsageError(
                        f"Values were written to a part or a view, of shape {tuple(target.shape)}, of a parameter that "
                        "waits on the meta device inside pagoda.init(), where they would be lost. Copy to the whole "
                        "parameter with load_state_dict, or with param.copy_(values) under torch.no_grad(); write the "
                        "values in _init_weights(module) or reset_parameters(); or build the model outside "
                        "pagoda.init()."
                    )
                _make_real(target)
        return func(*args, **(kwargs or {}))


def keep_loaded_values(module: nn.Module) -> None:
    """Make `load_state_dict` turn a module's meta parameters into real ones if it has values for them."""
    hooks = module._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", None) is _before_loading for hook in hooks):
        module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]


def remember_versions(params: Iterable[nn.Parameter]) -> None:
    """Record the versions of meta parameters, so that `is_overwritten` detects later writes."""
    for param in params:
        if param.is_meta:
            setattr(param, _VERSION, param._version)


def is_overwritten(param: nn.Parameter) -> bool:
    """Whether values were written to a parameter on meta after the `init` block, and so were lost."""
    return param.is_meta and getattr(param, _VERSION, param._version) != param._version


def _before_loading(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
    for name, param in module._parameters.items():
        value = state_dict.get(prefix + name)
        if param is None or not param.is_meta or not isinstance(value, torch.Tensor) or value.is_meta:
            continue
        if value.shape == param.shape and not metadata.get("assign_to_params_buffers"):
            _make_real(param)


def _make_real(param: nn.Parameter) -> None:
    """Give a parameter on meta memory, in place, because other modules may share it."""
    real = successor(param, torch.empty_like(param, device="cpu"), f"A parameter of shape {tuple(param.shape)}")
    forget_values(real)
    torch.utils.swap_tensors(param, real)  # type: ignore[no-untyped-call]


def _initialising() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _INITIALISERS:
            return True
        frame = frame.f_back
    return False
