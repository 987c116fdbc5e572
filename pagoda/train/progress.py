"""What a run says of its progress."""

from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console

from pagoda.console import say
from pagoda.memory.sizes import format_rate
from pagoda.train.metrics import Line

if TYPE_CHECKING:
    from pagoda.train.data import Batches

_LINES, _MOST_STEPS, _SLOW_S = 10, 10, 10.0


def expected(batches: "Batches", steps: int, done: int, step_s: float | None, evaluates: bool) -> str:
    """A message about the steps of a run from `done` to `steps`, and what they read of the data.

    `step_s`: seconds that a forecast expects of a step, or None.
    """
    samples, left = batches.samples_per_step, steps - done
    epochs = left * samples / len(batches.rows)
    takes = "step 1 shows the time that is left"
    if step_s is not None:
        takes = f"about {timedelta(seconds=round(left * step_s))}" + ", without evaluations" * evaluates
    of = f"{samples:,} sequence{'s' * (samples != 1)} ({batches.tokens_per_step:,} tokens)"
    read = f"{epochs:.3g} epoch{'s' * (epochs != 1)}" if epochs >= 0.1 else f"{100 * epochs:.2g}% of an epoch"
    return f"Run: {left:,} step{'s' * (left != 1)} of {of}, {read}; {takes}"


class Progress:
    """Prints loss, tokens per second, stalls and time left: after the first and the last step, after each step that
    takes long, and after every few others."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        """`steps` is the last step of the run. `done` is the number of steps before it was resumed."""
        self._console, self._steps, self._done = console, steps, done
        self._every = max(1, min((steps - done) // _LINES, _MOST_STEPS))

    def show(self, line: Line, left_s: float) -> None:
        """Show a finished step, from its line of metrics.jsonl, and the seconds that the other steps take."""
        step = line["step"]
        if step % self._every and step not in (self._done + 1, self._steps) and line["step_s"] < _SLOW_S:
            return
        balance = "" if line["aux_loss"] is None else f"  balance {line['aux_loss']:.3f}"
        say(
            self._console,
            f"step {step}/{self._steps}  loss {line['loss']:.4f}{balance}  {format_rate(line['tokens_per_s'])} "
            f"tokens/s  {_stalls(line)}  {timedelta(seconds=round(left_s))} left",
        )


def _stalls(line: Line) -> str:
    """The share of the step for which compute waited, and the lane for which it waited longest."""
    stall_s = line["stall_s"]
    waited_s = sum(stall_s.values())
    if waited_s < 0.005 * line["step_s"]:
        return "no stalls"
    return f"stalls {waited_s / line['step_s']:.0%} ({max(stall_s, key=stall_s.__getitem__)})"
