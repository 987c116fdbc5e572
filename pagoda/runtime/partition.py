"""Partitioned activations: block inputs of which each tensor-parallel rank keeps a part (ZeRO-R, arXiv 1910.02054).

What these ranks compute with is mostly the same on each of them. Of a block that is recomputed only inputs are kept,
and each rank then keeps an equal part of their bytes in place of all; all gather the whole before they recompute.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pagoda.errors import UsageError
from pagoda.runtime.offload import modified
from pagoda.runtime.saved import AbsentTensor, SavedStorage

LEAST_BYTES = 4096
"""Storages with less stay whole."""
_WORD = torch.int32
_COLUMNS = 61
"""Sums by which two ranks' bytes are compared: of every so-manieth word each."""
_MOST_OF_STORAGE = 8
"""A tensor that is less than one in so many bytes of its storage stays: keeping it would keep all of that."""


class PartitionedStorage:
    """This rank's part of a storage's bytes, as a graph keeps it."""

    __slots__ = ("__weakref__", "kept", "nbytes", "sums", "version")

    def __init__(self, kept: Any, nbytes: int, sums: torch.Tensor, version: int) -> None:
        self.kept = kept
        """What `Packing` keeps of it."""
        self.nbytes = nbytes
        self.sums = sums
        self.version = version


class PartitionedTensor(AbsentTensor):
    """What a graph keeps in place of a tensor whose storage was partitioned."""

    __slots__ = ("storage",)

    def __init__(self, tensor: torch.Tensor, storage: PartitionedStorage, position: int) -> None:
        super().__init__(tensor, position)
        self.storage = storage


class Partitioner:
    """Divides what all ranks of a tensor-parallel group have alike, and makes it whole again.

    Whether they do is found out by sums over its bytes when a block first saves it, by its place among what the forward
    saves: what they do not have alike, such as parts of sequences, stays. Later, each use compares the sums with those
    of what was gathered.

    The ranks of the group run the same program, so they save and use the same tensors in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = group.size()
        self._index = group.rank()
        self._alike: dict[tuple[int, int], bool] = {}
        """(block of the forward, place among what it saves) -> whether all ranks had the same."""
        self._place: tuple[int, int] | None = None

    def begin_block(self, index: int) -> None:
        """A block of the forward starts to save its inputs."""
        self._place = index, 0

    def end_block(self) -> None:
        """What is saved from now on is not partitioned."""
        self._place = None

    def partition(
        self, tensor: torch.Tensor, storage: SavedStorage, keep: Callable[[torch.Tensor], Any], position: int
    ) -> PartitionedTensor | None:
        """What a graph keeps in place of a tensor; None where it stays whole. `keep` says what it keeps of a part."""
        if self._place is None:
            return None
        place, self._place = self._place, (self._place[0], self._place[1] + 1)
        if storage.nbytes < LEAST_BYTES or storage.nbytes % _WORD.itemsize:
            return None
        if tensor.nbytes * _MOST_OF_STORAGE < storage.nbytes or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.is_leaf and tensor.requires_grad:
            return None  # the user's: it lives on
        words = _words(tensor, storage.nbytes)
        known: PartitionedStorage | None = storage.part() if isinstance(storage.part, weakref.ref) else None
        if known is not None and known.version != tensor._version:
            known = None
        sums = _sums(words) if known is None else known.sums
        if place not in self._alike:
            self._alike[place] = self._same(sums)
        if not self._alike[place]:
            return None
        if known is None:
            known = PartitionedStorage(keep(self._part(words)), storage.nbytes, sums, tensor._version)
            storage.part = weakref.ref(known)
        return PartitionedTensor(tensor, known, position)

    def whole(self, packed: PartitionedTensor, part: torch.Tensor) -> torch.Tensor:
        """The tensor, of all ranks' parts. Raises UsageError where they did not have the same, RuntimeError where the
        tensor was changed since."""
        if packed.modified:
            raise RuntimeError(modified(packed.shape, packed.version))
        words = self._gathered(part).view(-1)
        count = packed.storage.nbytes // _WORD.itemsize
        if not torch.equal(_sums(words[:count]), packed.storage.sums):
            raise UsageError(
                f"Tensor-parallel ranks do not have the same tensor of shape {tuple(packed.shape)} among the inputs of "
                "a block, though they had at first: leave out wrap(partition_activations=True)."
            )
        empty = torch.empty(0, dtype=packed.dtype, device=words.device)
        return empty.set_(words.untyped_storage(), packed.offset, packed.shape, packed.stride)

    def _part(self, words: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part, as long as every rank's."""
        each = -(-words.numel() // self._ranks)
        mine = words[self._index * each : (self._index + 1) * each]
        part = words.new_zeros(each)
        part[: mine.numel()] = mine
        return part

    def _same(self, sums: torch.Tensor) -> bool:
        """Whether all ranks have the same sums."""
        everyone = self._gathered(sums)
        return bool((everyone == everyone[0]).all())

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's flat tensor, a row each."""
        everyone = mine.new_empty(self._ranks, mine.numel())
        dist.all_gather(list(everyone), mine, group=self._group)
        return everyone


def _words(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """All of a tensor's storage, flat."""
    with torch.no_grad():
        empty = torch.empty(0, dtype=_WORD, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), 0, (nbytes // _WORD.itemsize,), (1,))


def _sums(words: torch.Tensor) -> torch.Tensor:
    """Sums that two different contents hardly share, int64, shape [_COLUMNS + 1]."""
    whole = words.numel() // _COLUMNS * _COLUMNS
    rest = words[whole:].sum(dtype=torch.int64).view(1)
    return torch.cat((words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64), rest))
