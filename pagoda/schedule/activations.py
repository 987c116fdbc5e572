"""When offloaded activations leave the memory of compute, and when they come back.

Forward saves activations, and backward uses them in reverse order. A live run and a simulation both drive these rules:

- an activation leaves as soon as only graphs hold it; the driver makes compute wait while more than a `window` of bytes
  is leaving;
- in backward, up to a `window` of the bytes that are used next is on its way back, or is back.

They are no part of `Scheduler`, because they need neither its trace nor its frames. An activation that backward does
not use is over when its graph is gone. No event of a step says so; the driver does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from pagoda.plan.activations import window_of
from pagoda.schedule.waits import AnyTransfer, InFlight


@dataclass(eq=False, slots=True)
class Activation:
    """A storage that a graph saves for backward, and that is offloaded meanwhile."""

    nbytes: int
    payload: Any = None
    """What the driver knows of it."""
    wanted: bool = False
    """Whether it has been asked back, so that it does not leave any more."""
    over: bool = False
    """Whether backward has used it, or the driver says that it will not, because the graph is gone."""


class GraphActivations(Generic[AnyTransfer]):
    """Decides about the offloaded activations of one graph. Its methods are events of compute."""

    def __init__(
        self,
        leaving: InFlight[AnyTransfer],
        offload: Callable[[Activation], AnyTransfer],
        bring_back: Callable[[Activation], None],
    ) -> None:
        """`leaving` has the activations of all graphs on their way out. `offload` moves an activation away.
        `bring_back` keeps one that has not left yet, and moves any other back. It is called once for each, unless it
        raises."""
        self._leaving = leaving
        self._offload = offload
        self._bring_back = bring_back
        self._saved: list[Activation] = []
        """In the order of forward, without those at the end that are over."""
        self._largest = 0

    @property
    def window(self) -> int:
        """Most bytes on their way out while compute goes on, and most that come back before they are used."""
        return window_of(self._largest)

    def save(self, activation: Activation) -> None:
        """Forward saves an activation."""
        self._saved.append(activation)
        self._largest = max(self._largest, activation.nbytes)

    def leave(self, activation: Activation) -> None:
        """Only graphs hold a saved activation now."""
        if not activation.wanted:
            self._leaving.add(self._offload(activation), activation.nbytes)

    def use(self, activation: Activation) -> None:
        """Backward uses an activation now. It must wait until the activation is back."""
        self._want(activation)
        activation.over = True
        self.begin_backward()

    def begin_backward(self) -> None:
        """Backward uses something of the graph."""
        while self._saved and self._saved[-1].over:
            self._saved.pop()
        room = self.window
        for activation in reversed(self._saved):
            if not activation.over:
                room -= activation.nbytes
                if room < 0:
                    break
                self._want(activation)

    def _want(self, activation: Activation) -> None:
        if not activation.wanted:
            self._bring_back(activation)
            activation.wanted = True
