"""A network in memory, in place of torch.distributed: ranks are threads of one process, and messages arrive late.

Messages between two ranks keep their order within a group and a tag. Collectives are messages too: if ranks run
different ones, or with other sizes, they meet, and that is noticed.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .threads import OverError, Thread, Threads, ViolationError


class _Message(NamedTuple):
    sender: int
    what: str
    data: torch.Tensor


class _Work:
    """What a collective returns."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self, _timeout: object = None) -> None:
        self._finish()

    def is_completed(self) -> bool:
        """After an error: a rank is gone, so nothing more will arrive."""
        return True


class Group(NamedTuple):
    """Some ranks, by their place in it."""

    number: int
    ranks: tuple[int, ...]


class P2POp(NamedTuple):
    """A message to send or receive."""

    do: Any
    tensor: torch.Tensor
    group: Group
    group_peer: int


class Network:
    """In place of the module torch.distributed. A thread's rank is that of its program."""

    class Backend:
        """Names that the package compares with."""

        GLOO = "gloo"

    P2POp = P2POp

    def __init__(self, threads: Threads, size: int) -> None:
        self.threads = threads
        self.size = size
        self.gone: set[int] = set()
        """Ranks whose program has ended."""
        self._boxes: defaultdict[tuple[object, ...], list[_Message]] = defaultdict(list)
        """(group, tag, receiver) -> messages."""
        self._waiters: list[Thread] = []
        self._groups: Counter[int] = Counter()
        """By rank, the groups that it has made."""
        self._meetings: Counter[int] = Counter()
        """By rank, how often its program has met the others."""
        self._collectives: Counter[tuple[int, int]] = Counter()
        """By group and rank, its collectives."""

    @property
    def rank(self) -> int:
        return self.threads.running.rank

    def leave(self, rank: int) -> None:
        """A program has ended."""
        self.gone.add(rank)
        self.threads.wake(self._waiters)

    def get_world_size(self) -> int:
        return self.size

    def is_initialized(self) -> bool:
        return True

    def new_group(self, ranks: Sequence[int], **_: object) -> Group:
        self._groups[self.rank] += 1
        return Group(self._groups[self.rank], tuple(ranks))

    def get_group_rank(self, group: Group, rank: int) -> int:
        return group.ranks.index(rank)

    def meet(self) -> None:
        """A collective of the program, of which the package knows nothing."""
        self._meetings[self.rank] += 1
        self.threads.wake(self._waiters)
        while min(self._meetings[rank] for rank in range(self.size)) < self._meetings[self.rank]:
            self.threads.block(self._waiters)

    # --- messages ---

    def _put(self, group: Group, tag: object, receiver: int, what: str, tensor: torch.Tensor) -> None:
        data = tensor.detach().reshape(-1).view(torch.uint8).clone()
        self._boxes[group.number, tag, receiver].append(_Message(self.rank, what, data))
        self.threads.wake(self._waiters)
        self.threads.pause()

    def _take(self, group: Group, tag: object, sender: int | None, what: str, into: torch.Tensor) -> int:
        """Receive the next message of a rank, or of any. Returns its sender."""
        box = self._boxes[group.number, tag, self.rank]
        self.threads.pause()
        while True:
            for place, message in enumerate(box):
                if sender is None or message.sender == sender:
                    del box[place]
                    target = into.view(-1).view(torch.uint8)
                    if message.what != what or message.data.numel() != target.numel():
                        wrong = (
                            f"rank {message.sender} sends {message.data.numel()} bytes of {message.what}, and rank "
                            f"{self.rank} expects {target.numel()} of {what}"
                        )
                        self.threads.end(ViolationError(wrong))
                        raise OverError
                    target.copy_(message.data)
                    return message.sender
            if sender in self.gone or (sender is None and len(self.gone) >= self.size - 1):
                raise RuntimeError(f"rank {sender} is gone")
            self.threads.block(self._waiters)

    def recv(self, into: torch.Tensor, src: None, group: Group, tag: int) -> int:
        return self._take(group, tag, None, "a message", into)

    def isend(self, tensor: torch.Tensor, group: Group, tag: int, group_dst: int) -> _Work:
        self._put(group, tag, group.ranks[group_dst], "a message", tensor)
        return _Work(lambda: None)

    def irecv(self, into: torch.Tensor, group: Group, tag: int, group_src: int) -> _Work:
        return _Work(lambda: void(self._take(group, tag, group.ranks[group_src], "a message", into)))

    def batch_isend_irecv(self, ops: Sequence[P2POp]) -> list[_Work]:
        for op in ops:
            if op.do == self.isend:
                self._put(op.group, "batch", op.group.ranks[op.group_peer], "a batch", op.tensor)
        return [
            _Work(
                lambda op=op: void(self._take(op.group, "batch", op.group.ranks[op.group_peer], "a batch", op.tensor))
            )
            for op in ops
            if op.do == self.irecv
        ]

    # --- collectives ---

    def _next(self, group: Group) -> int:
        self._collectives[group.number, self.rank] += 1
        return self._collectives[group.number, self.rank]

    def all_to_all_single(
        self,
        into: torch.Tensor,
        given: torch.Tensor,
        into_sizes: Sequence[int] | None = None,
        given_sizes: Sequence[int] | None = None,
        *,
        group: Any,
        async_op: bool,
    ) -> _Work:
        number, places = self._next(group), len(group.ranks)
        parts = given.split(list(given_sizes) if given_sizes else given.numel() // places)
        for rank, part in zip(group.ranks, parts, strict=True):
            self._put(group, number, rank, "all_to_all", part)
        arriving = into.split(list(into_sizes) if into_sizes else into.numel() // places)
        return self._taking(group, number, "all_to_all", arriving)

    def all_gather(self, into: Sequence[torch.Tensor], given: torch.Tensor, group: Group, async_op: bool) -> _Work:
        number = self._next(group)
        for rank in group.ranks:
            self._put(group, number, rank, "all_gather", given)
        return self._taking(group, number, "all_gather", into)

    def _taking(self, group: Group, number: int, what: str, arriving: Sequence[torch.Tensor]) -> _Work:
        """Receives one part from each rank."""

        def take() -> None:
            for rank, part in zip(group.ranks, arriving, strict=True):
                self._take(group, number, rank, what, part)

        return _Work(take)

    def broadcast(self, tensor: torch.Tensor, group: Group, async_op: bool, group_src: int) -> _Work:
        number, source = self._next(group), group.ranks[group_src]
        if source != self.rank:
            return _Work(lambda: void(self._take(group, number, source, "broadcast", tensor)))
        for rank in group.ranks:
            if rank != source:
                self._put(group, number, rank, "broadcast", tensor)
        return _Work(lambda: None)

    # --- how ranks that give up tell ---

    def PrefixStore(self, *_: object) -> "_Store":  # noqa: N802
        return _Store()


class _Store:
    """Of ranks that have given up: nobody has."""

    def set(self, *_: object) -> None:
        pass

    def check(self, *_: object) -> bool:
        return False


def void(_: object) -> None:
    """Nothing."""
