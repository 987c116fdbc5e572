"""Hidden tensors: they have the shape, dtype and device of weights whose values are in pages.

Every function of torch that gets one arrives here. Those that use values are carried out in `autograd/uses.py`. A view
of a hidden tensor is hidden too, and is made again from the values for each function that uses it.
"""

from functools import cache, partial, partialmethod
from types import FunctionType
from typing import Any, NamedTuple, NoReturn, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from pagoda.errors import PagodaError, UsageError

Tensor = TypeVar("Tensor", bound=torch.Tensor)

HOME = "_pagoda_home"
"""Attribute of a managed parameter. Its `open()` returns engine, unit and slot, with `read` and `overwrite`."""
MARKED = "_pagoda_marked"
"""Attribute of a marker: a hidden tensor that stands for a gradient or a state. Its `call` carries out functions."""
_VIEW = "_pagoda_view"
"""Attribute of a view of a hidden tensor: its `_View`."""
_VIEWS = "_pagoda_views"
"""Attribute of a hidden tensor with views: id -> view, of those that exist."""

as_plain = torch._C.DisableTorchFunctionSubclass
"""Inside `with as_plain():`, functions get placeholders, and attributes of hidden tensors cost as much as those of
other tensors."""

_MADE_ANEW = frozenset(
    {"empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"}
    | {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"}
)
"""Functions that read no value of the tensor and return a tensor with values of its own."""

MOVED = frozenset({"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"})
"""Functions that return the tensor itself if it is already as asked. Libraries call them without using values."""

_LIKE_ANOTHER = frozenset({"expand_as", "reshape_as", "type_as", "view_as"})
"""Functions that read only shape, dtype or device of all arguments except the first."""

READS_FIRST = _LIKE_ANOTHER | MOVED
"""Functions that use values of the first argument alone."""

_VIEW_ATTRIBUTES = frozenset({"H", "T", "data", "imag", "mH", "mT", "real"})
_VIEW_METHODS = frozenset(
    {"detach", "expand", "expand_as", "permute", "squeeze", "t", "transpose", "unsqueeze", "view", "view_as"}
)
"""What always gives a view, or the tensor itself. Whether another function does, its result shows."""

_DETACHES = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]

_REFUSED = frozenset({"__dlpack__", "__reduce_ex__", "as_strided", "resize_", "resize_as_", "set_", "storage"})
"""Functions that would keep, replace or look around in the memory of the values, which other weights use too."""

_HARMLESS = frozenset(
    {"__hash__", "__len__", "__repr__", "_has_compatible_shallow_copy_type", "_is_view", "can_cast", "data_ptr", "dim"}
    | {"element_size", "get_device", "grad", "has_names", "is_complex", "is_conj", "is_floating_point"}
    | {"is_inference", "is_neg", "is_pinned", "is_same_size", "is_shared", "is_signed"}
    | {"ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"}
    | {"result_type", "retain_grad", "share_memory_", "size", "untyped_storage"}
)
_OF_STRIDES = frozenset({"is_contiguous", "storage_offset", "stride"})
"""Functions that ask how values lie in memory, and read none. They get a tensor that lies as the values do."""


class Hidden:
    """What the class of a hidden tensor adds to the tensor's own class."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DIFFERENTIATE:
            return _differentiate(func, args, kwargs)
        name = getattr(func, "__name__", str(func)).partition(".")[0]  # that of an overload is "add.Tensor"
        # An attribute arrives here as the method of its descriptor.
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        first = args[0] if args else None
        if name in ("copy_", "set_") and len(args) > 1 and args[1] is first:
            return first  # `load_state_dict` ends with this, after its values were written to pages
        if (name, attribute) == ("__set__", "grad") and isinstance(args[1], torch.Tensor) and HOME in vars(first):
            home = vars(first)[HOME].open()
            return home.engine.stepper.values.assign(home.unit, home.slot, args[1])
        if (name, attribute) == ("__set__", "data") and not _is_same(first, args[1]):
            return _use(func, name, args, kwargs) if is_marker(first) else _replace_values(first, args[1])
        if name in _REFUSED and not in_forward(first) and not (name == "__reduce_ex__" and is_marker(first)):
            _refuse(f"cannot be used in {name}()", (args, kwargs))
        if name in _OF_STRIDES and isinstance(first, Hidden):
            with as_plain():
                if not in_forward(first):
                    first = viewed(first, torch.empty(root_of(first).shape, device="meta"))
                return func(first, *args[1:], **kwargs)
        is_view = name == "__get__" and attribute in _VIEW_ATTRIBUTES
        if not is_view if attribute else _reads_no_value(name, first):
            with as_plain():
                return func(*args, **kwargs)
        if isinstance(first, Hidden) and not in_forward(first):
            if is_view or name in _VIEW_METHODS:
                return views_of(func, args, kwargs)[0]
            # `grad.detach().cpu()` is a copy that may be kept, `grad.cpu()` is what a module sets that is moved.
            is_kept = is_marker(first) and root_of(first) is not first
            if name in MOVED and not is_kept and _moves_nothing(func, args, kwargs):
                return first
        return _use(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Only tensors of classes that have such a method get here. Because of it, torch.compile does not trace what
        uses hidden tensors, but runs it as it is."""
        return super().__torch_dispatch__(func, types, args, kwargs or {})  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        this: Any = self
        if id(this) not in memo:
            values = this.detach().clone()
            memo[id(this)] = nn.Parameter(values, this.requires_grad) if isinstance(this, nn.Parameter) else values
        return memo[id(this)]

    def __format__(self, form: str) -> str:
        return format(self.__deepcopy__({}), form)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        try:
            root = vars(root_of(self))
            if root[MARKED].is_alone if MARKED in root else root[HOME].open().engine.links.mesh.size == 1:
                return repr(self.__deepcopy__({}))
        except (PagodaError, KeyError):
            pass  # the values are gone or damaged; whoever prints, may print an error
        shape = tuple(self.shape)  # type: ignore[attr-defined]
        return f"<{name_of(self)!r}, shape {shape}, whose values are in Pagoda's pages>"


def _reads_no_value(name: str, first: Any) -> bool:
    if name == "data_ptr":
        return not in_forward(first)  # a kernel may be about to read there
    if name in _LIKE_ANOTHER or name in MOVED:
        return not isinstance(first, Hidden)
    return name in _HARMLESS or name in _MADE_ANEW


def _moves_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function of `MOVED` returns the tensor itself."""
    with as_plain():
        empty = torch.empty((0,) * args[0].dim(), dtype=args[0].dtype, device=args[0].device)
        return func(empty, *args[1:], **kwargs) is empty


def _use(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out a function that uses values."""
    for root in map(root_of, hidden_in((args, kwargs))):
        if (marked := vars(root).get(MARKED)) is not None:
            return marked.call(func, name, args, kwargs)
    homes = [vars(root).get(HOME) for root in map(root_of, hidden_in((args, kwargs)))]
    if not homes:  # a forward in another thread shows the weights since the function was called
        return func(*args, **kwargs)
    if None in homes:
        raise UsageError(
            f"{name}() was called on {name_of(hidden_in((args, kwargs))[0])!r}, whose layer is cut into tiles. Use the "
            "parameters of its tiles (module.parameters()), which pagoda.gathered(module) has too, or raise "
            "tiles.tile_limit."
        )
    return homes[0].open().engine.uses.call(func, name, args, kwargs)


# --- views --------------------------------------------------------------------------------------------------


class _View(NamedTuple):
    """How a view was made from another hidden tensor."""

    of: Any
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    part: int
    """Which tensor of the function's result it is."""


def views_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors in the result of a function, which are views of its one hidden argument, as hidden tensors.

    Raises ValueError if it has several, and RuntimeError if placeholders have no such view.
    """
    hidden = hidden_in(args[:1] if getattr(func, "__name__", "") in READS_FIRST else (args, kwargs))
    if not hidden:  # as in `_use`
        return tree_leaves(func(*args, **kwargs))
    (of,) = hidden
    with as_plain():
        views = tree_leaves(func(*args, **kwargs))
    for index, view in enumerate(views):
        if not isinstance(view, Hidden):
            setattr(hide(view, name_of(of)), _VIEW, _View(of, func, args, kwargs, index))
            vars(root_of(of)).setdefault(_VIEWS, WeakValueDictionary())[id(view)] = view
    return views


def _replace_values(param: Any, values: Any) -> None:
    """`param.data = values` outside forwards: write the values to pages. Older views keep the older values, as in plain
    PyTorch."""
    root = root_of(values) if isinstance(values, Hidden) else param
    with as_plain():
        alike = (param.shape, param.dtype, param.device) == (values.shape, values.dtype, values.device)
    if root is not param or not alike or HOME not in vars(param) or in_forward(param):
        _refuse("cannot be given this tensor as its data", (param,))
    values = values.detach().clone()
    views = {view: view.detach().clone() for view in vars(param).pop(_VIEWS, {}).values()}
    with torch.no_grad():
        param.copy_(values)
    for view, kept in views.items():
        view.__class__ = type(kept)
        del vars(view)[_VIEW]
        view.data = kept


def viewed(tensor: Any, values: torch.Tensor) -> torch.Tensor:
    """What a hidden tensor is of the values of its root, which it may be itself."""
    view = vars(tensor).get(_VIEW)
    if view is None:
        return values
    of = viewed(view.of, values)
    args, kwargs = tree_map(lambda leaf: of if leaf is view.of else leaf, (view.args, view.kwargs))
    made: torch.Tensor = tree_leaves(view.func(*args, **kwargs))[view.part]
    return made


def undetached(tensor: Any) -> Any:
    """A hidden tensor, or the one of which it is all by `detach()` or `data`."""
    while (view := vars(tensor).get(_VIEW)) is not None and view.func in _DETACHES:
        tensor = view.of
    return tensor


def root_of(tensor: Any) -> Any:
    """The parameter that a hidden tensor is, or is a view of."""
    while (view := vars(tensor).get(_VIEW)) is not None:
        tensor = view.of
    return tensor


def hidden_in(arguments: Any) -> list[Any]:
    """The hidden tensors in arguments of a function."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Hidden)]


def is_marker(tensor: Any) -> bool:
    """Whether a hidden tensor stands for a gradient or a state, or is a view of one that does."""
    return isinstance(tensor, Hidden) and MARKED in vars(root_of(tensor))


def _is_same(tensor: Any, other: Any) -> bool:
    """Whether two tensors are hidden tensors of the same values, as `module.cpu()` gives them to each other."""
    return isinstance(tensor, Hidden) and isinstance(other, Hidden) and undetached(tensor) is undetached(other)


def in_forward(tensor: Any) -> bool:
    """Whether a forward of the model whose parameter a tensor is, if it is hidden, runs in this thread."""
    home = vars(root_of(tensor)).get(HOME) if isinstance(tensor, Hidden) else None
    return home is not None and home.open().engine.active_forwards.runs_here


# --- gradients ----------------------------------------------------------------------------------------------


class _Shown(torch.autograd.Function):
    """A parameter with its values: its gradient is the parameter's. Autograd refuses to write to it."""

    @staticmethod
    def forward(_ctx: Any, _param: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


with_gradient: Any = _Shown.apply
"""Called with a hidden tensor and its values. Returns the values, as a function of the tensor."""
_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward)


def _differentiate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Differentiate by hidden parameters, through the edges of the graph that lead to them. Whatever runs in backward,
    such as a checkpoint, must find parameters hidden as ever."""
    for marker in filter(is_marker, hidden_in((args, kwargs))):
        raise UsageError(without_graph(name_of(marker)))
    edge: Any = torch.autograd.graph.get_gradient_edge
    with as_plain():
        on_edges, options = tree_map(lambda leaf: edge(leaf) if isinstance(leaf, Hidden) else leaf, (args, kwargs))
    if not options.pop("materialize_grads", False):
        return func(*on_edges, **options)
    grads = func(*on_edges, **{**options, "allow_unused": True})
    blank = partial(torch.zeros_like, requires_grad=options.get("create_graph", False))
    return tuple(blank(of) if grad is None else grad for grad, of in zip(grads, args[1], strict=True))


# --- hiding -------------------------------------------------------------------------------------------------


@cache
def hidden_class(kind: type) -> type:
    """The class of hidden tensors whose own class is `kind`.

    Methods that only `kind` has, such as a DTensor's `full_tensor`, do not arrive in `__torch_function__` by
    themselves. What arrives is not traced by torch.compile.
    """
    own = {name: method for base in reversed(kind.__mro__) for name, method in vars(base).items()}
    added = {
        name: partialmethod(_call_own, method)
        for name, method in own.items()
        if isinstance(method, FunctionType) and not name.startswith("_") and not hasattr(torch.Tensor, name)
    }
    if kind is nn.Parameter:
        return hidden_class(torch.Tensor)  # for `nn.Parameter(param)`, which wants the class of `param.detach()`
    untraced: Any = torch.compiler.disable  # its import takes seconds, so it is not used before a model is wrapped
    arrives: Any = classmethod(untraced(vars(Hidden)["__torch_function__"].__func__))
    attributes = {"__module__": __name__, "__slots__": (), "__torch_function__": arrives, **added}
    return type(kind)(f"Hidden{kind.__name__}", (Hidden, kind), attributes)


def _call_own(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).__torch_function__(method, (type(self),), (self, *args), kwargs)


def hide(tensor: Tensor, name: str) -> Tensor:
    """Hide a tensor from now on, in place. `name` is the parameter's name in errors."""
    tensor.hidden_name = name  # type: ignore[attr-defined]
    tensor._is_param = isinstance(tensor, nn.Parameter)
    if not isinstance(tensor, Hidden):  # as what a tensor class makes of one is
        tensor.__class__ = hidden_class(type(tensor))
    return tensor


def hide_part(part: torch.Tensor, param: Any, name: str) -> None:
    """Hide a rank's part of a DTensor, which its methods read. The part counts as a view of the parameter."""
    setattr(hide(part, name), _VIEW, _View(param, type(param).to_local, (param,), {}, 0))


def name_of(tensor: object) -> str:
    """The name of a hidden parameter."""
    return str(vars(tensor).get("hidden_name", "?"))


def unseen(name: str, what: str) -> str:
    """The error message for a parameter that is `what` although no function of torch has asked for its values."""
    return (
        f"Parameter {name!r} {what}, but no function of torch has read it since the last optimizer.step(). Code that "
        "torch does not see, such as a C++ extension, gets NaN: give it param.clone(). An autograd function must read "
        "in its forward what it saves. And a graph from before step() has other weights: run its backward before."
    )


def without_graph(name: str) -> str:
    """The error message for a gradient whose graph is asked for."""
    return (
        f"{name!r} is asked for as a part of a graph, but pages have its values alone. Use torch.autograd.grad(loss, "
        "params, create_graph=True), or for the values, param.grad.detach()."
    )


def write_instead(name: str) -> str:
    """How to write a parameter, for errors."""
    return (
        f"Write to {name!r} in place, for example with copy_() under torch.no_grad(), or inside `with "
        "pagoda.gathered(param, modify=True):`."
    )


def _refuse(what: str, args: Any) -> NoReturn:
    name = next(map(name_of, hidden_in(args)), "?")
    if any(map(is_marker, hidden_in(args))):
        raise UsageError(
            f"{name!r} {what}: its values are in pages, whose memory other values use too. Use its clone(), and write "
            "with copy_()."
        )
    raise UsageError(
        f"Parameter {name!r} {what}: its weights are in pages, whose memory other weights use too. To read it, use "
        f"param.clone(). {write_instead(name)} Its dtype is wrap(precision=...)'s, and its device memory.device's. To "
        "save it, use model.state_dict()."
    )
