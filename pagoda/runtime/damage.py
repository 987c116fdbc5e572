"""Damage: an error that has left some states changed and others not, so that together they are those of no step."""

from typing import NoReturn

from pagoda.errors import NonFiniteGradientError, StorageError


class Damage:
    """The first error that did so, until every state has been replaced. Thread-safe: one assignment.

    A checkpoint replaces all at once (`mend`). State dicts do so in parts and in any order: the weights of one
    parameter after another, and all that the optimizer keeps. The last of them mends.
    """

    def __init__(self) -> None:
        self.cause: BaseException | None = None
        """The error, where states are those of no step."""
        self.seen = False
        """Whether it has been raised."""
        self._weights: set[tuple[int, int]] = set()
        """(unit, slot) of parameters whose weights have been replaced since."""
        self._optimizer = False
        """Whether moments and step counts have been."""

    def note(self, error: BaseException | None) -> None:
        """What changes states has ended, with this error, if any. A gradient that is not finite changes none."""
        if error is None or isinstance(error, NonFiniteGradientError):
            return
        self._forget_replaced()
        if self.cause is None:
            self.cause, self.seen = error, False

    @property
    def found(self) -> bool:
        return self.cause is not None

    def check(self) -> None:
        """Raises StorageError where states are those of no step."""
        if self.cause is not None:
            self.seen = True
            raise StorageError(
                f"The training state is that of no step, since this failed: {self.cause} -- It can be neither used "
                "nor saved until a checkpoint is loaded, or the state dicts of both model and optimizer are, complete."
            ) from self.cause

    def raise_cause(self) -> NoReturn:
        """Raises the error itself, for whoever waits for what has failed; later the StorageError of `check`."""
        if self.seen:
            self.check()
        assert self.cause is not None
        self.seen = True
        raise self.cause

    def weights_replaced(self, unit: int, slot: int) -> None:
        """The weights of a parameter have been replaced."""
        self._weights.add((unit, slot))

    def optimizer_replaced(self) -> None:
        """All that the optimizer keeps of its parameters has been replaced."""
        self._optimizer = True

    def all_replaced(self, parameters: int) -> bool:
        """Whether nothing is left of what was damaged, in a model of so many parameters."""
        return self._optimizer and len(self._weights) == parameters

    def mend(self) -> None:
        """Every state has been replaced."""
        self._forget_replaced()
        self.cause = None

    def _forget_replaced(self) -> None:
        self._weights.clear()
        self._optimizer = False
