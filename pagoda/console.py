"""What commands print, and streams that may fail."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from pagoda.memory.files import append_to
from pagoda.process import temporarily


def say(console: Console, *lines: str) -> None:
    """Print lines without wrapping them."""
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


class FailingOnce:
    """A text stream that does not use its target any more after the first error of it (a closed pipe or terminal, a
    full disk)."""

    def __init__(self, target: IO[str]) -> None:
        self._target = target
        self._fails = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def write(self, text: str) -> int:
        self._do(lambda: self._target.write(text))
        return len(text)

    def flush(self) -> None:
        self._do(self._target.flush)

    def failed(self, error: OSError | ValueError) -> None:
        """Called with the first error; a ValueError says that the target was closed."""
        raise NotImplementedError

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work() if not self._fails else None
        except (OSError, ValueError) as error:
            self._fails = True
            with suppress(OSError, ValueError):
                discard(self._target)  # else Python's exit writes there again
            self.failed(error)


class Lasting(FailingOnce):
    """A text stream that does not fail: later text goes to the end of a file, or nowhere if that fails, too."""

    instead: Path | None = None
    """The file."""

    def write(self, text: str) -> int:
        super().write(text)
        if self._fails and self.instead is not None:
            with suppress(OSError), append_to(self.instead) as file:
                file.write(text.encode(errors="replace"))
        return len(text)

    def failed(self, error: OSError | ValueError) -> None:
        with suppress(OSError, ValueError):
            message = f"pagoda: {error}: the run continues, and writes what follows to output.txt in its directory"
            print(message, file=sys.stderr, flush=True)


@contextmanager
def lasting(console: Console) -> Iterator[Lasting]:
    """Inside, errors of the console's stream do not end the run."""
    output = Lasting(console.file)
    with temporarily(console, file=output):
        yield output


def discard(stream: IO[str]) -> None:
    """Discard what a stream has buffered, and all later text. Raises OSError if it has no file descriptor."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
