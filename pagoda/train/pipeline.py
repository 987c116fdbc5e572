"""How a stage of a pipeline runs: the passes of a step in torch's 1F1B schedule, and those of an evaluation one after
another."""

from collections.abc import Callable
from math import nan
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pagoda.errors import PagodaError
from pagoda.mesh.mesh import Mesh
from pagoda.optim.rule import DTYPES
from pagoda.optimizer import PagedOptimizer
from pagoda.train.config import TrainConfig
from pagoda.train.data import counted
from pagoda.train.passes import Batch, Losses, Passes

T = TypeVar("T")


class StagePasses(Passes):
    """Runs the passes of one stage.

    Every stage gets the same batches. The first one reads token ids, and the others the hidden states of the stage
    before.
    """

    def __init__(self, config: TrainConfig, model: nn.Module, optimizer: PagedOptimizer, mesh: Mesh) -> None:
        """`model`: reduced by `to_stage`, and wrapped."""
        super().__init__(config, model, optimizer)
        self.batches_at_once = config.gradient_accumulation_steps
        self._stage, stages, self._group = mesh.pipeline_stage, mesh.ranks.pipeline_parallel, mesh.pipeline
        self._first, self._last = self._stage == 0, self._stage == stages - 1
        self._width: int = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        self._dtype = DTYPES[config.chosen_precision]
        ids = torch.empty(config.per_device_train_batch_size, config.max_length, dtype=torch.int64, device="meta")
        hidden = self._hidden(ids).requires_grad_()
        # Without these shapes, torch would run a forward to infer them.
        part = PipelineStage(
            _StageModule(self._part),
            self._stage,
            stages,
            self.device,
            input_args=ids if self._first else hidden,
            output_args=torch.empty(1, device="meta") if self._last else hidden,
            group=self._group,
        )
        self._schedule = Schedule1F1B(
            part, config.gradient_accumulation_steps, loss_fn=self._divided, scale_grads=False
        )
        self._total = torch.full((), nan, device=self.device)

    def train(self, batch: Batch, targets: float) -> Losses:
        divisors = [
            targets / counted(labels)
            for labels in torch.split(batch["labels"], self.config.per_device_train_batch_size)
        ]
        ids, given = self._taken(self.moved(batch))
        if self._last:
            self._total = torch.zeros((), device=self.device)
            given["target"] = torch.tensor(divisors, dtype=torch.float64)
        try:
            self._schedule.step(*((ids,) if self._first else ()), **given)
        except RuntimeError as error:
            if isinstance(error.__cause__, PagodaError | torch.OutOfMemoryError):  # torch wraps it in its own error
                raise error.__cause__ from None
            raise
        return Losses(self._total)

    def _divided(self, loss: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        """The value from which the last stage's backward begins, from the loss of a pass [1]."""
        self._total += loss.detach().float().squeeze() / divisor.item()
        return self.optimizer.scale(loss / divisor.item())

    def _part(self, given: torch.Tensor, **arguments: torch.Tensor) -> torch.Tensor:
        """The loss of a pass [1], or hidden states for the next stage [B, T, H]."""
        output = self._called(given, **arguments)
        return torch.stack([output.loss]) if self._last else output.last_hidden_state

    def output(self, batch: Batch, read: Callable[[Any], T], **asked: bool) -> T | None:
        ids, given = self._taken(batch)
        if not self._first:
            received = self._hidden(ids)
            dist.recv(received, group=self._group, group_src=self._stage - 1)
        output = self._called(ids if self._first else received, **given, **asked)
        if self._last:
            return read(output)
        dist.send(output.last_hidden_state.contiguous(), group=self._group, group_dst=self._stage + 1)
        return None

    def _taken(self, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """The token ids, and the other arguments of this stage."""
        others = {"input_ids"} if self._last else {"input_ids", "labels"}
        return batch["input_ids"], {name: tensor for name, tensor in batch.items() if name not in others}

    def _called(self, given: torch.Tensor, **arguments: Any) -> Any:
        """The output of this stage for token ids [B, T], or for hidden states [B, T, H]."""
        model: Any = self.model
        name = "input_ids" if self._first else "inputs_embeds"
        return self.call(model if self._last else model.base_model, **{name: given}, **arguments)

    def _hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """An uninitialized tensor for the hidden states of token ids."""
        return torch.empty(*ids.shape, self._width, dtype=self._dtype, device=ids.device)


class _StageModule(nn.Module):
    """The module that torch calls. The model is not a submodule of it."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._call = call

    def forward(self, given: torch.Tensor, **arguments: torch.Tensor) -> torch.Tensor:
        return self._call(given, **arguments)
