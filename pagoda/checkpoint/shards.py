"""Shards in checkpoints: equal parts of a tensor along one dimension, read out of the whole, and the whole of them."""

from collections.abc import Callable, Sequence

import torch

from pagoda.checkpoint.tensors import TensorSpec
from pagoda.plan.units import TensorShard

Read = Callable[[int, int], torch.Tensor]
"""Elements [start, start + count) of a tensor, flat."""


def read_part(whole: Read, shard: TensorShard, index: int, start: int, count: int) -> torch.Tensor:
    """Elements [start, start + count) of part number `index`, flat.

    Where they lie in several rows of the whole, these rows are read; in one row, only they are.
    """
    first, last = start // shard.width, -(-(start + count) // shard.width)
    begin = index * shard.width
    if last - first <= 1:
        return whole(first * shard.row + begin + start - first * shard.width, count)
    rows = whole(first * shard.row, (last - first) * shard.row).view(-1, shard.row)
    at = start - first * shard.width
    return rows[:, begin : begin + shard.width].reshape(-1)[at : at + count]


def read_whole(parts: Sequence[Read], shard: TensorShard, start: int, count: int) -> torch.Tensor:
    """Elements [start, start + count) of the whole, flat, of all its parts in order."""
    first, last = start // shard.row, -(-(start + count) // shard.row)
    begin = start - first * shard.row
    if last - first > 1:
        rows = [read(first * shard.width, (last - first) * shard.width).view(-1, shard.width) for read in parts]
        return torch.cat(rows, dim=1).reshape(-1)[begin : begin + count]
    found = []
    for index, read in enumerate(parts):
        low, high = max(begin, index * shard.width), min(begin + count, (index + 1) * shard.width)
        if low < high:
            found.append(read(first * shard.width + low - index * shard.width, high - low))
    return torch.cat(found)


class JoinedShards:
    """A parameter of which tensor-parallel ranks have stored a part each, whole."""

    def __init__(self, name: str, shard: TensorShard, dtype: torch.dtype, parts: Sequence[Read]) -> None:
        self.specs = {name: TensorSpec(name, dtype, shard.shape)}
        self._shard = shard
        self._parts = parts

    def read(self, _name: str, start: int, count: int) -> torch.Tensor:
        """Elements [start, start + count), flat. Raises CheckpointError where they are damaged."""
        return read_whole(self._parts, self._shard, start, count)

    def close(self) -> None:
        """The parts' sources are closed by themselves."""
