"""Tensors that stay in their files: concatenated, stacked and cut without being read, then read in pieces.

transformers describes how a model's tensors lie in files by code on tensors (`torch.stack` of experts, `torch.chunk`
of a fused projection). Given lazy tensors, that same code yields lazy tensors, and nothing as large as a layer's
experts is ever in RAM. What joins and cuts blocks is exact and free; any other operation is put off until its result
is read, and then done on whole tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Protocol, Self

import numpy as np
import torch

from pagoda.checkpoint.tensors import TensorSpec
from pagoda.errors import CheckpointError

Read = Callable[[int, int], torch.Tensor]
"""Elements [start, start + count) of a stored tensor, flat."""
_CLOSE = 16
"""What is read may have so many elements for each that is wanted: part of each row, as one of several ranks has it."""


class Source(Protocol):
    """Where tensors are stored, by name."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements [start, start + count) of a tensor, flat. Raises CheckpointError where they are damaged."""


@dataclass(frozen=True)
class _Block:
    """A block of one stored tensor, and where it lies in the lazy one. Invariant: the order of axes is the same."""

    read: Read
    offset: int
    """Element of the stored tensor where it begins."""
    strides: tuple[int, ...]
    """Elements of the stored tensor from one index to the next, by axis."""
    shape: tuple[int, ...]
    origin: tuple[int, ...]
    """Its first index in the lazy tensor."""

    def narrowed(self, axis: int, start: int, stop: int) -> Self | None:
        """What lies in [start, stop) along an axis, whose origin that range becomes."""
        first = max(start, self.origin[axis])
        last = min(stop, self.origin[axis] + self.shape[axis])
        if first >= last:
            return None
        return replace(
            self,
            offset=self.offset + (first - self.origin[axis]) * self.strides[axis],
            shape=_with(self.shape, axis, last - first),
            origin=_with(self.origin, axis, first - start),
        )

    def fill(self, out: torch.Tensor, start: int, strides: tuple[int, ...]) -> None:
        """Copy what falls into `out`, elements from `start` on of the lazy tensor, whose strides are given."""
        axis = len(self.shape)
        run = 1
        while axis and (self.shape[axis - 1] == 1 or strides[axis - 1] == self.strides[axis - 1] == run):
            run *= self.shape[axis - 1]
            axis -= 1
        there, here = np.array([self.offset]), np.array([np.dot(self.origin, strides)], dtype=np.int64)
        for n, mine, its in zip(self.shape[:axis], self.strides[:axis], strides[:axis], strict=True):
            steps = np.arange(n)
            there = (there[:, None] + steps * mine).ravel()
            here = (here[:, None] + steps * its).ravel()
        stop = start + out.numel()
        wanted = slice(int(np.searchsorted(here, start - run, "right")), int(np.searchsorted(here, stop)))
        parts = []  # (first element in the lazy tensor, in the stored one, elements) of each run
        for begin, stored in zip(here[wanted].tolist(), there[wanted].tolist(), strict=True):
            first, last = max(start, begin), min(stop, begin + run)
            parts.append((first, stored + first - begin, last - first))
        read = self._reader(parts)
        for first, stored, count in parts:
            out[first - start : first - start + count] = read(stored, count)

    def _reader(self, parts: Sequence[tuple[int, int, int]]) -> Read:
        """What reads the parts of the stored tensor: one after another, or what lies between them too at once."""
        if len(parts) < 2:
            return self.read
        begin, end = parts[0][1], parts[-1][1] + parts[-1][2]
        if end - begin > _CLOSE * sum(count for _, _, count in parts):
            return self.read
        values = self.read(begin, end - begin)
        return lambda start, count: values[start - begin : start - begin + count]


class LazyTensor:
    """A tensor on the CPU whose values are read from where they are stored, piece by piece.

    Functions and methods of torch apply to it. Its values must not change while it is in use.
    """

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], blocks: Sequence[_Block]) -> None:
        self.dtype = dtype
        self.shape = torch.Size(shape)
        self._blocks = tuple(blocks)

    @classmethod
    def stored(cls, dtype: torch.dtype, shape: Sequence[int], read: Read) -> "LazyTensor":
        """A whole tensor, as it is stored."""
        return cls(dtype, shape, [_Block(read, 0, _strides(shape), tuple(shape), (0,) * len(shape))])

    @classmethod
    def all_of(cls, source: Source) -> "dict[str, LazyTensor]":
        """The tensors of a source, by name."""
        read = source.read
        return {name: cls.stored(spec.dtype, spec.shape, partial(read, name)) for name, spec in source.specs.items()}

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

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def spec(self, name: str) -> TensorSpec:
        """What a file that holds it says of it."""
        return TensorSpec(name, self.dtype, tuple(self.shape))

    def read(self, start: int, count: int) -> torch.Tensor:
        """Elements [start, start + count) of the flat tensor, as a copy. Raises IndexError beyond its end."""
        if not 0 <= start <= start + count <= self.numel():
            raise IndexError(f"elements {start} to {start + count} of a tensor of shape {list(self.shape)}")
        strides = _strides(self.shape)
        if count and len(self._blocks) == 1 and self._blocks[0].strides == strides:  # it lies together where it is
            return self._blocks[0].read(self._blocks[0].offset + start, count)
        out = torch.empty(count, dtype=self.dtype)
        if count:
            for block in self._blocks:
                block.fill(out, start, strides)
        return out

    def whole(self) -> torch.Tensor:
        """All of it, in RAM."""
        return self.read(0, self.numel()).view(self.shape)

    def narrow(self, dim: int, start: int, length: int) -> "LazyTensor":
        axis = dim % self.ndim
        blocks = [block.narrowed(axis, start, start + length) for block in self._blocks]
        return LazyTensor(self.dtype, _with(self.shape, axis, length), [block for block in blocks if block is not None])

    def squeeze(self, dim: int) -> "LazyTensor":
        axis = dim % self.ndim
        if self.shape[axis] != 1:
            return self

        def less(values: tuple[int, ...]) -> tuple[int, ...]:
            return values[:axis] + values[axis + 1 :]

        return self._reshaped(less)

    def unsqueeze(self, dim: int) -> "LazyTensor":
        axis = dim % (self.ndim + 1)
        return self._reshaped(lambda values: (*values[:axis], -1, *values[axis:]))

    def contiguous(self) -> "LazyTensor":
        return self

    def detach(self) -> "LazyTensor":
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Any other method of a tensor, put off."""
        method = getattr(torch.Tensor, name, None)
        if name.startswith("__") or not callable(method):
            raise AttributeError(f"a lazy tensor has no {name!r}")
        return lambda *args, **kwargs: _put_off(method, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        return _put_off(torch.Tensor.__getitem__, (self, index), {})

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        own = _OWN.get(function)
        return own(*args, **kwargs) if own is not None else _put_off(function, args, kwargs)

    def _reshaped(self, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> "LazyTensor":
        """With an axis of size 1 more (-1 where it comes) or less."""

        def changed(values: tuple[int, ...], new: int) -> tuple[int, ...]:
            return tuple(new if value == -1 else value for value in change(values))

        blocks = [
            replace(b, strides=changed(b.strides, 1), shape=changed(b.shape, 1), origin=changed(b.origin, 0))
            for b in self._blocks
        ]
        return LazyTensor(self.dtype, changed(tuple(self.shape), 1), blocks)


def cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """As `torch.cat`. Raises CheckpointError where dtypes or shapes do not fit."""
    first = tensors[0]
    axis = dim % first.ndim
    blocks, end = [], 0
    for tensor in tensors:
        if tensor.dtype is not first.dtype or _with(tensor.shape, axis, 0) != _with(first.shape, axis, 0):
            raise CheckpointError(
                f"tensors of {first.dtype} {list(first.shape)} and {tensor.dtype} {list(tensor.shape)} belong together "
                "in one, and do not fit"
            )
        blocks += [replace(b, origin=_with(b.origin, axis, b.origin[axis] + end)) for b in tensor._blocks]
        end += tensor.shape[axis]
    return LazyTensor(first.dtype, _with(first.shape, axis, end), blocks)


def _stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    return cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _split(tensor: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    whole = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    ends = np.cumsum(sizes).tolist()
    return tuple(tensor.narrow(dim, end - size, size) for size, end in zip(sizes, ends, strict=True))


def _chunk(tensor: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


_OWN: dict[Any, Callable[..., Any]] = {
    torch.cat: cat,
    torch.stack: _stack,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.squeeze: LazyTensor.squeeze,
    torch.unsqueeze: LazyTensor.unsqueeze,
}


class _Deferred:
    """An operation done when a result of it is read. The results of the last one done stay in RAM."""

    latest: "_Deferred | None" = None

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = (function, args, kwargs)
        self._results: list[torch.Tensor] = []

    def on(self, values: Callable[[LazyTensor], torch.Tensor]) -> Any:
        """The operation on what `values` gives for each lazy tensor."""
        function, args, kwargs = self._call
        with torch.no_grad():
            return function(*_with_values(args, values), **_with_values(kwargs, values))

    def read(self, result: int, start: int, count: int) -> torch.Tensor:
        """Elements of one of its results, flat."""
        if not self._results:
            self._forget_latest()
            done = self.on(LazyTensor.whole)
            self._forget_latest()  # an operation that this one needed
            _Deferred.latest = self
            self._results = [r.reshape(-1) for r in (done if isinstance(done, tuple | list) else (done,))]
        return self._results[result][start : start + count].clone()

    @staticmethod
    def _forget_latest() -> None:
        if _Deferred.latest is not None:
            _Deferred.latest._results = []
            _Deferred.latest = None


def _put_off(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation, which is only done when that is read; its shape is known by doing it on meta."""
    deferred = _Deferred(function, args, kwargs)
    shown = deferred.on(lambda lazy: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"))
    several = isinstance(shown, tuple | list)
    if not all(isinstance(one, torch.Tensor) for one in (shown if several else [shown])):
        return shown

    def lazy(number: int, one: torch.Tensor) -> LazyTensor:
        return LazyTensor.stored(one.dtype, one.shape, lambda start, count: deferred.read(number, start, count))

    return tuple(lazy(number, one) for number, one in enumerate(shown)) if several else lazy(0, shown)


def _with_values(item: Any, values: Callable[[LazyTensor], torch.Tensor]) -> Any:
    if isinstance(item, LazyTensor):
        return values(item)
    if isinstance(item, tuple | list):
        return type(item)(_with_values(part, values) for part in item) if type(item) in (tuple, list) else item
    if isinstance(item, dict):
        return {key: _with_values(part, values) for key, part in item.items()}
    return item


def _with(values: Sequence[int], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next, by axis, of a contiguous tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
