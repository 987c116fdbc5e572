"""Logits that are computed when they are read. A loss reads them in blocks, so they never exist all at once.

`chunked_loss` gives a model such logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map

from pagoda.errors import ConfigError, UsageError
from pagoda.prepare.linear_cross_entropy import Map, Reduced, cross_entropy, reduce_logits
from pagoda.prepare.tiles import TiledLinear, Visit

Model = TypeVar("Model", bound=nn.Module)


def chunked_loss(model: Model) -> Model:
    """Let a Hugging Face language model compute its loss without holding all logits at once. Returns the model.

    Call it before or after `wrap`:

        model = pagoda.chunked_loss(model)

    The model's output layer then returns logits that are computed when they are read. Cross-entropy reads them in
    blocks, and once more in backward, so the memory of the loss no longer grows with tokens times vocabulary. The cost
    is one more matrix product with the output layer. It applies to the model's own loss and to
    `torch.nn.functional.cross_entropy(logits, targets)`, with the shift of causal models, `ignore_index`,
    `label_smoothing`, sums over several batches, soft caps and scales. Any other operation that reads logits computes
    all of them.

    The loss is that of fp32 logits, as in transformers, summed in another order: it is no less accurate, but not the
    same to the last bit. With `torch.compile` of the whole model, logits are computed as usual.

    Raises ConfigError for a model without an output layer, or with one that is not a plain `nn.Linear`.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not (isinstance(head, nn.Module) and defer_logits(head)):
        found = "no output layer" if head is None else f"a {type(head).__name__} as output layer"
        raise ConfigError(
            f"chunked_loss needs a model whose get_output_embeddings() gives an nn.Linear; {type(model).__name__} has "
            f"{found}."
        )
    return model


def defer_logits(head: nn.Module) -> bool:
    """Defer the output of a linear layer, tiled or not, until it is read. Returns False for other layers.

    The layer changes its class. Its parameters, names and hooks stay the same.
    """
    if isinstance(head, LateHead | LateTiledHead):
        return True
    late = {nn.Linear: LateHead, TiledLinear: LateTiledHead}.get(type(head))
    if late is None:
        return False
    _count_steps()
    head.__class__ = late
    return True


class LateHead(nn.Linear):
    """A linear layer whose output is computed when it is read.

    A loss needs the weight after the layer's forward has ended, when a paged weight is no longer in memory. So it calls
    the layer again, with a function to apply to the weight, and hooks on the layer fetch the weight as usual.
    """

    def forward(self, hidden: torch.Tensor, visit: Visit | None = None) -> Any:
        if visit is not None:
            return visit(self.weight, self.bias, 0)
        if torch.compiler.is_compiling():
            return super().forward(hidden)
        return DeferredLogits.of(hidden, self)


class LateTiledHead(TiledLinear):
    """A tiled linear layer whose output is computed when it is read. Its tiles are in memory one after another."""

    def forward(self, hidden: torch.Tensor, visit: Visit | None = None) -> Any:
        if visit is not None or torch.compiler.is_compiling():
            return super().forward(hidden, visit)
        return DeferredLogits.of(hidden, self)


class _HeadCall(NamedTuple):
    """A deferred call of a head."""

    head: LateHead | LateTiledHead
    dtype: torch.dtype
    """The dtype in which the call would have computed."""
    with_grad: bool
    step: int
    """Steps that optimizers had taken at the time of the call."""


class DeferredLogits(torch.Tensor):
    """The output of a `LateHead`, shape [..., V].

    Shape, dtype and device are known. `torch.nn.functional.cross_entropy` runs block by block. Reshaping, selection of
    tokens, changes of dtype and products with numbers are deferred too. Any other operation computes the values, once.
    """

    hidden: torch.Tensor
    maps: tuple[Map, ...]
    call: _HeadCall
    _made: torch.Tensor | None

    @staticmethod
    def of(hidden: torch.Tensor, head: LateHead | LateTiledHead) -> DeferredLogits:
        """Deferred logits of `hidden` [..., H], in the dtype in which the layer would compute."""
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        return _late(hidden, dtype, (), _HeadCall(head, dtype, torch.is_grad_enabled(), _steps[0]))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        self = args[0] if args and isinstance(args[0], DeferredLogits) else kwargs.get("input")
        if isinstance(self, DeferredLogits) and self._made is None:
            late = None
            if func is functional.cross_entropy:
                late = _loss(self, *args[1:], **{key: value for key, value in kwargs.items() if key != "input"})
            elif func in _ELEMENTWISE:
                late = _mapped(self, func, args, kwargs)
            elif func in _RESHAPING:
                late = _reshaped(self, func, args, kwargs)
            elif func is torch.Tensor.__getitem__:
                late = _picked(self, args[1])
            if late is not None:
                return late
        return func(*tree_map(_real, args), **tree_map(_real, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub names a function that refuses
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(_real, args), **tree_map(_real, kwargs or {}))

    def values(self) -> torch.Tensor:
        """All logits. Raises UsageError if an optimizer has changed the weights since the call."""
        if self._made is None:
            rows: list[torch.Tensor] = []

            def take(weight: torch.Tensor, bias: torch.Tensor | None, _first: int) -> None:
                dtype = self.call.dtype
                rows.append(functional.linear(self.hidden.to(dtype), weight.to(dtype), _cast(bias, dtype)))

            with torch.set_grad_enabled(self.call.with_grad):
                self.visit(take)
                logits = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
                for each in self.maps:
                    logits = each(logits)
            self._made = logits
        return self._made

    def visit(self, rows: Visit) -> None:
        """Call the head with a function to apply to its weight."""
        if self.call.step != _steps[0]:
            raise UsageError(
                "Logits of a model with pagoda.chunked_loss were read after an optimizer.step(). They are computed "
                "when they are read, but the weights have changed. Read or .detach() them before the step."
            )
        with torch.autocast(self.hidden.device.type, enabled=False):
            self.call.head(self.hidden, rows)


def _late(hidden: torch.Tensor, dtype: torch.dtype, maps: tuple[Map, ...], call: _HeadCall) -> DeferredLogits:
    shape = (*hidden.shape[:-1], call.head.out_features)
    late: DeferredLogits = torch.Tensor._make_wrapper_subclass(
        DeferredLogits, shape, dtype=dtype, device=hidden.device, requires_grad=call.with_grad
    )
    late.hidden, late.maps, late.call, late._made = hidden, maps, call, None
    if call.with_grad:
        with torch._C.DisableTorchFunctionSubclass():
            late.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
    return late


def _refuse_gradient(_grad: torch.Tensor) -> None:
    raise UsageError(
        "Logits of a model with pagoda.chunked_loss got a gradient, but were never computed: the loss, such as a "
        "torch.autograd.Function, does not read them with torch's functions. Use torch.nn.functional.cross_entropy, or "
        "leave out pagoda.chunked_loss."
    )


def _mapped(late: DeferredLogits, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> DeferredLogits | None:
    """The logits with one more element-wise function, if its other arguments are only numbers and dtypes; otherwise
    None."""
    others = [*args[1:], *kwargs.values()]
    if not all(isinstance(other, int | float | torch.dtype) or other == late.device for other in others):
        return None
    dtype = func(torch.empty(0, dtype=late.dtype, device=late.device), *args[1:], **kwargs).dtype
    return _late(late.hidden, dtype, (*late.maps, partial(_apply, func, tuple(args[1:]), kwargs)), late.call)


def _only_widens(each: Map) -> bool:
    """Whether a function of `_mapped` changes no value."""
    assert isinstance(each, partial), "made by _mapped"
    func, others, _ = each.args
    return func in (_T.float, _T.contiguous, _T.clone) or (func is _T.to and others == (torch.float32,))


def _apply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = func(logits, *args, **kwargs)
    return result


def _reshaped(late: DeferredLogits, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> DeferredLogits | None:
    """The logits in another shape, or None if it splits the logits of a token. Elements keep their order, so comparing
    the last dimension suffices."""
    shape = func(torch.empty(late.shape, device="meta"), *args[1:], **kwargs).shape
    if not shape or shape[-1] != late.shape[-1]:
        return None
    return _late(late.hidden.reshape(*shape[:-1], late.hidden.shape[-1]), late.dtype, late.maps, late.call)


def _picked(late: DeferredLogits, index: Any) -> DeferredLogits | None:
    """The logits of some of the tokens, or None if the index selects from the vocabulary."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(part, int | slice | torch.Tensor) or part is ... for part in parts):
        return None
    taken = [part.dim() if isinstance(part, torch.Tensor) and part.dtype is torch.bool else 1 for part in parts]
    if ... in parts:
        at = next(place for place, part in enumerate(parts) if part is ...)
        open_ = late.dim() - sum(taken) + 1
        parts[at : at + 1] = [slice(None)] * open_
        taken[at : at + 1] = [1] * open_
    if sum(taken) == late.dim():
        if not (isinstance(parts[-1], slice) and parts[-1] == slice(None)):
            return None
        parts.pop()
    return _late(late.hidden[tuple(parts)], late.dtype, late.maps, late.call)


def _loss(
    late: DeferredLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """`torch.nn.functional.cross_entropy`, or None for arguments that are not supported in blocks."""
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not plain or late.dim() != 2 or target.dim() != 1 or target.is_floating_point() or len(target) != len(late):
        return None
    parts: list[Reduced] = []
    maps = () if all(map(_only_widens, late.maps)) else late.maps  # the loss is that of fp32 logits anyway

    def take(rows: torch.Tensor, bias: torch.Tensor | None, first: int) -> None:
        dtype = late.call.dtype
        parts.append(
            reduce_logits(
                late.hidden.to(dtype),
                rows.to(dtype),
                _cast(bias, dtype),
                target - first,
                maps,
                label_smoothing=label_smoothing,
            )
        )

    late.visit(take)
    loss = cross_entropy(
        parts,
        target,
        late.shape[-1],
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss.to(late.dtype)


def _real(value: Any) -> Any:
    return value.values() if isinstance(value, DeferredLogits) else value


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


_T = torch.Tensor
_ASKING = frozenset(
    {_T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.__len__, _T.is_floating_point, _T.is_complex}
    | {_T.__hash__, _T.element_size}
    | {getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta")}
)
_ELEMENTWISE = frozenset(
    {_T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.contiguous, _T.clone, _T.tanh, torch.tanh, _T.neg}
    | {_T.mul, _T.__mul__, _T.__rmul__, torch.mul, _T.div, _T.__truediv__, torch.div, _T.add, _T.sub, torch.clone}
)
_RESHAPING = frozenset({_T.view, _T.reshape, torch.reshape, _T.flatten, torch.flatten, _T.unflatten, _T.unsqueeze})

_steps = [0]
"""Steps that all optimizers have taken since the first head became a late one."""


@cache
def _count_steps() -> None:
    def count(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        _steps[0] += 1

    register_optimizer_step_post_hook(count)
