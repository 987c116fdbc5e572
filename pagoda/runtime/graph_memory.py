"""What graphs keep between forward and backward: the parts that pack it, move it, recompute it and account for it."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pagoda.distributed.tensors import local
from pagoda.plan.activations import LEAST_OFFLOADED_BYTES, ActivationBytes, ActivationPlan
from pagoda.plan.ops import HOST, SSD
from pagoda.runtime.accesses import Accesses
from pagoda.runtime.blocks import Block, without_cache
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import Lane
from pagoda.runtime.leases import Leases
from pagoda.runtime.offload import Offloader
from pagoda.runtime.packing import Packing
from pagoda.runtime.partition import Partitioner
from pagoda.runtime.places import open_places
from pagoda.runtime.policies import Policies
from pagoda.runtime.recompute import flat, run_recomputed
from pagoda.runtime.saved import SavedStorages
from pagoda.runtime.store import Store


class GraphMemory:
    """Owns the parts, and runs each block of a forward under its policy."""

    def __init__(
        self,
        leases: Leases,
        accesses: Accesses,
        store: Store,
        directories: Mapping[Path, int | None],
        lanes: dict[str, Lane],
        device: Device,
        stalled: Callable[[str, float], None],
        poison: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group` are the ranks that divide activations among them."""
        options = store.plan.options
        page = min(LEAST_OFFLOADED_BYTES, store.plan.page_bytes)
        places = open_places(store, device, directories, page, poison) if options.may_offload else []
        partitioner = None if group is None else Partitioner(group)
        required = options.activations != "auto"
        self._saved = SavedStorages()
        self._offloader = Offloader(places, page, required, lanes, device, self._saved, stalled)
        self._policies = Policies(options, places, device, page)
        self.packing = Packing(leases, accesses, self._saved, self._offloader, partitioner, self._policies.note)

    @property
    def plan(self) -> ActivationPlan:
        """The policies of the last forward, and what one forward was planned to take at most, or graphs have taken."""
        return self._policies.plan(self._taken(kept=0))

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """tier -> most bytes of offloaded activations at once, so far."""
        return {place.tier: place.scratch.peak_bytes for place in self._offloader.places if place.scratch.peak_bytes}

    def begin_forward(self, inputs: Any) -> None:
        """A forward of the whole model starts; `inputs` are its arguments.

        Raises BudgetError where one with inputs as large has shown that it cannot keep to the budget.
        """
        self._policies.begin_forward([leaf.shape for leaf in flat(inputs)[0] if isinstance(leaf, torch.Tensor)])

    def run(
        self,
        block: Block,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        again: Callable[..., Any],
    ) -> Any:
        """A block's forward, under its policy; `again` is the same forward when backward repeats it."""
        in_backward = torch._C._current_graph_task_id() != -1
        if self.packing.policy is not None or not torch.is_grad_enabled() or in_backward:
            return forward(*args, **kwargs)
        trace, policy = self._policies.trace, self._policies.next_policy()
        if policy.recomputes:
            kwargs = without_cache(block.module, kwargs)
        tensors = (leaf for leaf in flat((args, kwargs))[0] if isinstance(leaf, torch.Tensor))
        given = frozenset(self._saved.find(local(tensor)) for tensor in tensors)
        with self.packing.in_block(len(trace.blocks), policy), trace.block(policy, given) as account:
            if not policy.recomputes:
                return forward(*args, **kwargs)
            note = partial(trace.note, recomputed=account)
            return run_recomputed(block.module, forward, again, (args, kwargs), self.packing, note)

    def end_of_step(self) -> ActivationBytes:
        """Close a step; returns the most that its graphs kept."""
        self._policies.end_of_step()
        kept = self._saved.peak_bytes
        self._saved.start_step()
        self._offloader.settle()
        return self._taken(kept)

    def close(self) -> None:
        """Give everything back. Lanes have ended."""
        self._offloader.close()

    def _taken(self, kept: int) -> ActivationBytes:
        return ActivationBytes(kept, self.peak_bytes.get(HOST, 0), self.peak_bytes.get(SSD, 0))
