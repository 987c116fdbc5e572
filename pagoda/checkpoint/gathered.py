"""`gathered`: gives parameters real tensors outside forward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pagoda.checkpoint.state import ParameterState, state_of
from pagoda.errors import UsageError
from pagoda.plan.layout import WEIGHT


@contextmanager
def gathered(params: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool = False) -> Iterator[None]:
    """Inside the block, `params` (for a module, all its parameters) have real tensors in their compute dtype.

    With `modify`, values written to them become the new weights at the end of the block. Unchanged elements keep their
    full-precision master. Without `modify`, changes are discarded. The block uses RAM for a copy of `params`, and
    forwards of their modules are not possible inside it. Parameters that Pagoda does not manage are left alone. Results
    computed from `params` may be part of the loss, such as a penalty: the graph keeps the copies.

    Raises UsageError inside the forward of a module that uses one of them, and between backward and `step()` if updates
    run during backward. `step()` and the loading of checkpoints are refused inside the block.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, nn.Parameter):
        params = [params]
    states = {id(param): state for param in params if (state := state_of(param)) is not None}
    taken: list[ParameterState] = []
    # Otherwise graphs would keep the parameters themselves, which later hold placeholders.
    packing = next((packing for s in states.values() if (packing := s.engine.graphs.packing).enter()), None)
    try:
        for state in states.values():
            engine, unit, slot = state
            if slot in unit.gathered:  # by an outer block, which will release it
                continue
            engine.settle()
            if unit.active:
                raise UsageError(f"{state.name!r} cannot be gathered while its module's forward is running.")
            unit.set_part(slot, unit.shown(slot, state.read(WEIGHT).to(engine.device.torch_device)))
            unit.gathered.add(slot)
            unit.used |= torch.is_grad_enabled()
            taken.append(state)
        yield
        if modify:
            for state in states.values():
                state.overwrite(state.unit.current(state.slot))
    finally:
        if packing is not None:
            packing.leave()
        for _, unit, slot in taken:
            unit.gathered.discard(slot)
            unit.hide_slot(slot)
