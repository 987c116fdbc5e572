"""Quantized parameters: frozen parameters that are not plain floating-point tensors. Pages hold their bytes.

bitsandbytes packs two weights of 4 bits into each uint8. torchao has tensor classes around integers and scales. Between
uses, the bytes are stored as elements of the weights' dtype. Nothing computes with them, so every bit is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import nn

from pagoda.errors import ConfigError
from pagoda.mesh.dtensors import as_dtensor

ALIGN_BYTES = 256
"""Each tensor inside a parameter begins at a multiple of this many bytes, as parameters do in their unit."""
_KEPT = "Params4bit"
"""bitsandbytes' class of packed weights. Its autograd function keeps them in its context, where no hook sees them."""
_REPACKS = "support_avx512bf16_for_cpu"
"""Attribute of layers that repack their weights in place in their first evaluation on a CPU with bf16 kernels."""


_PACKING = "_pagoda_packing"
"""Attribute of a parameter that waits to be packed: the function that returns it packed."""


def waiting_to_be_packed(blank: Any, make: Callable[[], Any]) -> nn.Parameter:
    """A quantized parameter without values, on the CPU without memory or of a tensor class on meta. `packed` calls
    `make` for the values."""
    if hasattr(blank, "__tensor_flatten__"):
        names, context = blank.__tensor_flatten__()
        inner = {name: without_memory(of.shape, of.dtype) for name in names if (of := getattr(blank, name)) is not None}
        shown = type(blank).__tensor_unflatten__(inner, context, blank.shape, blank.stride())
        blank = nn.Parameter(shown, requires_grad=False)
    setattr(blank, _PACKING, make)
    return blank  # type: ignore[no-any-return]


def without_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one element that is expanded to a shape."""
    return torch.zeros((), dtype=dtype).expand(*shape)


def packed(param: Any) -> Any:
    """A parameter with its values: itself, or what it waited for. How bitsandbytes has packed it is then known where
    the parameter is used."""
    make = param.__dict__.pop(_PACKING, None)
    if make is None:
        return param
    made = make()
    if (state := getattr(param, "quant_state", None)) is not None:
        vars(state).update(vars(made.quant_state))
    return made


def is_quantized(param: torch.Tensor) -> bool:
    """Whether pages hold a parameter as bytes."""
    if param.requires_grad or param.numel() == 0 or as_dtensor(param) is not None:
        return False
    return not param.is_floating_point() or hasattr(type(param), "__tensor_flatten__")


def keep_packing(model: nn.Module) -> None:
    """Prevent layers from repacking their weights. Raises ConfigError if one has done so already.

    Weights no longer refer to their layers, which they do only to be packed: Python's garbage collector would not see
    that a dropped model refers to itself.
    """
    for name, module in model.named_modules():
        if not hasattr(module, _REPACKS):
            continue
        state: Any = getattr(module, "quant_state", None) or getattr(module.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ConfigError(
                f"{name!r} has been evaluated, so bitsandbytes has packed its weights. Call model.state_dict(), which "
                "unpacks them, before wrap."
            )
        setattr(module, _REPACKS, False)
        module.weight.__dict__["module"] = None


@dataclass(frozen=True)
class _Inner:
    """A plain tensor with some of the values."""

    name: str
    """The attribute that holds it, or "" for the parameter itself."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Its first byte."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class QuantizedForm:
    """How a quantized parameter is made from its bytes, and back."""

    inner: tuple[_Inner, ...]
    weight: torch.dtype
    """The dtype as which the bytes are stored."""
    kind: type
    """Class of the parameter."""
    rebuild: Any
    """(context, shape, stride) of a tensor class around other tensors. None for a plain tensor."""

    @classmethod
    def of(cls, param: torch.Tensor, weight: torch.dtype) -> "QuantizedForm | None":
        """The form of a parameter among weights of dtype `weight`, or None if it is not quantized."""
        if not is_quantized(param):
            return None
        rebuild = None
        tensors = {"": param}
        if hasattr(param, "__tensor_flatten__"):
            names, context = param.__tensor_flatten__()
            tensors = {name: tensor for name in names if (tensor := getattr(param, name)) is not None}
            rebuild = context, param.shape, param.stride()
        inner, end = [], 0
        for name, tensor in tensors.items():
            offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            inner.append(_Inner(name, tensor.dtype, tuple(tensor.shape), offset))
            end = offset + inner[-1].nbytes
        return cls(tuple(inner), weight, type(param), rebuild)

    @property
    def elements(self) -> int:
        """Number of elements of the weights' dtype that the bytes take."""
        return -(-(self.inner[-1].offset + self.inner[-1].nbytes) // self.weight.itemsize)

    def around(self, part: torch.Tensor) -> Any:
        """A tensor of the parameter's class over the bytes of `part`, shape [elements]."""
        shown = self._views(part)
        if self.rebuild is None:
            return shown[""]
        unflatten: Any = self.kind
        return unflatten.__tensor_unflatten__(shown, *self.rebuild)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of a tensor of the parameter's class, shape [elements]."""
        part = torch.zeros(self.elements, dtype=self.weight)
        for name, view in self._views(part).items():
            view.copy_(getattr(tensor, name) if name else tensor)
        return part

    @property
    def is_kept(self) -> bool:
        """Whether graphs keep the parameter itself, although it is hidden when backward reads it."""
        return self.rebuild is None and self.kind.__name__ == _KEPT

    def held(self, param: Any) -> torch.Tensor:
        """A tensor in whose memory some of the shown bytes lie."""
        found: torch.Tensor = getattr(param, self.inner[0].name) if self.inner[0].name else param
        return found

    def show(self, param: Any, part: torch.Tensor) -> None:
        """Make a parameter show the bytes of `part`."""
        for name, view in self._views(part).items():
            if name:
                setattr(param, name, view)
            else:
                param.data = view

    def _views(self, part: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in the storage of `part`. If that is an expanded placeholder, all of them show its one
        element."""
        expanded = part.stride() == (0,)
        found = {}
        for each in self.inner:
            offset = part.storage_offset() * part.dtype.itemsize + (0 if expanded else each.offset)
            stride = [0] * len(each.shape) if expanded else torch.empty(each.shape, device="meta").stride()
            empty = torch.empty(0, dtype=each.dtype, device=part.device)
            at = offset // each.dtype.itemsize
            found[each.name] = empty.set_(part.untyped_storage(), at, each.shape, tuple(stride))
        return found


@cache
def kept_class(kind: type) -> type:
    """The class of a parameter that graphs keep, while it is shown.

    bitsandbytes keeps `weight.view(-1, 1)`. The parameter already has that shape, so the view returns the parameter
    itself, and the graph keeps no lease.
    """

    def view(self: torch.Tensor, *shape: Any) -> torch.Tensor:
        viewed: torch.Tensor = kind.view(self, *shape)  # type: ignore[attr-defined]
        return self if viewed.shape == self.shape else viewed

    return type(kind)(f"Shown{kind.__name__}", (kind,), {"__module__": __name__, "view": view})
