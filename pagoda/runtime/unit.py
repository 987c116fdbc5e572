"""A unit of the live model: its parameters, what they look like between uses, and what is pending for them."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pagoda.errors import UsageError
from pagoda.parallel.tensors import Form
from pagoda.plan.units import UnitSpec
from pagoda.runtime.lanes import Handle

Owner = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""


class LiveUnit:
    """The parameters of one unit, in the order of its slots.

    Invariant: outside its modules' forward every parameter is a placeholder, a NaN expanded to the parameter's
    shape, so that shape, dtype and device stay true while a use of the value cannot go unseen. Of a DTensor, that is
    said of this rank's part: the parameter itself stays, and shows another part.
    """

    def __init__(
        self,
        spec: UnitSpec,
        params: list[nn.Parameter],
        owners: list[list[Owner]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.params = params
        self._owners = [[(weakref.ref(module), name) for module, name in of_param] for of_param in owners]
        self.active = 0
        """Forwards of this unit's modules that are running now; above zero the lease is pinned."""
        self.version = 0
        """Counts changes of the weights, as a tensor's version counter does."""
        self.packed = 0
        """References to the weights that autograd graphs hold; above zero a backward may still read them."""
        self.used = False
        """True once a graph may give the unit a gradient, since its gradients were last cleared."""
        self.updated = False
        """True from an update under backward until `step()`."""
        self.update: Handle | None = None
        """Ends when the latest update has published the weights."""
        self.gathered: set[int] = set()
        """Slots whose parameters hold real tensors at the user's wish."""
        self.trainable = sum(slot.param.trainable for slot in spec.slots)
        """Slots that have optimizer state and a gradient extent: the first ones. They may be frozen now."""
        self.grouped = set(range(self.trainable))
        """Slots whose parameters are in a param group: only they are updated."""
        self.steps = [0] * self.trainable
        """Updates each of those parameters has had."""
        self._replaced: list[int] = []
        """Slots for which the modules hold a new object while the unit is shown."""
        self.markers: list[torch.Tensor] = []
        """What each trainable parameter shows as its gradient while that lies in its extent."""
        self.forms = [Form.of(param) for param in params]
        """How each parameter that is a DTensor shows this rank's part; None for others."""
        self._nans = [torch.full((), torch.nan, dtype=dtype, device=device) for _ in params]
        self.placeholders = [nan.expand(slot.param.shape) for nan, slot in zip(self._nans, spec.slots, strict=True)]
        self._strides = [torch.empty(slot.param.shape, device="meta").stride() for slot in spec.slots]
        self.blanks = [nan.expand(param.shape) for nan, param in zip(self._nans, params, strict=True)]
        """The same in the whole parameter's shape."""
        self._versions = [param._version for param in params]
        """Of the parameters when what they show was last set: writing in place counts on."""

    @property
    def owners(self) -> list[list[Owner]]:
        """Who holds each parameter; several for a tied one. A unit does not keep them alive."""
        return [[(m, name) for of, name in of_param if (m := of()) is not None] for of_param in self._owners]

    @property
    def index(self) -> int:
        return self.spec.index

    def name(self, slot: int) -> str:
        """Qualified name of a parameter."""
        return self.spec.slots[slot].param.name

    def part_index(self, slot: int) -> int:
        """Which of its equal parts this rank has of a parameter; 0 where it has all of it."""
        form = self.forms[slot]
        return 0 if form is None or self.spec.slots[slot].param.shard is None else form.mesh.get_local_rank()

    def stored_name(self, slot: int) -> str:
        """What this rank's part of a parameter is called in a checkpoint; the parameter's name where it has all."""
        shard = self.spec.slots[slot].param.shard
        return self.name(slot) if shard is None else shard.name_of_part(self.name(slot), self.part_index(slot))

    def part(self, slot: int) -> torch.Tensor:
        """What a parameter shows of itself now, on this rank."""
        param: Any = self.params[slot]
        part: torch.Tensor = param.data if self.forms[slot] is None else param._local_tensor
        return part

    def set_part(self, slot: int, part: torch.Tensor) -> None:
        """Let a parameter show this. It stays the leaf that autograd knows."""
        param: Any = self.params[slot]
        self._versions[slot] = param._version
        if self.forms[slot] is None:
            param.data = part
        else:
            param._local_tensor = part

    def replace_param(self, slot: int, param: nn.Parameter) -> None:
        """Let another one, which shows the placeholder, be the parameter of a slot."""
        self.params[slot] = param
        self._versions[slot] = param._version

    def as_param(self, slot: int, part: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor in a parameter's shape, as the parameter is: a DTensor where that is one."""
        form = self.forms[slot]
        return part if form is None else form.around(part)

    def part_of(self, slot: int, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor in a parameter's shape, be that a DTensor or one that every rank has."""
        form = self.forms[slot]
        return value if form is None else form.part_of(value)

    def new_param(self, slot: int, part: torch.Tensor) -> nn.Parameter:
        """Another parameter that shows this, with the attributes of the one in a slot."""
        param = self.params[slot]
        made = nn.Parameter(self.as_param(slot, part), param.requires_grad)
        made.__dict__.update(param.__dict__)
        return made

    @property
    def expected(self) -> list[int]:
        """Slots that get a gradient from a backward that uses all parameters: in a group, and not frozen."""
        return [slot for slot in range(self.trainable) if slot in self.grouped and self.params[slot].requires_grad]

    def show(self, base: torch.Tensor) -> None:
        """Point the parameters into a lease. `base`: the unit's weights, shape [numel].

        A trainable parameter must stay the leaf that autograd knows, so its data is swapped. A frozen one is replaced
        in its modules by a new object: graphs keep frozen tensors themselves, not copies of their handles, and would
        see the placeholder later; a new object holds the lease's storage instead. Its data is swapped too, for whatever
        else holds it.

        Raises UsageError where something was written to a placeholder, which nothing would read.
        """
        for slot, (placed, strides, param) in enumerate(zip(self.spec.slots, self._strides, self.params, strict=True)):
            self._check_unwritten(slot)
            view = base.as_strided(placed.param.shape, strides, base.storage_offset() + placed.offset)
            self.set_part(slot, view)
            if not param.requires_grad:
                self._install(slot, self.new_param(slot, view))
                self._replaced.append(slot)

    def hide(self) -> None:
        """Put the placeholders back."""
        for slot, placeholder in enumerate(self.placeholders):
            self.set_part(slot, placeholder)
        for slot in self._replaced:
            self._install(slot, self.params[slot])
        self._replaced.clear()

    def _check_unwritten(self, slot: int) -> None:
        nan, placeholder, param = self._nans[slot], self.placeholders[slot], self.params[slot]
        shown: Any = param if self.forms[slot] is None else self.part(slot)
        # Reading the value would wait for a device: there, what is written past autograd (param.data) goes unseen.
        kept = math.isnan(nan.item()) if nan.device.type == "cpu" else param._version == self._versions[slot]
        if shown.data_ptr() == placeholder.data_ptr() and kept:
            return
        nan.fill_(torch.nan)
        self.set_part(slot, placeholder)
        raise UsageError(
            f"{self.name(slot)!r} was written to, moved or cast outside `with pagoda.gathered(param, modify=True):`, "
            "where its weights are not in memory. Write inside such a block; the dtype is wrap(precision=...)'s, and "
            "the device memory.device's."
        )

    def _install(self, slot: int, param: nn.Parameter) -> None:
        for module, name in self.owners[slot]:
            if isinstance(module, nn.RNNBase):  # has a list of them too, which would hold the lease
                setattr(module, name, param)
            else:
                module._parameters[name] = param

    def wait_for_update(self, waited: Callable[[Handle], None]) -> None:
        """Wait until the weights are those of the latest update; `waited` does the waiting and accounts for it."""
        if self.update is not None:
            waited(self.update)
            self.update = None
