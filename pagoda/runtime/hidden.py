"""Hidden tensors: they say shape, dtype and device of weights that are in pages.

If the values of a hidden parameter are used while a forward runs, its unit is leased until the innermost one ends, so
that any module may read it. Elsewhere, such a use raises.
"""

from functools import cache
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pagoda.errors import UsageError

Tensor = TypeVar("Tensor", bound=torch.Tensor)

HOME = "_pagoda_home"
"""Attribute of a managed parameter: its `open()` gives engine, unit and slot."""

as_plain = torch._C.DisableTorchFunctionSubclass
"""Inside `with as_plain():` nothing is refused, and attributes of hidden tensors cost what they do of others."""

_MADE_ANEW = frozenset(
    {"empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"}
    | {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"}
)
"""Functions that take no value from the tensor, and give one that has values."""

_MOVED = frozenset({"bfloat16", "cpu", "cuda", "detach", "double", "float", "half", "to", "type"})
"""Functions whose result is hidden as well: users and libraries call them before they use the values, or do not."""

_LIKE_ANOTHER = frozenset({"expand_as", "reshape_as", "type_as", "view_as"})
"""Functions that ask only shape, dtype or device of any argument but the first."""

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
    """What the class of a hidden tensor has besides that of the tensor itself."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        # Attributes come as the methods of their descriptors.
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        first = args[0] if args else None
        takes_value = attribute in _VALUES if name == "__get__" else name in _MOVED or name not in _HARMLESS
        if takes_value and not (name == "__set__" or (name in _LIKE_ANOTHER and not isinstance(first, Hidden))):
            leased = _leased((args, kwargs or {}))
            if leased is not None:
                return func(*leased[0], **leased[1])
        if attribute:
            if (name, attribute) == ("__set__", "data") and not isinstance(args[1], Hidden):
                _refuse("data =", args)
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


def _leased(arguments: Any) -> Any:
    """The arguments of a function, with every parameter shown that was hidden; None where no forward runs.

    It then is shown until the innermost running forward ends. Graphs keep a frozen tensor itself, which will be hidden
    again: they get a view of its values.
    """
    hidden: list[Any] = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Hidden)]
    for leaf in hidden:
        if not isinstance(leaf, Hidden):
            continue  # an earlier one was of the same unit
        home = vars(leaf).get(HOME)
        if home is None:
            return None
        engine, unit, _ = home.open()
        if not engine.active_forwards.use(unit):
            return None
    views = {id(param): param.data for param in hidden if not param.requires_grad}
    return tree_map(lambda leaf: views.get(id(leaf), leaf), arguments)


@cache
def hidden_class(kind: type) -> type:
    """The class of hidden tensors that are of class `kind` when they are not hidden."""
    return type(kind)(f"Hidden{kind.__name__}", (Hidden, kind), {"__module__": __name__, "__slots__": ()})


def hide(tensor: Tensor, name: str) -> Tensor:
    """Let a tensor be hidden from now on, in place; `name` is that of the parameter in errors."""
    tensor.hidden_name = name  # type: ignore[attr-defined]
    tensor.__class__ = hidden_class(type(tensor))
    return tensor


def name_of(tensor: object) -> str:
    """The name of a parameter, of a hidden tensor."""
    return str(vars(tensor).get("hidden_name", "?"))


def outside_use(name: str, what: str = "used") -> str:
    """The message for a parameter whose value is used while it is hidden; `what` is done to it."""
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
    raise UsageError(outside_use(names[0] if names else "?", f"used ({operation})"))
