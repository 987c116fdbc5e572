"""The checkpoints of a Trainer, written while it trains; and signals, which end a run after its step."""

import dataclasses
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from pagoda.api import plan_of
from pagoda.console import say
from pagoda.errors import CheckpointError, PagodaError, StorageError
from pagoda.forecast.report import plan_table
from pagoda.forecast.wear import endurance_of, wear
from pagoda.integrations.settings import record
from pagoda.integrations.staging import Staged, check_replaceable, delete_if_possible, delete_remains, removable
from pagoda.integrations.states import numbered
from pagoda.memory.identity import STATE, partial
from pagoda.memory.sizes import format_bytes
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_all, from_first
from pagoda.optimizer import PagedOptimizer
from pagoda.plan.planner import Plan
from pagoda.plan.traffic import bytes_written_to_ssd
from pagoda.process import temporarily

_BEGUN = "checkpoint-is-incomplete.txt"
"""What transformers writes before a checkpoint of `enable_jit_checkpoint`, and deletes after it, as a seal does."""
_OF_FILES = "iostream error", "PytorchStreamWriter", "inline_container"
"""In errors of torch.save."""
PATIENCE_S, RETRY_S = 30 * 60.0, 10.0
_SAY_S = 60.0
_LOOK_S = 0.1
"""Seconds in which a signal is noticed."""
_log = logging.getLogger("pagoda")


@dataclass
class _Asked:
    """A checkpoint that the trainer has asked for."""

    step: int
    write: Callable[[], None]
    """Writes the trainer's own files."""
    staged: Staged
    state: Any
    """The trainer's state, for callbacks."""
    best_before: str | None
    replaced: list[Path] = field(default_factory=list)


class Checkpoints:
    """Writes the checkpoints of a trainer in the background, one at a time. If a write fails, the run says so and
    continues, because the next checkpoint may succeed. The last one is retried for a while, because the state is still
    in memory.

    A checkpoint is written to `.checkpoint-N.partial`, sealed, and renamed to `checkpoint-N`. Only then are older ones
    deleted, callbacks told (`on_save`), and files pushed to the Hub. The last two happen between steps.
    """

    without = " (save_strategy='no' trains without checkpoints)"
    """The end of the refusal for a disk without room."""
    is_required = True
    """Whether a disk without room for one checkpoint is refused."""

    def __init__(self, trainer: Any, optimizer: PagedOptimizer) -> None:
        self.optimizer = optimizer
        self.stopped_by: int | None = None
        """The signal that ends the run, on all ranks."""
        self._trainer = trainer
        self._mesh, self._places = optimizer._engine.links.mesh, optimizer._engine.ssd_directories
        self._console = Console(stderr=True, quiet=self._mesh.everyone.rank > 0)
        self._writing: _Asked | None = None
        self._errors: list[Exception] = []
        """The error of the checkpoint that is being written, if any."""
        self._retrying: int | None = None
        """The step of the last checkpoint, once it could not be written."""
        self._now: _Asked | None = None
        """The checkpoint whose files the trainer is writing."""
        self._saved_at, self._last_step = time.monotonic(), -1
        """When the last save began, and its step."""

    @property
    def staging(self) -> Path | None:
        """The directory to which the trainer's own files of a checkpoint go, in place of the run's. None unless it is
        writing them."""
        return None if self._now is None else self._now.staged.path.parent

    def save(self, write: Callable[[], None], trial: Any) -> None:
        """Start a checkpoint. `write` writes the trainer's own files of it to `staging`."""
        trainer, args = self._trainer, self._trainer.args
        run = Path(trainer._get_output_dir(trial=trial))
        directory = run / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        with suppress(OSError):
            (directory / _BEGUN).unlink()
            directory.rmdir()
        self.end()
        self._saved_at, self._last_step = time.monotonic(), trainer.state.global_step
        best = trainer.state.best_model_checkpoint
        self._start(_Asked(trainer.state.global_step, write, Staged(directory, self._places), trainer.state, best))
        if args.save_only_model:
            self.end()

    def _start(self, now: _Asked) -> None:
        self._writing = now
        try:
            self._begin(now)
        except (PagodaError, OSError) as error:
            self._errors.append(error)
        except BaseException as error:
            if not self.optimizer.checkpoint_pending:  # else it is written all the same
                self._writing = None
                self._ended(now, error)
            raise

    def _begin(self, now: _Asked) -> None:
        trainer = self._trainer
        self._write_files(now)
        now.state = dataclasses.replace(trainer.state, log_history=[*trainer.state.log_history])
        now.replaced = self._replaced(now)
        if trainer.args.save_only_model:
            if self._mesh.everyone.rank == 0:
                now.staged.complete(now.replaced)
            return
        same = [now.staged.replaced] if now.staged.directory.exists() else []
        self.optimizer.save_checkpoint(
            now.staged.state,
            self._record(),
            wait=False,
            replaces=[path / STATE for path in (*now.replaced, *same)],
            on_error=self._errors.append,
            on_complete=lambda: now.staged.complete(now.replaced),
        )

    def _write_files(self, now: _Asked) -> None:
        """Let the trainer write its own files. It neither pushes them nor deletes older checkpoints."""
        trainer, args = self._trainer, self._trainer.args
        run = now.staged.directory.parent
        error: Exception | None = None
        try:
            from_first(self._mesh, "the directory of a checkpoint", now.staged.create)
            with temporarily(self, _now=now), temporarily(args, save_total_limit=None, push_to_hub=False):
                now.write()
            best = run / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.best_global_step}"
            if trainer.state.best_global_step and (best == now.staged.directory or best.is_dir()):
                trainer.state.best_model_checkpoint = str(best)
            if self._mesh.everyone.rank == 0:  # as they are
                torch.save(args, now.staged.path / TRAINING_ARGS_NAME)
                trainer.state.save_to_json(str(now.staged.path / TRAINER_STATE_NAME))
        except (PagodaError, OSError) as problem:
            error = problem
        except RuntimeError as problem:  # torch.save does not say that a file cannot be written
            if not any(words in str(problem) for words in _OF_FILES) and shutil.disk_usage(run).free > 1 << 20:
                raise
            error = StorageError(f"{now.staged.directory} could not be written: {problem}")
        problems = from_all(self._mesh, "the files of a checkpoint", None if error is None else str(error))
        if any(problems):
            raise error or CheckpointError(next(filter(None, problems)))

    def _record(self) -> dict[str, Any]:
        """What a checkpoint says of the run, for `check_resumes` of the trainer."""
        return record(self._trainer)

    def _replaced(self, now: _Asked) -> list[Path]:
        """The older checkpoints that a new one replaces."""
        if self._mesh.everyone.rank:
            return []
        by_age = self._by_age(now.staged.directory.parent)
        return removable(self.outdated_checkpoints([path for path in by_age if path != now.staged.directory], now))

    def _by_age(self, run: Path) -> list[Path]:
        """The checkpoints in a directory, the oldest first. The trainer asks for the time of a directory."""
        every = numbered(run, f"{PREFIX_CHECKPOINT_DIR}-")
        return [path for path in map(Path, sort_checkpoints(str(run), use_mtime=True)) if path in every]

    def outdated_checkpoints(self, older: list[Path], now: _Asked) -> list[Path]:
        """Those of the `older` checkpoints, by age, that are not kept. The trainer keeps the last ones and the best
        one."""
        limit = self._trainer.args.save_total_limit
        if not limit or limit <= 0:
            return []
        best = now.state.best_model_checkpoint
        kept = {now.staged.directory} | ({Path(best)} if best is not None else set())
        excess = len(older) + 1 - max(limit, len(kept))
        return [path for path in older if path not in kept][: max(0, excess)]

    def _ended(self, now: _Asked, error: BaseException | None) -> None:
        """Do what follows once a checkpoint is complete, or could not be written."""
        trainer = self._trainer
        now.staged.close()
        if self._mesh.everyone.rank == 0:
            done = (*now.replaced, now.staged.replaced)
            for path in done if error is None else (partial(now.staged.directory),):
                delete_if_possible(path, self._places)
        if error is not None:
            if trainer.state.best_model_checkpoint == str(now.staged.directory):
                trainer.state.best_model_checkpoint = now.best_before
            return
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(str(now.staged.directory))
        handler = trainer.callback_handler
        trainer.control = handler.call_event("on_save", trainer.args, now.state, trainer.control)

    def end(self, *, say_it: bool = True) -> Exception | None:
        """Wait for the checkpoint that is being written. Returns why it failed, or None."""
        if self._writing is None:
            return None
        self.optimizer.wait_for_checkpoint()
        now, self._writing = self._writing, None
        error = self._errors.pop() if self._errors else None
        self._ended(now, error)
        if error is not None and not isinstance(error, PagodaError | OSError):
            raise error
        if error is not None and say_it:
            why = str(error).rstrip(".")
            self._say(f"The checkpoint after step {now.step} was not saved: {why}. The run continues to the next one")
        return error

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. Before that, save the state if a signal has ended the run."""
        trainer = self._trainer
        if self.stopped_by is not None and self._last_step != trainer.state.global_step:
            trainer._save_checkpoint(trainer.model, None)
        self._complete()
        if self.stopped_by is not None and trainer.state.global_step < trainer.state.max_steps:
            self._say_how_to_continue()

    def _complete(self) -> None:
        """Wait until the last checkpoint is complete. If it cannot be written, try again for a while, and say so each
        minute. The first signal that arrives meanwhile ends the trying.

        Raises the error of the last try, and StorageError at once if the state itself is damaged.
        """
        received = self._trainer.received
        until, before = time.monotonic() + PATIENCE_S, len(received)
        reported, next_report = "", 0.0
        while (now := self._writing) is not None:
            error = self.end(say_it=False)
            problems = from_all(self._mesh, "the last checkpoint", None if error is None else str(error))
            problem = next((each for each in problems if each is not None), None)
            if problem is None:
                return
            self.optimizer.synchronize(show=False)
            stops = time.monotonic() > until or len(received) > before
            if any(from_all(self._mesh, "the end of a run", stops)):
                raise error or CheckpointError(f"the checkpoint after step {now.step} was not saved: {problem}")
            if problem != reported or time.monotonic() >= next_report:
                why = problem.rstrip(".")
                self._say(
                    f"The checkpoint after step {now.step} was not saved: {why}. The state is still in memory. "
                    f"Free space, or remove the cause: the run tries again every {RETRY_S:.0f} s for "
                    f"{PATIENCE_S / 60:.0f} minutes"
                )
                reported, next_report = problem, time.monotonic() + _SAY_S
            self._retrying = now.step
            again = time.monotonic() + RETRY_S
            while time.monotonic() < again and len(received) == before:
                time.sleep(_LOOK_S)
            self._start(now)

    def _say_how_to_continue(self) -> None:
        say(
            self._console,
            f"Interrupted after step {self._trainer.state.global_step}. Continue with: "
            "trainer.train(resume_from_checkpoint=True)",
        )

    def keep_best_alone(self, trial: Any) -> None:
        """Delete the last checkpoint if it is not the best one and `save_total_limit` is 1, as the trainer does at the
        end."""
        trainer, best = self._trainer, self._trainer.state.best_model_checkpoint
        if self._mesh.everyone.rank or best is None or trainer.args.save_total_limit != 1:
            return
        every = numbered(Path(trainer._get_output_dir(trial)), f"{PREFIX_CHECKPOINT_DIR}-")
        for path in removable([path for path in every if path != Path(best)]):
            delete_if_possible(path, self._places)

    def after_step(self, control: Any) -> None:
        """End what is written, and decide with all ranks whether to save or to stop."""
        received, written = self._trainer.received, self._writing is not None and not self.optimizer.checkpoint_pending
        mine = written, received[0] if received else None, time.monotonic() - self._saved_at
        every = from_all(self._mesh, "the end of a step", mine)
        if all(written for written, _, _ in every):
            self.end()
        self.stopped_by = next((number for _, number, _ in every if number is not None), None)
        minutes = self._trainer.paging.save_minutes
        if 0 < 60 * minutes <= every[0][2]:
            control.should_save = True
        if self.stopped_by is not None:
            control.should_training_stop = True

    def begin_run(self) -> None:
        """Before the first step: delete the remains of an interrupted run, show the plan, and check that there is room
        for checkpoints, and nothing of another trainer in their place. Raises StorageError and CheckpointError."""
        if self._mesh.everyone.rank == 0:
            run = Path(self._trainer._get_output_dir(None))
            delete_remains(run, f"{PREFIX_CHECKPOINT_DIR}-", self._places)
        self.stopped_by, self._saved_at, self._last_step = None, time.monotonic(), -1
        self._show_plan()
        self._check_room()

    def _check_room(self) -> None:
        """Raises StorageError if the disk has no room for a checkpoint, and CheckpointError if one would replace
        another trainer's. Says so if there is no room for all."""
        trainer, args = self._trainer, self._trainer.args
        if args.save_strategy == "no" and not trainer.paging.save_minutes:
            return
        model = sum(param.numel() * param.element_size() for param in trainer.model.parameters())
        exported = model if trainer.exports else 0
        one, copied = (exported + self.optimizer.checkpoint_bytes(copied=each) for each in (False, True))
        if args.save_only_model:
            one = copied = exported
        steps, every = trainer.state.max_steps - trainer.state.global_step, trainer.state.save_steps
        due = math.ceil(steps / every) if args.save_strategy == "steps" and every else 1

        def look() -> None:
            run = Path(args.output_dir).absolute()
            for path in run.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                step = re.fullmatch(r".*-(\d+)", path.name)
                if step is not None and int(step[1]) > trainer.state.global_step:
                    check_replaceable(path)
            limit, there = args.save_total_limit, len([*run.glob(f"{PREFIX_CHECKPOINT_DIR}-*")])
            most = max(1, min(due, limit + 1 - there) if limit else due)
            place = next(path for path in (run, *run.parents) if path.is_dir())
            free = shutil.disk_usage(place).free
            has = f"The disk of output_dir {args.output_dir} has {format_bytes(free)} free"
            if self.is_required and one > free:
                raise StorageError(
                    f"{has}, and a checkpoint takes {format_bytes(one)}: free space, or name a directory on another "
                    f"disk{self.without}"
                )
            if one + (most - 1) * copied > free:
                say(
                    self._console,
                    f"{has}. The run may add {most} checkpoints of up to {format_bytes(copied)} each: free space "
                    "before it needs it, or give a smaller save_total_limit",
                )

        from_first(self._mesh, "the room for checkpoints", look)

    def _show_plan(self) -> None:
        """Print the plan, and how much the run wears the SSD."""
        trainer = self._trainer
        plan = plan_of(trainer.model)
        self._console.print(plan_table(plan, None, explained=False))
        steps = trainer.state.max_steps - trainer.state.global_step
        _, worn = wear_of(plan, trainer.paging.memory.ssd_directories, steps, self._mesh)
        say(self._console, *([worn] if worn else []))

    def explain(self, name: str) -> str:
        """The message after a signal."""
        if self._mesh.everyone.rank:
            return ""
        if self._retrying is not None:
            return f"{name}: stops without a checkpoint of step {self._retrying} unless one more try succeeds"
        step = self._trainer.state.global_step + 1
        return f"{name}: stops after step {step} and saves it. Another signal stops at once"

    def _say(self, message: str) -> None:
        say(self._console, message) if self._mesh.everyone.rank == 0 else _log.warning("%s", message)


def wear_of(plan: Plan, directories: Iterable[Path], steps: int, mesh: Mesh) -> tuple[float, str]:
    """How much a run of so many steps wears the drives of these directories: the share of what they are rated for, and
    a message, which is empty if it writes nothing to them. All ranks call this."""
    endurance = endurance_of(directories, mesh.everyone.nodes)
    written = sum(from_all(mesh, "the bytes written to SSD", bytes_written_to_ssd(plan)))
    if endurance is None or not written:
        return 0.0, ""
    return written * steps / endurance.value, f"SSD: {wear(written, steps, endurance)}"


class SavingCallback(TrainerCallback):  # type: ignore[misc]
    """Asks for checkpoints by time, and ends a run after a signal."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Prepare for the first step."""
        self._trainer.checkpoints.begin_run()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Complete what was written, and save or stop if it is time."""
        self._trainer.checkpoints.after_step(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An epoch that a signal has ended in its middle is neither evaluated nor saved again."""
        if self._trainer.checkpoints.stopped_by is not None and state.epoch % 1:
            control.should_evaluate = control.should_save = False
