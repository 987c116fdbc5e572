"""Training on the built-in text."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import pagoda
from pagoda.models import build_model
from pagoda.optim.rule import Rule
from pagoda.plan.planner import Plan
from pagoda.train.data import Batches, Rows
from pagoda.train.sources import STDLIB
from pagoda.train.tokens import open_tokens

WINDOW = 20
"""Steps that a smoothed point of a loss curve is the mean of."""


def built(model: str, seq_len: int, checkpointing: bool = True, seed: int = 0) -> nn.Module:
    """A model whose weights `pagoda.wrap` initialises."""
    torch.manual_seed(seed)
    with pagoda.deferred_init():
        return build_model(model, seq_len=seq_len, gradient_checkpointing=checkpointing)


def batches_of_text(seq_len: int, batch_size: int, seed: int = 0) -> Batches:
    return Batches(rows=Rows.of(open_tokens(STDLIB), seq_len), batch_size=batch_size, seed=seed)


def batch_of(batches: Batches, step: int) -> dict[str, torch.Tensor]:
    """What a step reads, from 0: `input_ids` and `labels`, both int64 [B, T]."""
    return batches.of_rows(batches.row_indices(step))


def train_on_text(
    model: nn.Module, rule: Rule, batches: Batches, lr_factor: Callable[[int], float], steps: int
) -> tuple[list[float], float, Plan]:
    """(loss of every step, seconds of a step, plan) of a run in RAM, with the learning rate times `lr_factor(step)`."""
    model, optimizer = pagoda.wrap(model, rule, memory=pagoda.Memory(host="2GiB"), max_grad_norm=1.0, precision="bf16")
    plan = pagoda.plan_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        loss = model(**batch_of(batches, step)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
    optimizer.synchronize()
    seconds = (time.perf_counter() - start) / steps
    optimizer.close()
    return losses, seconds, plan


def smoothed(losses: list[float]) -> list[float]:
    """Means of the last `WINDOW` steps."""
    return [statistics.fmean(losses[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(losses))]
