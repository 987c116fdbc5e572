"""The service: what one rank asks another one for, outside the order of collectives."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pagoda.distributed.transport import Transport
from pagoda.distributed.world import rank_timeout_s
from pagoda.errors import PagodaError, RankError

_EVER = timedelta(days=365)
_STOP, _CLOSED = "stop", "closed"
_CLOSE_S = 2.0
"""How long the first rank waits for the others when it closes."""

Answer = Callable[[int, int], Iterable[torch.Tensor]]
"""Given a unit and a version, the messages that make this rank's slice of it, in RAM. Raises RankError to refuse."""


class Service:
    """Every rank answers the others on a thread and in a process group of its own, whatever else goes on. So a request
    waits for nothing that the asking rank has to do.

    Requests go through a store of keys and values, where a rank can wait for the next one whoever asks; answers go from
    rank to rank.
    """

    def __init__(self, transport: Transport, answer: Answer) -> None:
        """Every rank makes one at the same point."""
        self._transport = transport
        self._answer = answer
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=rank_timeout_s()))
        host = os.environ["MASTER_ADDR"]
        first = self._store(host, 0, is_master=True) if transport.rank == 0 else None
        (port, *_) = (number for (number,) in transport.announce([first.port if first is not None else 0]))
        self._asks = first or self._store(host, port)
        self._requests = self._store(host, port)
        """For the thread, as whoever waits keeps a client to itself."""
        self._thread = threading.Thread(target=self._run, name="pagoda-service", daemon=True)
        self._thread.start()

    def ask(self, unit: int, version: int, targets: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
        """Have the slices of a unit that other ranks have, after `version` updates: `targets` are ranks and where each
        one's messages go. Only one thread asks. Raises RankError where one refuses, or is gone."""
        refusals = []
        for rank, _ in targets:
            number = self._asks.add(f"{rank}", 1)
            self._asks.set(f"{rank}/{number}", f"{self._transport.rank} {unit} {version}")
        for rank, messages in targets:
            try:
                self._receive(rank, messages)
            except RankError as error:
                refusals.append(error)  # what the others send must be taken all the same
            except RuntimeError as error:
                raise self._transport.lost(rank, error) from error
        if refusals:
            raise refusals[0]

    def close(self) -> None:
        """Answer nobody any more. Requests of other ranks have been answered, or they stop with an error."""
        with suppress(RuntimeError):
            number = self._asks.add(f"{self._transport.rank}", 1)
            self._asks.set(f"{self._transport.rank}/{number}", _STOP)
        self._thread.join()
        with suppress(RuntimeError):
            closed = self._asks.add(_CLOSED, 1)
            deadline = time.monotonic() + _CLOSE_S
            while self._transport.rank == 0 and closed < self._transport.size and time.monotonic() < deadline:
                time.sleep(0.01)  # the store is here, and torch would warn the others of its end
                closed = self._asks.add(_CLOSED, 0)

    def _store(self, host: str, port: int, is_master: bool = False) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=is_master, wait_for_workers=False, timeout=_EVER
        )

    def _receive(self, rank: int, messages: Sequence[torch.Tensor]) -> None:
        for message in messages:
            self._check(rank)
            landing = message if message.device.type == "cpu" else torch.empty_like(message, device="cpu")
            dist.recv(landing.view(torch.uint8), src=rank, group=self._group)
            if landing is not message:
                message.copy_(landing)
        self._check(rank)

    def _check(self, rank: int) -> None:
        """What a rank says before each message, and after the last: the length of its refusal, 0 for none."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, src=rank, group=self._group)
        if length:
            text = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(text, src=rank, group=self._group)
            raise RankError(text.numpy().tobytes().decode())

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it the first rank
            for number in range(1, 1 << 62):
                key = f"{self._transport.rank}/{number}"
                request = self._requests.get(key).decode()
                self._requests.delete_key(key)
                if request == _STOP:
                    return
                asking, unit, version = map(int, request.split())
                with suppress(RuntimeError):  # the rank that has asked is gone: it finds that out by itself
                    self._reply(asking, unit, version)

    def _reply(self, asking: int, unit: int, version: int) -> None:
        def send(message: torch.Tensor) -> None:
            dist.send(message.view(torch.uint8), dst=asking, group=self._group)

        fine = torch.zeros(1, dtype=torch.int64)
        try:
            for message in self._answer(unit, version):
                send(fine)
                send(message)
            send(fine)
        except (PagodaError, OSError) as error:
            text = torch.frombuffer(bytearray(str(error).encode()), dtype=torch.uint8)
            send(torch.tensor([text.numel()]))
            send(text)
