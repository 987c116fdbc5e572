"""Activations: gives every block of a forward its policy, and carries it out."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from pagoda.errors import BudgetError
from pagoda.memory.sizes import format_at_least, format_bytes
from pagoda.parallel.tensors import local
from pagoda.plan.activations import (
    ActivationBytes,
    ActivationMode,
    ActivationPlan,
    Bucket,
    Policy,
    Room,
    StepSizes,
    bucket_of,
    choose,
    growth,
    peak_of,
)
from pagoda.runtime.blocks import Block, copied, is_cache, without_cache
from pagoda.runtime.device import Device
from pagoda.runtime.forward_trace import ForwardTrace
from pagoda.runtime.packing import Packing, References
from pagoda.runtime.partition import Partitioner
from pagoda.runtime.repeats import FirstForward
from pagoda.runtime.saved import SavedStorage, SavedStorages

_MOST_BUCKETS = 64
"""Shapes whose plans are remembered."""


class Activations:
    """Follows forwards, block by block.

    With the mode "auto", the first forward of a bucket of shapes recomputes every block, which shows how large each is;
    from the next one on the plan made of that is followed. No policy changes a bit, so plans may change at any time.
    """

    def __init__(
        self,
        mode: ActivationMode,
        packing: Packing,
        saved: SavedStorages,
        device: Device,
        page_bytes: int,
        room: Callable[[StepSizes], Room],
        partitioner: Partitioner | None = None,
    ) -> None:
        """`room` says what the activations of a step may use."""
        self._partitioner = partitioner
        self._packing = packing
        self._saved = saved
        self._device = device
        self._page_bytes = page_bytes
        self._room = room
        self._fixed = None if mode == "auto" else Policy(mode)
        self._plans: dict[Bucket, ActivationPlan] = {}
        self._refusals: dict[Bucket, str] = {}
        self._bucket: Bucket = ()
        self._growth = 1.0
        self._trace = self._new_trace()
        self._in_block = False
        self._peak = ActivationBytes()
        packing.noted = self._note

    @property
    def chooses(self) -> bool:
        """Whether policies are chosen."""
        return self._fixed is None

    @property
    def plan(self) -> ActivationPlan:
        """The policies of the last forward that was planned, and the largest peak that any forward was planned with."""
        latest = self._plans.get(self._bucket, ActivationPlan((), ActivationBytes()))
        return replace(latest, peak=self._peak)

    def begin_forward(self, inputs: Any) -> None:
        """A forward of the whole model starts; `inputs` are its arguments.

        Raises BudgetError where one with inputs as large has shown that it cannot keep to the budget.
        """
        self._learn()
        shapes = [leaf.shape for leaf in _flatten(inputs)[0] if isinstance(leaf, torch.Tensor)]
        self._bucket = bucket_of(shapes)
        self._growth = growth(shapes)
        self._trace = self._new_trace()
        if self._bucket in self._refusals:
            raise BudgetError(self._refusals[self._bucket])

    def end_of_step(self) -> None:
        """Make a plan of what has been seen."""
        self._learn(ended=True)
        self._trace = self._new_trace()

    def run(
        self,
        block: Block,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        again: Callable[..., Any],
    ) -> Any:
        """A block's forward, under its policy; `again` is the same forward when backward repeats it."""
        if self._in_block or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return forward(*args, **kwargs)
        index = len(self._trace.blocks)
        policy = self._policy(index)
        if policy.recomputes:
            kwargs = without_cache(block.module, kwargs)
        leaves, structure = _flatten((args, kwargs))
        trace, packing = self._trace, self._packing
        account = trace.enter(policy, [local(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)])
        self._in_block = True
        packing.offloading = policy.offloads
        try:
            if not policy.recomputes:
                return forward(*args, **kwargs)
            calls = [forward]
            first = FirstForward(block.module)
            caches = {index: copied(leaf) for index, leaf in enumerate(leaves) if is_cache(leaf)}

            def run(*leaves: Any) -> Any:
                if not calls:
                    as_first = [copied(caches[i]) if i in caches else leaf for i, leaf in enumerate(leaves)]
                    args, kwargs = tree_unflatten(as_first, structure)
                    with first.again():
                        return again(*args, **kwargs)
                args, kwargs = tree_unflatten(leaves, structure)
                output = calls.pop()(*args, **kwargs)
                first.ended()
                return output

            if self._partitioner is not None:
                self._partitioner.begin_block(index)
            watches = _Watch(packing), _Watch(packing, partial(trace.note_recomputed, account))
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=lambda: watches)
        finally:
            packing.offloading = False
            if self._partitioner is not None:
                self._partitioner.end_block()
            self._in_block = False
            trace.leave()

    def _policy(self, index: int) -> Policy:
        if self._fixed is not None:
            return self._fixed
        plan = self._plans.get(self._bucket)
        return Policy.RECOMPUTE if plan is None or index >= len(plan.policies) else plan.policies[index]

    def _new_trace(self) -> ForwardTrace:
        planned = self._fixed is not None or self._bucket in self._plans
        return ForwardTrace(self._saved, self._page_bytes, None if planned else self._device)

    def _note(self, storage: SavedStorage) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._trace.note(storage)

    def _learn(self, ended: bool = False) -> None:
        """Plan for the bucket of the last forward, once, if all of that has been seen.

        When a step has `ended`, what has not been recomputed needs no gradients.
        """
        if self._bucket in self._plans or not (self._trace.complete or (ended and self._trace.begun)):
            return
        sizes = self._trace.sizes
        if self._fixed is None:
            room = self._room(sizes)
            plan = choose(sizes.scaled(self._growth), room)
            needed = peak_of(sizes, plan.policies, room.host).kept
            if room.strict and needed > room.kept:
                self._refusals[self._bucket] = (
                    f"Activations do not fit: for inputs of shapes {', '.join(map(str, self._bucket))} graphs keep "
                    f"{format_at_least(needed)} even with every block recomputed, and memory.activations allows "
                    f"{format_bytes(room.kept)}. Raise it, give memory.ssd to offload to, or make the batch smaller."
                )
        else:
            policies = (self._fixed,) * len(sizes.blocks)
            plan = ActivationPlan(policies, peak_of(sizes, policies, self._room(sizes).host), sizes, "as asked")
        if len(self._plans) == _MOST_BUCKETS:
            del self._plans[next(iter(self._plans))]
        self._plans[self._bucket] = plan
        self._peak = self._peak.or_more(plan.peak)


def _flatten(values: Any) -> tuple[list[Any], TreeSpec]:
    """What is in nested tuples, lists and dictionaries, and how to nest it again; other objects stay themselves."""
    return tree_flatten(values, is_leaf=lambda value: type(value) not in (tuple, list, dict))


class _Watch:
    """Stands between the hooks of a checkpoint and the graph, whose hooks would hide all others.

    Weights go by reference, so a block that is recomputed pins no lease; what else a recomputation saves is counted.
    Entered anew for each recomputation.
    """

    def __init__(self, packing: Packing, note: Callable[[SavedStorage], None] | None = None) -> None:
        """`note` is told of every storage that is saved; None during the first forward, which saves nothing."""
        self._packing = packing
        self._note = note
        self._hooks: Any = None

    def __enter__(self) -> None:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert top is not None, "a checkpoint has hooks"
        pack: Callable[[Any], Any] = top[0]
        unpack: Callable[[Any], Any] = top[1]
        packing, note = self._packing, self._note

        def packed(tensor: torch.Tensor) -> Any:
            if note is None:
                return pack(tensor)
            reference = packing.reference(tensor)
            if reference is not None:
                return pack(reference)  # as good as a tensor to a checkpoint, which only holds it
            storage = packing.count(tensor)
            if storage is not None:
                note(storage)
            return pack(tensor)

        def unpacked(held: Any) -> torch.Tensor:
            found = unpack(held)
            return packing.weight(found) if isinstance(found, References) else found

        self._hooks = torch.autograd.graph.saved_tensors_hooks(packed, unpacked)
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__()
