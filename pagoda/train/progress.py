"""Messages and progress of a run: a live bar on a terminal, elsewhere a plain line every few steps."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn

from pagoda.memory.files import append_to
from pagoda.memory.sizes import format_rate
from pagoda.train.metrics import StepMetrics

if TYPE_CHECKING:
    from pagoda.train.data import Batches

_PLAIN_LINES = 10
_PLAIN_EVERY = 10


def say(console: Console, *lines: str) -> None:
    """Print lines without wrapping them."""
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def expected(batches: "Batches", steps: int, done: int, step_s: float | None, evaluates: bool) -> str:
    """A message about what a run of `steps` steps is going to do after the first `done`.

    `step_s`: seconds that a forecast expects of a step, or None.
    """
    samples = batches.samples_per_step
    epochs = steps * samples / len(batches.rows)
    takes = "step 1 shows the time that is left"
    if step_s is not None:
        takes = f"about {timedelta(seconds=round((steps - done) * step_s))}" + ", without evaluations" * evaluates
    of = f"{samples:,} sequence{'s' * (samples != 1)} ({batches.tokens_per_step:,} tokens)"
    read = f"{epochs:.3g} epoch{'s' * (epochs != 1)}" if epochs >= 0.1 else f"{100 * epochs:.2g}% of an epoch"
    return f"Run: {steps - done:,} steps of {of}, {read}; {takes}"


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
    before = console.file
    output = Lasting(before)
    console.file = cast(IO[str], output)
    try:
        yield output
    finally:
        console.file = before


def discard(stream: IO[str]) -> None:
    """Discard what a stream has buffered, and all later text. Raises OSError if it has no file descriptor."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Progress(Bar):
    """Shows loss, tokens per second, stalls and time left after each step: a bar if the console is a terminal,
    otherwise a line every few steps. `steps` is the last step of the run. `done` is the number of steps before it was
    resumed."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        super().__init__(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TextColumn("{task.fields[left]} left"),
            console=console,
            disable=not console.is_terminal,
            expand=True,
        )
        self._steps = steps
        self._every = max(1, min((steps - done) // _PLAIN_LINES, _PLAIN_EVERY))
        self._seen = 0
        self._task = self.add_task("train", total=steps, completed=done, figures="", left="-:--:--")

    def show(self, metrics: StepMetrics, left_s: float) -> None:
        """Show one finished step, and the seconds that are left."""
        self._seen += 1
        balance = "" if metrics.aux_loss is None else f"balance {metrics.aux_loss:.3f}  "
        figures = f"loss {metrics.loss:.4f}  {balance}{format_rate(metrics.tokens_per_s)} tokens/s  {_stalls(metrics)}"
        left = timedelta(seconds=round(left_s))
        if self.console.is_terminal:
            self.update(self._task, completed=metrics.step, figures=figures, left=left)
        elif self._seen == 1 or metrics.step % self._every == 0 or metrics.step == self._steps:
            say(self.console, f"step {metrics.step}/{self._steps}  {figures}  {left} left")


def _stalls(metrics: StepMetrics) -> str:
    """The share of the step for which compute waited, and the lane for which it waited longest."""
    waited_s = sum(metrics.stall_s.values())
    if waited_s < 0.005 * metrics.step_s:
        return "no stalls"
    lane = max(metrics.stall_s, key=lambda name: metrics.stall_s[name])
    return f"stalls {waited_s / metrics.step_s:.0%} ({lane})"
