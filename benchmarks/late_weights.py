"""What late weights cost: the loss of a run whose gradients are those of the weights some steps ago.

By default in plain PyTorch, against which the loss of Pagoda's asynchronous updates is to be held: same model, batches,
schedule and clipping as benchmarks/async_update.py, all in memory; every weight is exactly `--late` steps old.

With `--study`, Pagoda trains a small model of bytes in fp32 at each of `STUDY`, with several seeds.

    python benchmarks/late_weights.py [--late 2] [--beta1 0.9] [--warmup 20] [--batch-size 1] [--out FILE.json]
    python benchmarks/late_weights.py --study [--steps 300] [--out FILE.json]
"""

import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

import pagoda
from pagoda.models import build_model
from pagoda.optim.rule import DTYPES
from pagoda.train.config import OptimConfig
from script import begin, machine, write
from text import batches_of_text

FINAL_STEPS, FINAL_STEPS_OF_STUDY = 10, 40
"""The final loss is the mean over so many last steps."""
STUDY: dict[str, pagoda.Updates] = {
    "sync": pagoda.Updates(),
    "one step late": pagoda.Updates("async"),
    "one step late, predicted": pagoda.Updates("async", predict=True),
    "one step late after 40 steps": pagoda.Updates("async", sync_steps=40),
    "one step late after 40 steps, predicted": pagoda.Updates("async", sync_steps=40, predict=True),
    "two steps late": pagoda.Updates("async", max_staleness=2),
    "two steps late, predicted": pagoda.Updates("async", max_staleness=2, predict=True),
}
"""Ways to update. The first is what the others are compared with."""
SEEDS = 3


@dataclass(frozen=True)
class Settings:
    """Train with weights that are late."""

    late: int = 2
    """Steps whose gradients the weights lack, beside those of their own step."""
    model: str = "llama-15m"
    steps: int = 300
    seq_len: int = 512
    lr: float = 3e-4
    """Peak learning rate, after warm-up and before a cosine."""
    warmup: int = 20
    """Steps."""
    batch_size: int = 1
    """Sequences of a step."""
    beta1: float = 0.9
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of forward and backward."""
    seed: int = 0
    study: bool = False
    """Let Pagoda train a small model at each of `STUDY`. Of the settings before, only `steps` and `beta1` count."""
    out: Path | None = None


def train(settings: Settings) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(settings.seed)
    model = build_model(settings.model, seq_len=settings.seq_len, gradient_checkpointing=True)
    params, dtype = list(model.parameters()), DTYPES[settings.precision]
    masters = [param.detach().clone() for param in params]
    for param in params:
        param.data = param.data.to(dtype)
    config = OptimConfig(lr=settings.lr, warmup_steps=settings.warmup)
    optimizer = torch.optim.AdamW(masters, config.lr, (settings.beta1, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: config.lr_factor(step, settings.steps))
    batches = batches_of_text(settings.seq_len, settings.batch_size)
    newer: deque[list[torch.Tensor]] = deque()
    losses = []
    for step in range(settings.steps):
        loss = model(**batches.batch(step)).loss
        loss.backward()
        losses.append(loss.item())
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        schedule.step()
        newer.append([master.detach().to(dtype, copy=True) for master in masters])
        if len(newer) > settings.late:
            for param, weight in zip(params, newer.popleft(), strict=True):
                param.data = weight
    return losses


def train_small(update: pagoda.Updates, settings: Settings, seed: int) -> float:
    """The final loss of a small model of bytes, trained by Pagoda."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=256, use_cache=False, **sizes))
    config = OptimConfig(lr=1e-3, warmup_steps=40)
    rule = pagoda.AdamW(lr=config.lr, betas=(settings.beta1, 0.95), weight_decay=0.1)
    model, optimizer = pagoda.wrap(
        model, rule, memory=pagoda.Memory(host="256MiB"), precision="fp32", clip_grad_norm=1.0, update=update
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: config.lr_factor(step, settings.steps))
    batches, losses = batches_of_text(64, 8, seed), []
    for step in range(settings.steps):
        loss = model(**batches.batch(step)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    optimizer.close()
    return statistics.fmean(losses[-FINAL_STEPS_OF_STUDY:])


def study(settings: Settings) -> Iterator[dict[str, Any]]:
    """The final losses of each way to update, and by how much their mean is above that of the first."""
    first = 0.0
    for name, update in STUDY.items():
        losses = [train_small(update, settings, seed) for seed in range(SEEDS)]
        first = first or statistics.fmean(losses)
        yield {"update": name, "final_losses": losses, "above": statistics.fmean(losses) / first - 1}


def main(settings: Settings) -> None:
    """Train, and print the mean of the last losses."""
    begin()
    report: dict[str, Any] = {
        **machine(),
        "settings": {key: value for key, value in asdict(settings).items() if key not in ("out", "study")},
    }
    if settings.study:
        report["study"] = []
        for row in study(settings):
            print(row, flush=True)
            report["study"].append(row)
            write(settings.out, report)
    else:
        losses = train(settings)
        report["final_loss"] = statistics.fmean(losses[-FINAL_STEPS:])
        print(report)
        write(settings.out, {**report, "losses": [round(loss, 4) for loss in losses]})


if __name__ == "__main__":
    main(tyro.cli(Settings))
