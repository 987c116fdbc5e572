"""Trainers from transformers, and from libraries built on it such as TRL, with training state in pages."""

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy

from pagoda.autograd.activations.blocks import find_blocks
from pagoda.checkpoint.pretrained import SINGLE
from pagoda.checkpoint.rng import restore_rng, rng_state
from pagoda.checkpoint.state import is_paged
from pagoda.errors import CheckpointError, ConfigError
from pagoda.integrations import seals
from pagoda.integrations.accelerate import PRECISIONS, adopt
from pagoda.integrations.checkpoints import Checkpoints, SavingCallback
from pagoda.integrations.evaluation import TokenMean
from pagoda.integrations.paging import Paging, hand_over, optimizer_of
from pagoda.integrations.settings import check_resumes
from pagoda.integrations.staging import name_complete
from pagoda.integrations.states import adapter_state, exported_into, numbered
from pagoda.integrations.vllm import check_adapters, stream_weights
from pagoda.memory.identity import STATE
from pagoda.optimizer import PagedOptimizer
from pagoda.process import temporarily
from pagoda.runtime.stats import StepStats
from pagoda.signals import first_signal

_SCHEDULER = "scheduler.pt"
_OF_ANOTHER_TRAINER = (
    " Another trainer has saved it, with weights alone: load the model from it, and leave out resume_from_checkpoint."
)
_REFUSED = {
    "auto_find_batch_size": "a step that ran out of memory cannot be repeated: choose the batch size",
    "fp16_full_eval": "evaluation uses the weights as training does: set fp16",
    "bf16_full_eval": "evaluation uses the weights as training does: set bf16",
    "fsdp": "Pagoda divides state over ranks by itself",
    "deepspeed": "Pagoda divides state over ranks by itself",
    "sync_ref_model": "a reference model in pages does not change",
}
"""Arguments that a paged trainer refuses, with the reason or the alternative."""


_Trainer: Any = object
"""For mypy: base of a mixin that uses attributes of trainers."""


class PagedTrainerMixin(_Trainer):  # type: ignore[misc]
    """A mixin, listed before a trainer class, that keeps the training state in pages::

        class PagedSFTTrainer(PagedTrainerMixin, trl.SFTTrainer): pass
        trainer = PagedSFTTrainer(model, args, ..., paging=Paging(memory=pagoda.Memory(host="8GiB", ssd="/nvme")))

    The model is wrapped when training or evaluation begins. Optimizer, learning rate, weight decay, clipping,
    accumulation, bf16 and fp16 are those of `TrainingArguments`. With bf16 or fp16, weights have that dtype in forward
    and backward, with a master in fp32, and autocast is off, unless `Paging(autocast=True)` asks for it. Without
    either, the dtype is the model's.

    Checkpoints have a directory `pagoda` with all state, for `train(resume_from_checkpoint=...)`, which continues with
    the same bits. They are written while training continues, and have their name once they are complete. With
    `Paging(export=True)` they also have the model's files, for `from_pretrained`. The best model is loaded together
    with the optimizer's state of that step. `Paging(reference=...)` puts a reference model in pages.

    With `torch_compile`, each of the model's layers is compiled.

    Under torchrun, Pagoda divides the state over the ranks; DDP is not used.

    Raises ConfigError for arguments that cannot be combined with paging, and BudgetError like `wrap`.
    """

    optimizer: Any

    def __init__(self, *args: Any, paging: Paging | None = None, **kwargs: Any) -> None:
        self.paging = Paging() if paging is None else paging
        self._paged: PagedOptimizer | None = None
        self._reference: PagedOptimizer | None = None
        """Of a reference model in pages."""
        self.checkpoints: Checkpoints | None = None
        self._token_mean: TokenMean | None = None
        self.received: list[int] = []
        """The signal that ends the run, if it has come."""
        self._was_given = False
        for given in (*args, *kwargs.values()):
            if isinstance(given, transformers.TrainingArguments):
                self.check_arguments(given)
        super().__init__(*args, **kwargs)
        self.paging.check_device(self.args.device)
        self.callback_handler.on_save = self._on_save
        self.add_callback(SavingCallback(self))
        if (generation := getattr(self, "vllm_generation", None)) is not None:
            check_adapters(self.model)
            stream_weights(generation)

    @staticmethod
    def check_arguments(settings: Any) -> None:
        """Raises ConfigError for `TrainingArguments` that cannot be combined with paging."""
        for name, advice in _REFUSED.items():
            if getattr(settings, name, None):
                raise ConfigError(f"{name} cannot be used with paging: {advice}.")
        if getattr(settings, "use_vllm", False) and settings.vllm_mode != "server":
            raise ConfigError(
                f"vllm_mode={settings.vllm_mode!r} cannot be used with paging: vLLM would take the memory that pages "
                "have. Use vllm_mode='server', on other GPUs, or leave out use_vllm to generate from pages."
            )
        if settings.mixed_precision not in PRECISIONS:
            raise ConfigError(f"mixed_precision is {settings.mixed_precision!r}; use one of {', '.join(PRECISIONS)}.")
        if settings.n_gpu > 1:
            raise ConfigError(f"One process has {settings.n_gpu} GPUs, which is DataParallel: start with torchrun.")

    # --- the model and its optimizer -----------------------------------------------------------------------------

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Wrap the model with the optimizer that was given, or that `create_optimizer` returns: the trainer's, or that
        of a class of the user's. The trainer calls this when training or evaluation begins."""
        if self.optimizer is None and not training and _in_pages(self.model):
            self.model._is_accelerate_prepared = True  # evaluation needs no optimizer
            return super()._wrap_model(model, training, *args, **kwargs)
        if self.optimizer is None:
            self.create_optimizer()
        if isinstance(self.optimizer, PagedOptimizer):
            self._was_given |= self._paged is None
        else:
            self.optimizer = self._taken_over(self.optimizer)
        paged: PagedOptimizer = self.optimizer
        if self._paged is not paged:
            self._paged, self.checkpoints = paged, self._checkpoints_of(paged)
        adopt(self.accelerator, self.model, paged)
        self.optimizer._is_accelerate_prepared = True  # type: ignore[union-attr]
        return super()._wrap_model(model, training, *args, **kwargs)

    def _checkpoints_of(self, optimizer: PagedOptimizer) -> Checkpoints:
        return Checkpoints(self, optimizer)

    def _taken_over(self, optimizer: Any) -> PagedOptimizer:
        args, model = self.args, self.model
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"A {type(optimizer).__name__} is no torch.optim.Optimizer: give Paging(optimizer=...).")
        if self._paged is not None and self._paged is not optimizer_of(model):  # `model_init` has replaced its model
            self._paged.close()
        for block in find_blocks(model) if args.torch_compile and not _in_pages(model) else ():
            block.module.compile(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
        paged = self.paging.take_over(
            model,
            optimizer,
            PRECISIONS[args.mixed_precision],
            groups=None if self.paging.optimizer is None else self._groups(),
            max_grad_norm=args.max_grad_norm or None,
            gradient_accumulation_steps=self._announced(),
            keeps_pages=True,
        )
        if self.lr_scheduler is not None:
            hand_over(self.lr_scheduler, paged)
        return paged

    def _announced(self) -> int | None:
        """Backward passes in a step. None if a class that is not of transformers or TRL may run any number of them."""
        passes = self.paging.backward_passes
        if passes == "auto":
            owners = {
                getattr(type(self), name).__module__.partition(".")[0] for name in ("compute_loss", "training_step")
            }
            passes = 1 if owners <= {"transformers", "trl"} else None
        return None if passes is None else passes * self.args.gradient_accumulation_steps

    def _groups(self) -> list[dict[str, Any]]:
        """The param groups of `Paging(optimizer=...)`: with its weight decay, and without."""
        decayed = set(self.get_decay_parameter_names(self.model))
        trained = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        return [
            {"params": [param for name, param in trained if name in decayed]},
            {"params": [param for name, param in trained if name not in decayed], "weight_decay": 0.0},
        ]

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Turn off Accelerate's autocast and loss scaling: the weights have their dtype, and Pagoda scales the loss."""
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator. It wraps a model that is prepared for evaluation: the reference model of DPO and
        others."""
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model

        def prepare_model(model: nn.Module, *args: Any, evaluation_mode: bool = False, **kwargs: Any) -> Any:
            if evaluation_mode and self.paging.reference is not None and model is not self.model:
                self._reference = self.paging.wrap_reference(model, PRECISIONS[self.args.mixed_precision])
                model._is_accelerate_prepared = True  # type: ignore[assignment]
            return prepare(model, *args, evaluation_mode=evaluation_mode, **kwargs)

        self.accelerator.prepare_model = prepare_model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: `wrap` places the model."""

    # --- steps ---------------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Clip if the user wrapped the model. Otherwise `step` clips, with the norm given to `wrap`."""
        if self._was_given and self._paged is not None:
            self._paged.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Return None: the norm is known only after `step`, and `log` adds it."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and add the last step's gradient norm and figures of paging to the training loss."""
        if self._paged is not None and "loss" in logs:
            stats = self._paged.stats
            norm = {} if stats.grad_norm is None else {"grad_norm": stats.grad_norm}
            logs = {"loss": logs["loss"], **norm, **logs, **_figures(stats)}
        super().log(logs, *args, **kwargs)

    # --- evaluation ----------------------------------------------------------------------------------------------

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict, and count the tokens that the loss counts."""
        found = super().prediction_step(model, inputs, *args, **kwargs)
        if self._token_mean is not None:
            self._token_mean.add(inputs, found[0])
        return found

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate, and add the loss as a mean over tokens to the metrics, in nats and bits; see `TokenMean`."""
        mean = TokenMean(self)
        with temporarily(self, _token_mean=mean):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        found = mean.metrics(None if self._paged is None else self._paged._engine.links.mesh)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        return output

    # --- saving --------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Start to write a checkpoint. Between the backward and the end of a step that has updated some units, it is
        written at the end of the step."""
        if self.checkpoints is None:
            super()._save_checkpoint(model, trial)
        elif self.checkpoints.optimizer.updates_have_begun:
            self.control.should_save = True
        else:
            self.checkpoints.save(lambda: super(PagedTrainerMixin, self)._save_checkpoint(model, trial), trial)

    def _get_output_dir(self, trial: Any) -> str:
        """The directory of the run, or that to which a checkpoint's files are written."""
        staging = None if self.checkpoints is None else self.checkpoints.staging
        return super()._get_output_dir(trial) if staging is None else str(staging)

    def _on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """In place of the callback handler's `on_save`, which the trainer calls after it has begun a checkpoint. The
        callbacks are told once it is complete."""
        control.should_save = False
        if self.checkpoints is None:
            return self.callback_handler.call_event("on_save", args, state, control, **kwargs)
        return control

    @property
    def exports(self) -> bool:
        """Whether checkpoints have the whole model; see `Paging.export`."""
        pushes = self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END
        return bool(self.args.save_only_model or pushes) if self.paging.export is None else self.paging.export

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model in pieces, or its adapters. The trainer writes the other files."""
        paged = _in_pages(self.model)
        if paged and state_dict is None and getattr(self.model, "peft_config", None):
            state_dict = adapter_state(self.model)
        if not paged or state_dict is not None:
            super()._save(output_dir, state_dict=state_dict)
            return
        out = Path(self.args.output_dir if output_dir is None else output_dir)
        if self.checkpoints is not None and self.checkpoints.staging is not None and not self.exports:
            super()._save(str(out), state_dict={})
            (out / SINGLE).unlink(missing_ok=True)
            return
        with exported_into(out, self.model):
            super()._save(str(out), state_dict={})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the scheduler's state. `checkpoints` writes the rest."""
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the loss scale is in Pagoda's checkpoint."""

    # --- resuming ------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train. `resume_from_checkpoint=True` uses the last checkpoint that is complete and not damaged, and warns of
        later ones.

        SIGINT (Ctrl-C), SIGTERM and SIGHUP end the run after its step: it saves a checkpoint, and then the signal has
        its usual effect. A second one has that at once. With `enable_jit_checkpoint`, SIGTERM is transformers'.
        """
        if self.checkpoints is not None:
            self.checkpoints.end()
        if self.args.should_save:
            name_complete(Path(self.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-")
        self.accelerator.wait_for_everyone()
        numbers = [signal.SIGINT, signal.SIGHUP, *([] if self.args.enable_jit_checkpoint else [signal.SIGTERM])]
        with first_signal(self._explain, numbers) as self.received:
            try:
                found = self._train(resume_from_checkpoint, *args, **kwargs)
            except Exception:
                if self.checkpoints is not None:
                    self.checkpoints.end()
                raise
        if self.checkpoints is not None and self.checkpoints.stopped_by is not None:
            self._end_by(self.checkpoints.stopped_by)
        return found

    def _end_by(self, number: int) -> None:
        """Let a signal have its usual effect, after the run has ended."""
        signal.raise_signal(number)

    def _explain(self, name: str) -> str:
        if self.checkpoints is None:
            return f"{name}: stops after the first step and saves it. Another signal stops at once"
        return self.checkpoints.explain(name)

    def _train(self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is not True:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        paths = numbered(Path(self.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-")
        for path in reversed(paths):
            try:
                return super().train(str(path), *args, **kwargs)
            except _ResumeError as error:
                if path == paths[0]:
                    raise
                warnings.warn(f"{error} The run resumes from the checkpoint before it.", stacklevel=3)
        raise _ResumeError(
            f"No valid checkpoint found in output directory ({self.args.output_dir}): leave out resume_from_checkpoint "
            "to begin."
        )

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """Complete the last checkpoint, then do what the trainer does. After a signal, the best model is not loaded."""
        assert self.checkpoints is not None, "it is made when the model is wrapped"
        self.checkpoints.finish()
        ended = self.checkpoints.stopped_by is None
        if ended:
            self.checkpoints.keep_best_alone(trial)
        loads_best, limit = ended and self.args.load_best_model_at_end, self.args.save_total_limit
        limit = None if limit == 1 else limit  # else the trainer deletes checkpoints itself, also those that we keep
        with temporarily(self.args, load_best_model_at_end=loads_best, save_total_limit=limit):
            return super()._finalize_training(trial, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check that there is state to resume from. It is loaded after the model is wrapped."""
        with _can_resume(resume_from_checkpoint):
            self._check_resumes(Path(resume_from_checkpoint, STATE))
            seals.check(Path(resume_from_checkpoint))

    def _check_resumes(self, state: Path) -> None:
        """Raises ConfigError or CheckpointError if the run cannot go on from a checkpoint's state."""
        check_resumes(self, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self._paged is not None, "the model is wrapped before its state is loaded"
        with _can_resume(checkpoint):
            self._paged.load_checkpoint(Path(checkpoint, STATE))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: the loss scale is in Pagoda's checkpoint."""

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if self._paged is not None and (best / STATE).is_dir():
            generators = rng_state()
            self._paged.load_checkpoint(best / STATE)
            restore_rng(generators)  # the run continues
        else:  # save_only_model
            super()._load_best_model()


def _figures(stats: StepStats) -> dict[str, float]:
    """Figures of the last step for metrics, with `pagoda_` before the names of `StepStats`."""
    stalls = {f"stall_s_{lane}": seconds for lane, seconds in stats.stall_s.items() if seconds}
    moved = {f"bytes_moved_{lane}": nbytes for lane, nbytes in stats.bytes_moved.items() if nbytes}
    peaks = {f"peak_bytes_{tier}": nbytes for tier, nbytes in stats.peak_bytes.items()}
    found = {"step_s": stats.step_s, "hit_rate": stats.hit_rate, "faults": stats.faults, **stalls, **moved, **peaks}
    return {f"pagoda_{name}": value for name, value in found.items()}


def _in_pages(model: nn.Module) -> bool:
    return any(map(is_paged, model.parameters()))


class _ResumeError(CheckpointError, ValueError):
    """There is no checkpoint, or it is damaged, not complete, or not of Pagoda's. It is a ValueError as the stock
    trainer's, which scripts catch to begin anew."""


@contextmanager
def _can_resume(checkpoint: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        if not os.path.isdir(checkpoint):
            raise _ResumeError(f"Can't find a valid checkpoint at {checkpoint}: there is no such directory.") from error
        others = not os.path.isdir(os.path.join(checkpoint, STATE)) and os.path.exists(
            os.path.join(checkpoint, TRAINER_STATE_NAME)
        )
        raise _ResumeError(
            f"{checkpoint} cannot be resumed with paging: {str(error).rstrip('.')}."
            + (_OF_ANOTHER_TRAINER if others else "")
        ) from error


class Trainer(PagedTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with its training state in pages; see `PagedTrainerMixin`."""


class Seq2SeqTrainer(PagedTrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """`transformers.Seq2SeqTrainer` with its training state in pages; see `PagedTrainerMixin`."""
