"""Partitioned activations: each tensor-parallel rank keeps a part of every block's inputs (ZeRO-R, arXiv 1910.02054).

Most inputs are the same on all these ranks. A recomputed block keeps only its inputs. Each rank keeps an equal part of
their bytes, and all ranks gather the whole before they recompute.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pagoda.autograd.activations.saved import AbsentStorage, Packed, SavedStorage, storage_of
from pagoda.errors import UsageError

_LEAST_BYTES = 4096
"""Smaller storages stay whole."""
_WORD = torch.int32
_COLUMNS = 61
"""Number of sums that compare the bytes of two ranks. Sum i covers every word whose index is i modulo this number."""


@dataclass(eq=False, slots=True)
class PartitionedStorage(AbsentStorage):
    """A storage of which this rank keeps a part."""

    _shape: torch.Size
    _part: Packed
    _nbytes: int
    sums: torch.Tensor
    _gather: Callable[[torch.Tensor], torch.Tensor]
    """Takes this rank's row and returns the rows of all ranks."""

    def whole(self) -> torch.Tensor:
        """All ranks' parts together. Raises UsageError if the ranks did not have the same bytes."""
        words = self._gather(self._part()).view(-1)
        if not torch.equal(_sums(words[: self._nbytes // _WORD.itemsize]), self.sums):
            raise UsageError(
                f"Tensor-parallel ranks do not have the same tensor of shape {tuple(self._shape)} among the inputs of "
                "a block, though they had at first: leave out partition_activations=True."
            )
        return words


class Partitioner:
    """Divides storages that all ranks of a tensor-parallel group have alike.

    When a block first saves a storage, the ranks compare sums over its bytes. The result is kept for this position in
    the forward. Storages that differ, such as parts of sequences, stay whole. Later uses compare the sums with those of
    the gathered bytes.

    The ranks of the group run the same program, so they save and use the same tensors in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._alike: dict[tuple[int, int], bool] = {}
        """(block of the forward, position among its saved storages) -> whether all ranks had the same bytes."""
        self._block = self._saved = 0

    def begin_block(self, index: int) -> None:
        """A block of the forward starts to save its inputs."""
        self._block, self._saved = index, 0

    def partition(
        self, tensor: torch.Tensor, storage: SavedStorage, keep: Callable[[torch.Tensor], Packed]
    ) -> PartitionedStorage | None:
        """Divide the storage of a tensor. Returns None if it stays whole. `keep` packs the part that this rank
        keeps."""
        place = self._block, self._saved
        self._saved += 1
        if not storage.may_leave(tensor, _LEAST_BYTES) or storage.nbytes % _WORD.itemsize:
            return None
        words = storage_of(tensor, _WORD)
        known = storage.absent(PartitionedStorage, tensor._version)
        sums = _sums(words) if known is None else known.sums
        if place not in self._alike:
            everyone = self._gather(sums)
            self._alike[place] = bool((everyone == everyone[0]).all())
        if not self._alike[place]:
            return None
        if known is None:
            part = keep(self._part(words))
            known = PartitionedStorage(tensor._version, tensor.shape, part, storage.nbytes, sums, self._gather)
            storage.replace_by(known)
        return known

    def _part(self, words: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part. All ranks' parts are equally long."""
        each = -(-words.numel() // self._group.size())
        mine = words[self._group.rank() * each :][:each]
        part = words.new_zeros(each)
        part[: mine.numel()] = mine
        return part

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        """The flat tensors of all ranks, one per row."""
        everyone = mine.new_empty(self._group.size(), mine.numel())
        dist.all_gather(list(everyone), mine, group=self._group)
        return everyone


def _sums(words: torch.Tensor) -> torch.Tensor:
    """Sums that are almost never equal for different contents: int64, shape [_COLUMNS + 1]."""
    whole = words.numel() // _COLUMNS * _COLUMNS
    rest = words[whole:].sum(dtype=torch.int64).view(1)
    return torch.cat((words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64), rest))
