"""Checks that `wrap` can train a model."""

import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from operator import is_

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from pagoda.checkpoint.pretrained import listed
from pagoda.checkpoint.state import is_paged
from pagoda.checkpoint.waiting import WaitingTensor
from pagoda.config.training import Precision
from pagoda.errors import ConfigError, UsageError
from pagoda.mesh.dtensors import as_dtensor
from pagoda.models.build import kept_in_fp32
from pagoda.optim.rule import PRECISIONS
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
                f"{name!r} is on the meta device, so it has no values. Build the model inside pagoda.deferred_init(), "
                "or load "
                "it with pagoda.load, and not on torch.device('meta'); or give it memory and values with "
                "model.to_empty(device='cpu') and load_state_dict."
            )
        if param.is_inference():
            raise ConfigError(f"{name!r} was made under torch.inference_mode(), so autograd cannot train it.")


DtypeOf = Callable[[torch.Tensor], torch.dtype]
"""The dtype in which a parameter computes, or for packed weights, that of the elements that hold their bytes."""


def check_nodes_are_free(model: nn.Module, dtype_of: DtypeOf, device: torch.device) -> None:
    """Raises ConfigError if autograd's node of a parameter that will get another dtype or device is in use."""
    for name, param in model.named_parameters():
        is_made_anew = isinstance(param, WaitingTensor) or as_dtensor(param) is not None
        if is_made_anew or param.dtype is not dtype_of(param) or param.device.type != device.type:
            check_node_is_free(param, name)


def check_converted(model: nn.Module, dtype: torch.dtype) -> None:
    """Warn of weights in another dtype than most, and of those that transformers would keep in fp32 wherever the model
    comes from, because `precision` converts all of them to `dtype`. Quantized weights have a check of their own."""
    names = _dtypes(model)
    if len(names) > 1:
        warnings.warn(
            f"The model has {_examples(names)}. wrap converts all of them to {dtype}, because precision is given. "
            "Without precision, each parameter keeps its dtype.",
            stacklevel=3,
        )
    elif kept := [name for name in kept_in_fp32(model, dtype) if name in dict(model.named_parameters())]:
        warnings.warn(
            f"transformers keeps {listed(kept)} in fp32 in a model of this class, but wrap computes with all "
            f"weights in {dtype}, which precision sets. Use precision='fp32' if results get worse.",
            stacklevel=3,
        )


def own_precision(model: nn.Module) -> Precision:
    """The precision of a model's floating-point parameters. If it mixes dtypes, that of most elements in 16 bits.

    Raises ConfigError for a dtype in which Pagoda does not compute.
    """
    names = _dtypes(model)
    if unknown := {of: name for of, name in names.items() if of not in PRECISIONS}:
        raise ConfigError(
            f"The model has {_examples(unknown)}, in which Pagoda does not compute: give wrap(precision=...), which "
            "converts every parameter, or convert the model first, for example with model.float()."
        )
    counts: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        counts[param.dtype] += param.numel()
    most = sorted(counts.keys() & PRECISIONS.keys(), key=lambda of: (of.itemsize, -counts[of]))
    return PRECISIONS[most[0]] if most else "bf16"


def _dtypes(model: nn.Module) -> dict[torch.dtype, str]:
    """The dtypes of floating-point parameters, without quantized ones, each with the name of the first one.

    Raises ConfigError for weights that are stored in 8 bits.
    """
    names: dict[torch.dtype, str] = {}
    for name, param in model.named_parameters():
        if param.is_floating_point() and not is_quantized(param):
            names.setdefault(param.dtype, name)
    if any(of.itemsize == 1 for of in names):
        raise ConfigError(
            f"The model has {_examples(names)}. Layers that store plain weights in 8 bits, as diffusers' "
            "enable_layerwise_casting does, cast them in place, which is impossible in pages. Leave that out and "
            "quantize the frozen layers with torchao, which takes as many bytes: quantize_(model, "
            "Float8WeightOnlyConfig())."
        )
    return names


def _examples(names: Mapping[torch.dtype, str]) -> str:
    return " and ".join(f"{name!r} in {of}" for of, name in names.items())


def check_quantized(model: nn.Module, dtype_of: DtypeOf, trained: Container[str]) -> None:
    """Raises ConfigError for a quantized parameter that cannot be in pages, or cannot compute in its dtype."""
    for name, param in model.named_parameters():
        if not is_quantized(param):
            continue
        if param.is_meta:
            raise ConfigError(f"{name!r} is quantized and has no values: quantize outside pagoda.deferred_init().")
        if name in trained:
            raise ConfigError(f"{name!r} is quantized, so it cannot be trained: leave it out of param_groups.")
        if type(param).__name__ == "Int8Params":
            raise ConfigError(
                f"{name!r} is in a Linear8bitLt of bitsandbytes, which holds its weights a second time, in its "
                "`state`. Use Linear4bit of bitsandbytes, or torchao's quantize_(model, Int8WeightOnlyConfig())."
            )
        if param.is_floating_point() and param.dtype is not (dtype := dtype_of(param)):
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


def check_batch_norms(model: nn.Module, dtype_of: DtypeOf) -> None:
    """Raises ConfigError for a batch norm that torch's CPU kernels, unlike CUDA's, refuse with weights in its dtype.

    `model.bfloat16()` would also cast the running statistics. These would stop changing once an update is smaller than
    the rounding: with momentum 0.01, far from the correct values. So they keep their dtype, as all buffers do.
    """
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or module.weight is None or module.running_mean is None:
            continue
        dtype = dtype_of(module.weight)
        if module.running_mean.dtype is torch.float32 and dtype is not torch.float32:
            raise ConfigError(
                f"{name!r} is a {type(module).__name__} with running statistics in fp32, which torch's CPU kernels do "
                f"not support with {dtype} weights. Wrap with precision='fp32', or use a norm without running "
                "statistics (GroupNorm, or track_running_stats=False)."
            )
