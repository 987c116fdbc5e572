"""The transport: tensors between ranks, and small announcements to all, over torch.distributed."""

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pagoda.distributed.world import World, rank_timeout_s
from pagoda.errors import RankError

_SECONDS_TO_DIE = 2.0
"""How long a process may look alive after its connections have ended."""

Parcel = tuple[int, torch.Tensor]
"""A rank, and a contiguous tensor for it or from it."""


class Transport:
    """A process group of all ranks for one thread at a time. Bytes are sent as they are, whatever their dtype.

    Point to point, every rank sends each other one what that one needs, so gathering slices or scattering them costs
    what a ring would, takes no buffers beside the target, and adds nothing up: the order of sums is the caller's.

    Raises RankError, naming the rank, where another one is gone, or silent for longer than the timeout.
    """

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self.size = world.size
        self._group = dist.new_group(timeout=timedelta(seconds=rank_timeout_s()))
        self.broken = False
        """Whether a rank could not be reached."""
        self._processes: list[tuple[str, int]] = []
        """Every rank's host and process number, once known."""
        said = self.announce_bytes(f"{_host()} {os.getpid()}".encode())
        self._processes = [(host, int(number)) for host, number in (text.decode().split() for text in said)]

    def connect(self, device: torch.device) -> None:
        """Let tensors on `device` travel too; every rank has to call it.

        NCCL connects a group when it is first used, which all of its ranks must do together, and what follows here is
        often between some of them.
        """
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
            torch.cuda.current_stream(device).synchronize()

    def announce(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, as many from each, by rank."""
        everyone = torch.empty(self.size, len(numbers), dtype=torch.int64)
        everyone[self.rank] = torch.tensor(numbers, dtype=torch.int64)
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.trade(((rank, everyone[self.rank]) for rank in others), ((rank, everyone[rank]) for rank in others))
        by_rank: list[list[int]] = everyone.tolist()
        return by_rank

    def announce_floats(self, numbers: Sequence[float]) -> list[float]:
        """Every rank's numbers, of any count, in the order of ranks."""
        said = self.announce_bytes(struct.pack(f"{len(numbers)}d", *numbers))
        return [value for data in said for (value,) in struct.iter_unpack("d", data)]

    def announce_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of any length, by rank."""
        lengths = [length for (length,) in self.announce([len(data)])]
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        by_rank = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        by_rank[self.rank] = mine
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.trade(((rank, mine) for rank in others), ((rank, by_rank[rank]) for rank in others))
        return [row.numpy().tobytes() for row in by_rank]

    def trade(self, sends: Iterable[Parcel], receives: Iterable[Parcel]) -> None:
        """Send and receive tensors; between two ranks in the order given. Returns when all have arrived."""
        self.start(sends, receives)()

    def start(self, sends: Iterable[Parcel], receives: Iterable[Parcel]) -> Callable[[], None]:
        """Begin to send and receive tensors; between two ranks in the order in which that is asked for. What it returns
        is to be called once, and returns when all have arrived."""
        parcels: list[tuple[int, Any, torch.Tensor]] = [
            (rank, dist.irecv, tensor) for rank, tensor in receives if tensor.numel()
        ]
        parcels += [(rank, dist.isend, tensor) for rank, tensor in sends if tensor.numel()]
        if not parcels:
            return lambda: None
        try:
            ops = [dist.P2POp(do, _raw(tensor), group=self._group, group_peer=to) for to, do, tensor in parcels]
            works = dist.batch_isend_irecv(ops)  # one for all, where NCCL makes them one
        except RuntimeError as error:
            raise self.lost(parcels[0][0], error) from error

        def wait() -> None:
            waited = 0
            try:
                for work in works:
                    work.wait()
                    waited += 1
                if parcels[0][2].is_cuda:  # what has been waited for so far is the stream's queue
                    torch.cuda.current_stream(parcels[0][2].device).synchronize()
            except RuntimeError as error:
                raise self.lost(parcels[min(waited, len(parcels) - 1)][0], error) from error

        return wait

    def lost(self, rank: int | None, error: RuntimeError) -> RankError:
        """The error of a rank that could not be reached, one of all if it is None: one that has died, if one has on
        this host."""
        self.broken = True
        deadline = time.monotonic() + _SECONDS_TO_DIE
        while time.monotonic() < deadline:
            dead = [r for r, (host, number) in enumerate(self._processes) if host == _host() and not _lives(number)]
            if dead:
                names = ", ".join(f"{r} (process {self._processes[r][1]})" for r in dead)
                return RankError(f"Rank {names} has ended, so rank {self.rank} stops.")
            time.sleep(0.05)
        who = "A rank" if rank is None else f"Rank {rank}"
        if rank is not None and self._processes:
            who += f" on {self._processes[rank][0].partition('/')[0]}"
        return RankError(
            f"{who} is gone, or has not answered rank {self.rank} for {rank_timeout_s():g} s (set PAGODA_RANK_TIMEOUT "
            f"for more): {error}"
        )


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _host() -> str:
    """What processes that see each other's numbers have in common."""
    return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"


def _lives(process: int) -> bool:
    """Whether a process of this host runs: one that has died and nobody has asked about does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
