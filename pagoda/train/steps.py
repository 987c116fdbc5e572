"""The steps of a run, and what is due between them: metrics, evaluations, samples and checkpoints."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path

from rich.console import Console

from pagoda.api import plan_of
from pagoda.errors import ConfigError
from pagoda.forecast.chrome_trace import write_trace
from pagoda.forecast.record import as_lines, machine_record, plan_record, timeline_record
from pagoda.forecast.wear import endurance_of
from pagoda.memory.files import write_durably
from pagoda.memory.sizes import format_rate
from pagoda.mesh.mesh import Mesh
from pagoda.plan.planner import Plan
from pagoda.schedule.served import AccessCounts, add_counts, summary
from pagoda.train.choice import ChosenPlan
from pagoda.train.data import Batches
from pagoda.train.evaluate import Evaluation, Evaluator, best_step, read_losses, since_best
from pagoda.train.generate import Sample, continued, prompt_ids
from pagoda.train.inputs import described
from pagoda.train.metrics import StepMetrics, read_metrics
from pagoda.train.progress import Progress, say
from pagoda.train.ranks import MetricsFiles, from_first, share_metrics
from pagoda.train.resume import Beginning
from pagoda.train.run_dir import RunDir
from pagoda.train.saving import Saving
from pagoda.train.session import Session
from pagoda.train.signals import first_signal
from pagoda.train.tokenizer import Tokenizer
from pagoda.train.trackers import Trackers

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


class Steps:
    """Runs the steps, and does what is due between them."""

    def __init__(
        self,
        session: Session,
        evaluated: Batches | None,
        tokenizer: Tokenizer,
        run_dir: RunDir,
        chosen: ChosenPlan,
        mesh: Mesh,
        console: Console,
    ) -> None:
        self._session = session
        self._config = session.config
        self._tokenizer = tokenizer
        self._run_dir = run_dir
        self._chosen = chosen
        self._mesh = mesh
        self._console = console
        self._evaluator = None
        if evaluated is not None:
            self._evaluator = Evaluator(evaluated, tokenizer, mesh, session.config.sequence_parallel)
        self._losses: list[tuple[int, float]] = []
        """(steps done, loss) of each evaluation."""
        self._saving = Saving(session, run_dir, tokenizer.files, mesh, console)
        self._done, self._step_s = 0, 0.0
        """Number of steps done, and seconds of the last one."""
        self._resumed = 0
        """Number of steps that were done before."""
        self._started = self._evaluated_s = self._evaluation_s = 0.0
        """When the first step began, and the seconds of all evaluations since then and of the last one."""
        self._began: float | None = None
        """When the step began that is running. None between steps."""
        self._over = False
        if session.config.sample_every:
            chat = session.batches.rows.tokens.about.chats
            prompt_ids(session.model, tokenizer, session.config.prompt, chat)  # before hours of training

    def run(self, beginning: Beginning) -> TrainResult:
        """Run the remaining steps."""
        self._done = self._resumed = beginning.done
        self._saving.check_room(self._config.max_steps - self._done)
        self._trackers = Trackers(replace(self._config, report_to=()), self._done, self._warn)

        def start_trackers() -> None:
            self._trackers = Trackers(self._config, self._done, self._warn)

        from_first(self._mesh, "the trackers", start_trackers)
        with closing(self._trackers):
            return self._run(beginning)

    def _run(self, beginning: Beginning) -> TrainResult:
        config, done = self._config, beginning.done
        losses: list[float] = []
        accesses: AccessCounts = {}
        seconds, step = 0.0, done
        stopped_by: int | None = None
        files: MetricsFiles | None = None
        first: Evaluation | None = None
        if self._evaluator is not None:
            self._losses = read_losses(self._run_dir.evals, until=done, data=self._evaluator.data)
            if not self._losses and read_metrics(self._run_dir.evals):
                say(
                    self._console,
                    "Evaluation: on other sequences than before, or noted by another version: the best "
                    "checkpoint is chosen anew",
                )
            evaluated = any(step == done for step, _ in self._losses)
            # A run that was interrupted has left out the evaluation after its last step.
            first = None if evaluated or done % config.evaluates_every else self._evaluate(done)
        self._started, self._evaluated_s = time.monotonic(), 0.0
        signals, bar = first_signal(self._explain), Progress(self._console, config.max_steps, done)
        with ExitStack() as opened, signals as received, bar as progress:
            while not self._over:
                traced = step == done + min(config.trace_step, config.max_steps - done) - 1
                if traced:
                    self._session.optimizer.trace_next_step()
                self._began = time.monotonic()
                mine = self._session.step(step)
                if files is None and self._mesh.everyone.rank == 0:
                    # Before another rank continues and may use their names.
                    for checkpoint, name in beginning.later:
                        self._run_dir.put_aside(checkpoint, name)
                metrics, stopped_by = share_metrics(self._mesh, mine, received[0] if received else None)
                step, self._began = step + 1, None
                self._done, self._step_s = step, metrics.step_s
                self._over = step == config.max_steps or stopped_by is not None
                losses.append(metrics.loss)
                seconds += metrics.step_s
                accesses = add_counts((accesses, metrics.accesses))
                if files is None:  # after the first step has succeeded
                    files = opened.enter_context(closing(self._new_files(done, first)))
                files.write(together=metrics, own=mine)
                self._trackers.step(metrics)
                if traced and self._mesh.everyone.rank == 0:
                    self._write_timeline(step)
                progress.show(metrics, self._left_s(step))
                self._show_moved()
                self._between(metrics, files, stopped_by is not None)
            # The first signal must not end the process before the last checkpoint is complete.
            self._saving.pending.finish(received)
            if step == config.max_steps and stopped_by is not None:  # nothing is left for a resumed run
                stopped_by = None
                if self._evaluator is not None and files is not None:
                    self._record_evaluation(step, files)
        result = TrainResult(
            out=self._run_dir.path,
            plan=plan_of(self._session.model),
            first_step=done + 1,
            last_step=step,
            first_loss=losses[0],
            final_loss=losses[-1],
            tokens_per_s=len(losses) * self._session.batches.tokens_per_step / seconds,
            accesses=accesses,
            checkpoint=self._saving.saved,
            stopped_by=stopped_by,
            best_step=best_step(self._losses),
        )
        self._show_end(result)
        return result

    def _left_s(self, step: int) -> float:
        """Seconds until the end of the run, by its steps so far, with their checkpoints, and by the last evaluation."""
        config, took_s = self._config, time.monotonic() - self._started - self._evaluated_s
        left_s = (config.max_steps - step) * took_s / (step - self._resumed)
        if self._evaluator is None:
            return left_s
        every = config.evaluates_every
        return left_s + (ceil(config.max_steps / every) - (step - 1) // every) * self._evaluation_s

    def _new_files(self, done: int, first: Evaluation | None) -> MetricsFiles:
        """Create the files of the run. `first`: the evaluation before the first step of this call, if one was due."""
        if self._mesh.everyone.rank == 0:
            self._run_dir.create(self._config, self._tokenizer.files)
            self._write_plan()
            with self._warning_of(self._run_dir.data):
                lines = described(self._session.batches.rows.tokens, self._tokenizer)
                write_durably(self._run_dir.data, as_lines({"lines": lines}).encode())
        files = MetricsFiles(
            self._run_dir,
            self._mesh,
            done,
            evals=self._evaluator is not None,
            samples=bool(self._config.sample_every),
            warn=self._warn,
        )
        if first is not None:
            files.write(evals=first)
            self._trackers.evaluation(first)
        return files

    def _write_plan(self) -> None:
        """Write the plan for the steps to come."""
        with self._warning_of(self._run_dir.plan):
            plan = plan_of(self._session.model)
            endurance = endurance_of(self._config.memory.ssd_directories, self._mesh.everyone.nodes)
            record = {**plan_record(plan), "reasons": [*self._chosen.reasons, *plan.reasons]}
            record |= {"timeline": self._chosen.predicted, "not_predicted": self._chosen.not_predicted}
            record |= {"machine": machine_record(), "endurance": endurance and asdict(endurance)}
            write_durably(self._run_dir.plan, as_lines(record).encode())

    def _show_moved(self) -> None:
        """Say what has moved to another tier after the step, if anything has."""
        moved = self._session.optimizer.stats.moved
        if moved is not None and self._mesh.everyone.rank == 0:
            say(self._console, moved)
            self._write_plan()

    def _between(self, metrics: StepMetrics, files: MetricsFiles, interrupted: bool) -> None:
        """Do what is due after a step."""
        config, step = self._config, metrics.step
        improved = False
        if step == config.max_steps:
            self._session.optimizer.synchronize()  # so that the last evaluation reads all updates
        if self._evaluator is not None and not interrupted and (self._over or step % config.evaluates_every == 0):
            self._record_evaluation(step, files)
            improved = config.keep_best and best_step(self._losses) == step
            if (
                config.early_stopping_patience
                and since_best(self._losses) >= config.early_stopping_patience
                and not self._over
            ):
                self._over = True
                say(
                    self._console,
                    f"Stopped early: no evaluation was better than that after step {best_step(self._losses)} in "
                    f"{since_best(self._losses)} evaluations (--early-stopping-patience "
                    f"{config.early_stopping_patience})",
                )
        if config.sample_every and (self._over or step % config.sample_every == 0) and not interrupted:
            self._sample(step, files)
        due = self._saving.due(metrics)
        if due or interrupted or improved or (config.save_at_end and self._over):
            files.sync()
            self._saving.save(step, best_step(self._losses) if config.keep_best else None)

    def _record_evaluation(self, step: int, files: MetricsFiles) -> None:
        found = self._evaluate(step)
        files.write(evals=found)
        self._trackers.evaluation(found)

    def _evaluate(self, step: int) -> Evaluation:
        assert self._evaluator is not None
        found = self._evaluator.measure(self._session, step)
        self._losses.append((step, found.loss))
        self._evaluation_s = found.seconds
        self._evaluated_s += found.seconds
        say(self._console, str(found))
        return found

    def _sample(self, step: int, files: MetricsFiles) -> None:
        """Print and record what the model writes, with the most likely tokens and with sampled ones. Every rank takes
        part, because each has some of the weights."""
        config, chat = self._config, self._session.batches.rows.tokens.about.chats
        written = {
            how: continued(
                self._session.model,
                self._tokenizer,
                config.prompt,
                chat=chat,
                tokens=config.sample_tokens,
                seed=seed,
            )
            for how, seed in (("greedy", None), ("drawn", config.seed + step))
        }
        files.write(samples=Sample(step=step, prompt=config.prompt, **written))
        say(
            self._console,
            *(f"Sample after step {step}, {how}: {config.prompt}|{text}" for how, text in written.items()),
        )

    def _write_timeline(self, step: int) -> None:
        """Write what compute and the lanes did in the step: for `pagoda report`, and for Perfetto if the user asked for
        it."""
        timeline = self._session.optimizer.timeline
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
            self._warn(f"{path} cannot be written: {why}. The run continues without it")

    def _warn(self, message: str) -> None:
        say(self._console, message) if self._mesh.everyone.rank == 0 else _log.warning("%s", message)

    def _explain(self, name: str) -> str:
        """The message after a signal: when the run will end, and how."""
        if self._mesh.everyone.rank:
            return ""
        if self._saving.pending.retrying is not None:
            what = (
                f"stops without {self._run_dir.checkpoint(self._saving.pending.retrying)} unless one more try succeeds"
            )
        elif self._over:
            what = f"the steps are done; stops when {self._run_dir.checkpoint(self._done)} is complete"
        else:
            last = self._done + 1
            what = f"stops after step {last}{self._when()} and saves {self._run_dir.checkpoint(last)}"
        saved = self._run_dir.all_checkpoints()
        lost = f"the steps after {saved[-1].path.name}" if saved else "all steps"
        return f"{name}: {what}. Another signal stops the run at once and loses {lost}"

    def _when(self) -> str:
        """When the step ends that is running or comes next."""
        if not self._step_s:
            return ""
        if self._began is None:
            return f", about {ceil(self._step_s)} s after the evaluation, sample or checkpoint that is under way,"
        return f", in about {ceil(max(0.0, self._began + self._step_s - time.monotonic()))} s,"

    def _show_end(self, result: TrainResult) -> None:
        lines = [
            f"Steps {result.first_step} to {result.last_step}: loss {result.first_loss:.4f} ->"
            f" {result.final_loss:.4f}, {format_rate(result.tokens_per_s)} tokens/s. Metrics: {self._run_dir.metrics}",
            f"Fetching: weights were {summary(result.accesses)}.",
        ]
        if self._config.trace is not None and result.last_step >= result.first_step + self._config.trace_step - 1:
            lines.append(f"Trace: {self._config.trace}")
        if result.checkpoint is not None:
            lines.append(f"Checkpoint: {result.checkpoint}")
            best = result.best_step
            if self._config.keep_best and best not in (None, result.last_step):
                lines.append(f"Best evaluation: after step {best}, {self._run_dir.checkpoint(best)}")
        if result.stopped_by is not None:
            flags = " ".join(["", *self._run_dir.foreign(self._config).values()])
            lines.append(
                "Interrupted. Continue with: pagoda train --resume-from-checkpoint last --output-dir "
                f"{self._run_dir.path}{flags}"
            )
        say(self._console, *lines)
