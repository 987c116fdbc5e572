"""What a checkpoint of `pagoda train` costs beside the engine's own: how long compute stalls, with all state on SSD.

A run of `pagoda train` saves in turns through its Trainer and by `optimizer.save_checkpoint` alone, at the same place
of its loop, and each checkpoint replaces the one before of its kind. The call of a checkpoint is the time from the end
of a step to the beginning of the next one, less that between quiet steps. Its stall has also what the next step takes
beyond the mean of the quiet steps before and after.

    python benchmarks/checkpoint_train.py --ssd DIR [--model smollm2-135m] [--max-length 128] [--count 20] [--out FILE]
"""

import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import tyro
from rich.console import Console
from transformers import TrainerCallback

import pagoda
from pagoda.train import TrainConfig, assembly, run
from pagoda.train.trainer import RunTrainer
from script import begin, machine, write

_WARM = 3
"""Steps before the first checkpoint."""


class Stalls(TrainerCallback):
    """Saves after quiet steps, in turns, and keeps seconds."""

    def __init__(self, trainer: RunTrainer, folder: Path, count: int) -> None:
        self.trainer, self.folder, self.count = trainer, folder, count
        self.steps: list[float] = []
        self.gaps: list[float] = []
        """From the end of each step to the beginning of the next one."""
        self.saved: list[int] = []
        """The number of the step before each save: by the Trainer, by the engine, and so on."""
        self.busy: set[int] = set()
        """Steps while a checkpoint was written."""
        self.at = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        if self.steps:
            self.gaps.append(now - self.at)
        if self.trainer.passes.optimizer.checkpoint_pending:
            self.busy.add(len(self.steps))
        self.at = now

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        self.steps.append(now - self.at)
        self.at = now
        last, optimizer = len(self.steps) - 1, self.trainer.passes.optimizer
        if last < _WARM or last in self.busy or optimizer.checkpoint_pending:
            return
        if len(self.saved) == self.count or (self.saved and last - 1 in (*self.busy, *self.saved)):
            control.should_training_stop = len(self.saved) == self.count and last - 1 in self.busy
            return  # two quiet steps are between checkpoints
        number = len(self.saved)
        self.saved.append(last)
        if number % 2 == 0:
            control.should_save = True
        else:
            before = [self.folder / str(number - 2)] if number > 2 else []
            optimizer.save_checkpoint(self.folder / str(number), wait=False, replaces=before)

    def figures(self) -> dict[str, Any]:
        """Seconds of stalls, by who saved."""
        loud = {*self.busy, *(step + 1 for step in self.saved)}
        quiet = [step for step in range(_WARM, len(self.steps)) if step not in loud]
        gap = statistics.median(self.gaps[step] for step in quiet if step not in self.saved and step < len(self.gaps))
        stalls: list[float] = []
        for step in self.saved:
            around = [max(each for each in quiet if each <= step), min(each for each in quiet if each > step)]
            usual = statistics.mean(self.steps[each] for each in around)
            stalls.append(max(0.0, self.gaps[step] - gap) + max(0.0, self.steps[step + 1] - usual))
        found: dict[str, Any] = {"step_s": statistics.median(self.steps[step] for step in quiet), "gap_s": gap}
        for name, first in (("trainer", 0), ("engine", 1)):
            calls = [self.gaps[step] - gap for step in self.saved[first::2]]
            mine = stalls[first::2]
            found[name] = {
                "call_s": {"median": statistics.median(calls), "max": max(calls)},
                "stall_s": {"median": statistics.median(mine), "max": max(mine)},
                "all": {"calls_s": calls, "stalls_s": mine},
            }
        found["ratio_of_calls"] = found["trainer"]["call_s"]["median"] / found["engine"]["call_s"]["median"]
        return found


def main(
    ssd: Path, model: str = "smollm2-135m", max_length: int = 128, count: int = 20, out: Path | None = None
) -> None:
    """Measure both (target: a stall of at most 0.1 s)."""
    begin()
    console, made = Console(), []
    with TemporaryDirectory(dir=ssd) as folder:
        root = Path(folder)
        (root / "pages").mkdir()
        config = TrainConfig(
            model=model, max_length=max_length, per_device_train_batch_size=1, max_steps=100 * count, eval_share=0.0,
            plan="usual", precision="bf16", save_steps=1 << 20, save_minutes=0.0, save_at_end=False, save_total_limit=2,
            output_dir=root / "run", memory=pagoda.Memory(host=1 << 10, ssd=str(root / "pages")),
        )  # fmt: skip

        class Timed(RunTrainer):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.args.save_total_limit = 1  # the other one of two is the engine's
                made.append(Stalls(self, root / "engine", count))
                self.add_callback(made[0])

        with patch.object(assembly, "RunTrainer", Timed):
            try:
                run(config, Console(quiet=True))
            except pagoda.BudgetError as refusal:
                config = replace(config, memory=replace(config.memory, host=refusal.needed_bytes))
            run(config, console)
    figures = {**machine(), "model": model, "max_length": max_length, **made[0].figures()}
    console.print(figures)
    write(out, figures)


if __name__ == "__main__":
    tyro.cli(main)
