"""The transport: communication between ranks over process groups of torch.distributed. It does not sum anything."""

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from pagoda.errors import RankError
from pagoda.mesh.world import World, rank_timeout_s

T = TypeVar("T")

_SECONDS_TO_DIE = 2.0
"""Seconds for which a process may seem alive after its connections have closed."""
_SECONDS_TO_LOOK = 1.0
"""Seconds after which a rank that waits looks whether the others are still alive."""
_LENGTH_BYTES, _SHORT_BYTES = 8, 504
"""The sizes of an announcement's length field and of its data in the first message. The rest of a longer one
follows."""

Parcel = tuple[int, torch.Tensor]
"""A rank, and a contiguous tensor to send to it or receive from it."""


def new_groups(world: World, parts: Iterable[Sequence[int]], **settings: Any) -> list[Any]:
    """A process group for each of `parts`, which are sequences of ranks of the world.

    Every process of torchrun must call it at the same point with the same parts of its own world, because torch
    requires that all processes create all groups.
    """
    parts, reach = list(parts), world.size * world.apart
    found: list[Any] = []
    for block in range(0, dist.get_world_size() if parts else 0, reach):
        for first in range(block, block + world.apart):
            numbers = ([first + rank * world.apart for rank in ranks] for ranks in parts)
            made = [dist.new_group(each, **settings) for each in numbers]
            found = made if first == world.first else found
    return found


class Transport:
    """Communication with the ranks of a world, for one thread at a time. Bytes are sent unchanged, whatever their
    dtype.

    Every method raises RankError if another rank is gone, or silent for longer than the timeout.
    """

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self.size = world.size
        self.world = world
        (self._group,) = new_groups(world, [range(world.size)], timeout=timedelta(seconds=rank_timeout_s()))
        self.broken = False
        """Whether a rank could not be reached."""
        self._processes: list[tuple[str, int]] = []
        """Every rank's host and process id, once known."""
        self._processes = self.announce((_host(), os.getpid()))

    def connect(self, device: torch.device) -> None:
        """Prepare to send tensors on `device`. Every rank must call it.

        NCCL connects a group when all of its ranks first use it together. Most of the later communication is between
        some ranks.
        """
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
            torch.cuda.current_stream(device).synchronize()

    def announce(self, value: T) -> list[T]:
        """Every rank's value, by rank. Values must be picklable."""
        data = pickle.dumps(value)
        head = (len(data).to_bytes(_LENGTH_BYTES) + data[:_SHORT_BYTES]).ljust(_LENGTH_BYTES + _SHORT_BYTES, b"\0")
        given = torch.frombuffer(bytearray(head * self.size), dtype=torch.uint8)
        found = torch.empty_like(given)
        # gloo's all-to-all takes less than half the time of its all-gather, and a third of the time of sends.
        self.run(lambda: [dist.all_to_all_single(found, given, group=self._group, async_op=True)])
        by_rank = [row.numpy().tobytes() for row in found.view(self.size, -1)]
        longest = max(int.from_bytes(row[:_LENGTH_BYTES]) for row in by_rank)
        if longest > _SHORT_BYTES:
            tail = torch.frombuffer(bytearray(data[_SHORT_BYTES:].ljust(longest - _SHORT_BYTES)), dtype=torch.uint8)
            tails = [torch.empty_like(tail) for _ in by_rank]
            self.run(lambda: [dist.all_gather(tails, tail, group=self._group, async_op=True)])
            by_rank = [row + rest.numpy().tobytes() for row, rest in zip(by_rank, tails, strict=True)]
        return [pickle.loads(row[_LENGTH_BYTES:]) for row in by_rank]

    def trade(self, sends: Iterable[Parcel], receives: Iterable[Parcel]) -> None:
        """Send and receive tensors. Between two ranks they keep the given order. Returns when all have arrived."""
        parcels: list[tuple[int, Any, torch.Tensor]] = [
            (rank, dist.irecv, tensor) for rank, tensor in receives if tensor.numel()
        ]
        parcels += [(rank, dist.isend, tensor) for rank, tensor in sends if tensor.numel()]

        def travel() -> list[Any]:
            ops = [dist.P2POp(do, _raw(tensor), group=self._group, group_peer=to) for to, do, tensor in parcels]
            for work in dist.batch_isend_irecv(ops):  # NCCL combines them into one
                work.wait()  # gloo closes the connection when this stops waiting, so `run` cannot look in between
            return []

        if parcels:
            self.run(travel, parcels[0][2])

    def run(self, begin: Callable[[], Iterable[Any]], tensor: torch.Tensor | None = None) -> None:
        """Run a collective of all ranks or some. Returns when it has ended. `begin` begins it and returns what to wait
        for. `tensor` is one of its tensors."""
        try:
            if tensor is None or not tensor.is_cuda:
                for work in begin():
                    self._await(work)
                return
            for work in begin():  # without a limit, after which NCCL would end the whole group
                work.wait()
            torch.cuda.current_stream(tensor.device).synchronize()  # so far, only the stream waits for it
        except RuntimeError as error:
            raise self.lost(None, error) from error

    def _await(self, work: Any) -> None:
        """Wait for a part of a collective in RAM, and look in between whether the other ranks still live: on a busy
        machine, gloo was seen to wait for a rank that had ended, once in 60 times."""
        gone: list[int] = []
        while True:
            try:
                work.wait(timedelta(seconds=_SECONDS_TO_LOOK))
                return
            except RuntimeError:
                if work.is_completed():
                    break  # it has failed, or the look ran out of time just before it ended
                if gone:
                    raise
            gone = self._dead()  # what a rank sent before it ended may still arrive
        work.wait()

    def _dead(self) -> list[int]:
        """The ranks of this host whose processes have ended."""
        return [r for r, (host, number) in enumerate(self._processes) if host == _host() and not lives(number)]

    def lost(self, rank: int | None, error: RuntimeError) -> RankError:
        """The error to raise after a rank could not be reached. `rank` is None if it is not known which one.

        The error names the ranks whose processes on this host have ended. If there are none, it names `rank`; without
        `rank`, it names those that have not reported, as this rank does, that they give up.
        """
        self.broken, me = True, self.world.global_rank(self.rank)
        answers = self._ask_who_is_silent()
        deadline = time.monotonic() + _SECONDS_TO_DIE
        while time.monotonic() < deadline:
            if dead := self._dead():
                return RankError(f"Rank {self._names(dead)} has ended, so rank {me} stops.")
            time.sleep(0.05)
        missing = [rank] if rank is not None else [other for answer in answers for other in answer]
        where = os.environ.get("MASTER_ADDR", "rank 0's node")
        store = f" Nor does torch's store on {where} answer." if not answers else ""
        return RankError(
            f"{f'Rank {self._names(missing)}' if missing else 'A rank'} is gone, or has not answered rank {me} for "
            f"{rank_timeout_s():g} s (set PAGODA_RANK_TIMEOUT for more). If it waits in a collective of its "
            f"program, let all ranks call the model (in stage 3, also to evaluate) and backward equally often "
            f"before it.{store} {error}"
        )

    def _ask_who_is_silent(self) -> list[list[int]]:
        """Report to torch's store that this rank gives up. A thread soon adds to the returned list which ranks have not
        done so. If the list stays empty, the store does not answer: it may be gone with its node."""
        answers: list[list[int]] = []

        def ask() -> None:
            with suppress(RuntimeError):
                store = dist.PrefixStore("pagoda/given-up", _get_default_store())  # type: ignore[attr-defined]
                store.set(str(self.world.global_rank(self.rank)), "")
                time.sleep(_SECONDS_TO_DIE / 2)
                everyone = [(rank, str(self.world.global_rank(rank))) for rank in range(self.size)]
                answers.append([rank for rank, key in everyone if not store.check([key])])

        threading.Thread(target=ask, name="pagoda-given-up", daemon=True).start()  # the store may never answer
        return answers

    def _names(self, ranks: Iterable[int]) -> str:
        processes = self._processes or [("", 0)] * self.size
        return ", ".join(
            f"{rank} (process {process} on {host.partition('/')[0]})" if host else str(rank)
            for rank, (host, process) in ((self.world.global_rank(rank), processes[rank]) for rank in ranks)
        )


class Group:
    """A subset of the ranks, which run the same collectives in the same order, one at a time."""

    def __init__(self, transport: Transport, members: Callable[[int], tuple[int, ...]]) -> None:
        """`members` returns the ranks of the group of a given rank, in order. Every rank must call this at the same
        point, with equal functions."""
        self.ranks = members(transport.rank)
        self.place = self.ranks.index(transport.rank)
        """This rank's index in `ranks`."""
        self._transport = transport
        self.messages = 0
        """The number of collectives so far."""
        self.sent_bytes = 0
        """Bytes that this rank has sent, counted once for each receiver."""
        parts = sorted({ranks for rank in range(transport.size) if len(ranks := members(rank)) > 1})
        groups = new_groups(transport.world, parts, timeout=timedelta(seconds=rank_timeout_s()))
        self._group = dict(zip(parts, groups, strict=True)).get(self.ranks)

    def gather(self, whole: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Complete `whole`, of which the rank at each place has the elements [start, stop) of its span.

        On a GPU, equal slices use one all-gather, in place. A short last slice is padded if `whole` is long enough, so
        elements after it may change. Otherwise each rank's slice uses a broadcast, because on a CPU, gloo would copy an
        all-gather through a separate buffer.
        """
        if len(self.ranks) == 1 or not any(stop - start for start, stop in spans):
            return
        raw, size = _raw(whole), whole.element_size()
        (first, stop), mine = spans[0], spans[self.place]
        each = stop - first
        starts = [min(first + place * each, spans[-1][1]) for place in range(len(spans))]
        padded = raw[first * size : (first + len(spans) * each) * size]
        equal = starts == [start for start, _ in spans] and len(padded) == len(spans) * each * size

        def broadcasts() -> list[Any]:
            parts = [raw[start * size : stop * size] for start, stop in spans]
            return [
                dist.broadcast(part, group=self._group, async_op=True, group_src=place)
                for place, part in enumerate(parts)
                if part.numel()
            ]

        def all_gather() -> list[Any]:
            given = padded.view(len(spans), -1)[self.place]
            return [dist.all_gather_into_tensor(padded, given, group=self._group, async_op=True)]

        self._count((mine[1] - mine[0]) * size * (len(spans) - 1))
        self._transport.run(all_gather if whole.is_cuda and equal and each else broadcasts, whole)

    def exchange(self, arriving: torch.Tensor, given: torch.Tensor, given_sizes: Sequence[int]) -> None:
        """Send the rank at each place its part of `given`, uint8, with the size in bytes in `given_sizes`. Receive from
        each rank the number of bytes that this rank has for itself, into `arriving`, uint8 [places, bytes]."""
        mine = arriving.shape[1]
        if len(self.ranks) == 1:
            arriving.copy_(given.view(1, -1))
            return
        self._count(given.numel() - given_sizes[self.place])
        equal = all(size == mine for size in given_sizes)
        sizes = (None, None) if equal else ([mine] * len(self.ranks), [*given_sizes])
        self._transport.run(
            lambda: [dist.all_to_all_single(arriving.view(-1), given, *sizes, group=self._group, async_op=True)],  # type: ignore[misc]
            given,
        )

    def _count(self, sent: int) -> None:
        self.messages += 1
        self.sent_bytes += sent


def lives(process: int) -> bool:
    """Whether a process of this host is running, as far as one can see. A zombie is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # for example, this process has too many open files
        return True


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _host() -> str:
    """A name that is equal for processes that can see each other's process ids."""
    return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"
