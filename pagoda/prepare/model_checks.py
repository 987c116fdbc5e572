"""Checks that `wrap` can train a model."""

import re
import warnings
from collections.abc import Container, Iterable
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from pagoda.checkpoint.pretrained import listed
from pagoda.checkpoint.state import is_paged
from pagoda.checkpoint.waiting import WaitingTensor
from pagoda.errors import ConfigError, UsageError
from pagoda.mesh.dtensors import as_dtensor
from pagoda.parameters.quantized import is_quantized
from pagoda.parameters.unit import check_node_is_free


def check_model(model: object) -> None:
    """Raises the errors of `wrap` for a model that no settings can train."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"wrap() takes a torch.nn.Module; {model!r} is not one.")
    if any(is_paged(param) for param in model.parameters()):
        raise UsageError(
            "This model is wrapped already, or is a part of a wrapped model: build a new one and wrap all of it."
        )
    if not any(True for _ in model.parameters()):
        raise ConfigError("The model has no parameters to train.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            what = f"{name!r}" if name else "The model"
            raise ConfigError(
                f"{what} is a TorchScript module (torch.jit.script or trace). It reads parameters outside Python, so "
                "pages cannot take their place. Build the model without TorchScript; to compile, use torch.compile."
            )
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise ConfigError(f"{name!r} has no shape yet: run a forward of the model first, then wrap it.")
        if param.requires_grad and not param.is_floating_point():
            raise ConfigError(f"{name!r} is {param.dtype}: only real floating-point parameters can be trained.")
        if param.is_meta and not is_quantized(param):
            raise ConfigError(
                f"{name!r} is on the meta device, so it has no values. Build the model inside pagoda.init(), or load "
                "it with pagoda.load, and not on torch.device('meta'); or give it memory and values with "
                "model.to_empty(device='cpu') and load_state_dict."
            )
        if param.is_inference():
            raise ConfigError(f"{name!r} was made under torch.inference_mode(), so autograd cannot train it.")


def check_nodes_are_free(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError if autograd's node of a parameter that will get another dtype or device is in use."""
    for name, param in model.named_parameters():
        is_made_anew = isinstance(param, WaitingTensor) or as_dtensor(param) is not None
        if is_made_anew or param.dtype is not dtype or param.device.type != device.type:
            check_node_is_free(param, name)


def check_one_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Check that all weights have one dtype. Compute uses one dtype for all, so it would change a model that mixes
    dtypes.

    Quantized weights have a check of their own. Adapters in fp32 over frozen 16-bit weights are an exception, because
    trained parameters have an fp32 master anyway: that everything computes in `dtype` is then only a warning. Any other
    mixture raises ConfigError. If all have one dtype, a warning names those that transformers would keep in fp32,
    wherever the model comes from.
    """
    names: dict[tuple[bool, torch.dtype], str] = {}
    for name, param in model.named_parameters():
        if param.is_floating_point() and not is_quantized(param):
            names.setdefault((param.requires_grad, param.dtype), name)
    dtypes = {of for _, of in names}
    if len(dtypes) <= 1:
        if kept := _kept_in_fp32(model, dtype):
            warnings.warn(
                f"transformers keeps {listed(kept)} in fp32 in a model of this class, but wrap computes with all "
                f"weights in {dtype}, which precision sets. Use precision='fp32' if results get worse.",
                stacklevel=3,
            )
        return
    examples = " and ".join(f"{name!r} in {of}" for (_, of), name in names.items())
    if any(of.itemsize == 1 for of in dtypes):
        raise ConfigError(
            f"The model has {examples}. Layers that store plain weights in 8 bits, as diffusers' "
            "enable_layerwise_casting does, cast them in place, which is impossible in pages. Leave that out and "
            "quantize the frozen layers with torchao, which takes as many bytes: quantize_(model, "
            "Float8WeightOnlyConfig())."
        )
    if {of for trained, of in names if trained} == {torch.float32} and len(names) == 2:
        warnings.warn(
            f"The model has {examples}. wrap computes with all of them in {dtype}, which precision sets. Trained "
            "parameters keep a master in fp32.",
            stacklevel=3,
        )
        return
    raise ConfigError(
        f"The model mixes dtypes: it has {examples}. wrap computes with all weights in {dtype}, which precision sets, "
        "but a part in another dtype may need that dtype. To accept this, first give all parameters one dtype with "
        "model.float(). This loses nothing, because trained parameters have an fp32 master."
    )


def _kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Names of the parameters that `from_pretrained(dtype=dtype)` leaves in fp32."""
    found: list[str] = []
    roots: list[str] = []
    for prefix, module in model.named_modules():
        plan: Any = getattr(module, "_get_dtype_plan", None)
        if plan is None or any(prefix.startswith(root) for root in roots):  # an outer model's plan has the inner ones
            continue
        roots.append(f"{prefix}." if prefix else "")
        if patterns := [pattern.replace("*", ".*") for pattern in plan(dtype)]:
            kept = re.compile("|".join(patterns))
            found += [roots[-1] + name for name, _ in module.named_parameters() if kept.search(name)]
    return found


def check_quantized(model: nn.Module, dtype: torch.dtype, trained: Container[str]) -> None:
    """Raises ConfigError for a quantized parameter that cannot be in pages, or cannot compute with weights of
    `dtype`."""
    for name, param in model.named_parameters():
        if not is_quantized(param):
            continue
        if param.is_meta:
            raise ConfigError(f"{name!r} is quantized and has no values: quantize outside pagoda.init().")
        if name in trained:
            raise ConfigError(f"{name!r} is quantized, so it cannot be trained: leave it out of param_groups.")
        if type(param).__name__ == "Int8Params":
            raise ConfigError(
                f"{name!r} is in a Linear8bitLt of bitsandbytes, which holds its weights a second time, in its "
                "`state`. Use Linear4bit of bitsandbytes, or torchao's quantize_(model, Int8WeightOnlyConfig())."
            )
        if param.is_floating_point() and param.dtype is not dtype:
            raise ConfigError(
                f"{name!r} is a {type(param).__name__} that computes in {param.dtype}, but all other weights compute "
                f"in {dtype}: set precision to that of {name!r}, or quantize a model that you have cast to {dtype}."
            )


class Members:
    """The parameters in pages of a wrapped model, under their names at `wrap`."""

    def __init__(self, model: nn.Module, in_pages: Container[int]) -> None:
        """`in_pages`: the ids of those parameters."""
        self._model = model
        self._in_pages = in_pages
        self._names = self._named()
        self._remember()

    def check(self) -> None:
        """Raises UsageError if the model got parameters that train, or if parameters now have other names, because
        modules were moved, replaced or deleted: checkpoints have the names at `wrap`.

        If nothing changed, this takes about 0.2 microseconds for each module and parameter.
        """
        if all(
            modules == known and params.keys() == held.keys() and all(map(is_, params.values(), held.values()))
            for modules, known, params, held in self._tree
        ) and not any(param.requires_grad for param in self._not_in_pages):
            return
        unseen = [
            name
            for name, param in self._model.named_parameters()
            if param.requires_grad and id(param) not in self._in_pages
        ]
        if unseen:
            raise UsageError(
                f"{listed(unseen)} were added to the model after wrap(), so this optimizer does not train them, and "
                "they are not in its checkpoints. Change the model first (peft.get_peft_model, new layers or heads), "
                "then wrap it; or freeze them with requires_grad_(False)."
            )
        names = self._named()
        if changed := [name for name in self._names | names if self._names.get(name) != names.get(name)]:
            raise UsageError(
                f"{listed(changed)} is not the parameter that had this name at wrap(), because modules were moved, "
                "replaced or deleted since. Checkpoints and the optimizer use the names at wrap(). Change the model "
                "first, then wrap it; or put the modules back."
            )
        self._remember()

    def _named(self) -> dict[str, int]:
        return {
            name: id(p) for name, p in self._model.named_parameters(remove_duplicate=False) if id(p) in self._in_pages
        }

    def _remember(self) -> None:
        self._tree = [(m._modules, {**m._modules}, m._parameters, {**m._parameters}) for m in self._model.modules()]
        self._not_in_pages = [param for param in self._model.parameters() if id(param) not in self._in_pages]


def check_step(trains: Iterable[bool]) -> None:
    """Raises UsageError if a step would train nothing. `trains`: for each parameter in the optimizer's groups, whether
    it is not frozen or has a gradient."""
    if not any(trains):
        raise UsageError(
            "Every parameter of the optimizer is frozen (requires_grad=False) and none has a gradient, so this step "
            "trains nothing. If peft.get_peft_model or other code froze them after wrap(), call it before wrap(); "
            "otherwise, call requires_grad_(True) on the parameters to train."
        )


def check_batch_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Raises ConfigError for a batch norm that torch's CPU kernels, unlike CUDA's, refuse with weights of `dtype`.

    `model.bfloat16()` would also cast the running statistics. These would stop changing once an update is smaller than
    the rounding: with momentum 0.01, far from the correct values. So they keep their dtype, as all buffers do.
    """
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or module.weight is None or module.running_mean is None:
            continue
        if module.running_mean.dtype is torch.float32 and dtype is not torch.float32:
            raise ConfigError(
                f"{name!r} is a {type(module).__name__} with running statistics in fp32, which torch's CPU kernels do "
                f"not support with {dtype} weights. Wrap with precision='fp32', or use a norm without running "
                "statistics (GroupNorm, or track_running_stats=False)."
            )
