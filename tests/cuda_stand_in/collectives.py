"""NCCL's part: tensors of the GPU between processes that each have a stand-in of their own.

Bytes go by gloo. For streams it is as NCCL has it: what is sent and received is an operation on a stream of NCCL's,
behind what the current stream was told before the call; `wait()` has the current stream wait for it, not the host. A
group must have been used by all of its ranks at once before some of them use it.
"""

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


class _Work:
    """What a collective on the GPU returns."""

    def __init__(self, native: ModuleType, work: Any, event: int) -> None:
        self._native, self._work, self._event = native, work, event

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()  # gloo's, so that bytes are there: NCCL would return at once
        self._native.stream_waits(self._native.current_stream(), self._event)


def install_collectives(native: ModuleType) -> None:
    """Let `torch.distributed` take tensors of the stand-in, as with NCCL."""
    names = ("init_process_group", "all_reduce", "batch_isend_irecv", "all_to_all_single")
    names += ("broadcast", "gather", "all_gather_into_tensor")
    gloo = {name: getattr(dist, name) for name in names}
    stream = native.new_stream()
    connected: set[Any] = set()

    def in_ram(tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes, where gloo can reach them."""
        assert tensor.is_contiguous()
        at = native.reach(tensor.data_ptr())
        return torch.frombuffer((ctypes.c_char * tensor.nbytes).from_address(at), dtype=tensor.dtype).view(tensor.shape)

    def issue(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> int:
        """Tell NCCL's stream to do it; the event behind that."""
        before = native.current_stream()
        native.stream_waits(stream, native.record(0, before))
        native.set_current_stream(stream)
        native.kernel(list(read), list(written), "nccl")
        native.set_current_stream(before)
        event: int = native.record(0, stream)
        return event

    def init_process_group(backend: str, *arguments: Any, **options: Any) -> None:
        assert backend == "cpu:gloo,cuda:nccl"
        gloo["init_process_group"]("gloo", *arguments, **options)

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        assert tensor.is_cuda
        connected.add(group)
        event = issue([], [tensor])
        gloo["all_reduce"](in_ram(tensor), group=group)
        _Work(native, None, event).wait()

    def batch_isend_irecv(ops: Sequence[dist.P2POp]) -> Sequence[Any]:
        if not ops[0].tensor.is_cuda:
            return gloo["batch_isend_irecv"](ops)  # type: ignore[no-any-return]
        assert ops[0].group in connected, "NCCL would wait here for ranks that do not take part"
        sent, received = ([op.tensor for op in ops if op.op is do] for do in (dist.isend, dist.irecv))
        event = issue(sent, received)
        there = [dist.P2POp(op.op, in_ram(op.tensor), group=op.group, group_peer=op.group_peer) for op in ops]
        return [_Work(native, work, event) for work in gloo["batch_isend_irecv"](there)]

    def all_to_all_single(out: torch.Tensor, given: torch.Tensor, *sizes: Any, group: Any = None) -> None:
        if not out.is_cuda:
            gloo["all_to_all_single"](out, given, *sizes, group=group)
            return
        event = issue([given], [out])
        if out.numel() or given.numel():
            landing = torch.empty(out.shape, dtype=out.dtype)
            gloo["all_to_all_single"](landing, in_ram(given) if given.numel() else given.cpu(), *sizes, group=group)
            if out.numel():
                in_ram(out).copy_(landing)
        _Work(native, None, event).wait()

    def broadcast(tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        if not tensor.is_cuda:
            return gloo["broadcast"](tensor, src=src, group=group, async_op=async_op)
        work = _Work(native, None, issue([tensor], [tensor]))
        gloo["broadcast"](in_ram(tensor), src=src, group=group)
        return work if async_op else work.wait()

    def gather(tensor: torch.Tensor, into: Any = None, dst: int = 0, group: Any = None) -> None:
        if not tensor.is_cuda:
            gloo["gather"](tensor, into, dst=dst, group=group)
            return
        event = issue([tensor], into or [])
        gloo["gather"](in_ram(tensor), into and [in_ram(each) for each in into], dst=dst, group=group)
        _Work(native, None, event).wait()

    def all_gather_into_tensor(whole: torch.Tensor, part: torch.Tensor, group: Any = None) -> None:
        if not whole.is_cuda:
            gloo["all_gather_into_tensor"](whole, part, group=group)
            return
        event = issue([part], [whole])
        gloo["all_gather_into_tensor"](in_ram(whole), in_ram(part), group=group)
        _Work(native, None, event).wait()

    dist.broadcast = broadcast
    dist.gather = gather
    dist.all_gather_into_tensor = all_gather_into_tensor
    dist.init_process_group = init_process_group
    dist.all_reduce = all_reduce
    dist.batch_isend_irecv = batch_isend_irecv
    dist.all_to_all_single = all_to_all_single
    dist.get_backend = lambda group=None: dist.Backend.NCCL
