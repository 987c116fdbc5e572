"""NCCL's part: tensors of the GPU between processes that each have a stand-in of their own.

Bytes go by gloo. For streams it is as NCCL has it: what is sent and received is an operation on a stream of NCCL's,
behind what the current stream was told before the call; `wait()` has the current stream wait for it, not the host. A
group must have been used by all of its ranks at once before some of them use it.
"""

import ctypes
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves


class _Work:
    """What a collective on the GPU returns."""

    def __init__(self, native: ModuleType, work: Any, event: int) -> None:
        self._native, self._work, self._event = native, work, event

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()  # gloo's, so that bytes are there: NCCL would return at once
        self._native.stream_waits(self._native.current_stream(), self._event)


WRITTEN_AND_READ = {
    "all_reduce": ([0], []),
    "broadcast": ([0], [0]),
    "gather": ([1], [0]),
    "all_gather_into_tensor": ([0], [1]),
    "all_to_all_single": ([0], [1]),
}
"""Which arguments of each are written and read: tensors, or lists of them."""


def install_collectives(native: ModuleType) -> None:
    """Let `torch.distributed` take tensors of the stand-in, as with NCCL."""
    gloo = {name: getattr(dist, name) for name in (*WRITTEN_AND_READ, "init_process_group", "batch_isend_irecv")}
    stream = native.new_stream()
    connected: set[Any] = set()

    def in_ram(given: Any) -> Any:
        """The same, with the same bytes in place of each tensor, where gloo can reach them."""
        if isinstance(given, list):
            return [in_ram(each) for each in given]
        if not isinstance(given, torch.Tensor):
            return given
        assert given.is_contiguous()
        if not given.numel():
            return torch.empty(given.shape, dtype=given.dtype)
        at = native.reach(given.data_ptr())
        return torch.frombuffer((ctypes.c_char * given.nbytes).from_address(at), dtype=given.dtype).view(given.shape)

    def issue(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> int:
        """Tell NCCL's stream to do it; the event behind that."""
        before = native.current_stream()
        native.stream_waits(stream, native.record(0, before))
        native.set_current_stream(stream)
        native.kernel(list(read), list(written), "nccl")
        native.set_current_stream(before)
        event: int = native.record(0, stream)
        return event

    def collective(name: str) -> Callable[..., Any]:
        written, read = WRITTEN_AND_READ[name]

        def call(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
            if not arguments[0].is_cuda:
                return gloo[name](*arguments, async_op=async_op, **options)
            if name == "all_reduce":
                connected.add(options["group"])
            of = [[t for at in which for t in tree_leaves(arguments[at]) if t is not None] for which in (read, written)]
            work = _Work(native, None, issue(*of))
            gloo[name](*map(in_ram, arguments), **options)
            return work if async_op else work.wait()

        return call

    def init_process_group(backend: str, *arguments: Any, **options: Any) -> None:
        assert backend == "cpu:gloo,cuda:nccl"
        gloo["init_process_group"]("gloo", *arguments, **options)

    def batch_isend_irecv(ops: Sequence[dist.P2POp]) -> Sequence[Any]:
        if not ops[0].tensor.is_cuda:
            return gloo["batch_isend_irecv"](ops)
        assert ops[0].group in connected, "NCCL would wait here for ranks that do not take part"
        sent, received = ([op.tensor for op in ops if op.op is do] for do in (dist.isend, dist.irecv))
        event = issue(sent, received)
        there = [dist.P2POp(op.op, in_ram(op.tensor), group=op.group, group_peer=op.group_peer) for op in ops]
        return [_Work(native, work, event) for work in gloo["batch_isend_irecv"](there)]

    for name in WRITTEN_AND_READ:
        setattr(dist, name, collective(name))
    dist.init_process_group = init_process_group
    dist.batch_isend_irecv = batch_isend_irecv
    dist.get_backend = lambda group=None: dist.Backend.NCCL
