"""A unit of the live model: its parameters, what they look like between uses, and what is pending for them."""

from collections.abc import Callable

import torch
from torch import nn

from pagoda.plan.units import UnitSpec
from pagoda.runtime.lanes import Handle


class LiveUnit:
    """The parameters of one unit, in the order of its slots.

    Invariant: outside its modules' forward every parameter is a placeholder, a NaN expanded to the parameter's
    shape, so that shape, dtype and device stay true while a use of the value cannot go unseen.
    """

    def __init__(self, spec: UnitSpec, params: list[nn.Parameter], dtype: torch.dtype) -> None:
        self.spec = spec
        self.params = params
        self.active = 0
        """Forwards of this unit's modules that are running now; above zero the lease is pinned."""
        self.version = 0
        """Counts changes of the weights, as a tensor's version counter does."""
        self.packed = 0
        """References to the weights that autograd graphs hold; above zero a backward may still read them."""
        self.used = False
        """True once a forward has used the unit since its gradients were last cleared."""
        self.updated = False
        """True from an update under backward until `step()`."""
        self.update: Handle | None = None
        """Ends when the latest update has published the weights."""
        self.gathered: set[int] = set()
        """Slots whose parameters hold real tensors at the user's wish."""
        self.trainable = sum(slot.param.trainable for slot in spec.slots)
        self.steps = [0] * self.trainable
        """Updates each trainable parameter has had."""
        self.placeholders = [torch.full((1,), torch.nan, dtype=dtype).expand(p.shape) for p in params]

    @property
    def index(self) -> int:
        return self.spec.index

    def name(self, slot: int) -> str:
        """Qualified name of a parameter."""
        return self.spec.slots[slot].param.name

    def show(self, base: torch.Tensor) -> None:
        """Point the parameters into a lease. `base`: the unit's weights, shape [numel]."""
        for slot, param in zip(self.spec.slots, self.params, strict=True):
            shape = slot.param.shape
            param.data = base.narrow(0, slot.offset, slot.param.numel).view(shape)

    def hide(self) -> None:
        """Put the placeholders back."""
        for param, placeholder in zip(self.params, self.placeholders, strict=True):
            param.data = placeholder

    def wait_for_update(self, waited: Callable[[Handle], None]) -> None:
        """Wait until the weights are those of the latest update; `waited` does the waiting and accounts for it."""
        if self.update is not None:
            waited(self.update)
            self.update = None
