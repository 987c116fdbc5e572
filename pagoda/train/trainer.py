"""The trainer of `pagoda train`: transformers' own, with the data order and the checkpoints of a run."""

import logging
import math
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
from pagoda.console import say
from pagoda.errors import CheckpointError
from pagoda.integrations import Paging, seals
from pagoda.integrations.checkpoints import Checkpoints
from pagoda.integrations.transformers import PagedTrainerMixin
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_first
from pagoda.optimizer import PagedOptimizer
from pagoda.train.config import TrainConfig
from pagoda.train.data import Batches
from pagoda.train.evaluate import Evaluator
from pagoda.train.metrics import MetricsFile, read_evaluations
from pagoda.train.passes import Losses, Passes
from pagoda.train.resume import CHAT, CONFIG, EVALUATED, SAMPLES_PER_STEP
from pagoda.train.run_dir import RunDir

_log = logging.getLogger("pagoda")
_VERSION = "transformers_version"
_TRACED = 3
"""The step of a call that is recorded: the first in steady state."""


def arguments(config: TrainConfig, passes: Passes, evaluates_first: bool) -> TrainingArguments:
    """The arguments of transformers' trainer."""
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
        eval_strategy="steps" if config.evaluates else "no",
        eval_steps=config.eval_steps or None,
        eval_on_start=evaluates_first,
        metric_for_best_model="loss",
        greater_is_better=False,
        save_strategy="steps",
        save_steps=config.save_steps,
        save_total_limit=config.most_checkpoints,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        label_names=["labels"],
        use_cache=bool(getattr(passes.model.config, "use_cache", False)),
        use_cpu=passes.device.type == "cpu",
        report_to=[*config.report_to] or "none",
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

    control: Any

    def __init__(
        self,
        config: TrainConfig,
        passes: Passes,
        batches: Batches,
        evaluator: Evaluator | None,
        run_dir: RunDir,
        done: int,
        mesh: Mesh,
        console: Console,
    ) -> None:
        """`done`: number of steps that were done before. `batches` begin after them."""
        self.config, self.passes, self.batches, self.evaluator = config, passes, batches, evaluator
        self.run_dir, self.done, self.mesh, self.console = run_dir, done, mesh, console
        self.files: dict[str, MetricsFile] = {}
        """The files of figures. Empty before the first step has succeeded, and on all ranks but the first."""
        self.losses: list[Losses] = []
        """Of the step that is under way."""
        self.began = self.data_s = self.lr = 0.0
        """When the last step began, the seconds in which its data were read, and its learning rate."""
        self.traced = done + min(_TRACED, config.max_steps - done)
        """The step to record, counted from 1."""
        self.saved: Path | None = None
        """The last checkpoint that is complete."""
        schedule = LambdaLR(passes.optimizer, lambda step: config.lr_factor(step, config.max_steps))
        minutes = config.save_minutes if config.saves_by_time else 0.0
        super().__init__(
            passes.model,
            arguments(config, passes, self._evaluates_first()),
            train_dataset=batches,
            eval_dataset=None if evaluator is None else evaluator.batches,
            optimizers=(passes.optimizer, schedule),
            paging=Paging(memory=config.memory, save_minutes=minutes),
        )
        self.remove_callback(PrinterCallback)

    def _evaluates_first(self) -> bool:
        """Whether an evaluation is due before the first step. A run that was interrupted may have left one out."""
        if self.evaluator is None or self.done % self.config.eval_steps:
            return False
        evals, data = self.run_dir.evals, self.evaluator.data
        known = from_first(self.mesh, "the evaluations", lambda: read_evaluations(evals, data))
        return all(line["step"] != self.done for line in known)

    # --- steps ---------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The batches of all steps that are left."""
        order: Any = self.batches.order(self.done, self.config.max_steps, self.passes.batches_at_once)
        generator = torch.Generator()  # else the loader draws from the one of dropout
        return DataLoader(self.batches, batch_sampler=order, collate_fn=dict, generator=generator)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], int]:
        """The batches of the next step, and the tokens that its loss counts on all ranks."""
        self.began, self.losses = time.perf_counter(), []
        self.passes.optimizer.restart_clock()  # an evaluation or a checkpoint may have waited
        self.lr = self.passes.optimizer.param_groups[0]["lr"]
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        targets = self.batches.targets_of_step(self.state.global_step)
        self.data_s = time.perf_counter() - self.began
        return batches, targets

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of a batch, of which ranks may have a part of the layers or of each sequence."""
        self.losses.append(self.passes.train(inputs, num_items_in_batch / self.batches.ranks))
        return self.losses[-1].loss

    def floating_point_ops(self, inputs: Any) -> int:
        """0: metrics have seconds and bytes, and `pagoda plan` counts operations."""
        return 0

    def store_flos(self) -> None:
        """Do nothing, as no operations are counted."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Send figures to trackers. The files of the run have all of them."""
        self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measure the loss on the data to evaluate on, and note whether it is the best one after a step."""
        assert self.evaluator is not None, "only then an evaluation is due"
        state = self.state
        figures = self.evaluator.measure(self.passes, state.global_step)
        metrics = {f"eval_{name}": value for name, value in figures.items()}
        if state.global_step and figures["loss"] < (math.inf if state.best_metric is None else state.best_metric):
            state.best_metric, state.best_global_step = figures["loss"], state.global_step
        self.log({f"eval_{name}": figures[name] for name in ("loss", "perplexity", "bits_per_byte")})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

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


def _is_ours_alone(checkpoint: Path) -> bool:
    """Whether a checkpoint has no file of the user's. Else it is kept, with a warning."""
    try:
        seals.check_removable(checkpoint)
    except CheckpointError as error:
        _log.warning("%s was not deleted: %s", checkpoint, error)
        return False
    return True


class RunCheckpoints(Checkpoints):
    """The checkpoints of a run."""

    without = " (--no-save-at-end trains without keeping the weights)"

    def __init__(self, trainer: RunTrainer, optimizer: PagedOptimizer) -> None:
        super().__init__(trainer, optimizer)
        self._run, self._console = trainer, trainer.console
        self.is_required = trainer.config.save_at_end or trainer.config.save_steps > 0

    def begin_run(self) -> None:
        """Take the intervals from the settings, because the state of a checkpoint has those of before."""
        state, args = self._run.state, self._run.args
        state.save_steps, state.eval_steps = args.save_steps, args.eval_steps
        super().begin_run()

    def save(self, write: Any, trial: Any) -> None:
        """Make figures survive a power loss, then start a checkpoint."""
        for file in self._run.files.values():
            file.flush(sync=True)
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
            EVALUATED: None if self._run.evaluator is None else self._run.evaluator.data,
        }

    def _by_age(self, run: Path) -> list[Path]:
        return [checkpoint.path for checkpoint in self._run.run_dir.all_checkpoints()]

    def outdated_checkpoints(self, older: list[Path], now: Any) -> list[Path]:
        return [path for path in super().outdated_checkpoints(older, now) if _is_ours_alone(path)]

    def _show_plan(self) -> None:
        """Do nothing: the plan was shown before."""

    def _say_how_to_continue(self) -> None:
        say(
            self._console,
            "Interrupted. Continue with: pagoda train --resume-from-checkpoint last --output-dir "
            f"{self._run.run_dir.path}",
        )
