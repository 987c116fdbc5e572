"""How a model runs: the forward and backward passes of a step, and those of an evaluation."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from pagoda.models.build import first_forward
from pagoda.optimizer import PagedOptimizer
from pagoda.prepare.lookups import device_of
from pagoda.prepare.sequence_parallel import SequenceRanks
from pagoda.train.config import TrainConfig

Batch = dict[str, torch.Tensor]
"""The model's arguments in a pass."""
MicroBatches = Iterable[tuple[Batch, float]]
"""The batch of each pass, with the divisor of its loss."""
T = TypeVar("T")


class Losses(NamedTuple):
    """The losses of a step. The device may still be computing them."""

    loss: torch.Tensor
    """Sum over its passes, each loss divided by its divisor. NaN if another stage computes it."""
    balance: torch.Tensor | None = None
    """Mean load-balancing loss without its coefficient, if the model has one."""


class Passes:
    """Runs one pass after another."""

    def __init__(self, config: TrainConfig, model: nn.Module, optimizer: PagedOptimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.device = device_of(model)
        self._name = config.model
        self.sequences: SequenceRanks | None = None
        """The ranks that divide each sequence, if any do."""
        self._ran = False
        """Whether the model has run in training mode."""

    def train(self, micro_batches: MicroBatches) -> Losses:
        """Forward and backward of a step."""
        total = torch.zeros((), device=self.device)
        figures: list[torch.Tensor] = []
        for batch, divisor in micro_batches:
            output = self._whole(self.moved(batch))
            self.optimizer.scale(output.loss / divisor).backward()  # type: ignore[no-untyped-call]
            total += output.loss.detach().float() / divisor
            figures += _balance_of(output)
        return Losses(total, torch.stack(figures).mean() if figures else None)

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


def _balance_of(output: Any) -> list[torch.Tensor]:
    """The load-balancing loss in a model's output, without its coefficient. Empty if there is none."""
    found = getattr(output, "aux_loss", None)
    return [found.detach().float().mean()] if isinstance(found, torch.Tensor) else []
