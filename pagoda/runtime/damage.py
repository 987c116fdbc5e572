"""Damage: why states can be neither used nor saved, until a checkpoint has replaced them all."""

from dataclasses import dataclass
from typing import NoReturn

from pagoda.errors import NonFiniteGradientError, PagodaError, StorageError


@dataclass(eq=False)
class Damage:
    """The first error after which some states belong to one step and some to another, until a checkpoint has replaced
    every state. Thread-safe, because it is set by one assignment."""

    cause: BaseException | None = None
    """The error, or None if states are not damaged."""
    seen: bool = False
    """Whether the error has been raised."""
    is_final: bool = False
    """Whether not even a checkpoint can be loaded, because the driver has stopped."""

    def note(self, error: BaseException | None) -> None:
        """An operation that changes states has ended, perhaps with an error. A gradient that is not finite changes no
        state."""
        if error is None or isinstance(error, NonFiniteGradientError):
            return
        if self.cause is None:
            self.cause, self.seen = error, False

    def check(self) -> None:
        """Raises StorageError if states are damaged."""
        if self.cause is not None:
            self.seen = True
            text = str(self.cause)
            known = text and isinstance(self.cause, PagodaError)
            said = text if known else f"{type(self.cause).__name__}{': ' if text else ''}{text}"
            way_out = "Start the program again, from a" if self.is_final else "Load a"
            raise StorageError(
                f"The training state is damaged: a part of it was changed when this failed: {said} -- {way_out} "
                "checkpoint. Until then it can be neither used nor saved."
            ) from self.cause

    def raise_cause(self) -> NoReturn:
        """Raises the error itself the first time, and later the StorageError of `check`."""
        if self.seen:
            self.check()
        assert self.cause is not None
        self.seen = True
        raise self.cause
