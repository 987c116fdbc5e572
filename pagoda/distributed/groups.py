"""Groups: ranks that run plain collectives of torch.distributed together."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pagoda.distributed.transport import Transport
from pagoda.distributed.world import rank_timeout_s

Members = Callable[[int], tuple[int, ...]]
"""The ranks of the group that a rank is in, in order."""


class Group:
    """Ranks that run the same collectives in the same order, one at a time. Bytes move as they are, whatever their
    dtype, and nothing is added up: the order of sums is the caller's.

    Every method raises RankError where another rank is gone, or silent for longer than the timeout.
    """

    def __init__(self, transport: Transport, members: Members) -> None:
        """Every rank of the world calls it at the same point, with functions that agree."""
        self.ranks = members(transport.rank)
        self.place = self.ranks.index(transport.rank)
        """This rank's among `ranks`."""
        self._transport = transport
        self.messages = 0
        """Collectives so far."""
        self.sent_bytes = 0
        """What this rank had for the others, counted once for each of those that got it."""
        for ranks in sorted({members(rank) for rank in range(transport.size)}):
            if len(ranks) == 1:
                continue
            group: Any = dist.new_group(list(ranks), timeout=timedelta(seconds=rank_timeout_s()))
            if ranks == self.ranks:
                self._group = group

    def gather(self, whole: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Complete `whole`, of which each rank has the elements [start, stop) that `spans` says, by place.

        Equal slices go as one all-gather, in place. A short last slice is padded where `whole` goes on behind it: what
        lies there may change. gloo would pass an all-gather through a buffer of its own, so on a CPU, as where slices
        are of other sizes, each rank's goes as a broadcast.
        """
        if not any(stop - start for start, stop in spans):
            return
        raw, size = whole.view(torch.uint8), whole.element_size()
        (first, stop), mine = spans[0], spans[self.place]
        each = stop - first
        starts = [min(first + place * each, spans[-1][1]) for place in range(len(spans))]
        padded = raw[first * size : (first + len(spans) * each) * size]
        equal = starts == [start for start, _ in spans] and len(padded) == len(spans) * each * size
        self._count((mine[1] - mine[0]) * size * (len(spans) - 1))
        if whole.is_cuda and equal and each:
            row = padded.view(len(spans), -1)[self.place]
            self._run(lambda: dist.all_gather_into_tensor(padded, row, group=self._group), whole)
            return

        def broadcasts() -> None:
            parts = [
                (rank, raw[start * size : stop * size]) for rank, (start, stop) in zip(self.ranks, spans, strict=True)
            ]
            works = [
                dist.broadcast(part, src=rank, group=self._group, async_op=True) for rank, part in parts if part.numel()
            ]
            for work in works:
                work.wait()

        self._run(broadcasts, whole)

    def gather_rows(self, rows: torch.Tensor) -> None:
        """Complete `rows`, shape [places, elements], of which each rank has the one at its place."""
        each = rows.shape[1]
        self.gather(rows.view(-1), [(place * each, (place + 1) * each) for place in range(len(rows))])

    def exchange(self, arriving: torch.Tensor, given: torch.Tensor) -> None:
        """Give the rank at each place its row of `given`, and get one row from each; both are uint8 [places, bytes]."""
        if len(self.ranks) == 1:
            arriving.copy_(given)
        self._count(given.numel() - given.shape[1])
        self._run(lambda: dist.all_to_all_single(arriving, given, group=self._group), given)

    def collect(self, place: int, given: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Give the rank at a place `given`, uint8 [bytes]; `rows`, [places, bytes], are for what it gets there."""
        to_me = place == self.place
        self._count(0 if to_me else given.numel())
        into = list(rows) if rows is not None and to_me else None
        self._run(lambda: dist.gather(given, into, dst=self.ranks[place], group=self._group), given)

    def hand_out(self, place: int, given: torch.Tensor) -> None:
        """Have what the rank at a place has, uint8 [bytes], on all."""
        self._count(given.numel() * (len(self.ranks) - 1) if place == self.place else 0)
        self._run(lambda: dist.broadcast(given, src=self.ranks[place], group=self._group), given)

    def _count(self, sent: int) -> None:
        self.messages += 1
        self.sent_bytes += sent

    def _run(self, collective: Callable[[], object], tensor: torch.Tensor) -> None:
        """Run a collective; returns when it has ended."""
        if len(self.ranks) == 1:
            return
        try:
            collective()
            if tensor.is_cuda:  # what has been waited for so far is the stream's queue
                torch.cuda.current_stream(tensor.device).synchronize()
        except RuntimeError as error:
            raise self._transport.lost(None, error) from error
