"""What a run writes and shows between its steps."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from pagoda.api import plan_of
from pagoda.console import say
from pagoda.errors import ConfigError
from pagoda.forecast.chrome_trace import write_trace
from pagoda.forecast.record import as_lines, machine_record, plan_record, timeline_record
from pagoda.memory.files import write_durably
from pagoda.memory.sizes import format_rate
from pagoda.plan.planner import Plan
from pagoda.schedule.served import AccessCounts, add_counts, summary
from pagoda.train.choice import ChosenPlan
from pagoda.train.metrics import Line, MetricsFile
from pagoda.train.progress import Progress
from pagoda.train.resume import Beginning
from pagoda.train.step_metrics import of_all_ranks, of_step
from pagoda.train.tokenizer import Tokenizer
from pagoda.train.trainer import RunTrainer

_log = logging.getLogger("pagoda")


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of one call of `run`."""

    out: Path
    plan: Plan
    first_step: int
    """First step of this call, counted from 1."""
    last_step: int
    """Last step of this call. Below the configured number of steps only if the run was interrupted."""
    first_loss: float
    final_loss: float
    tokens_per_s: float
    """Over all steps of this call, without checkpoints."""
    accesses: AccessCounts
    """Over all steps of this call: what compute found when it used weights."""
    checkpoint: Path | None
    """The last checkpoint that was saved."""
    stopped_by: int | None
    """Number of the signal that interrupted the run, or None."""
    best_step: int | None = None
    """Number of steps before the evaluation with the lowest loss. None without evaluations."""


class RunCallback(TrainerCallback):  # type: ignore[misc]
    """Writes and shows the figures of steps and evaluations. The last callback of the trainer."""

    def __init__(
        self, trainer: RunTrainer, tokenizer: Tokenizer, chosen: ChosenPlan, beginning: Beginning, progress: Progress
    ) -> None:
        self._trainer, self._tokenizer, self._chosen, self._progress = trainer, tokenizer, chosen, progress
        self._beginning, self._config, self._run_dir = beginning, trainer.config, trainer.run_dir
        self._mesh, self._console = trainer.mesh, trainer.console
        self._losses: list[float] = []
        """Of each step of this call."""
        self._accesses: AccessCounts = {}
        self._seconds = 0.0
        """Of all steps."""
        self._first: Line | None = None
        """The evaluation before the first step of this call, until the files of the run are made."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Prepare for the first step."""
        done, config, evaluator = self._trainer.done, self._config, self._trainer.evaluator
        # Recomputed because `steps` may have changed. Otherwise the value is the same.
        factor = config.lr_factor(done, config.max_steps)
        for group, base in zip(objects["optimizer"].param_groups, objects["lr_scheduler"].base_lrs, strict=True):
            group["lr"] = base * factor
        if state.best_metric is not None and self._beginning.evaluated != (evaluator and evaluator.data):
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
            say(self._console, "Evaluation: not on the sequences of before: the best checkpoint is chosen anew")
        self._trace_after(done)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to record the next step, if it is the one. Updates of this one are a part of it."""
        self._trace_after(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the step, and decide what is due after it."""
        step, trainer, config = state.global_step, self._trainer, self._config
        mine = self.measured(step)
        if not self._losses:
            self._make_files()  # before another rank continues and may use their names
        line = of_all_ranks(self._mesh, mine)
        self._losses.append(line["loss"])
        self._seconds += line["step_s"]
        self._accesses = add_counts((self._accesses, line["accesses"]))
        self._write("metrics", line)
        trainer.log(_logged(line))
        if step == trainer.traced and self._mesh.everyone.rank == 0:
            self._write_timeline(step)
        self._progress.show(line, (config.max_steps - step) * self._seconds / len(self._losses))
        self._show_moved()
        if step == config.max_steps:
            trainer.passes.optimizer.synchronize()  # so that the last evaluation reads all updates
            if not config.save_at_end:
                control.should_save = bool(config.save_steps) and step % config.save_steps == 0
        elif trainer.checkpoints is not None and trainer.checkpoints.stopped_by is not None:
            control.should_evaluate = False

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        """Record an evaluation. Save if it is the best one, and stop if it is too long ago that one was."""
        step, config = state.global_step, self._config
        line = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        when = f"after step {step}" if step else "before the first step"
        say(
            self._console,
            f"Evaluation {when}: loss {line['loss']:.4f}, perplexity {line['perplexity']:,.2f}, "
            f"{line['bits_per_byte']:.4f} bits per byte, {line['sequences']:,} sequences in {line['seconds']:.1f} s",
        )
        self._trace_after(step)  # anew, without the evaluation
        if not self._losses:
            self._first = line
            return
        self._write("evals", line)
        best = state.best_global_step or 0
        if best == step:
            control.should_save |= config.keep_best
        elif 0 < config.early_stopping_patience * config.eval_steps <= step - best and step < config.max_steps:
            control.should_training_stop = True
            control.should_save |= config.save_at_end
            say(
                self._console,
                f"Stopped early: no evaluation was better than that after step {best} "
                f"(--early-stopping-patience {config.early_stopping_patience})",
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint is complete. If the run's directory was moved or deleted, the new one gets its settings, too."""
        self._trainer.saved = self._run_dir.checkpoint(state.global_step)
        if self._mesh.everyone.rank == 0 and not self._run_dir.config.exists():
            with self._warning_of(self._run_dir.config):
                self._run_dir.create(self._config, self._tokenizer.files)

    def measured(self, step: int) -> Line:
        """The line of the step that has ended, of this rank."""
        trainer = self._trainer
        balances = [each.balance for each in trainer.losses if each.balance is not None]
        loss = torch.stack([each.loss for each in trainer.losses]).sum().item()
        step_s = time.perf_counter() - trainer.began
        return of_step(
            trainer.passes.optimizer.stats,
            trainer.data_s,
            step=step,
            loss=loss,
            lr=trainer.lr,
            aux_loss=torch.stack(balances).mean().item() if balances else None,
            step_s=step_s,
            tokens_per_s=trainer.batches.tokens_per_step / step_s,
        )

    def _trace_after(self, done: int) -> None:
        if done == self._trainer.traced - 1:
            self._trainer.passes.optimizer.trace_next_step()

    # --- files ---------------------------------------------------------------------------------------------------

    def _make_files(self) -> None:
        """Create the files of the run on the first rank."""
        if self._mesh.everyone.rank:
            return
        for checkpoint, new_name in self._beginning.later:
            self._run_dir.put_aside(checkpoint, new_name)
        self._run_dir.create(self._config, self._tokenizer.files)
        self._write_plan()
        paths = {"metrics": self._run_dir.metrics}
        if self._trainer.evaluator is not None:
            paths["evals"] = self._run_dir.evals
        for name, path in paths.items():
            self._trainer.files[name] = MetricsFile(path, self._trainer.done, self.warn)
        if self._first is not None:
            self._write("evals", self._first)

    def _write(self, name: str, line: Line) -> None:
        if name in self._trainer.files:
            self._trainer.files[name].write(line)

    def _write_plan(self) -> None:
        """Write the plan for the steps to come."""
        with self._warning_of(self._run_dir.plan):
            plan = plan_of(self._trainer.passes.model)
            record = {**plan_record(plan), "reasons": [*self._chosen.reasons, *plan.reasons]}
            record |= {"timeline": self._chosen.predicted, "not_predicted": self._chosen.not_predicted}
            record |= {"machine": machine_record()}
            write_durably(self._run_dir.plan, as_lines(record).encode())

    def _show_moved(self) -> None:
        """Say what has moved to another tier after the step, if anything has."""
        moved = self._trainer.passes.optimizer.stats.moved
        if moved is not None and self._mesh.everyone.rank == 0:
            say(self._console, moved)
            self._write_plan()

    def _write_timeline(self, step: int) -> None:
        """Write what compute and the lanes did in the step: for `pagoda report`, and for Perfetto if the user asked for
        it."""
        timeline = self._trainer.passes.optimizer.timeline
        assert timeline is not None, "a step that was traced has ended"
        with self._warning_of(self._run_dir.timeline):
            record = {"step": step, **timeline_record(timeline)}
            write_durably(self._run_dir.timeline, as_lines(record).encode())
        if self._config.trace is not None:
            with self._warning_of(self._config.trace):
                write_trace(timeline, f"{self._config.model}, step {step}, measured", self._config.trace)

    @contextmanager
    def _warning_of(self, path: Path) -> Iterator[None]:
        """Let the run continue without a file that cannot be written."""
        try:
            yield
        except (ConfigError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self.warn(f"{path} cannot be written: {why}. The run continues without it")

    def warn(self, message: str) -> None:
        """Print a message on the first rank, and log it on others."""
        say(self._console, message) if self._mesh.everyone.rank == 0 else _log.warning("%s", message)

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the files."""
        for file in self._trainer.files.values():
            file.close()

    def result(self) -> TrainResult:
        """What this call has done. Prints it."""
        trainer, step = self._trainer, self._trainer.state.global_step
        assert trainer.checkpoints is not None, "the run has ended"
        result = TrainResult(
            out=self._run_dir.path,
            plan=plan_of(trainer.passes.model),
            first_step=trainer.done + 1,
            last_step=step,
            first_loss=self._losses[0],
            final_loss=self._losses[-1],
            tokens_per_s=len(self._losses) * trainer.batches.tokens_per_step / self._seconds,
            accesses=self._accesses,
            checkpoint=trainer.saved,
            stopped_by=trainer.checkpoints.stopped_by if step < self._config.max_steps else None,
            best_step=trainer.state.best_global_step,
        )
        lines = [
            f"Steps {result.first_step} to {result.last_step}: loss {result.first_loss:.4f} ->"
            f" {result.final_loss:.4f}, {format_rate(result.tokens_per_s)} tokens/s. Metrics: {self._run_dir.metrics}",
            f"Fetching: weights were {summary(result.accesses)}.",
        ]
        if self._config.trace is not None and step >= trainer.traced:
            lines.append(f"Trace: {self._config.trace}")
        if result.checkpoint is not None:
            lines.append(f"Checkpoint: {result.checkpoint}")
            best = result.best_step
            if self._config.keep_best and best not in (None, step):
                lines.append(f"Best evaluation: after step {best}, {self._run_dir.checkpoint(best)}")
        say(self._console, *lines)
        return result


def _logged(line: Line) -> dict[str, float]:
    """What trackers get of a step."""
    figures = {
        "loss": line["loss"],
        "learning_rate": line["lr"],
        "tokens_per_s": line["tokens_per_s"],
        "step_s": line["step_s"],
        **{f"stall_share_{lane}": seconds / line["step_s"] for lane, seconds in line["stall_s"].items()},
        **{f"peak_bytes_{tier}": float(nbytes) for tier, nbytes in line["peak_bytes"].items()},
        **{f"tier_use_{tier}": use["mean"] for tier, use in line["tier_use"].items()},
    }
    return figures if line["grad_norm"] is None else {**figures, "grad_norm": line["grad_norm"]}
