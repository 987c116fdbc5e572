"""How a model runs: forward and backward of a batch, and forward alone in an evaluation."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from pagoda.models.build import first_forward
from pagoda.optimizer import PagedOptimizer
from pagoda.prepare.lookups import device_of
from pagoda.prepare.sequence_parallel import SequenceRanks
from pagoda.train.config import TrainConfig
from pagoda.train.data import counted

Batch = dict[str, torch.Tensor]
"""The model's arguments in a pass."""
T = TypeVar("T")


class Losses(NamedTuple):
    """The losses of a batch. The device may still be computing them."""

    loss: torch.Tensor
    """The part of the batch in the step's loss. NaN if another stage computes it."""
    balance: torch.Tensor | None = None
    """Load-balancing loss without its coefficient, if the model has one."""


class Passes:
    """Runs a whole model."""

    batches_at_once = 1
    """Micro-batches of a step that `train` gets as one batch."""

    def __init__(self, config: TrainConfig, model: nn.Module, optimizer: PagedOptimizer) -> None:
        self.config, self.model, self.optimizer = config, model, optimizer
        self.device = device_of(model)
        self._name = config.model
        self.sequences: SequenceRanks | None = None
        """The ranks that divide each sequence, if any do."""
        self._ran = False
        """Whether the model has run in training mode."""

    def train(self, batch: Batch, targets: float) -> Losses:
        """Forward and backward. `targets`: tokens that the loss of the step counts, a rank."""
        divisor = targets / counted(batch["labels"])  # each token of the step has the same weight in the loss
        output = self._whole(self.moved(batch))
        self.optimizer.scale(output.loss / divisor).backward()  # type: ignore[no-untyped-call]
        return Losses(output.loss.detach().float() / divisor, _balance_of(output))

    def evaluate(self, batch: Batch, read: Callable[[Any], T]) -> T | None:
        """What `read` returns for the model's output, in evaluation mode, without gradients and without a router's
        loss. None if another stage has the output."""
        asked = {"output_router_logits": False} if getattr(self.model.config, "output_router_logits", False) else {}
        self.model.eval()
        try:
            with torch.no_grad():
                return self.output(self.moved(batch), read, **asked)
        finally:
            self.model.train()

    def loss(self, batch: Batch) -> float | None:
        """The loss of a batch in evaluation mode. None if another stage has it."""
        return self.evaluate(batch, lambda output: float(output.loss.item()))

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """The logits of a batch in evaluation mode, fp32 on the CPU: [B, T, vocabulary]. None if another stage has
        them."""
        return self.evaluate(batch, lambda output: (output.logits + 0).float().cpu())

    def output(self, batch: Batch, read: Callable[[Any], T], **asked: bool) -> T | None:
        """What `read` returns for the model's output. None if another stage has the output."""
        return read(self._whole(batch, **asked))

    def _whole(self, batch: Batch, **asked: bool) -> Any:
        """The model's output for a batch. If ranks divide sequences, it is that for this rank's part, and the mean of
        their losses is that of the batch."""
        if self.sequences is None:
            return self.call(self.model, **batch, **asked)
        part = self.sequences.part(batch)
        output = self.call(self.model, **part.inputs, **asked)
        output.loss = part.loss(output.logits)
        return output

    def moved(self, batch: Batch) -> Batch:
        """The batch on the device."""
        if self.device.type != "cuda":
            return batch
        # Copies from pinned memory do not wait for queued work.
        return {name: tensor.pin_memory().to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def call(self, module: nn.Module, **arguments: Any) -> Any:
        """Call the model, or a part of it. Raises ConfigError if the model comes from a directory and its first forward
        pass fails."""
        with nullcontext() if self._ran else first_forward(self._name):
            output = module(**arguments)
        self._ran |= module.training
        return output


def _balance_of(output: Any) -> torch.Tensor | None:
    """The load-balancing loss in a model's output, without its coefficient."""
    found = getattr(output, "aux_loss", None)
    return found.detach().float().mean() if isinstance(found, torch.Tensor) else None
