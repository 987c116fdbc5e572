"""Damage: an error that has left some states changed and others not, so that together they are those of no step."""

from typing import NoReturn

from pagoda.errors import NonFiniteGradientError, StorageError


class Damage:
    """The first error that did so, until a checkpoint has replaced every state. Thread-safe: one assignment."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None
        """The error, where states are those of no step."""
        self.seen = False
        """Whether it has been raised."""

    def note(self, error: BaseException | None) -> None:
        """What changes states has ended, with this error, if any. A gradient that is not finite changes none."""
        if error is None or isinstance(error, NonFiniteGradientError):
            return
        if self.cause is None:
            self.cause, self.seen = error, False

    @property
    def found(self) -> bool:
        return self.cause is not None

    def check(self) -> None:
        """Raises StorageError if states are damaged: some are of one step and some of another."""
        if self.cause is not None:
            self.seen = True
            raise StorageError(
                f"The training state is damaged: a part of it was changed when this failed: {self.cause} -- Load a "
                "checkpoint. Until then it can be neither used nor saved."
            ) from self.cause

    def raise_cause(self) -> NoReturn:
        """Raises the error itself, where something waits for what has failed; later the StorageError of `check`."""
        if self.seen:
            self.check()
        assert self.cause is not None
        self.seen = True
        raise self.cause
