"""A run's model between steps. It can be restored, stepped and evaluated."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pagoda.checkpoint.directory import read_manifest
from pagoda.checkpoint.model_config import model_record
from pagoda.errors import CheckpointError, ConfigError, PagodaError
from pagoda.models.build import model_directory
from pagoda.optimizer import PagedOptimizer
from pagoda.train.config import TrainConfig
from pagoda.train.data import Batches
from pagoda.train.metrics import DATA, StepMetrics
from pagoda.train.run_dir import RunCheckpoint

_VERSION = "transformers_version"


class Session:
    """A wrapped model with its optimizer, learning rate and batches."""

    def __init__(self, config: TrainConfig, batches: Batches, model: nn.Module, optimizer: PagedOptimizer) -> None:
        self.config = config
        self.batches = batches
        self.model = model
        self.optimizer = optimizer
        self._is_switch = getattr(model.config, "model_type", None) == "switch_transformers"
        self._scheduler = LambdaLR(optimizer, lambda step: config.optim.lr_factor(step, config.steps))
        self._device = next(model.parameters()).device
        self._ran = False
        """Whether the model has computed a loss."""
        # Initialisation draws random numbers in an order that may depend on the memory split. Dropout must not depend
        # on it. Ranks with other batches drop other elements.
        seed_all(config.seed + batches.rank)

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Load `checkpoint`. Raises CheckpointError if it belongs to another model or text."""
        self._check_model(checkpoint)
        extra = self.optimizer.load_checkpoint(checkpoint.path)
        if extra.get("text") != self.batches.rows.tokens.about.fingerprint:
            raise CheckpointError(
                f"{checkpoint.path} was trained on another text than data {self.config.data!r}: give --data the files, "
                "and --tokenizer the tokenizer, that the run started with"
            )
        self.batches = replace(self.batches, first_step=checkpoint.step, first_sample=extra["samples"])
        self._scheduler.last_epoch = checkpoint.step
        # Recomputed because `steps` may have changed. Otherwise the value is the same.
        factor = self.config.optim.lr_factor(checkpoint.step, self.config.steps)
        for group, base in zip(self.optimizer.param_groups, self._scheduler.base_lrs, strict=True):
            group["lr"] = base * factor

    def _check_model(self, checkpoint: RunCheckpoint) -> None:
        """Raises CheckpointError if the model's configuration differs from the one in the checkpoint."""
        saved, mine = read_manifest(checkpoint.path).get("model"), model_record(self.model)
        if saved is None or mine is None:
            return
        theirs, ours = saved["config"], mine["config"]
        if theirs.get(_VERSION) != ours.get(_VERSION):
            return  # another version of transformers may say the same in other words
        if differing := sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)):
            raise CheckpointError(
                f"{checkpoint.path} was trained with another config.json than --model {self.config.model} has: "
                + ", ".join(f"{name} was {theirs.get(name)} and is {ours.get(name)}" for name in differing)
                + ". Put back what it was"
            )

    def step(self, step: int) -> StepMetrics:
        """Run step number `step`, counted from 0."""
        started = time.perf_counter()
        self.optimizer.restart_clock()  # an evaluation, a sample or a checkpoint may have waited since the last step
        passes = self.config.accumulation_steps
        loss_sum = torch.zeros((), device=self._device)
        balance: torch.Tensor | None = None
        targets = self.batches.targets_of_step(step)
        data_s = time.perf_counter() - started
        # Switch Transformers have no such setting in their config.json.
        asked = {"output_router_logits": True} if self._is_switch else {}
        for index in range(passes):
            before = time.perf_counter()
            batch = self.batches.batch(step, index)
            data_s += time.perf_counter() - before
            # All tokens of the step have the same weight in the loss. Ranks average their gradients.
            share = targets / self.batches.ranks / self.batches.targets(batch["labels"])
            output = self._forward(batch, **asked)
            self.optimizer.scale(output.loss / share).backward()  # type: ignore[no-untyped-call]
            loss_sum += output.loss.detach().float() / share
            if (figure := _balance_of(output)) is not None:
                balance = figure / passes + (0 if balance is None else balance)
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._scheduler.step()
        loss_mean = loss_sum.item()
        step_s = time.perf_counter() - started
        stats = self.optimizer.stats
        return StepMetrics.of(
            stats,
            step=step + 1,
            loss=loss_mean,
            aux_loss=None if balance is None else balance.item(),
            lr=lr,
            step_s=step_s,
            tokens_per_s=self.batches.tokens_per_step / step_s,
            stall_s={**stats.stall_s, DATA: data_s},
        )

    def _forward(self, batch: dict[str, torch.Tensor], **asked: bool) -> Any:
        """Call the model. Raises ConfigError if the model comes from a directory and its first forward pass fails."""
        if self._device.type == "cuda":  # copies from pinned memory do not wait for queued work
            batch = {name: tensor.pin_memory().to(self._device, non_blocking=True) for name, tensor in batch.items()}
        try:
            return self.model(**batch, **asked)
        except (PagodaError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # sizes that do not fit each other show here at the earliest
            if self._ran or model_directory(self.config.model) is None:
                raise
            raise ConfigError(
                f"model {self.config.model!r} fails in its first forward pass: {type(error).__name__}: {error}. Check "
                "its config.json"
            ) from error
        finally:
            self._ran |= "labels" in batch

    def loss(self, batch: dict[str, torch.Tensor]) -> float:
        """The loss of a batch in evaluation mode, without gradients and without a router's loss."""
        loss: float = self._evaluated(batch, lambda output: output.loss.item())
        return loss

    def logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The logits of a batch in evaluation mode, without gradients, fp32 on the CPU: [B, T, vocabulary]."""
        logits: torch.Tensor = self._evaluated(batch, lambda output: (output.logits + 0).float().cpu())
        return logits

    def _evaluated(self, batch: dict[str, torch.Tensor], read: Callable[[Any], Any]) -> Any:
        asked = {"output_router_logits": False} if getattr(self.model.config, "output_router_logits", False) else {}
        self.model.eval()
        try:
            with torch.no_grad():
                return read(self._forward(batch, **asked))
        finally:
            self.model.train()


def seed_all(seed: int) -> None:
    """Seed every random generator that a model may use."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _balance_of(output: Any) -> torch.Tensor | None:
    """The load-balancing loss in a model's output, without its weight, or None."""
    names = ("aux_loss", "encoder_aux_loss", "decoder_aux_loss")
    found = [figure for name in names if isinstance(figure := getattr(output, name, None), torch.Tensor)]
    return torch.stack(found).detach().float().mean() if found else None
