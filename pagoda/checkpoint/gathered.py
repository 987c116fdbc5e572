"""`gathered`: gives parameters real tensors outside forward."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import xxhash
from torch import nn

from pagoda.checkpoint.state import ParameterState, overwrite_all, state_of
from pagoda.errors import UsageError
from pagoda.memory.arena import tensor_bytes
from pagoda.parameters.unit import Gathered
from pagoda.plan.layout import WEIGHT


@contextmanager
def gathered(params: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool = False) -> Iterator[None]:
    """Inside the block, `params` (for a module, all its parameters) have real tensors in their compute dtype.

    With `modify`, values written to them become the new weights at the end of the block. Unchanged elements keep their
    full-precision master. The block uses RAM for a copy of `params`, and forwards of their modules are not possible
    inside it. Parameters that Pagoda does not manage are left alone. Results computed from `params` may be part of the
    loss, such as a penalty: the graph keeps the copies.

    Raises UsageError inside the forward of a module that uses one of them, and between backward and `step()` if updates
    run during backward; and at the end of a block without `modify`, if a parameter was written to. That write is lost.
    `step()` and the loading of checkpoints are refused inside the block.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, nn.Parameter):
        params = [params]
    states = {id(param): state for param in params if (state := state_of(param)) is not None}
    taken: list[ParameterState] = []
    lock = threading.Lock()
    # Otherwise graphs would keep the parameters themselves, which later hold placeholders.
    packing = next((packing for s in states.values() if (packing := s.engine.graphs.packing).enter()), None)
    if packing is not None:
        packing.gathered_lock = lock
    with lock:
        try:
            for state in states.values():
                engine, unit, slot = state
                if slot in unit.gathered:  # by an outer block, which will release it
                    continue
                with engine.settled():
                    if unit.active:
                        raise UsageError(f"{state.name!r} cannot be gathered while its module's forward is running.")
                    values = state.read(WEIGHT)
                    taken.append(state)
                    unit.gathered[slot] = Gathered(_hash(values), lock)
                    unit.set_part(slot, unit.shown(slot, values.to(unit.placeholders[slot].device)))
                    unit.used |= torch.is_grad_enabled()
            yield
            if modify:
                writes = [(state, state.unit.current(state.slot)) for state in states.values()]
                overwrite_all(writes)
                for (_, unit, slot), written in writes:
                    unit.gathered[slot].hash = _hash(written)
            for state in taken if not modify else ():
                if _hash(state.unit.current(state.slot)) != state.unit.gathered[state.slot].hash:
                    raise UsageError(
                        f"{state.name!r} was written to inside pagoda.gathered(...), which drops what is written. "
                        "Write inside `with pagoda.gathered(params, modify=True):`, or to a copy (param.clone()). If "
                        "peft merged an adapter there, the weights do not have it, but its layers count it as merged: "
                        "unmerge it."
                    )
        finally:
            if packing is not None:
                packing.leave()
            for _, unit, slot in taken:
                unit.give_back(slot)


def _hash(values: torch.Tensor) -> int:
    """Notices every write, also those through `data`, which change no version counter."""
    return xxhash.xxh3_64_intdigest(tensor_bytes(values.detach().cpu().contiguous()))
