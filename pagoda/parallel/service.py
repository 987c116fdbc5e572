"""The service: what one rank asks another one for, outside the order of collectives."""

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import torch

from pagoda.errors import RankError
from pagoda.parallel.wire import Wire
from pagoda.parallel.world import World, rank_timeout_s

_REQUEST = struct.Struct("<qq")
_MORE, _END, _REFUSED = b"\0", b"\1", b"\2"
_TOKEN_BYTES = 16

Answer = Callable[[int, int], Iterable[torch.Tensor]]
"""Given a unit and a version, the messages that make this rank's slice of it, in RAM. Raises RankError to refuse."""


class Service:
    """Every rank listens, and a thread of its own answers each rank that asks, whatever else goes on. So a request
    waits for nothing that the asking rank has to do."""

    def __init__(self, wire: Wire, world: World, answer: Answer) -> None:
        """Every rank makes one at the same point."""
        self._wire = wire
        self._answer = answer
        address = _address(world)
        self._listener = socket.create_server((address if world.nodes == 1 else "", 0))
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        mine = f"{address} {self._listener.getsockname()[1]} {self._token.hex()}"
        self._addresses = [said.decode().split() for said in wire.announce_bytes(mine.encode())]
        self._asked: dict[int, socket.socket] = {}
        """rank -> the connection on which this rank asks it."""
        self._open: list[socket.socket] = []
        """Connections on which others ask this one."""
        self._threads = [threading.Thread(target=self._accept, name="pagoda-service", daemon=True)]
        self._threads[0].start()

    def ask(self, unit: int, version: int, targets: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
        """Have the slices of a unit that other ranks have: `targets` are ranks and where each one's messages go. Only
        one thread asks. Raises RankError where one refuses, or is gone."""
        for rank, _ in targets:
            self._call(rank, lambda rank=rank: self._connection(rank).sendall(_REQUEST.pack(unit, version)))  # type: ignore[misc]
        for rank, messages in targets:
            self._call(rank, lambda rank=rank, messages=messages: self._receive(self._asked[rank], messages))  # type: ignore[misc]

    def close(self) -> None:
        """Answer nobody any more, and join the threads."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in (*self._asked.values(), *self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in (*self._asked.values(), *self._open):
            connection.close()

    def _call(self, rank: int, do: Callable[[], None]) -> None:
        try:
            do()
        except OSError as error:
            raise self._wire.lost(rank, error) from error

    def _connection(self, rank: int) -> socket.socket:
        if rank not in self._asked:
            host, port, token = self._addresses[rank]
            connection = socket.create_connection((host, int(port)), rank_timeout_s())
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(bytes.fromhex(token))
            self._asked[rank] = connection
        return self._asked[rank]

    def _receive(self, connection: socket.socket, messages: Sequence[torch.Tensor]) -> None:
        for message in messages:
            self._check(connection, _MORE)
            landing = message if message.device.type == "cpu" else torch.empty_like(message, device="cpu")
            _receive_into(connection, _bytes(landing))
            if landing is not message:
                message.copy_(landing)
        self._check(connection, _END)

    def _check(self, connection: socket.socket, expected: bytes) -> None:
        said = _read(connection, 1)
        if said == _REFUSED:
            (length,) = struct.unpack("<q", _read(connection, 8))
            raise RankError(_read(connection, length).decode())
        assert said == expected, "ranks have the same plan"

    # --- of the rank that is asked ---

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            thread = threading.Thread(target=self._serve, args=(connection,), name="pagoda-service", daemon=True)
            self._open.append(connection)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one rank until it hangs up."""
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not secrets.compare_digest(_read(connection, _TOKEN_BYTES), self._token):
                connection.close()
                return
            while True:
                for part in self._reply(*_REQUEST.unpack(_read(connection, _REQUEST.size))):
                    connection.sendall(part)

    def _reply(self, unit: int, version: int) -> Iterator[bytes | memoryview]:
        try:
            for message in self._answer(unit, version):
                yield _MORE
                yield _bytes(message)
            yield _END
        except OSError:
            raise
        except Exception as error:
            text = str(error).encode()
            yield _REFUSED + struct.pack("<q", len(text)) + text


def _address(world: World) -> str:
    """How other ranks reach this one."""
    if world.nodes == 1:
        return "127.0.0.1"
    master = os.environ["MASTER_ADDR"]
    if world.rank < world.local_size:  # the node that all others know by this name
        return master
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))
        return str(probe.getsockname()[0])


def _bytes(message: torch.Tensor) -> memoryview:
    return memoryview(cast("Any", message.view(torch.uint8).numpy()))


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the connection has been closed")
        view = view[count:]
