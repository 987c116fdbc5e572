"""Partitioned activations: block inputs of which each tensor-parallel rank keeps a part (ZeRO-R, arXiv 1910.02054).

What these ranks compute with is mostly the same on each of them. Of a block that is recomputed only inputs are kept,
and each rank then keeps an equal part of their bytes in place of all; all gather the whole before they recompute.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from pagoda.errors import UsageError
from pagoda.runtime.activations.saved import AbsentStorage, Packed, SavedStorage, storage_of

_LEAST_BYTES = 4096
"""Storages with less stay whole."""
_WORD = torch.int32
_COLUMNS = 61
"""Sums by which two ranks' bytes are compared: of every so-manieth word each."""


class PartitionedStorage(AbsentStorage):
    """A storage of which this rank keeps a part."""

    __slots__ = ("_gather", "_nbytes", "_part", "_shape", "sums")

    def __init__(
        self,
        tensor: torch.Tensor,
        part: Packed,
        nbytes: int,
        sums: torch.Tensor,
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """`gather` gives every rank's part of what this rank has one of, a row each."""
        super().__init__(tensor._version)
        self._shape = tensor.shape
        self._part = part
        self._nbytes = nbytes
        self.sums = sums
        self._gather = gather

    def whole(self) -> torch.Tensor:
        """All ranks' parts. Raises UsageError where the ranks did not have the same."""
        words = self._gather(self._part()).view(-1)
        if not torch.equal(_sums(words[: self._nbytes // _WORD.itemsize]), self.sums):
            raise UsageError(
                f"Tensor-parallel ranks do not have the same tensor of shape {tuple(self._shape)} among the inputs of "
                "a block, though they had at first: leave out partition_activations=True."
            )
        return words


class Partitioner:
    """Divides what all ranks of a tensor-parallel group have alike.

    Whether they do is found out by sums over its bytes when a block first saves it, by its place among what the forward
    saves: what they do not have alike, such as parts of sequences, stays. Later, each use compares the sums with those
    of what was gathered.

    The ranks of the group run the same program, so they save and use the same tensors in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._alike: dict[tuple[int, int], bool] = {}
        """(block of the forward, place among what it saves) -> whether all ranks had the same."""
        self._block = self._saved = 0

    def begin_block(self, index: int) -> None:
        """A block of the forward starts to save its inputs."""
        self._block, self._saved = index, 0

    def partition(
        self, tensor: torch.Tensor, storage: SavedStorage, keep: Callable[[torch.Tensor], Packed]
    ) -> PartitionedStorage | None:
        """Divide the storage of a tensor; None where it stays whole. `keep` says what a graph keeps of a part."""
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
            known = PartitionedStorage(tensor, part, storage.nbytes, sums, self._gather)
            storage.replace_by(known)
        return known

    def _part(self, words: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part, as long as every rank's."""
        each = -(-words.numel() // self._group.size())
        mine = words[self._group.rank() * each :][:each]
        part = words.new_zeros(each)
        part[: mine.numel()] = mine
        return part

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's flat tensor, a row each."""
        everyone = mine.new_empty(self._group.size(), mine.numel())
        dist.all_gather(list(everyone), mine, group=self._group)
        return everyone


def _sums(words: torch.Tensor) -> torch.Tensor:
    """Sums that two different contents hardly share, int64, shape [_COLUMNS + 1]."""
    whole = words.numel() // _COLUMNS * _COLUMNS
    rest = words[whole:].sum(dtype=torch.int64).view(1)
    return torch.cat((words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64), rest))
