"""A unit of the live model: its parameters, what they look like between uses, and what is pending for them."""

from collections.abc import Callable

import torch
from torch import nn

from pagoda.plan.units import UnitSpec
from pagoda.runtime.lanes import Handle

Owner = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""


class LiveUnit:
    """The parameters of one unit, in the order of its slots.

    Invariant: outside its modules' forward every parameter is a placeholder, a NaN expanded to the parameter's
    shape, so that shape, dtype and device stay true while a use of the value cannot go unseen.
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
        self.owners = owners
        """Who holds each parameter; several for a tied one."""
        self.active = 0
        """Forwards of this unit's modules that are running now; above zero the lease is pinned."""
        self.version = 0
        """Counts changes of the weights, as a tensor's version counter does."""
        self.packed = 0
        """References to the weights that autograd graphs hold; above zero a backward may still read them."""
        self.used = False
        """True once a forward has used the unit, or has it get a gradient, since its gradients were last cleared."""
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
        self.placeholders = [torch.full((), torch.nan, dtype=dtype, device=device).expand(p.shape) for p in params]

    @property
    def index(self) -> int:
        return self.spec.index

    def name(self, slot: int) -> str:
        """Qualified name of a parameter."""
        return self.spec.slots[slot].param.name

    @property
    def expected(self) -> list[int]:
        """Slots that get a gradient from a backward that uses all parameters: in a group, and not frozen."""
        return [slot for slot in range(self.trainable) if slot in self.grouped and self.params[slot].requires_grad]

    def show(self, base: torch.Tensor) -> None:
        """Point the parameters into a lease. `base`: the unit's weights, shape [numel].

        A trainable parameter must stay the leaf that autograd knows, so its data is swapped. A frozen one is replaced
        in its modules by a new object: graphs keep frozen tensors themselves, not copies of their handles, and would
        see the placeholder later; a new object holds the lease's storage instead.
        """
        for slot, (placed, param) in enumerate(zip(self.spec.slots, self.params, strict=True)):
            view = base.narrow(0, placed.offset, placed.param.numel).view(placed.param.shape)
            if param.requires_grad:
                param.data = view
            else:
                shown = nn.Parameter(view, requires_grad=False)
                shown.__dict__.update(param.__dict__)
                self._install(slot, shown)
                self._replaced.append(slot)

    def hide(self) -> None:
        """Put the placeholders back."""
        for param, placeholder in zip(self.params, self.placeholders, strict=True):
            param.data = placeholder
        for slot in self._replaced:
            self._install(slot, self.params[slot])
        self._replaced.clear()

    def _install(self, slot: int, param: nn.Parameter) -> None:
        for module, name in self.owners[slot]:
            module._parameters[name] = param

    def wait_for_update(self, waited: Callable[[Handle], None]) -> None:
        """Wait until the weights are those of the latest update; `waited` does the waiting and accounts for it."""
        if self.update is not None:
            waited(self.update)
            self.update = None
