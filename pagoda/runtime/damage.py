"""Damage: an error that has left some states changed and others not, so that together they are those of no step."""

from pagoda.errors import NonFiniteGradientError, StorageError


class Damage:
    """The first error that did so, until every state has been replaced. Thread-safe: one assignment."""

    def __init__(self) -> None:
        self._cause: BaseException | None = None

    def note(self, error: BaseException | None) -> None:
        """What changes states has ended, with this error, if any. A gradient that is not finite changes none."""
        if error is not None and self._cause is None and not isinstance(error, NonFiniteGradientError):
            self._cause = error

    @property
    def found(self) -> bool:
        return self._cause is not None

    def check(self) -> None:
        """Raises StorageError where states are those of no step."""
        if self._cause is not None:
            raise StorageError(
                f"The training state is that of no step, since this failed: {self._cause} -- It can be neither used "
                "nor saved until a checkpoint is loaded."
            ) from self._cause

    def mend(self) -> None:
        """Every state has been replaced."""
        self._cause = None
