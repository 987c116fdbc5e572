"""Packing: what graphs keep in place of saved tensors. For a weight this is its name, for an activation the tensor
itself or the place of its bytes."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from pagoda.autograd.accesses import LET_UPDATES_WAIT, Accesses
from pagoda.autograd.activations.blocks import ModelBlock
from pagoda.autograd.activations.offload import Graph, Offloader
from pagoda.autograd.activations.partition import Partitioner
from pagoda.autograd.activations.saved import (
    Check,
    Packed,
    SavedStorage,
    SavedStorages,
    View,
    kept,
    moved,
    unchanged,
)
from pagoda.errors import UsageError
from pagoda.interrupts import holding_signals
from pagoda.mesh.dtensors import DTensorForm, local
from pagoda.parameters.hidden import hidden_class, unseen
from pagoda.parameters.unit import LiveUnit, ShownParameter
from pagoda.plan.activations import Policy
from pagoda.runtime.leases import Fetcher

Note = Callable[[SavedStorage], None]
"""Called with each saved storage that is not a weight's."""
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""A pair of hooks for `torch.autograd.graph.saved_tensors_hooks`."""


class WeightReference:
    """What a graph keeps in place of a tensor that lies in a lease.

    torch's checkpoint treats it as a tensor: it asks for shape, dtype, device and requires_grad.
    """

    __slots__ = ("_accesses", "_edition", "_form", "_graph", "_packed", "_unit", "_view", "device", "dtype", "shape")

    requires_grad = False

    def __init__(self, accesses: Accesses, unit: LiveUnit, tensor: torch.Tensor, graph: Graph, first: int = 0) -> None:
        """`first`: the element of the lease with which the tensor's storage begins."""
        self._graph = graph
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self._view, self._form = View(local(tensor)), DTensorForm.of(tensor)
        self._view.offset += first
        self._accesses = accesses
        self._unit = unit
        self._edition = accesses.edition(unit)
        self._packed = unit.pack  # referring to it makes `unit.packed` true

    def unpack(self) -> torch.Tensor:
        """Lease the weight again. Raises UsageError if the weight was updated in the meantime."""
        self._graph.begin_backward()
        unit = self._unit
        edition = self._accesses.edition(unit)
        if edition != self._edition:
            raise UsageError(
                f"Backward needs the weights of {unit.spec.name!r} as they were in forward (version {self._edition}), "
                f"but an update has changed them since (version {edition}). Run every backward of a graph before "
                f"optimizer.step(); with updates during backward, {LET_UPDATES_WAIT} so that they wait for step()."
            )
        weight = self._view.of(self._accesses.read(unit))
        return weight if self._form is None else self._form.around(weight)


class ComputedReference:
    """What a graph keeps in place of a tensor that is cheap to compute from weights: how, and references to these."""

    __slots__ = ("_function", "_inputs", "_view", "device", "dtype", "shape")

    requires_grad = False

    def __init__(self, function: Callable[..., torch.Tensor], inputs: Sequence[Packed], tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self._function, self._inputs, self._view = function, inputs, View(tensor)

    def unpack(self) -> torch.Tensor:
        """Compute the tensor again."""
        with holding_signals(), torch.no_grad():
            return self._view.of(self._function(*(packed() for packed in self._inputs)))


class _Checked(NamedTuple):
    """What a checkpoint's first forward saves."""

    held: Any
    """What the checkpoint makes of it."""
    check: Check
    """Raises RuntimeError if it was changed since then."""


@dataclass(eq=False, slots=True)
class _Input:
    """An input of a block that backward will recompute, until its forward has ended and it is packed."""

    tensor: torch.Tensor
    block: ModelBlock
    alike: bool
    """Whether other ranks may have the same tensor."""
    packed: Packed | None = None
    check: Check = field(init=False)
    _copy: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.check = unchanged(self.tensor, self.block.name)
        if self.block.changes_inputs is not False:
            self._copy = self.tensor.detach().clone()

    @property
    def copy(self) -> torch.Tensor:
        """The input as it was before the block's forward."""
        assert self._copy is not None, "it was not known that the block keeps its inputs as they are"
        return self._copy

    @property
    def has_changed(self) -> bool:
        """Whether the forward has changed it, also by writes that autograd does not see."""
        return not torch.equal(self.tensor, self.copy)

    def settle(self, packed: Packed) -> None:
        """From now on, this stands for `packed` and holds no tensor itself."""
        self.packed = packed
        del self.tensor, self._copy, self.check

    def __call__(self) -> torch.Tensor:
        assert self.packed is not None, "the block's forward has ended"
        return self.packed()


@dataclass(eq=False, repr=False)
class Packing:
    """The pair of hooks for `torch.autograd.graph.saved_tensors_hooks`.

    Unpacking is the access of backward: it leases the unit again. So correctness never depends on a backward hook.
    These hooks hide the ones outside them, so they also apply the policy for activations.
    """

    _leases: Fetcher
    _accesses: Accesses
    _saved: SavedStorages
    _offloader: Offloader
    _partitioner: Partitioner | None
    _note: Note
    graph: Graph
    """The graph of the model's latest forward."""
    policy: Policy | None = None
    """The policy of the block whose forward runs. None outside blocks."""
    _block: ModelBlock | None = None
    """That block."""
    _inputs: list["_Input"] = field(default_factory=list)
    """Inputs of that block, until its forward has ended."""
    gathered_lock: "threading.Lock | None" = None
    """The lock of the last `with pagoda.gathered(...)` with which packing began. It is held inside."""
    _of_thread: threading.local = field(default_factory=threading.local)
    _placeholders: dict[int, str] = field(default_factory=dict)
    _buffers: frozenset[int] = frozenset()
    _copies: dict[int, tuple[LiveUnit, int, torch.dtype]] = field(default_factory=dict)
    """Storage of a copy of a parameter -> its unit, its first element there, and its dtype."""
    _computed: dict[int, tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor]]] = field(default_factory=dict)
    """Storage of a tensor that is computed from weights -> the function and its arguments."""

    @property
    def _entered(self) -> list[tuple[Callable[[torch.Tensor], Any], Any]]:
        """This thread's active hooks, outermost first, each with the function that packs for it."""
        entered: list[Any] = self._of_thread.__dict__.setdefault("entered", [])
        return entered

    def register(self, units: list[LiveUnit]) -> None:
        """Register the placeholders, so that saving one raises an error with the name of the parameter."""
        self._placeholders = {
            placeholder.untyped_storage()._cdata: unit.name(slot)
            for unit in units
            for slot, placeholder in enumerate(unit.placeholders)
        }

    def leave_alone(self, buffers: Iterable[torch.Tensor]) -> None:
        """Register the model's buffers. They are alive anyway, so a graph that saves one keeps no extra memory."""
        dense = (buffer for buffer in buffers if buffer.layout is torch.strided)
        self._buffers = frozenset(buffer.untyped_storage()._cdata for buffer in dense)

    def enter(self, note: Note | None = None, checks: bool = False) -> bool:
        """Start packing if it is not active. Returns whether `leave` must be called.

        A non-reentrant checkpoint must see each saved tensor. Inside one, weights are passed to it by reference, so it
        pins no lease. `note` is for its recomputation; recomputation by a user's checkpoint is not counted. `checks` is
        for its first forward: what it saves must not change before backward, although backward computes it anew. Hooks
        of the user get all tensors except weights, because a weight kept by them would be a placeholder after the
        forward.
        """
        if self.is_innermost:
            return False
        top = _top()
        pack: Callable[[torch.Tensor], Any] = self._pack
        unpack: Callable[[Any], torch.Tensor] = partial(self._unpack, self.graph)
        if top is not None and _of_checkpoint(top):
            pack, unpack = (
                partial(self._pack_in_checkpoint, top[0], note, checks),
                partial(self._unpack_in_checkpoint, top[1]),
            )
        elif top is not None and top[0] != self._pack:
            pack = partial(self._pack_inside, top)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        try:
            hooks.__enter__()
        except RuntimeError as error:
            raise UsageError(
                f"Hooks for saved tensors are disabled ({error}), but a wrapped model saves references to weights by "
                "such hooks: call it outside `with torch.autograd.graph.disable_saved_tensors_hooks(...)`, or under "
                "torch.no_grad()."
            ) from error
        self._entered.append((pack, hooks))
        return True

    @property
    def is_left_over(self) -> bool:
        """Whether packing is active in this thread without a reason. Ask it outside forwards, where only
        `gathered_lock` is one."""
        if self.gathered_lock is not None and self.gathered_lock.locked():
            return False
        top = _top()
        return bool(self._entered) or (top is not None and self._is_mine(top))

    def _is_mine(self, hooks: Hooks) -> bool:
        pack: Any = hooks[0]
        return getattr(getattr(pack, "func", pack), "__self__", None) is self

    def end_leftovers(self) -> None:
        """No forward runs in this thread. End what a signal's handler has kept from ending."""
        self.leave_block()
        self._entered.clear()
        self._copies.clear()
        self._computed.clear()
        while (top := _top()) is not None and self._is_mine(top):
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def leave_block(self) -> None:
        """No block runs."""
        self.policy = self._block = None
        self._inputs.clear()

    def leave(self) -> None:
        """Stop packing."""
        _, hooks = self._entered.pop()
        hooks.__exit__(None, None, None)

    @contextmanager
    def copied(self, unit: LiveUnit, slot: int, copy: torch.Tensor) -> Iterator[None]:
        """Inside, `copy` has the values of a parameter. If graphs save it, they keep a reference to the weights."""
        if unit.forms[slot] is not None:
            yield
            return
        storage = copy.untyped_storage()._cdata
        self._copies[storage] = unit, unit.spec.slots[slot].offset, copy.dtype
        try:
            yield
        finally:
            del self._copies[storage]

    @contextmanager
    def computed(
        self, result: torch.Tensor, function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Inside, `result` is `function(*inputs)`. Graphs that save it compute it again, from references to weights."""
        storage = result.untyped_storage()._cdata
        self._computed[storage] = function, inputs
        try:
            yield
        finally:
            del self._computed[storage]

    @property
    def is_innermost(self) -> bool:
        """Whether these hooks get what is saved now."""
        top = _top()
        return top is not None and bool(self._entered) and top[0] is self._entered[-1][0]

    @property
    def in_checkpoint(self) -> bool:
        """Whether a non-reentrant checkpoint gets what is saved now."""
        top = _top()
        return top is not None and (_of_checkpoint(top) or getattr(top[0], "func", None) == self._pack_in_checkpoint)

    @contextmanager
    def in_block(self, index: int, block: ModelBlock, policy: Policy) -> Iterator[None]:
        """Inside, a block runs its first forward."""
        self.policy, self._block = policy, block
        if self._partitioner is not None:
            self._partitioner.begin_block(index)
        try:
            yield
        finally:
            self.leave_block()
            self._offloader.write_free()

    def keep_inputs(self) -> None:
        """The forward of a block that backward will recompute has ended. Keep its inputs, or if it has changed any of
        them, copies from before."""
        inputs, self._inputs = self._inputs, []
        if self._block is not None and self._block.changes_inputs is None:
            self._block.changes_inputs = any(given.has_changed for given in inputs)
        if self._block is not None and self._block.changes_inputs:
            storages = {given.tensor.untyped_storage()._cdata for given in inputs}
            if len(storages) < len(inputs):
                raise UsageError(
                    f"The block {self._block.name!r} changes its inputs in place, and some of them share memory, so it "
                    "cannot be recomputed. Let it change a copy, or use wrap(activations='keep') or 'offload'."
                )
        for given in inputs:
            given.settle(self._pack_input(given))

    def _pack(self, tensor: torch.Tensor) -> Packed:
        reference = self._reference(tensor)
        if reference is not None:
            return reference.unpack
        form = DTensorForm.of(tensor)
        if form is None:
            return self._pack_part(tensor, alike=True)
        part = self._pack_part(local(tensor), form.replicated)
        return lambda: form.around(part())

    def _pack_part(self, tensor: torch.Tensor, alike: bool) -> Packed:
        """Pack this rank's part of a tensor. `alike`: other ranks may have the same tensor."""
        storage = self._activation(tensor)
        if storage is None:
            return kept(tensor)
        if self._block is not None and self.policy is not None and self.policy.recomputes:
            given = _Input(tensor, self._block, alike)
            if self._block.changes_inputs is False:
                return self._pack_input(given)
            self._inputs.append(given)
            return given
        return self._keep(tensor, storage)

    def _pack_input(self, given: "_Input") -> Packed:
        """Pack an input of a block that backward recomputes."""
        tensor, check = given.tensor, given.check
        if given.block.changes_inputs:
            tensor = given.copy
            check = unchanged(tensor, given.block.name)
        storage = self._saved.find(tensor)
        if given.alike and self._partitioner is not None:
            partitioned = self._partitioner.partition(
                tensor, storage, lambda part: self._keep(part, self._saved.find(part))
            )
            if partitioned is not None:
                return moved(tensor, partitioned, check)
        return self._keep(tensor, storage, check)

    def _keep(self, tensor: torch.Tensor, storage: SavedStorage, check: Check | None = None) -> Packed:
        self._saved.count(storage)
        self._note(storage)
        if self.policy is not None and self.policy.offloads:
            offloaded = self._offloader.offload(tensor, storage, self.graph)
            if offloaded is not None:
                return moved(tensor, offloaded, check)
        return kept(tensor, check)

    def _pack_inside(self, hooks: Hooks, tensor: torch.Tensor) -> Packed:
        """Pack a tensor inside hooks of the user."""
        pack, unpack = hooks
        reference = self._reference(tensor)
        if reference is not None:
            return reference.unpack
        if self._partitioner is not None or (self.policy is not None and self.policy.offloads):
            raise UsageError(
                "Hooks for saved tensors (torch.autograd.graph.saved_tensors_hooks, save_on_cpu, ...) are active "
                "around a forward whose activations wrap(activations=...) offloads or divides: leave one of them out."
            )
        return partial(unpack, pack(tensor))

    def _pack_in_checkpoint(
        self, pack: Callable[[Any], Any], note: Note | None, checks: bool, tensor: torch.Tensor
    ) -> Any:
        reference = self._reference(tensor)
        if reference is None and note is not None:
            storage = self._activation(local(tensor))
            if storage is not None:
                self._saved.count(storage)
                note(storage)
        held = pack(reference or tensor)
        return _Checked(held, unchanged(tensor)) if checks and reference is None and _plain(tensor) else held

    def _unpack(self, graph: Graph, packed: Packed) -> torch.Tensor:
        graph.begin_backward()
        self._pack_in_backward()
        return packed()

    def _unpack_in_checkpoint(self, unpack: Callable[[Any], Any], held: Any) -> torch.Tensor:
        if isinstance(held, _Checked):
            held.check()
            held = held.held
        found: Any = unpack(held)
        self._pack_in_backward()
        return found.unpack() if isinstance(found, WeightReference | ComputedReference) else found

    def _pack_in_backward(self) -> None:
        """With `create_graph`, backward builds a graph too, which must not hold weights. torch restores the hooks of
        the thread after each node of the graph, so these last until the node that unpacks now has run."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1 and _top() is None:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, partial(self._unpack, self.graph))

    def _reference(self, tensor: torch.Tensor) -> WeightReference | ComputedReference | None:
        """The reference to a leased weight or to what is computed from weights, or None for another tensor. Raises
        UsageError for a weight without a lease."""
        self._accesses.computing()  # a module may have changed the stream since its forward began
        mine = local(tensor)
        if not (_plain(mine) or isinstance(mine, nn.Parameter)):
            return None
        address = mine.untyped_storage()._cdata
        lease = self._leases.find(address)
        if lease is not None:
            return WeightReference(self._accesses, lease.unit, tensor, self.graph)
        unit, first, dtype = self._copies.get(address, (None, 0, None))
        if unit is not None and tensor.dtype is dtype:
            return WeightReference(self._accesses, unit, tensor, self.graph, first)
        if address in self._computed:
            function, inputs = self._computed[address]
            references = [self._reference(each) for each in inputs]
            held = [kept(each) if it is None else it.unpack for each, it in zip(inputs, references, strict=True)]
            return ComputedReference(function, held, tensor)
        name = self._placeholders.get(address)
        if name is not None:
            raise UsageError(unseen(name, "is saved for backward"))
        return None

    def _activation(self, tensor: torch.Tensor) -> SavedStorage | None:
        """The storage of a tensor that is not a weight, or None if the storage lives anyway."""
        if not _plain(tensor) or tensor.untyped_storage()._cdata in self._buffers:
            return None
        return self._saved.find(tensor)


def _top() -> Any:
    """The innermost pair of hooks, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _of_checkpoint(hooks: Any) -> bool:
    return getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def _plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of its storage alone."""
    return tensor.layout is torch.strided and type(tensor) in _plain_classes()


@cache
def _plain_classes() -> tuple[type, ...]:
    return torch.Tensor, nn.Parameter, ShownParameter, hidden_class(torch.Tensor), hidden_class(nn.Parameter)
