"""Modules that choose, in their forward, which of their children will run."""

from collections.abc import Callable, Sequence

from torch import nn


class Announcing(nn.Module):
    """A module that says which children are about to run, so that their weights are fetched before they are used."""

    coming: Callable[[Sequence[nn.Module], Sequence[nn.Module]], None] | None = None
    """Set by the runtime. A forward calls it with the children that are about to run, in that order, and with those
    that get a gradient of zeros without running."""

    def pieces(self) -> list[tuple[nn.Module, int]]:
        """The children to choose from, in order, and how many experts each holds."""
        raise NotImplementedError
