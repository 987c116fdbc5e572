"""A run's model between steps. It can be restored, stepped and evaluated."""

import random
import time
from dataclasses import replace

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from pagoda.checkpoint.directory import read_manifest
from pagoda.checkpoint.model_config import give_generation_config, model_record
from pagoda.errors import CheckpointError
from pagoda.prepare.sequence_parallel import divide_sequences
from pagoda.train.config import TrainConfig
from pagoda.train.data import Batches
from pagoda.train.metrics import DATA, StepMetrics
from pagoda.train.passes import Batch, MicroBatches, Passes
from pagoda.train.run_dir import RunCheckpoint

_VERSION = "transformers_version"


class Session:
    """A wrapped model with its optimizer, learning rate and batches."""

    def __init__(self, config: TrainConfig, batches: Batches, passes: Passes, part: int = 0) -> None:
        """`part`: which part of a batch's work this rank has, as a stage of a pipeline or with a part of each sequence.
        Ranks with other parts draw other random numbers."""
        self.config = config
        self.batches = batches
        self.model, self.optimizer = passes.model, passes.optimizer
        self._passes = passes
        self._scheduler = LambdaLR(self.optimizer, lambda step: config.lr_factor(step, config.max_steps))
        # Initialisation draws random numbers in an order that may depend on the memory split. Dropout must not depend
        # on it. Ranks with other batches or layers drop other elements.
        seed_all(config.seed + part * batches.ranks + batches.rank)

    def divide_sequences(self) -> None:
        """Let ranks divide each sequence from now on, if the configuration says so."""
        if self.config.sequence_parallel > 1:
            self._passes.sequences = divide_sequences(self.model, self.config.sequence_parallel)

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Load `checkpoint`. Raises CheckpointError if it belongs to another model or text."""
        self._adopt_model(checkpoint)
        extra = self.optimizer.load_checkpoint(checkpoint.path)
        if extra.get("text") != self.batches.rows.tokens.about.fingerprint:
            raise CheckpointError(
                f"{checkpoint.path} was trained on another text than data {self.config.data!r}: give --data the files, "
                "and --tokenizer the tokenizer, that the run started with"
            )
        self.batches = replace(self.batches, first_step=checkpoint.step, first_sample=extra["samples"])
        self._scheduler.last_epoch = checkpoint.step
        # Recomputed because `steps` may have changed. Otherwise the value is the same.
        factor = self.config.lr_factor(checkpoint.step, self.config.max_steps)
        for group, base in zip(self.optimizer.param_groups, self._scheduler.base_lrs, strict=True):
            group["lr"] = base * factor

    def _adopt_model(self, checkpoint: RunCheckpoint) -> None:
        """Let the model generate text as the checkpoint says. Raises CheckpointError if its configuration differs from
        the one in the checkpoint. A key-value cache decides no bit."""
        saved, mine = read_manifest(checkpoint.path).get("model"), model_record(self.model)
        if saved is None or mine is None:
            return
        give_generation_config(self.model, saved)
        theirs, ours = saved["config"], mine["config"]
        if theirs.get(_VERSION) != ours.get(_VERSION):
            return  # another version of transformers may say the same in other words
        names = sorted({*theirs, *ours} - {"use_cache"})
        if differing := [name for name in names if theirs.get(name) != ours.get(name)]:
            raise CheckpointError(
                f"{checkpoint.path} was trained with another config.json than --model {self.config.model} has: "
                + ", ".join(f"{name} was {theirs.get(name)} and is {ours.get(name)}" for name in differing)
                + ". Put back what it was"
            )

    def step(self, step: int) -> StepMetrics:
        """Run step number `step`, counted from 0."""
        started = time.perf_counter()
        self.optimizer.restart_clock()  # an evaluation, a sample or a checkpoint may have waited since the last step
        targets = self.batches.targets_of_step(step)
        data_s = time.perf_counter() - started

        def micro_batches() -> MicroBatches:
            nonlocal data_s
            for index in range(self.config.gradient_accumulation_steps):
                before = time.perf_counter()
                batch = self.batches.batch(step, index)
                data_s += time.perf_counter() - before
                # All tokens of the step have the same weight in the loss. Ranks average their gradients.
                yield batch, targets / self.batches.ranks / self.batches.targets(batch["labels"])

        losses = self._passes.train(micro_batches())
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._scheduler.step()
        loss, balance = losses.loss.item(), losses.balance
        step_s = time.perf_counter() - started
        stats = self.optimizer.stats
        return StepMetrics.of(
            stats,
            step=step + 1,
            loss=loss,
            aux_loss=None if balance is None else balance.item(),
            lr=lr,
            step_s=step_s,
            tokens_per_s=self.batches.tokens_per_step / step_s,
            stall_s={**stats.stall_s, DATA: data_s},
        )

    def loss(self, batch: Batch) -> float | None:
        """The loss of a batch in evaluation mode, without gradients and without a router's loss. None if another stage
        of a pipeline has it."""
        return self._passes.evaluate(batch, lambda output: float(output.loss.item()))

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """The logits of a batch in evaluation mode, without gradients, fp32 on the CPU: [B, T, vocabulary]. None if
        another stage of a pipeline has them."""
        return self._passes.evaluate(batch, lambda output: (output.logits + 0).float().cpu())


def seed_all(seed: int) -> None:
    """Seed every random generator that a model may use."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
