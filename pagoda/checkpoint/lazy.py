"""Tensors that stay in their files: they are joined and cut without being read, and read in pieces later.

transformers describes how files store a model's tensors with code on tensors (`torch.stack` of experts, `torch.chunk`
of a fused projection). Given lazy tensors, that code returns lazy tensors, so nothing as large as a layer's experts is
ever in RAM. Joining and cutting is exact and free. Any other operation is deferred until its result is read, and then
runs on whole tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from pagoda.checkpoint.tensors import TensorFile, TensorSpec
from pagoda.errors import CheckpointError

Read = Callable[[int, int], torch.Tensor]
"""Function that returns elements [start, start + count) of a tensor, flat."""
_MAX_READ_RATIO = 16
"""Parts of rows, such as those of one rank, are read at once with the elements between them. If that would read more
than this many times the wanted elements, each part is read by itself."""


class LazyTensor:
    """A tensor on the CPU whose values are read piece by piece from where they are stored.

    Functions and methods of torch accept it. Its values must not change while it is in use.
    """

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], read: Read) -> None:
        self.dtype = dtype
        self.shape = torch.Size(shape)
        self._read = read
        self.packed: dict[str, LazyTensor] | None = None
        """The tensors of quantized files from which the values are computed. Layers that compute with packed weights
        can keep them."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def numel(self) -> int:
        return prod(self.shape)

    def spec(self, name: str) -> TensorSpec:
        """Its name, dtype and shape in a file."""
        return TensorSpec(name, self.dtype, tuple(self.shape))

    def read(self, start: int, count: int) -> torch.Tensor:
        """A copy of elements [start, start + count) of the flat tensor. Raises IndexError if they are out of range."""
        if not 0 <= start <= start + count <= self.numel():
            raise IndexError(f"elements {start} to {start + count} of a tensor of shape {list(self.shape)}")
        return self._read(start, count) if count else torch.empty(0, dtype=self.dtype)

    def whole(self) -> torch.Tensor:
        """The whole tensor, in RAM."""
        return self.read(0, self.numel()).view(self.shape)

    def with_shape(self, shape: Sequence[int]) -> "LazyTensor":
        """The same elements in another shape."""
        made = LazyTensor(self.dtype, shape, self._read)
        made.packed = self.packed
        return made

    def narrow(self, dim: int, start: int, length: int) -> "LazyTensor":
        axis = dim % self.ndim
        if length == self.shape[axis]:
            return self
        inner = prod(self.shape[axis + 1 :])
        read = partial(_read_part_of_rows, self, self.shape[axis] * inner, start * inner, length * inner)
        return LazyTensor(self.dtype, _with(self.shape, axis, length), read)

    def squeeze(self, dim: int | Sequence[int] | None = None) -> "LazyTensor":
        dims = range(self.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
        axes = {each % self.ndim for each in dims}
        return self.with_shape([size for axis, size in enumerate(self.shape) if size != 1 or axis not in axes])

    def unsqueeze(self, dim: int) -> "LazyTensor":
        axis = dim % (self.ndim + 1)
        return self.with_shape((*self.shape[:axis], 1, *self.shape[axis:]))

    def cast(self, dtype: torch.dtype) -> "LazyTensor":
        """The same elements, rounded to another dtype."""
        made = LazyTensor(dtype, self.shape, lambda start, count: self._read(start, count).to(dtype))
        made.packed = self.packed
        return made

    def contiguous(self) -> "LazyTensor":
        return self

    def detach(self) -> "LazyTensor":
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Any other method of a tensor, deferred."""
        method = getattr(torch.Tensor, name, None)
        if name.startswith("__") or not callable(method):
            raise AttributeError(f"a lazy tensor has no {name!r}")
        return lambda *args, **kwargs: put_off(method, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        return put_off(torch.Tensor.__getitem__, (self, index), {})

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        own = _OWN.get(function)
        return own(*args, **kwargs) if own is not None else put_off(function, args, kwargs)


def constant(tensor: torch.Tensor) -> LazyTensor:
    """The values of a tensor in RAM."""

    def read(start: int, count: int) -> torch.Tensor:
        return flat[start : start + count].to("cpu", copy=True)

    flat = tensor.reshape(-1)
    return LazyTensor(tensor.dtype, tensor.shape, read)


def tensors_of(file: TensorFile) -> dict[str, LazyTensor]:
    """The tensors of a file, by name."""
    return {name: LazyTensor(spec.dtype, spec.shape, partial(file.read, name)) for name, spec in file.specs.items()}


def cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Like `torch.cat`. Raises CheckpointError if dtypes or shapes do not match."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    axis = dim % first.ndim
    for tensor in tensors:
        if tensor.dtype is not first.dtype or _with(tensor.shape, axis, 0) != _with(first.shape, axis, 0):
            raise CheckpointError(
                f"tensors of {first.dtype} {list(first.shape)} and {tensor.dtype} {list(tensor.shape)} cannot be "
                "joined: their dtypes or shapes do not match"
            )
    shape = _with(first.shape, axis, sum(tensor.shape[axis] for tensor in tensors))
    widths = [prod(tensor.shape[axis:]) for tensor in tensors]
    return LazyTensor(first.dtype, shape, partial(_read_joined_rows, tensors, widths))


def _read_part_of_rows(whole: LazyTensor, width: int, first: int, kept: int, start: int, count: int) -> torch.Tensor:
    """Read from a tensor that consists of a part of each row of `whole`: `kept` elements, from element `first` of the
    row on. A row of `whole` has `width` elements."""
    rows = [(row * width + first + begin, end - begin) for row, begin, end in _rows(kept, start, count)]
    at, (last, its_count) = rows[0][0], rows[-1]
    length = last + its_count - at
    if length > _MAX_READ_RATIO * count:
        return torch.cat([whole.read(*row) for row in rows])
    values = whole.read(at, length)
    return torch.cat([values[begin - at : begin - at + some] for begin, some in rows])


def _read_joined_rows(tensors: Sequence[LazyTensor], widths: Sequence[int], start: int, count: int) -> torch.Tensor:
    """Read from a tensor whose rows join rows of all `tensors`, of the given widths. Reads each tensor once."""
    rows = list(_rows(sum(widths), start, count))
    by_tensor = []
    for tensor, width, end in zip(tensors, widths, accumulate(widths), strict=True):
        before = end - width  # elements of a row that come before this tensor's
        parts = [
            (row * width + min(max(first - before, 0), width), row * width + min(max(last - before, 0), width))
            for row, first, last in rows
        ]
        counts = [last - first for first, last in parts]
        by_tensor.append(torch.split(tensor.read(parts[0][0], sum(counts)), counts))
    return torch.cat([part for of_row in zip(*by_tensor, strict=True) for part in of_row])


def _rows(width: int, start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Divide [start, start + count) into rows of `width` elements: (row, first, end) for each row."""
    for row in range(start // width, (start + count - 1) // width + 1):
        yield row, max(start - row * width, 0), min(start + count - row * width, width)


def stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Like `torch.stack`. Raises CheckpointError like `cat`."""
    return cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _split(tensor: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    whole = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    return tuple(tensor.narrow(dim, end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True))


def _chunk(tensor: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


_OWN: dict[Any, Callable[..., Any]] = {
    torch.cat: cat,
    torch.stack: stack,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.squeeze: LazyTensor.squeeze,
    torch.unsqueeze: LazyTensor.unsqueeze,
}


class Deferred:
    """An operation that runs when one of its results is read. The results of the latest one of which only a part was
    read stay in RAM."""

    latest: "tuple[Deferred | None, list[torch.Tensor]]" = (None, [])

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = (function, args, kwargs)

    def on(self, values: Callable[[LazyTensor], torch.Tensor]) -> Any:
        """Run the operation with `values(lazy)` in place of each lazy tensor."""
        function, args, kwargs = tree_map_only(LazyTensor, values, self._call)
        with torch.no_grad():
            return function(*args, **kwargs)

    def read(self, result: int, start: int, count: int) -> torch.Tensor:
        """Elements of one of the results, flat."""
        if Deferred.latest[0] is not self:
            Deferred.latest = None, []
            done = self.on(LazyTensor.whole)
            results: list[torch.Tensor] = [
                each.reshape(-1) for each in (done if isinstance(done, tuple | list) else (done,))
            ]
            if len(results) == 1 and count == results[0].numel():
                return results[0]
            Deferred.latest = self, results
        return Deferred.latest[1][result][start : start + count].clone()

    @classmethod
    def forget(cls) -> None:
        """Free the results that stay in RAM."""
        Deferred.latest = None, []


def put_off(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The lazy result of an operation, which runs when the result is read. A run on the meta device gives the shape."""
    deferred = Deferred(function, args, kwargs)
    shown = deferred.on(lambda lazy: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"))
    several = isinstance(shown, tuple | list)
    if not all(isinstance(one, torch.Tensor) for one in (shown if several else [shown])):
        return shown
    lazy = [
        LazyTensor(one.dtype, one.shape, partial(deferred.read, number))
        for number, one in enumerate(shown if several else [shown])
    ]
    return tuple(lazy) if several else lazy[0]


def _with(values: Sequence[int], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
