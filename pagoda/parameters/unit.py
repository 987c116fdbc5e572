"""A unit of the live model: its parameters, their placeholders between uses, and its counters."""

import gc
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pagoda.errors import ConfigError, UsageError
from pagoda.mesh.dtensors import DTensorForm
from pagoda.parameters.hidden import as_plain, hidden_class, hide, hide_part, name_of
from pagoda.parameters.quantized import QuantizedForm, kept_class
from pagoda.plan.units import UnitSpec

_DATA: Any = torch.Tensor.data
DATA_GIVEN = "_data_given"
"""Attribute of a parameter that a forward may read: the tensors that its `data` has returned."""


class ShownParameter(nn.Parameter):
    """The class of a parameter while a forward may read it. It detects writes to its `data`, which autograd does not
    see.

    Each tensor that `data` returns has its own version counter.
    """

    @property
    def data(self) -> torch.Tensor:
        """The values, without autograd."""
        part: torch.Tensor = _DATA.__get__(self)
        self.__dict__.setdefault(DATA_GIVEN, []).append(part)
        return part

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        is_same = value.dtype is self.dtype and value.shape == self.shape
        if not is_same or (value.data_ptr() != self.data_ptr() and not torch.equal(value, _DATA.__get__(self))):
            raise UsageError(written_in_forward(name_of(self)))

    def set_(self, *source: Any) -> torch.Tensor:
        """As of a tensor. With itself, as torch's parametrizations call it, it does nothing."""
        return self if len(source) == 1 and source[0] is self else super().set_(*source)


def written_in_forward(name: str) -> str:
    """The error message for a parameter to which a forward has written."""
    return (
        f"Parameter {name!r} was written to inside a forward, where only what compute reads of it is in memory: the "
        "write is lost, or changes a part of the master's bits alone. Write between steps, inside `with "
        "pagoda.gathered(param, modify=True):`, or keep the values in a buffer."
    )


def node_is_held(param: torch.Tensor) -> bool:
    """Whether someone holds the node with which autograd accumulates a parameter's gradient. It may have hooks."""
    if not param.requires_grad or param.is_inference():
        return False
    holders = param._use_count()  # type: ignore[attr-defined]
    with torch.inference_mode(False):
        edge = torch.autograd.graph.get_gradient_edge(param)  # makes the node, unless it exists
    held: bool = edge is not None and param._use_count() == holders  # type: ignore[attr-defined]
    return held


def check_node_is_free(param: torch.Tensor, name: str) -> None:
    """Raises ConfigError if autograd's node of a parameter that gets a new one has hooks, which would be lost, or if
    Python code holds it, which may count on it. Graphs may hold it."""
    if not node_is_held(param):
        return
    node = torch.autograd.graph.get_gradient_edge(param).node
    others = 0
    for kind in ("register_hook", "register_prehook"):
        mine: Any = getattr(node, kind)(_nothing)
        others += len(mine.hooks_dict_ref()) - 1
        mine.remove()
    if others or gc.get_referrers(node):
        raise ConfigError(
            f"{name!r} gets new memory or a new dtype, but a hook on autograd's node of it would be lost "
            "(torch.autograd.graph.register_multi_grad_hook). Register such hooks after wrap(), or use "
            "param.register_hook(...)."
        )


def retire_node(param: torch.Tensor, name: str) -> None:
    """A parameter gets a new node. From now on, graphs that hold the old one raise UsageError in backward."""

    def refuse(*_: Any) -> None:
        raise UsageError(
            f"This backward reaches {name!r} through a graph from before wrap(), which gave the parameter new memory "
            "or a new dtype: run it before wrap(), or compute the graph again."
        )

    if node_is_held(param):
        torch.autograd.graph.get_gradient_edge(param).node.register_prehook(refuse)


def _nothing(*_: Any) -> None:
    pass


def successor(param: nn.Parameter, values: torch.Tensor, name: str) -> nn.Parameter:
    """A new parameter with `values` that takes the place of another one: it has its attributes and its hooks. Handles
    of these hooks remove them from both.

    Raises ConfigError like `check_node_is_free`.
    """
    check_node_is_free(param, name)
    retire_node(param, name)
    made = nn.Parameter(values, param.requires_grad)
    made.__dict__.update(param.__dict__)
    if param._backward_hooks is not None:
        made._backward_hooks = param._backward_hooks
    if param._post_accumulate_grad_hooks is not None:
        made._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    return made


@dataclass(eq=False)
class Gathered:
    """A real tensor that a block of `gathered` has given to a parameter."""

    hash: int
    """Of the values that pages have."""
    lock: threading.Lock
    """Held inside the block."""


class LiveUnit:
    """The parameters of one unit, in the order of its slots.

    Invariant: outside its modules' forward, every parameter is hidden. Its shape, dtype and device are true, and
    functions of torch that use its values read them from pages. For code that torch does not see, it contains a
    placeholder: NaN expanded to its shape. For a DTensor this holds for the rank's part: the parameter itself stays,
    and shows another part.
    """

    def __init__(self, spec: UnitSpec, params: list[nn.Parameter], dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.params = params
        self.active = 0
        """Number of running forwards of this unit's modules. Above zero, the lease is pinned."""
        self.pack = object()
        """Held by every reference to the weights in an autograd graph."""
        self._unpacked = sys.getrefcount(self.pack)
        self.used = False
        """True if a graph may give the unit a gradient since its gradients were last cleared."""
        self.updated = False
        """True between an update during backward and `step()`."""
        self.fetch_error: BaseException | None = None
        """Why the weights did not come since compute last asked for them."""
        self._gathered: dict[int, Gathered] = {}
        self.trainable = sum(slot.param.trainable for slot in spec.slots)
        """Number of slots with optimizer state and a gradient extent. They come first. Some may be frozen now."""
        self.grouped = set(range(self.trainable))
        """Slots whose parameters are in a param group. Only these are updated."""
        self.steps = [0] * self.trainable
        """Number of updates of each of these parameters."""
        self._versions: list[int] = []
        """Version of each parameter when the unit was shown. In-place writes increase it."""
        self._kinds = [type(param) for param in params]
        """The classes of the parameters while they are not hidden."""
        self.markers: list[torch.Tensor] = []
        """The marker of each trainable parameter, which it shows as its gradient while the gradient is in its
        extent."""
        self.marked: set[int] = set()
        """Slots with a gradient that no update has taken. Their markers stand for it, unless the user drops it."""
        self.forms = [
            DTensorForm.of(param, stored_whole=slot.param.shard is None) or QuantizedForm.of(param, dtype)
            for param, slot in zip(params, spec.slots, strict=True)
        ]
        """How a DTensor shows this rank's part, or a quantized parameter its bytes. None for other parameters."""
        nans = [torch.full((8,), torch.nan, dtype=dtype, device=device)[0] for _ in params]
        wholes = [nan.expand(slot.param.shape) for nan, slot in zip(nans, spec.slots, strict=True)]
        self.placeholders = [self.shown(slot, whole) for slot, whole in enumerate(wholes)]
        self._strides = [torch.empty(slot.param.shape, device="meta").stride() for slot in spec.slots]
        blanks = [nan.expand(slot.param.shape) for nan, slot in zip(nans, spec.slots, strict=True)]
        self.blanks = [self.as_param(slot, self.shown(slot, blanks[slot])) for slot in range(self.trainable)]
        """Placeholders of the trainable parameters' gradients."""

    @property
    def index(self) -> int:
        return self.spec.index

    @property
    def packed(self) -> bool:
        """Whether autograd graphs have references to the weights, so that a backward may still read them. References
        are counted by Python itself: in a `__del__`, an exception of a signal's handler would be lost."""
        return sys.getrefcount(self.pack) > self._unpacked

    @property
    def gathered(self) -> "dict[int, Gathered]":
        """Slots whose parameters hold real tensors because the user asked for it."""
        for slot in [slot for slot, copy in self._gathered.items() if not copy.lock.locked()]:
            self.give_back(slot)  # an exception, as that of Ctrl-C, has cut off the end of the block
        return self._gathered

    def give_back(self, slot: int) -> None:
        """A parameter is no longer gathered."""
        self.hide_slot(slot)
        self._gathered.pop(slot, None)

    def name(self, slot: int) -> str:
        """Qualified name of a parameter."""
        return self.spec.slots[slot].param.name

    def part_index(self, slot: int) -> int:
        """Index of this rank's part among the equal parts of a parameter. 0 if this rank has all of it."""
        form = self.forms[slot]
        if not isinstance(form, DTensorForm) or self.spec.slots[slot].param.shard is None:
            return 0
        return form.mesh.get_local_rank()

    def current(self, slot: int) -> torch.Tensor:
        """The values that a parameter shows now, as pages store them."""
        param: Any = self.params[slot]
        form = self.forms[slot]
        values: torch.Tensor = param.data if form is None else form.stored(param)
        return values

    def shown(self, slot: int, stored: torch.Tensor) -> torch.Tensor:
        """What a parameter shows of a tensor as pages store it: a view."""
        form = self.forms[slot]
        return form.shown(stored) if isinstance(form, DTensorForm) else stored

    def set_part(self, slot: int, part: torch.Tensor) -> None:
        """Make a parameter show `part`, for everyone to use. It stays the leaf that autograd knows."""
        param: Any = self.params[slot]
        param.__class__ = self._kinds[slot]
        form = self.forms[slot]
        if form is None:
            param.data = part
        else:
            form.show(param, part)

    def as_param(self, slot: int, part: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor in a parameter's shape, as a DTensor if the parameter is one."""
        form = self.forms[slot]
        return part if form is None else form.around(part)

    def stored(self, slot: int, value: torch.Tensor) -> torch.Tensor:
        """What pages store on this rank of a tensor in a parameter's shape. The tensor is a DTensor, or every rank has
        all of it."""
        form = self.forms[slot]
        return value if form is None else form.stored(value)

    def new_param(self, slot: int, part: torch.Tensor) -> nn.Parameter:
        """A new parameter that shows `part`, in place of the slot's parameter."""
        return successor(self.params[slot], self.as_param(slot, part), self.name(slot))

    def replace(self, slot: int, param: nn.Parameter) -> None:
        """Put a parameter in the place of one that was planned."""
        self.params[slot], self._kinds[slot] = param, type(param)

    def mark(self, slot: int) -> None:
        """Show the marker of a parameter as its gradient."""
        with as_plain():
            self.params[slot].grad = self.markers[slot]
        self.marked.add(slot)

    def has_gradient(self, slot: int) -> bool:
        """Whether the next step uses a gradient of a parameter."""
        return slot in self.marked and self.params[slot].grad is not None

    @property
    def expected(self) -> list[int]:
        """Slots that get a gradient from a backward that uses all parameters: those in a group that are not frozen."""
        with as_plain():
            return [slot for slot in range(self.trainable) if slot in self.grouped and self.params[slot].requires_grad]

    def show(self, base: torch.Tensor) -> None:
        """Point the parameters into a lease. `base`: the unit's weights, shape [numel].

        The parameters must stay the leaves that autograd knows, so their data is swapped. Raises UsageError if a
        parameter was moved or cast.
        """
        for slot, param in enumerate(self.params):
            kind = param.__class__ = self._kinds[slot]
            self._check_unmoved(slot)
            self.set_part(slot, self.view(slot, base))
            self._versions.append(param._version)
            if self.is_kept(slot):
                param.__class__ = kept_class(kind)
            elif kind is nn.Parameter:  # others keep their class
                param.__class__ = ShownParameter

    def view(self, slot: int, base: torch.Tensor) -> torch.Tensor:
        """The tensor that a parameter shows of a lease, on this rank."""
        placed = self.spec.slots[slot]
        stored = base.as_strided(placed.param.shape, self._strides[slot], base.storage_offset() + placed.offset)
        return self.shown(slot, stored)

    def is_kept(self, slot: int) -> bool:
        """Whether graphs keep the parameter itself without calling hooks, so that it is hidden in backward."""
        form = self.forms[slot]
        return isinstance(form, QuantizedForm) and form.is_kept

    def hide(self) -> str | None:
        """Hide the parameters again. Returns the name of a parameter that was written to since they were shown, if
        any."""
        written = None
        for slot, version in enumerate(self._versions):
            param = self.params[slot]
            param.__class__ = self._kinds[slot]
            given = param.__dict__.pop(DATA_GIVEN, ())
            if param._version != version or any(data._version for data in given):
                written = self.name(slot)
        self._versions.clear()
        for slot in range(len(self.params)):
            self.hide_slot(slot)
        return written

    def hide_slot(self, slot: int) -> None:
        """Hide one parameter again."""
        self.set_part(slot, self.placeholders[slot])
        self.params[slot].__class__ = hidden_class(self._kinds[slot])

    def begin_hiding(self) -> None:
        """From now on, hide the parameters outside forwards."""
        for slot, param in enumerate(self.params):
            self._kinds[slot] = type(param)
            form = self.forms[slot]
            if isinstance(form, DTensorForm):
                hide_part(self.placeholders[slot], param, self.name(slot))
                form.show(param, self.placeholders[slot])
            hide(param, self.name(slot))

    def _check_unmoved(self, slot: int) -> None:
        form = self.forms[slot]
        shown: Any = self.params[slot] if form is None else form.held(self.params[slot])
        if shown.data_ptr() == self.placeholders[slot].data_ptr():
            return
        self.hide_slot(slot)
        raise UsageError(
            f"{self.name(slot)!r} was moved, cast or given other data outside `with pagoda.gathered(param, "
            "modify=True):`, where its weights are not in memory. Write inside such a block; the dtype is "
            "wrap(precision=...)'s, and the device memory.device's."
        )
