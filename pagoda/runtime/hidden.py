"""Hidden tensors: they have the shape, dtype and device of weights whose values are in pages.

If a running forward uses the values of a hidden parameter, its unit is leased until the innermost forward ends. So any
module may read it. Outside a forward, such a use raises an error.
"""

from functools import cache, partial
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pagoda.errors import UsageError

Tensor = TypeVar("Tensor", bound=torch.Tensor)

HOME = "_pagoda_home"
"""Attribute of a managed parameter. Its `open()` returns engine, unit and slot."""

as_plain = torch._C.DisableTorchFunctionSubclass
"""Inside `with as_plain():`, nothing is refused, and attributes of hidden tensors cost as much as those of other
tensors."""

_MADE_ANEW = frozenset(
    {"empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"}
    | {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"}
)
"""Functions that read no value of the tensor and return a tensor with values of its own."""

_MOVED = frozenset({"bfloat16", "cpu", "cuda", "detach", "double", "float", "half", "to", "type"})
"""Functions whose result is hidden too. Users and libraries call them before they use the values, or without using
them."""

_LIKE_ANOTHER = frozenset({"expand_as", "reshape_as", "type_as", "view_as"})
"""Functions that read only shape, dtype or device of all arguments except the first."""

_VALUES = frozenset({"H", "T", "data", "imag", "mH", "mT", "real"})
"""Attributes that are views of the values."""

_HARMLESS = (
    _MADE_ANEW
    | _MOVED
    | {"__hash__", "__len__", "__repr__", "_has_compatible_shallow_copy_type", "can_cast", "data_ptr", "dim"}
    | {"element_size", "get_device", "grad", "has_names", "is_complex", "is_conj", "is_contiguous"}
    | {"is_floating_point", "is_inference", "is_neg", "is_pinned", "is_same_size", "is_shared", "is_signed"}
    | {"ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"}
    | {"result_type", "retain_grad", "share_memory_", "size", "storage_offset", "stride", "untyped_storage"}
)


class Hidden:
    """What the class of a hidden tensor adds to the tensor's own class."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DIFFERENTIATE:
            return _differentiate(func, args, kwargs or {})
        name = getattr(func, "__name__", str(func))
        # An attribute arrives here as the method of its descriptor.
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        first = args[0] if args else None
        if name == "copy_" and len(args) > 1 and args[1] is first:
            return first  # `load_state_dict` ends with this, after its values were written to pages
        takes_value = attribute in _VALUES if name == "__get__" else name in _MOVED or name not in _HARMLESS
        if takes_value and not (name == "__set__" or (name in _LIKE_ANOTHER and not isinstance(first, Hidden))):
            leased = _leased((args, kwargs or {}))
            if leased is not None:
                return func(*leased[0], **leased[1])
        if attribute:
            if (name, attribute) == ("__set__", "data") and not isinstance(args[1], Hidden):
                _refuse("data =", args)
        elif name == "view_as" and args[1] is first:
            pass  # torch.autograd.graph.get_gradient_edge wants its node
        elif name not in _HARMLESS and (name not in _LIKE_ANOTHER or isinstance(first, Hidden)):
            _refuse(f"{name}()", (args, kwargs))
        with as_plain():
            result = func(*args, **(kwargs or {}))
        if not isinstance(first, Hidden) or result is first or name in _MADE_ANEW or attribute == "grad":
            return result
        return hide(result, name_of(first)) if isinstance(result, torch.Tensor) else result

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        shape = tuple(self.shape)  # type: ignore[attr-defined]
        return f"<parameter {name_of(self)!r}, shape {shape}, whose weights are in Pagoda's pages>"


class _Shown(torch.autograd.Function):
    """A parameter with its values: its gradient is the parameter's. Autograd refuses to write to it."""

    @staticmethod
    def forward(_ctx: Any, _param: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


_shown: Any = _Shown.apply
_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward)


def _differentiate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Differentiate by hidden parameters, through the edges of the graph that lead to them. Whatever runs in backward,
    such as a checkpoint, must find parameters hidden as ever."""
    edge: Any = torch.autograd.graph.get_gradient_edge
    with as_plain():
        on_edges, options = tree_map(lambda leaf: edge(leaf) if isinstance(leaf, Hidden) else leaf, (args, kwargs))
    if not options.pop("materialize_grads", False):
        return func(*on_edges, **options)
    grads = func(*on_edges, **{**options, "allow_unused": True})
    blank = partial(torch.zeros_like, requires_grad=options.get("create_graph", False))
    return tuple(blank(of) if grad is None else grad for grad, of in zip(grads, args[1], strict=True))


def _leased(arguments: Any) -> Any:
    """The arguments of a function, with every hidden parameter shown. None if no forward runs.

    A parameter stays shown until the innermost running forward ends, or until other units need room. Graphs keep a
    frozen tensor itself, which will be hidden again, so they get a view of its values. Where backward repeats a part of
    a forward, and for parameters that graphs keep without hooks, the unit is leased for this function only.
    """
    hidden: list[Any] = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Hidden)]
    views: dict[int, Any] = {}
    homes = [vars(leaf).get(HOME) for leaf in hidden]
    if None in homes:
        return None
    opened = [home.open() for home in homes]
    units: dict[Any, dict[Any, None]] = {}
    for engine, unit, _ in opened:
        units.setdefault(engine, {})[unit] = None
    in_forward = {engine for engine, used in units.items() if engine.active_forwards.use([*used])}
    for leaf, (engine, unit, slot) in zip(hidden, opened, strict=True):
        if engine in in_forward:
            continue
        if torch._C._current_graph_task_id() == -1 or not (torch.is_grad_enabled() or unit.is_kept(slot)):
            return None
        with as_plain():
            view = unit.as_param(slot, unit.view(slot, engine.accesses.read(unit)))
            trains = torch.is_grad_enabled() and unit.params[slot].requires_grad
            views[id(leaf)] = _shown(leaf, view) if trains else view
    views |= {id(param): param.data for param in hidden if id(param) not in views and not param.requires_grad}
    return tree_map(lambda leaf: views.get(id(leaf), leaf), arguments)


@cache
def hidden_class(kind: type) -> type:
    """The class of hidden tensors whose own class is `kind`."""
    return type(kind)(f"Hidden{kind.__name__}", (Hidden, kind), {"__module__": __name__, "__slots__": ()})


def hide(tensor: Tensor, name: str) -> Tensor:
    """Hide a tensor from now on, in place. `name` is the parameter's name in errors."""
    tensor.hidden_name = name  # type: ignore[attr-defined]
    if not isinstance(tensor, Hidden):  # as what a tensor class makes of one is
        tensor.__class__ = hidden_class(type(tensor))
    return tensor


def name_of(tensor: object) -> str:
    """The name of a hidden parameter."""
    return str(vars(tensor).get("hidden_name", "?"))


def outside_use(name: str, what: str = "used") -> str:
    """The error message for a use of a hidden parameter's values. `what` is done to it."""
    module = name.rpartition(".")[0]
    holder = f"module {module!r}" if module else "the model itself"
    return (
        f"Parameter {name!r}, which {holder} holds, was {what} outside the forward of the model or a part of it, where "
        "its weights are not in memory. Use it inside a forward; read it inside `with pagoda.gathered(param):`, also "
        "for the loss; write it inside `with pagoda.gathered(param, modify=True):`; save it with "
        "model.state_dict()."
    )


def _refuse(operation: str, args: Any) -> NoReturn:
    names = [name_of(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Hidden)]
    message = outside_use(names[0] if names else "?", f"used ({operation})")
    if torch._C._current_graph_task_id() != -1:
        message += (
            " In the backward of a torch.autograd.Function, take it from ctx.saved_tensors (ctx.save_for_backward in "
            "its forward), not from an attribute of ctx."
        )
    raise UsageError(message)
