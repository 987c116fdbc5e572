"""GraphMemory: runs each block under its activation policy, which is given or learned from earlier forwards."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from pagoda.autograd.accesses import Accesses
from pagoda.autograd.activations.blocks import ModelBlock, without_cache
from pagoda.autograd.activations.forward_trace import ForwardTrace
from pagoda.autograd.activations.offload import Graph, Offloader
from pagoda.autograd.activations.packing import Packing
from pagoda.autograd.activations.partition import Partitioner
from pagoda.autograd.activations.places import follow_plan, open_places
from pagoda.autograd.activations.recompute import flat, run_recomputed
from pagoda.autograd.activations.saved import SavedStorage, SavedStorages
from pagoda.errors import BudgetError
from pagoda.memory.sizes import format_at_least, format_bytes
from pagoda.mesh.dtensors import local
from pagoda.plan.activations import (
    LEAST_OFFLOADED_BYTES,
    ActivationBytes,
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
from pagoda.plan.tiers import HOST, SSD
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import Lane
from pagoda.runtime.leases import Fetcher
from pagoda.runtime.store import Store

_MOST_BUCKETS = 64
"""Number of input shapes whose plans are kept."""
_NO_LIMIT = 1 << 62


class GraphMemory:
    """Runs each block of a forward under its policy.

    With the mode "auto", the first forward with inputs of some size recomputes every block and measures the blocks. The
    next forwards follow a plan made from these sizes. Policies do not change results, so plans may change at any time.
    """

    def __init__(
        self, leases: Fetcher, accesses: Accesses, store: Store, lanes: dict[str, Lane], device: Device
    ) -> None:
        self._collectives = accesses.collectives
        self._store = store
        self._options = options = store.plan.options
        self._device = device
        least = min(LEAST_OFFLOADED_BYTES, store.plan.page_bytes)
        self._places = open_places(store, device) if options.may_offload else []
        self._page_bytes = self._places[0].page_bytes if self._places else least
        """Pages of the place where storages go first."""
        self._fixed = None if options.activations == "auto" else Policy(options.activations)
        self._saved = SavedStorages()
        self.offloader = Offloader(
            self._places, least, self._fixed is not None, lanes, device, self._saved, accesses.meter
        )
        partitioner = None
        if options.partition_activations:
            partitioner = Partitioner(self._collectives.mesh.tensor.get_group())
        graph = self.offloader.new_graph()
        self.packing = Packing(leases, accesses, self._saved, self.offloader, partitioner, self._note, graph)
        self._rates: dict[str, tuple[float, float]] | None = None
        """Rates of each place, once they are measured."""
        self._plans: dict[Bucket, ActivationPlan] = {}
        self._refusals: dict[Bucket, str] = {}
        self._bucket: Bucket = ()
        self._growth = 1.0
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        """Graphs of forwards whose backward has not run yet."""
        self._at_once = self._most = 1
        """The number of these graphs that share the memory for activations, and the most of them at once in this step
        so far."""
        self._peak = ActivationBytes()
        """The most that was planned for any forward."""
        self._trace = self._new_trace()
        """The trace of the last forward."""

    @property
    def plan(self) -> ActivationPlan:
        """The policies of the last planned forward, and the most bytes that a forward was planned to take or graphs
        have taken."""
        latest = self._plans.get(self._bucket, ActivationPlan())
        return replace(latest, peak=self._peak.or_more(self._taken(kept=0)))

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """tier -> most bytes of offloaded activations at once so far."""
        return {place.tier: place.peak_bytes for place in self._places if place.peak_bytes}

    def take_memory(self) -> None:
        """Take the memory that the store's plan, which is new, has for activations. Nothing is on its way."""
        self._options = self._store.plan.options
        follow_plan(self._places, self._store)

    def begin_forward(self, inputs: Any) -> None:
        """A forward of the whole model starts. `inputs` are its arguments.

        Raises BudgetError if an earlier forward with inputs of this size could not keep to the budget.
        """
        self._learn()
        self.packing.graph = self.offloader.new_graph()
        self._graphs.add(self.packing.graph)
        # A backward ends before the next forward begins, even if the loss keeps some of its graph alive.
        self._most = max(self._most, sum(not graph.in_backward for graph in self._graphs))
        shapes = [tensor.shape for tensor in _tensors(inputs)]
        mine = self._most, bucket_of(shapes), growth(shapes)
        of_all = [mine] if self._fixed is not None else self._agree("the shapes of a forward", mine)
        self._most, self._growth = max(most for most, _, _ in of_all), max(each for _, _, each in of_all)
        self._bucket = tuple(chain.from_iterable(bucket for _, bucket, _ in of_all))
        self._share(max(self._most, self._at_once))
        self._trace = self._new_trace()
        if self._bucket in self._refusals:
            raise BudgetError(self._refusals[self._bucket])

    def run(
        self,
        block: ModelBlock,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        again: Callable[..., Any],
    ) -> Any:
        """Run a block's forward under its policy. `again` is the same forward for recomputation in backward.

        Inside a checkpoint of the user's, which recomputes the block and keeps nothing of it, no policy applies.
        """
        packing = self.packing
        if packing.policy is not None or packing.in_checkpoint or not torch.is_grad_enabled() or _in_backward():
            return forward(*args, **kwargs)
        trace, policy = self._trace, self._next_policy()
        if policy.recomputes:
            kwargs = without_cache(block.module, kwargs)
        given = frozenset(self._saved.find(local(tensor)) for tensor in _tensors((args, kwargs)))
        with self.packing.in_block(len(trace.blocks), block, policy), trace.block(policy, given) as account:
            if not policy.recomputes:
                return forward(*args, **kwargs)
            graph = self.packing.graph

            def repeat(*args: Any, **kwargs: Any) -> Any:
                graph.begin_backward()
                return again(*args, **kwargs)

            return run_recomputed(block, forward, repeat, (args, kwargs), self.packing, account.save)

    def end_step(self) -> ActivationBytes:
        """End a step, before which no activation was on its way out, and plan from what it has shown. Returns the most
        bytes that its graphs kept."""
        self._learn(ended=True)
        self._share(self._most)
        self._most = 1
        self._trace = self._new_trace()
        kept = self._saved.peak_bytes
        self._saved.start_step()
        return self._taken(kept)

    def _agree(self, what: str, mine: Any) -> list[Any]:
        """The answers of all ranks that run blocks together. These ranks must recompute the same blocks, so all of them
        ask at the same points of their programs."""
        return self._collectives.of_each_forward(what, mine)

    def _taken(self, kept: int) -> ActivationBytes:
        return ActivationBytes(kept, self.peak_bytes.get(HOST, 0), self.peak_bytes.get(SSD, 0))

    def _note(self, storage: SavedStorage) -> None:
        """A graph saves a storage."""
        if not _in_backward():
            self.offloader.write_free()  # what compute no longer holds since the last one
            self._trace.save(storage)

    def _share(self, graphs: int) -> None:
        """From now on, `graphs` graphs share the memory."""
        if graphs != self._at_once:
            self._at_once = graphs
            self._plans.clear()
            self._refusals.clear()

    def _next_policy(self) -> Policy:
        if self._fixed is not None:
            return self._fixed
        plan, index = self._plans.get(self._bucket), len(self._trace.blocks)
        return Policy.RECOMPUTE if plan is None or index >= len(plan.policies) else plan.policies[index]

    def _new_trace(self) -> ForwardTrace:
        planned = self._fixed is not None or self._bucket in self._plans
        return ForwardTrace(None if planned else self._device)

    def _learn(self, ended: bool = False) -> None:
        """Plan for the input size of the last forward, once, if all of its sizes are known.

        `ended`: the step is over, so blocks that were not recomputed need no gradients.
        """
        if self._bucket in self._plans:
            return
        seen = None
        if self._trace.complete or (ended and self._trace.begun):
            sizes = self._trace.sizes(self._page_bytes)
            seen = sizes, self._room(sizes)
        everyone = [seen] if self._fixed is not None else self._agree("what a forward has left to its backward", seen)
        shown = [each for each in everyone if each is not None]
        if len(shown) < len(everyone) or len({len(sizes.blocks) for sizes, _ in shown}) > 1:
            return
        sizes, room = StepSizes.most([sizes for sizes, _ in shown]), Room.least([room for _, room in shown])
        of_all = sizes.scaled(self._at_once)
        if self._fixed is None:
            plan = choose(of_all.scaled(self._growth), room)
            needed = peak_of(of_all, plan.policies, room.host).kept
            if self._options.activations_limited and needed > room.kept:
                self._refusals[self._bucket] = (
                    f"Activations do not fit: for inputs of shapes {', '.join(map(str, self._bucket))} graphs keep "
                    f"{format_at_least(needed)} even with every block recomputed, and memory.activations allows "
                    f"{format_bytes(room.kept)}. Raise it, give memory.ssd to offload to, or make the batch smaller."
                )
        else:
            policies = (self._fixed,) * len(sizes.blocks)
            plan = ActivationPlan(policies, peak_of(of_all, policies, room.host), sizes)
        if len(self._plans) == _MOST_BUCKETS:
            del self._plans[next(iter(self._plans))]
        self._plans[self._bucket] = plan
        self._peak = self._peak.or_more(plan.peak)

    def _room(self, sizes: StepSizes) -> Room:
        """Memory that the activations of a step may use."""
        if self._rates is None:
            self._rates = {place.tier: place.rates() for place in self._places} if self._fixed is None else {}
        limit = self._options.activation_bytes
        kept = _NO_LIMIT if limit is None else limit
        return Room.of_step(sizes, kept, {place.tier: place.room_bytes for place in self._places}, self._rates)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flat(values)[0] if isinstance(leaf, torch.Tensor)]
