"""What is due between the steps of a run: metrics, evaluations, samples and checkpoints."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from pagoda.api import plan_of
from pagoda.console import say
from pagoda.errors import ConfigError, PagodaError
from pagoda.forecast.chrome_trace import write_trace
from pagoda.forecast.record import as_lines, machine_record, plan_record, timeline_record
from pagoda.forecast.wear import endurance_of
from pagoda.memory.files import write_durably
from pagoda.memory.sizes import format_rate
from pagoda.plan.planner import Plan
from pagoda.schedule.served import AccessCounts, add_counts, summary
from pagoda.train.choice import ChosenPlan
from pagoda.train.evaluate import Evaluation, Evaluator, best_step, read_losses, since_best
from pagoda.train.generate import Sample, continued, prompt_ids
from pagoda.train.inputs import described
from pagoda.train.metrics import DATA, StepMetrics, read_metrics
from pagoda.train.metrics_of_ranks import MetricsFiles, share_metrics
from pagoda.train.progress import Progress
from pagoda.train.run_dir import RunCheckpoint
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
    """Does what is due between steps. The last callback of the trainer."""

    def __init__(
        self,
        trainer: RunTrainer,
        evaluator: Evaluator | None,
        tokenizer: Tokenizer,
        chosen: ChosenPlan,
        later: Sequence[tuple[RunCheckpoint, Path]],
        progress: Progress,
    ) -> None:
        """`later`: later checkpoints than the one that the run continues from, each with its new name."""
        self._trainer, self._evaluator, self._tokenizer = trainer, evaluator, tokenizer
        self._chosen, self._later, self._progress = chosen, later, progress
        self._config, self._run_dir = trainer.config, trainer.run_dir
        self._mesh, self._console = trainer.mesh, trainer.console
        self._evaluations: list[tuple[int, float]] = []
        """(steps done, loss) of each."""
        self._losses: list[float] = []
        """Of each step of this call."""
        self._accesses: AccessCounts = {}
        self._seconds = self._started = self._evaluated_s = self._evaluation_s = 0.0
        """Seconds of all steps; when the first step began; seconds of all evaluations since then and of the last
        one."""
        self._first: Evaluation | None = None
        """The evaluation before the first step of this call, if one was due."""
        self._files: MetricsFiles | None = None
        """None before the first step has succeeded."""
        if self._config.sample_every:
            prompt_ids(trainer.passes.model, tokenizer, self._config.prompt, self._chats)  # before hours of training

    @property
    def has_written(self) -> bool:
        """Whether the first step has succeeded, and the run has begun to write files."""
        return self._files is not None

    @property
    def _chats(self) -> bool:
        return self._trainer.batches.rows.tokens.about.chats

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Evaluate before the first step."""
        done, config, checkpoints = self._trainer.done, self._config, self._trainer.checkpoints
        checkpoints.before = self._before_checkpoint  # type: ignore[union-attr]
        # Recomputed because `steps` may have changed. Otherwise the value is the same.
        factor = config.lr_factor(done, config.max_steps)
        for group, base in zip(objects["optimizer"].param_groups, objects["lr_scheduler"].base_lrs, strict=True):
            group["lr"] = base * factor
        if self._evaluator is not None:
            self._evaluations = read_losses(self._run_dir.evals, until=done, data=self._evaluator.data)
            if not self._evaluations and read_metrics(self._run_dir.evals):
                say(
                    self._console,
                    "Evaluation: on other sequences than before, or noted by another version: the best "
                    "checkpoint is chosen anew",
                )
            evaluated = any(step == done for step, _ in self._evaluations)
            # A run that was interrupted has left out the evaluation after its last step.
            self._first = None if evaluated or done % config.evaluates_every else self._evaluate(done)
        self._started, self._evaluated_s = time.monotonic(), 0.0
        self._trace_after(done)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to record the next step, if it is the one. Updates of this one are a part of it."""
        self._trace_after(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the step, then do what is due after it."""
        step, trainer = state.global_step, self._trainer
        mine = self.measured(step)
        if self._files is None and self._mesh.everyone.rank == 0:
            for checkpoint, name in self._later:  # before another rank continues and may use their names
                self._run_dir.put_aside(checkpoint, name)
        metrics = share_metrics(self._mesh, mine)
        trainer.is_in_step, trainer.step_s = False, metrics.step_s
        self._losses.append(metrics.loss)
        self._seconds += metrics.step_s
        self._accesses = add_counts((self._accesses, metrics.accesses))
        if self._files is None:
            self._files = self._new_files()
        self._files.write(together=metrics, own=mine)
        trainer.log(_logged(metrics))
        if step == trainer.traced and self._mesh.everyone.rank == 0:
            self._write_timeline(step)
        self._progress.show(metrics, self._left_s(step))
        self._show_moved()
        if self._between(step, control, self._files):
            self._trace_after(step)  # anew, without what came between

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint is complete."""
        self._trainer.saved = self._run_dir.checkpoint(state.global_step)

    def measured(self, step: int) -> StepMetrics:
        """The figures of the step that has ended, on this rank."""
        trainer = self._trainer
        loss = torch.stack([each.loss for each in trainer.losses]).sum().item()
        balances = [each.balance for each in trainer.losses if each.balance is not None]
        balance = torch.stack(balances).mean().item() if balances else None
        step_s = time.perf_counter() - trainer.began
        stats = trainer.passes.optimizer.stats
        return StepMetrics.of(
            stats,
            step=step,
            loss=loss,
            aux_loss=balance,
            lr=trainer.lr,
            step_s=step_s,
            tokens_per_s=trainer.batches.tokens_per_step / step_s,
            stall_s={**stats.stall_s, DATA: trainer.data_s},
        )

    def _left_s(self, step: int) -> float:
        """Seconds until the end of the run, by its steps so far, with their checkpoints, and by the last evaluation."""
        config, took_s = self._config, time.monotonic() - self._started - self._evaluated_s
        left_s = (config.max_steps - step) * took_s / (step - self._trainer.done)
        if self._evaluator is None:
            return left_s
        every = config.evaluates_every
        return left_s + (ceil(config.max_steps / every) - (step - 1) // every) * self._evaluation_s

    def _trace_after(self, done: int) -> None:
        if done == self._trainer.traced - 1:
            self._trainer.passes.optimizer.trace_next_step()

    def _between(self, step: int, control: Any, files: MetricsFiles) -> bool:
        """Do what is due after a step. Returns whether the model has run."""
        config, checkpoints = self._config, self._trainer.checkpoints
        assert checkpoints is not None, "it is made when the model is wrapped"
        interrupted = checkpoints.stopped_by is not None and step < config.max_steps
        improved = ran = False
        if step == config.max_steps:
            self._trainer.passes.optimizer.synchronize()  # so that the last evaluation reads all updates
        if self._evaluator is not None and not interrupted:
            if step == config.max_steps or step % config.evaluates_every == 0:
                files.write(evals=self._evaluate(step))
                ran = True
            improved = config.keep_best and best_step(self._evaluations) == step
            if (
                config.early_stopping_patience
                and since_best(self._evaluations) >= config.early_stopping_patience
                and step < config.max_steps
            ):
                control.should_training_stop = True
                say(
                    self._console,
                    f"Stopped early: no evaluation was better than that after step {best_step(self._evaluations)} in "
                    f"{since_best(self._evaluations)} evaluations (--early-stopping-patience "
                    f"{config.early_stopping_patience})",
                )
        over = control.should_training_stop
        if config.sample_every and (over or step % config.sample_every == 0) and not interrupted:
            self._sample(step, files)
            ran = True
        checkpoints.best = best_step(self._evaluations) if config.keep_best else None  # type: ignore[attr-defined]
        due = config.save_steps and step % config.save_steps == 0
        if due or interrupted or improved or (config.save_at_end and over):
            control.should_save = True
        return ran

    def _evaluate(self, step: int) -> Evaluation:
        assert self._evaluator is not None
        found = self._evaluator.measure(self._trainer.passes, step)
        self._evaluations.append((step, found.loss))
        self._evaluation_s = found.seconds
        self._evaluated_s += found.seconds
        say(self._console, str(found))
        names = ("loss", "perplexity", "bits_per_byte")
        self._trainer.log({f"eval_{name}": getattr(found, name) for name in names})
        return found

    def _sample(self, step: int, files: MetricsFiles) -> None:
        """Print and record what the model writes, with the most likely tokens and with sampled ones. Every rank takes
        part, because each has some of the weights."""
        config, model = self._config, self._trainer.passes.model
        written = {
            how: continued(
                model, self._tokenizer, config.prompt, chat=self._chats, tokens=config.sample_tokens, seed=seed
            )
            for how, seed in (("greedy", None), ("drawn", config.seed + step))
        }
        files.write(samples=Sample(step=step, prompt=config.prompt, **written))
        say(
            self._console,
            *(f"Sample after step {step}, {how}: {config.prompt}|{text}" for how, text in written.items()),
        )

    # --- files ---------------------------------------------------------------------------------------------------

    def _new_files(self) -> MetricsFiles:
        """Create the files of the run."""
        if self._mesh.everyone.rank == 0:
            self._run_dir.create(self._config, self._tokenizer.files)
            self._write_plan()
            with self._warning_of(self._run_dir.data):
                lines = described(self._trainer.batches.rows.tokens, self._tokenizer)
                write_durably(self._run_dir.data, as_lines({"lines": lines}).encode())
        files = MetricsFiles(
            self._run_dir,
            self._mesh,
            self._trainer.done,
            evals=self._evaluator is not None,
            samples=bool(self._config.sample_every),
            warn=self.warn,
        )
        if self._first is not None:
            files.write(evals=self._first)
        return files

    def _before_checkpoint(self) -> None:
        """Make metrics survive a power loss, and create the run's directory again if it is gone."""
        if self._files is not None:
            self._files.sync()
        if self._mesh.everyone.rank == 0 and not self._run_dir.config.exists():
            say(self._console, f"{self._run_dir.path} was moved or deleted: the run creates it again")
            with suppress(PagodaError, OSError):  # saving fails, too, and says why
                self._run_dir.create(self._config, self._tokenizer.files)

    def _write_plan(self) -> None:
        """Write the plan for the steps to come."""
        with self._warning_of(self._run_dir.plan):
            plan = plan_of(self._trainer.passes.model)
            endurance = endurance_of(self._config.memory.ssd_directories, self._mesh.everyone.nodes)
            record = {**plan_record(plan), "reasons": [*self._chosen.reasons, *plan.reasons]}
            record |= {"timeline": self._chosen.predicted, "not_predicted": self._chosen.not_predicted}
            record |= {"machine": machine_record(), "endurance": endurance and asdict(endurance)}
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
        if self._files is not None:
            self._files.close()

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
            best_step=best_step(self._evaluations),
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
        if result.stopped_by is not None:
            flags = " ".join(["", *self._run_dir.foreign(self._config).values()])
            lines.append(
                "Interrupted. Continue with: pagoda train --resume-from-checkpoint last --output-dir "
                f"{self._run_dir.path}{flags}"
            )
        say(self._console, *lines)
        return result


def _logged(metrics: StepMetrics) -> dict[str, float]:
    """What trackers get of a step."""
    figures = {
        "loss": metrics.loss,
        "learning_rate": metrics.lr,
        "tokens_per_s": metrics.tokens_per_s,
        "step_s": metrics.step_s,
        **{f"stall_share_{lane}": seconds / metrics.step_s for lane, seconds in metrics.stall_s.items()},
        **{f"peak_bytes_{tier}": float(nbytes) for tier, nbytes in metrics.peak_bytes.items()},
        **{f"tier_use_{tier}": use["mean"] for tier, use in metrics.tier_use.items()},
    }
    return figures if metrics.grad_norm is None else {**figures, "grad_norm": metrics.grad_norm}
