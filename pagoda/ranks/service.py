"""The service: answers requests from other ranks, independently of the order of collectives."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from pagoda.errors import PagodaError, RankError
from pagoda.mesh.world import rank_timeout_s
from pagoda.process import start_thread
from pagoda.ranks.transport import Transport, new_groups

_EVER = timedelta(days=365)
_REQUEST, _ANSWER = range(2)
"""The tags of messages."""
_STOP = -1
"""Sent in place of a unit to end the thread."""
_CLOSE_S = 2.0
"""Seconds that a rank waits for its thread when it closes."""

Answer = Callable[[int, int], Iterable[torch.Tensor]]
"""Given a unit and a version, returns the messages that contain this rank's slice, in RAM. Raises RankError to
refuse."""


class Requests:
    """Asks the other ranks' services, in a separate process group."""

    def __init__(self, transport: Transport) -> None:
        """Every rank must call this at the same point."""
        self.transport = transport
        (self.group,) = new_groups(transport.world, [range(transport.size)], backend="gloo", timeout=_EVER)

    def ask(self, unit: int, version: int, targets: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
        """Get other ranks' slices of a unit after `version` updates. `targets` names each rank and the tensors that
        receive its messages. Only one thread may call it. Raises RankError if a rank refuses or is gone."""
        refusals = []
        try:
            for rank, _ in targets:
                self.send(torch.tensor([unit, version]), rank, _REQUEST)
            for rank, messages in targets:
                refusal = self._receive(rank, messages)
                if refusal is not None:
                    refusals.append(refusal)  # the other ranks' messages must still be received
        except RuntimeError as error:
            raise self.transport.lost(rank, error) from error
        if refusals:
            raise RankError(refusals[0])

    def _receive(self, rank: int, messages: Sequence[torch.Tensor]) -> str | None:
        """Receive what `_reply` sends. Returns the reason if the rank refuses."""

        def receive(into: torch.Tensor) -> None:
            _await(dist.irecv(into.view(torch.uint8), group=self.group, tag=_ANSWER, group_src=rank))

        length = torch.zeros(1, dtype=torch.int64)
        for message in (*messages, None):
            receive(length)
            if length:
                text = torch.empty(int(length), dtype=torch.uint8)
                receive(text)
                return text.numpy().tobytes().decode()
            if message is not None:
                landing = message if message.device.type == "cpu" else torch.empty_like(message, device="cpu")
                receive(landing)
                if landing is not message:
                    message.copy_(landing)
        return None

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        """Send a message, which is a request or a part of an answer."""
        _await(dist.isend(tensor.view(torch.uint8), group=self.group, tag=tag, group_dst=rank))


class Service:
    """Answers the other ranks on a separate thread, independently of all other work. So another rank gets its answer
    even while this rank's other work waits for that rank."""

    def __init__(self, requests: Requests, answer: Answer) -> None:
        self._requests = requests
        self._answer = answer
        self._thread = start_thread(self._run, "pagoda-service")

    def close(self) -> None:
        """Stop answering. All ranks close at the same point, and each ends the thread of the next rank. If a rank
        cannot be reached, the threads end with their processes."""
        transport = self._requests.transport
        if transport.broken:
            return
        with suppress(RuntimeError):
            self._requests.send(torch.tensor([_STOP, 0]), (transport.rank + 1) % transport.size, _REQUEST)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        group = self._requests.group
        with suppress(RuntimeError):  # a rank has ended, so all others will end too
            while True:
                request = torch.empty(2, dtype=torch.int64)
                number = dist.recv(request, src=None, group=group, tag=_REQUEST)
                unit, version = request.tolist()
                if unit == _STOP:
                    return
                self._reply(dist.get_group_rank(group, number), unit, version)

    def _reply(self, asking: int, unit: int, version: int) -> None:
        """Answer a request. Before each message and after the last one, send the length of a refusal: 0 means
        that there is none. Every error is a refusal, so that the rank that asks need not wait for its timeout."""
        send, mine, fine = self._requests.send, self._requests.transport.rank, torch.zeros(1, dtype=torch.int64)
        try:
            for message in self._answer(unit, version):
                send(fine, asking, _ANSWER)
                send(message, asking, _ANSWER)
            send(fine, asking, _ANSWER)
        except Exception as error:
            expected = isinstance(error, (PagodaError, OSError))
            reason = str(error) if expected else f"{type(error).__name__} on rank {mine}: {error}"
            text = torch.frombuffer(bytearray(reason.encode()), dtype=torch.uint8)
            send(torch.tensor([text.numel()]), asking, _ANSWER)
            send(text, asking, _ANSWER)


def _await(work: dist.Work | None) -> None:
    """Wait for a message, with a timeout. The group itself has none, because its thread waits for requests."""
    assert work is not None
    work.wait(timedelta(seconds=rank_timeout_s()))
