"""The trainer of `pagoda train`: transformers' own, with the data order and the checkpoints of a run."""

import logging
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainingArguments

from pagoda.checkpoint.directory import read_manifest
from pagoda.checkpoint.model_config import give_generation_config, model_record
from pagoda.checkpoint.pending import DiskRoom
from pagoda.console import say
from pagoda.errors import CheckpointError
from pagoda.integrations import Paging, seals
from pagoda.integrations.checkpoints import Checkpoints
from pagoda.integrations.transformers import PagedTrainerMixin
from pagoda.memory.sizes import format_bytes
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_first
from pagoda.optimizer import PagedOptimizer
from pagoda.train.config import TrainConfig
from pagoda.train.data import Batches
from pagoda.train.metrics import LINE_BYTES
from pagoda.train.passes import Losses, Passes
from pagoda.train.resume import CHAT, CONFIG, SAMPLES_PER_STEP
from pagoda.train.run_dir import RunDir

_log = logging.getLogger("pagoda")
_VERSION = "transformers_version"


def arguments(config: TrainConfig, passes: Passes) -> TrainingArguments:
    """The arguments of transformers' trainer. What they leave out, such as when to save, callbacks decide."""
    threads = torch.get_num_threads()
    made = TrainingArguments(
        output_dir=str(config.output_dir),
        run_name=config.output_dir.name if config.output_dir else None,
        max_steps=config.max_steps,
        per_device_train_batch_size=config.per_device_train_batch_size * passes.batches_at_once,
        gradient_accumulation_steps=config.gradient_accumulation_steps // passes.batches_at_once,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup_steps or 0,
        max_grad_norm=0.0,  # the optimizer clips
        seed=config.seed,
        ignore_data_skip=True,  # the order of the data begins anywhere
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        label_names=["labels"],
        use_cache=bool(getattr(passes.model.config, "use_cache", False)),
        use_cpu=passes.device.type == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    if made.n_gpu > 1:  # without torchrun, a run uses one
        made._n_gpu = 1
    if torch.get_num_threads() != threads:  # accelerate may choose a number, and sums would have other bits
        torch.set_num_threads(threads)
    return made


class RunTrainer(PagedTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """Trains a wrapped model on the batches of a run.

    All tokens of a step have the same weight in its loss, on all ranks and in all passes.
    """

    def __init__(
        self,
        config: TrainConfig,
        passes: Passes,
        batches: Batches,
        run_dir: RunDir,
        done: int,
        mesh: Mesh,
        console: Console,
    ) -> None:
        """`done`: number of steps that were done before. `batches` begin after them."""
        self.config, self.passes, self.batches, self.run_dir = config, passes, batches, run_dir
        self.done, self.mesh, self.console = done, mesh, console
        self.losses: list[Losses] = []
        """Of the step that is under way."""
        self.began = self.data_s = self.lr = 0.0
        """When the last step began, the seconds in which its data were read, and its learning rate."""
        self.step_s = 0.0
        """Seconds that it took."""
        self.is_in_step = False
        self.traced = done + min(config.trace_step, config.max_steps - done)
        """The step to record, counted from 1."""
        self.saved: Path | None = None
        """The last checkpoint that is complete."""
        schedule = LambdaLR(passes.optimizer, lambda step: config.lr_factor(step, config.max_steps))
        minutes = config.save_minutes if config.saves_by_time else 0.0
        super().__init__(
            passes.model,
            arguments(config, passes),
            train_dataset=batches,
            optimizers=(passes.optimizer, schedule),
            paging=Paging(memory=config.memory, save_minutes=minutes),
        )
        self.remove_callback(PrinterCallback)

    # --- steps ---------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The batches of all steps that are left."""
        order = _Order(self.batches, self.done, self.config.max_steps, self.passes.batches_at_once)
        generator = torch.Generator()  # else the loader draws from the one of dropout
        return DataLoader(self.batches, batch_sampler=order, collate_fn=dict, generator=generator)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], int]:
        """The batches of the next step, and the tokens that its loss counts on all ranks."""
        self.began, self.is_in_step, self.losses = time.perf_counter(), True, []
        self.passes.optimizer.restart_clock()  # an evaluation, a sample or a checkpoint may have waited
        self.lr = self.passes.optimizer.param_groups[0]["lr"]
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        targets = self.batches.targets_of_step(self.state.global_step)
        self.data_s = time.perf_counter() - self.began
        return batches, targets

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of a batch, of which ranks may have a part of the layers or of each sequence."""
        self.losses.append(self.passes.train(inputs, num_items_in_batch / self.batches.ranks))
        return self.losses[-1].loss

    def until_end(self) -> str:
        """When the step ends that is under way or comes next, as a part of a sentence."""
        if not self.step_s:
            return ""
        if not self.is_in_step:
            return f", about {math.ceil(self.step_s)} s after the evaluation, sample or checkpoint that is under way,"
        return f", in about {math.ceil(max(0.0, self.began + self.step_s - time.perf_counter()))} s,"

    def floating_point_ops(self, inputs: Any) -> int:
        """0: metrics have seconds and bytes, and `pagoda plan` counts operations."""
        return 0

    def store_flos(self) -> None:
        """Do nothing, as no operations are counted."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Send figures to trackers. The files of the run have all of them."""
        self.callback_handler.on_log(self.args, self.state, self.control, logs)

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def _checkpoints_of(self, optimizer: PagedOptimizer) -> Checkpoints:
        return RunCheckpoints(self, optimizer)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Do nothing: `pagoda export` writes the model's files, from Pagoda's own checkpoint."""

    def _end_by(self, number: int) -> None:
        """Do nothing: the caller learns of the signal."""

    def _check_resumes(self, state: Path) -> None:
        """Adopt the generation config of a checkpoint. Raises CheckpointError if it is of another model or text. A
        key-value cache decides no bit."""
        manifest = read_manifest(state)
        if manifest["extra"]["text"] != self.batches.rows.tokens.about.fingerprint:
            raise CheckpointError(
                f"it was trained on another text than data {self.config.data!r}: give --data the files, and "
                "--tokenizer the tokenizer, that the run started with"
            )
        saved, mine = manifest.get("model"), model_record(self.passes.model)
        if saved is None or mine is None:
            return
        give_generation_config(self.passes.model, saved)
        theirs, ours = saved["config"], mine["config"]
        if theirs.get(_VERSION) != ours.get(_VERSION):
            return  # another version of transformers may say the same in other words
        names = sorted({*theirs, *ours} - {"use_cache"})
        if differing := [name for name in names if theirs.get(name) != ours.get(name)]:
            raise CheckpointError(
                f"it was trained with another config.json than --model {self.config.model} has: "
                + ", ".join(f"{name} was {theirs.get(name)} and is {ours.get(name)}" for name in differing)
                + ". Put back what it was"
            )


class _Order:
    """The rows of each batch, for a DataLoader. It has no length, because a run need not end with an epoch."""

    def __init__(self, *order: Any) -> None:
        self._batches, *self._range = order

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches.order(*self._range)


def _is_ours_alone(checkpoint: Path) -> bool:
    """Whether a checkpoint has no file of the user's. Else it is kept, with a warning."""
    try:
        seals.check_removable(checkpoint)
    except CheckpointError as error:
        _log.warning("%s was not deleted: %s", checkpoint, error)
        return False
    return True


class RunCheckpoints(Checkpoints):
    """The checkpoints of a run: the last ones and the best one."""

    def __init__(self, trainer: RunTrainer, optimizer: PagedOptimizer) -> None:
        super().__init__(trainer, optimizer)
        self._run, self._console = trainer, trainer.console
        self.best: int | None = None
        """The number of steps before the best evaluation, if its checkpoint is kept."""
        self.before: Any = lambda: None
        """Called before each checkpoint."""

    def save(self, write: Any, trial: Any) -> None:
        """Start a checkpoint."""
        self.before()
        super().save(write, trial)

    def _record(self) -> dict[str, Any]:
        config, batches, step = self._run.config, self._run.batches, self._run.state.global_step
        return {
            "step": step,
            CONFIG: config.settings(),
            CHAT: batches.rows.tokens.about.chats,
            "text": batches.rows.tokens.about.fingerprint,
            "samples": batches.samples_before(step),
            SAMPLES_PER_STEP: batches.samples_per_step,
        }

    def _outdated(self, older: list[Path], now: Any) -> list[Path]:
        if not (keep := self._run.config.save_total_limit):
            return []
        steps = {path: int(path.name.rpartition("-")[2]) for path in (*older, now.staged.directory)}
        last = sorted(steps.values())[-keep:]
        return [path for path in older if steps[path] not in (*last, self.best) and _is_ours_alone(path)]

    def _check_room(self) -> None:
        """Raises StorageError if the disk has no room for one checkpoint. Prints a message if it has none for all that
        the run keeps at a time."""
        run, config, ranks = self._run, self._run.config, self._mesh.everyone.size
        steps = config.max_steps - run.done
        one, copied = self.optimizer.checkpoint_bytes(), self.optimizer.checkpoint_bytes(copied=True)

        def look() -> None:
            due = 1 + bool(config.saves_by_time)
            if config.save_steps:
                due = math.ceil(steps / config.save_steps)
            # A checkpoint is deleted when the one that replaces it is complete.
            kept = config.save_total_limit + 1 + (config.evaluates and config.keep_best)
            most = max(1, (min(due, kept) if config.save_total_limit else due) - len(run.run_dir.all_checkpoints()))
            lines = steps * LINE_BYTES * (1 + ranks * (ranks > 1))
            required = config.save_at_end or config.save_steps > 0
            message = DiskRoom(one=one, copied=copied, most=most, beside=lines, required=required).check(
                f"The disk of --output-dir {run.run_dir.path}",
                shutil.disk_usage(run.run_dir.path).free,
                f"a checkpoint takes {format_bytes(one)}, metrics {format_bytes(lines)}",
                " (--no-save-at-end trains without keeping the weights)",
                "--save-total-limit",
            )
            if message is not None:
                say(self._console, message)

        from_first(self._mesh, "the room for checkpoints", look)

    def _show_plan(self) -> None:
        """Do nothing: the plan was shown before."""

    def _say_how_to_continue(self) -> None:
        """Do nothing: the end of the run is told with its last checkpoint."""

    def explain(self, name: str) -> str:
        """The message after a signal: when the run will end, and how."""
        run = self._run
        if self._mesh.everyone.rank:
            return ""
        step = run.state.global_step
        if self._pending.retrying is not None:
            what = f"stops without {run.run_dir.checkpoint(self._pending.retrying)} unless one more try succeeds"
        elif run.control.should_training_stop:
            what = f"the steps are done; stops when {run.run_dir.checkpoint(step)} is complete"
        else:
            what = f"stops after step {step + 1}{run.until_end()} and saves {run.run_dir.checkpoint(step + 1)}"
        saved = run.run_dir.all_checkpoints()
        lost = f"the steps after {saved[-1].path.name}" if saved else "all steps"
        return f"{name}: {what}. Another signal stops the run at once and loses {lost}"
