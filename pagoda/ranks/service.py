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


class Service:
    """Answers the other ranks on a separate thread and in a separate process group, independently of all other work. So
    another rank gets its answer even while this rank's other work waits for that rank."""

    def __init__(self, transport: Transport, answer: Answer) -> None:
        """Every rank must create its service at the same point."""
        self._transport = transport
        self._answer = answer
        (self._group,) = new_groups(transport.world, [range(transport.size)], backend="gloo", timeout=_EVER)
        self._thread = start_thread(self._run, "pagoda-service")

    def ask(self, unit: int, version: int, targets: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
        """Get other ranks' slices of a unit after `version` updates. `targets` names each rank and the tensors that
        receive its messages. Only one thread may call it. Raises RankError if a rank refuses or is gone."""
        refusals = []
        try:
            for rank, _ in targets:
                self._send(torch.tensor([unit, version]), rank, _REQUEST)
            for rank, messages in targets:
                refusal = self._receive(rank, messages)
                if refusal is not None:
                    refusals.append(refusal)  # the other ranks' messages must still be received
        except RuntimeError as error:
            raise self._transport.lost(rank, error) from error
        if refusals:
            raise RankError(refusals[0])

    def close(self) -> None:
        """Stop answering. All ranks close at the same point, and each ends the thread of the next rank. If a rank
        cannot be reached, the threads end with their processes."""
        if self._transport.broken:
            return
        with suppress(RuntimeError):
            self._send(torch.tensor([_STOP, 0]), (self._transport.rank + 1) % self._transport.size, _REQUEST)
        self._thread.join(_CLOSE_S)

    def _receive(self, rank: int, messages: Sequence[torch.Tensor]) -> str | None:
        """Receive what `_reply` sends. Returns the reason if the rank refuses."""

        def receive(into: torch.Tensor) -> None:
            _await(dist.irecv(into.view(torch.uint8), group=self._group, tag=_ANSWER, group_src=rank))

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

    def _run(self) -> None:
        with suppress(RuntimeError):  # a rank has ended, so all others will end too
            while True:
                request = torch.empty(2, dtype=torch.int64)
                number = dist.recv(request, src=None, group=self._group, tag=_REQUEST)
                unit, version = request.tolist()
                if unit == _STOP:
                    return
                self._reply(dist.get_group_rank(self._group, number), unit, version)

    def _reply(self, asking: int, unit: int, version: int) -> None:
        """Answer a request. Before each message and after the last one, send the length of a refusal: 0 means
        that there is none. Every error is a refusal, so that the rank that asks need not wait for its timeout."""
        fine = torch.zeros(1, dtype=torch.int64)
        try:
            for message in self._answer(unit, version):
                self._send(fine, asking, _ANSWER)
                self._send(message, asking, _ANSWER)
            self._send(fine, asking, _ANSWER)
        except Exception as error:
            expected = isinstance(error, (PagodaError, OSError))
            reason = str(error) if expected else f"{type(error).__name__} on rank {self._transport.rank}: {error}"
            text = torch.frombuffer(bytearray(reason.encode()), dtype=torch.uint8)
            self._send(torch.tensor([text.numel()]), asking, _ANSWER)
            self._send(text, asking, _ANSWER)

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        _await(dist.isend(tensor.view(torch.uint8), group=self._group, tag=tag, group_dst=rank))


def _await(work: dist.Work | None) -> None:
    """Wait for a message, with a timeout. The group itself has none, because its thread waits for requests."""
    assert work is not None
    work.wait(timedelta(seconds=rank_timeout_s()))
