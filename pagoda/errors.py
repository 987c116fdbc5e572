"""The errors that Pagoda raises on purpose. A message says what was asked, what there is, and what to change."""

import difflib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any


class PagodaError(Exception):
    """Base of every error that Pagoda raises on purpose. The command line prints it without a traceback and exits with
    2."""


class ConfigError(PagodaError, ValueError):
    """A setting, path or model name cannot be used."""


class BudgetError(ConfigError):
    """The training state does not fit the given memory.

    `tier` and `needed_bytes` name the budget that is too small and its minimum, if known.
    """

    def __init__(self, message: str, tier: str | None = None, needed_bytes: int | None = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.needed_bytes = needed_bytes


class StorageError(PagodaError, OSError):
    """The SSD directory is missing, full, or failed to read or write."""


class CorruptPageError(StorageError):
    """A page on SSD does not contain the bytes that were written. The message names the file and the offset."""


class UsageError(PagodaError, RuntimeError):
    """The training loop did something that would silently give a wrong result."""


class NonFiniteGradientError(PagodaError, FloatingPointError):
    """A gradient is NaN or infinite. The message names the first such parameter in the order of backward."""


class RankError(PagodaError, RuntimeError):
    """Other ranks have ended, or do something else than this one. The message names them and what they do."""


class CheckpointError(PagodaError):
    """A checkpoint is missing, incomplete, or does not belong to this model."""


def needed(module: str, refusal: str) -> Any:
    """Import a module of another package. Raises ConfigError with the message `refusal` if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(refusal) from error


def check_installed(module: str, refusal: str) -> None:
    """Raises ConfigError with the message `refusal` if a package is not installed. Does not import it."""
    try:
        found = find_spec(module)
    except ImportError:
        found = None
    if found is None:
        raise ConfigError(refusal)


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Raises every error of what is read as a ConfigError: datasets and the packages under it have many kinds."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error.__cause__ or error).strip().splitlines()[:1] or [type(error).__name__]
        raise ConfigError(f"{what} cannot be read: {reason[0]}") from error


def unknown_name(name: str, known: Collection[str], refusal: str, offer: str) -> ConfigError:
    """The error for an unknown name. It suggests the only known name that has it at the start of one of its words, such
    as --output-dir for --out, or the closest one, if one is close."""
    longer = [each for each in known if f"-{name.lstrip('-')}" in f"-{each}"]
    close = longer if len(longer) == 1 else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ConfigError(f"{refusal}{hint} {offer}")
