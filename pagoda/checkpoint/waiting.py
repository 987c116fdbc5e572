"""Waiting tensors: parameters whose values are known, and not in memory.

`pagoda.deferred_init` and `pagoda.load` put them into models. To other code they are tensors on the CPU. In place of
memory they have a record of what their values come from: a file, a random initialisation, other tensors. Operations
that copy, cut, cast, join or fill them are recorded. Any other operation reads the values that it needs and runs at
once, and what it writes stays in RAM. So a model can be copied, resized and adapted like any other, and `wrap`
evaluates the records.
"""

import sys
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map_only

from pagoda.checkpoint.lazy import LazyTensor, cat, constant, put_off, stack
from pagoda.checkpoint.sources import SharedValues, ValueSource, combined
from pagoda.errors import UsageError
from pagoda.mesh.dtensors import local
from pagoda.parameters.hidden import Hidden

_CPU = torch.device("cpu")
_ATEN = torch.ops.aten
_OVERWRITES = frozenset(
    ("zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_")
)
"""Operations that give every element of a tensor a new value."""
_MAX_DEPTH = 32
"""Most recorded writes of which each changes the result of the one before. One more brings the memory into RAM."""
_USES_SHAPE = frozenset(
    [f"{what}_like" for what in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")]
    + [f"new_{what}" for what in ("empty", "zeros", "ones", "full", "empty_strided")]
)
"""Operations that take the shape and dtype of a tensor, and not its values."""
_NEEDS_MEMORY = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "data_ptr",
        "untyped_storage",
        "storage",
        "numpy",
        "tolist",
        "__array__",
        "__dlpack__",
        "share_memory_",
    )
)
"""Functions that use a tensor's memory directly, past torch's dispatcher."""


class WaitingTensor(torch.Tensor):
    """A tensor on the CPU whose values are not in memory. See this file's docstring."""

    __slots__ = ("_memory",)
    _memory: SharedValues

    @staticmethod
    def __new__(cls, memory: SharedValues, like: torch.Tensor) -> "WaitingTensor":
        """A view of `memory` with the shape, strides, offset and dtype of `like`.

        To torch's kernels it is on the meta device, so a plain tensor's `data` cannot be set to it.
        """
        made: WaitingTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=torch.device("meta"),
            dispatch_device=True,
        )
        made._memory = memory
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _GET_IS_META:
            return _is_skipped(args[0], _caller())
        if func == _SET_DATA:
            return _set_data(*args)
        if func is torch._has_compatible_shallow_copy_type and isinstance(args[0], WaitingTensor):
            return True  # its data can be set to any tensor, and Module.to then keeps tied parameters tied
        if func is torch.empty_like and _is_of_dtensor(_caller()):
            return blank(torch.empty_like(_shown(args[0])))
        if func in _NEEDS_MEMORY:
            args, kwargs = tree_map_only(WaitingTensor, in_memory, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            ram = args[0]._memory.ram
            return _CPU if ram is None else ram.device
        if func is _ATEN.set_.source_Tensor:
            return _set_data(*args)
        for record in (_record_view, _record_copy, _record_join, _record_write):
            recorded = record(func, args, kwargs)
            if recorded is not None:
                return recorded
        return _run(func, args, kwargs)

    __deepcopy__ = Hidden.__deepcopy__

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = in_memory(self)
        plain = nn.Parameter(values, self.requires_grad) if isinstance(self, nn.Parameter) else values
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"WaitingTensor({list(self.shape)}, {self.dtype}: its values are read when they are used)"


_GET_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def is_waiting(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are not in memory. Of a DTensor, those of this rank's part."""
    mine = local(tensor)
    return isinstance(mine, WaitingTensor) and mine._memory.ram is None


def blank(like: torch.Tensor) -> WaitingTensor:
    """A tensor without values, in the shape and dtype of `like`, as from `torch.empty`. Records random writes."""
    read = partial(_nans, like.dtype)
    return _new(ValueSource(LazyTensor(like.dtype, like.shape, read), unset=True), replays=True)


def waiting_for_initialiser(values: torch.Tensor | None, like: torch.Tensor) -> WaitingTensor:
    """A tensor that an initialiser will overwrite. It has `values` until then, or none."""
    made = blank(like)
    if values is not None:
        made._memory.source = ValueSource(constant(values.detach()), in_ram=True)
    return made


def set_source(tensor: WaitingTensor, values: LazyTensor) -> None:
    """Give a whole tensor the values of a lazy tensor of the same shape."""
    source = ValueSource(values if values.dtype is tensor.dtype else values.cast(tensor.dtype))
    tensor._memory.source, tensor._memory.ram, tensor._memory.replays = source, None, False


def source_of(tensor: torch.Tensor) -> ValueSource | None:
    """What a tensor's values come from, with `values` in its shape. None for a tensor of another class."""
    if not isinstance(tensor, WaitingTensor):
        return None
    memory = tensor._memory
    if memory.ram is not None:
        return ValueSource(constant(in_memory(tensor)), in_ram=True)
    return replace(memory.source, values=_values(tensor))


def in_memory(tensor: WaitingTensor) -> torch.Tensor:
    """The tensor as a plain one. Its memory, and that of its views, is in RAM from now on."""
    ram = tensor._memory.load()
    return ram.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def memory_start(tensor: torch.Tensor) -> tuple[int, int]:
    """The identity of a waiting tensor's memory and the tensor's first byte in it. For another tensor, 0 and its
    address."""
    if isinstance(tensor, WaitingTensor):
        return id(tensor._memory), int(tensor.storage_offset()) * tensor.itemsize
    return 0, tensor.data_ptr()


def _nans(dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
    return torch.full((count,), torch.nan, dtype=dtype, device="cpu")


def _shown(tensor: WaitingTensor) -> torch.Tensor:
    """The tensor on the meta device, as a view of its memory."""
    memory = torch.empty(tensor._memory.elements, dtype=tensor.dtype, device="meta")
    return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _is_whole(tensor: WaitingTensor) -> bool:
    """Whether the tensor is all of its memory, in order."""
    return tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.numel() == tensor._memory.elements


def _values(tensor: WaitingTensor) -> LazyTensor:
    """The values of a tensor whose memory is not in RAM."""
    values, first = tensor._memory.source.values, int(tensor.storage_offset())
    if _is_whole(tensor):
        return values.with_shape(tensor.shape)
    if tensor.is_contiguous():
        return LazyTensor(values.dtype, tensor.shape, lambda start, count: values.read(first + start, count))
    cut: LazyTensor = put_off(torch.as_strided, (values, tensor.size(), tensor.stride(), first), {})
    return cut


def _value(tensor: WaitingTensor) -> torch.Tensor:
    """The values of a tensor, as a plain one. This does not bring its memory into RAM."""
    return in_memory(tensor) if tensor._memory.ram is not None else _values(tensor).whole()


def _new(source: ValueSource, replays: bool) -> WaitingTensor:
    """A new tensor with the values of a source."""
    like = torch.empty(source.values.shape, dtype=source.values.dtype, device="meta")
    return WaitingTensor(SharedValues(source, replays), like)


def _record_view(func: Any, args: Any, kwargs: Any) -> Any:
    if not func.is_view or torch.Tag.inplace_view in func.tags:
        return None
    tensor = args[0]
    shown = func(_shown(tensor), *args[1:], **kwargs)
    if any(each.dtype is not tensor.dtype for each in tree_iter(shown)):
        return func(in_memory(tensor), *args[1:], **kwargs)
    return tree_map_only(torch.Tensor, partial(WaitingTensor, tensor._memory), shown)


def _record_copy(func: Any, args: Any, kwargs: Any) -> Any:
    if func not in (_ATEN.clone.default, _ATEN._to_copy.default, _ATEN._unsafe_view.default):
        return None
    tensor = args[0]
    device = kwargs.get("device") or _CPU
    if device.type == "meta":
        return func(_shown(tensor), **kwargs)
    dtype = kwargs.get("dtype") or tensor.dtype
    if device.type != "cpu" or tensor._memory.ram is not None or not dtype.is_floating_point:
        return None
    source = _copied(tensor, dtype)
    if func is _ATEN._unsafe_view.default:
        source = replace(source, values=source.values.with_shape(args[1]))
    return _new(source, tensor._memory.replays)


def _record_join(func: Any, args: Any, kwargs: Any) -> Any:
    if func not in (_ATEN.cat.default, _ATEN.stack.default):
        return None
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    waits = all(isinstance(each, WaitingTensor) and each._memory.ram is None for each in tensors)
    if not waits or len({each.dtype for each in tensors}) > 1:
        return None
    func([_shown(each) for each in tensors], dim)  # raises torch's errors
    join = cat if func is _ATEN.cat.default else stack
    joined = join([_values(each) for each in tensors], dim)
    source = replace(combined(*(each._memory.source for each in tensors)), values=joined)
    return _new(source, tensors[0]._memory.replays)


def _record_write(func: Any, args: Any, kwargs: Any) -> Any:
    """Record an operation in place whose other arguments are numbers and tensors in RAM, or that copies another waiting
    tensor to its target."""
    name = func._schema.name.removeprefix("aten::")
    random = torch.Tag.nondeterministic_seeded in func.tags
    if not name.endswith("_") or name.startswith("_foreach") or torch.Tag.inplace_view in func.tags:
        return None
    target, others = args[0], (args[1:], kwargs)
    if not isinstance(target, WaitingTensor) or target._memory.ram is not None:
        return None
    given = [each for each in tree_iter(others) if isinstance(each, torch.Tensor)]
    waits = [each for each in given if isinstance(each, WaitingTensor)]
    if (waits and name != "copy_") or kwargs.get("generator") is not None or (random and not target._memory.replays):
        return None
    if any(each._memory.ram is not None for each in waits) or any(each.device != _CPU for each in given):
        return None
    memory, whole = target._memory, _is_whole(target) and name in _OVERWRITES
    if whole and name == "copy_" and given[0].shape == target.shape:
        memory.source = _copied(given[0], target.dtype)
        return target
    if memory.source.depth >= _MAX_DEPTH and not whole:
        return None
    sources = [each._memory.source if isinstance(each, WaitingTensor) else _IN_RAM for each in given]
    kept = tree_map_only(torch.Tensor, _kept, (args[1:], kwargs))
    memory.write(target, partial(_call, func, kept), sources, keeps=not whole, random=random)
    return target


_IN_RAM = replace(combined(), in_ram=True)


def _kept(tensor: torch.Tensor) -> LazyTensor:
    """The values of a tensor as they are now."""
    return _values(tensor) if isinstance(tensor, WaitingTensor) else constant(tensor.detach().clone())


def _call(func: Any, kept: tuple[tuple[Any, ...], dict[str, Any]], target: torch.Tensor) -> None:
    args, kwargs = tree_map_only(LazyTensor, LazyTensor.whole, kept)
    func(target, *args, **kwargs)


def _copied(tensor: torch.Tensor, dtype: torch.dtype) -> ValueSource:
    """The source of a copy of a tensor."""
    source, values = tensor._memory.source if isinstance(tensor, WaitingTensor) else _IN_RAM, _kept(tensor)
    return replace(source, values=values if values.dtype is dtype else values.cast(dtype))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the values of waiting tensors. The memory that it writes to is then in RAM."""
    if torch.Tag.inplace_view in func.tags:
        raise UsageError(
            f"{func} would change the shape of a tensor in place, but its values are not in memory yet "
            "(pagoda.deferred_init, "
            "pagoda.load). Assign a new parameter instead."
        )
    if func._schema.name.removeprefix("aten::") in _USES_SHAPE:
        shown = args[0]
        return func(
            torch.empty_strided(shown.size(), shown.stride(), dtype=shown.dtype, device="cpu"), *args[1:], **kwargs
        )
    targets: list[tuple[torch.Tensor, WaitingTensor]] = []

    def in_place(tensor: WaitingTensor) -> torch.Tensor:
        plain = in_memory(tensor)
        targets.append((plain, tensor))
        return plain

    writes = {arg.name for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write}
    names = [arg.name for arg in func._schema.arguments]
    plain_args = [
        tree_map_only(WaitingTensor, in_place if name in writes else _value, arg)
        for name, arg in zip(names, args, strict=False)
    ]
    plain_kwargs = {
        name: tree_map_only(WaitingTensor, in_place if name in writes else _value, arg) for name, arg in kwargs.items()
    }
    result = func(*plain_args, **plain_kwargs)

    def as_given(tensor: torch.Tensor) -> torch.Tensor:
        return next((given for plain, given in targets if plain is tensor), tensor)

    return tree_map_only(torch.Tensor, as_given, result)


def _set_data(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Make `target` share the memory of `value`."""
    if not isinstance(target, WaitingTensor):
        raise UsageError(
            "The data of a tensor in memory cannot be set to that of a parameter that waits for its values "
            "(pagoda.deferred_init, pagoda.load): copy them, with tensor.copy_(values), or assign the parameter itself."
        )
    if not isinstance(value, WaitingTensor):
        values = value.detach()
        memory = SharedValues(ValueSource(constant(values)), target._memory.replays)
        memory.ram = values
        value = WaitingTensor(memory, values)
    with torch._C.DisableTorchFunctionSubclass():
        target.data = value
    target._memory = value._memory
    return target


def _is_skipped(tensor: WaitingTensor, reader: FrameType) -> bool:
    """What `tensor.is_meta` tells the code that reads it: True if that code must skip the tensor.

    torch's initialisers skip tensors on meta. A call of one on the whole tensor is recorded here instead, because its
    operations may depend on values. torch's DTensor skips them too: a rank's part is taken when it is evaluated.
    """
    if tensor._memory.ram is not None:
        return tensor._memory.ram.is_meta
    if _is_of_dtensor(reader):
        return True
    code, given = reader.f_code, reader.f_locals
    if reader.f_globals is not vars(nn.init) or not tensor._memory.replays or given.get("generator") is not None:
        return False
    if not _is_whole(tensor) or given.get("tensor") is not tensor:
        return False
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    settings = {name: given[name] for name in names if name != "tensor"}
    tensor._memory.write(tensor, partial(getattr(nn.init, code.co_name), **settings), random=True)
    return True


def _is_of_dtensor(reader: FrameType) -> bool:
    return str(reader.f_globals.get("__name__")).startswith("torch.distributed.tensor")


def _caller() -> FrameType:
    """The code that called a function of torch on a waiting tensor."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:  # of a mode
        frame = frame.f_back
    return frame
