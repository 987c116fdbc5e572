"""Messages and progress of a run: a live bar on a terminal, elsewhere a plain line every few steps."""

from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn

from pagoda.console import say
from pagoda.memory.sizes import format_rate
from pagoda.train.metrics import StepMetrics

if TYPE_CHECKING:
    from pagoda.train.data import Batches

_PLAIN_LINES = 10
_PLAIN_EVERY = 10


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
