"""What late weights alone cost: plain PyTorch whose gradients are those of the weights some steps ago.

Asynchronous updates of Pagoda change nothing else, so their loss is to be held against this one. Same model, batches,
schedule and clipping as benchmarks/async_update.py, all in memory; every weight is exactly `--late` steps old. With
`--study`, a small model of bytes is trained at each of `STUDY`.

    python benchmarks/late_weights.py [--late 2] [--beta1 0.9] [--warmup 20] [--batch-size 1] [--out FILE.json]
    python benchmarks/late_weights.py --study [--out FILE.json]
"""

import json
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import tyro

from pagoda.models import build_model
from pagoda.optim.rule import DTYPES
from pagoda.train.config import OptimConfig
from script import begin, machine, write
from text import batch_of, batches_of_text

FINAL_STEPS = 10
"""The final loss is the mean over so many last steps."""
STUDY: list[dict[str, Any]] = [
    {"late": 0},
    {"late": 1},
    {"late": 1, "predict": 1.0},
    {"late": 1, "predict": 1.0, "sync": 40},
    {"late": 2},
    {"late": 2, "predict": 2.0},
]
"""Changes of `SMALL`. The first is what the others are compared with."""
SEEDS, STUDIED_STEPS = 3, 40
"""The study's losses are means over so many last steps, and over seeds."""


@dataclass(frozen=True)
class Settings:
    """Train in plain PyTorch with weights that are late."""

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
    predict: float = 0.0
    """Forward and backward use weights extrapolated by so many of their last steps."""
    sync: int = 0
    """First steps without lateness."""
    seed: int = 0
    study: bool = False
    """Train at each of `STUDY` in place of these settings."""
    out: Path | None = None


SMALL = Settings(steps=200, seq_len=64, lr=1e-3, warmup=40, batch_size=4, precision="fp32")
SIZES = {
    "vocab_size": 256, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "model_type": "llama",
}  # fmt: skip
"""The study's model."""


def train(settings: Settings) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(settings.seed)
    model = build_model(settings.model, seq_len=settings.seq_len, gradient_checkpointing=True)
    params, dtype = list(model.parameters()), DTYPES[settings.precision]
    masters = [param.detach().clone() for param in params]
    for param in params:
        param.data = param.data.to(dtype)
    config = OptimConfig(learning_rate=settings.lr, warmup_steps=settings.warmup)
    optimizer = torch.optim.AdamW(masters, settings.lr, (settings.beta1, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: config.lr_factor(step, settings.steps))
    batches = batches_of_text(settings.seq_len, settings.batch_size, settings.seed)
    newer: deque[list[torch.Tensor]] = deque()
    losses = []
    for step in range(settings.steps):
        loss = model(**batch_of(batches, step)).loss
        loss.backward()
        losses.append(loss.item())
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        before = [master.detach().clone() for master in masters] if settings.predict else masters
        optimizer.step()
        schedule.step()
        ahead = settings.predict if step >= settings.sync else 0.0
        newer.append(
            [
                (new.detach() + ahead * (new.detach() - old)).to(dtype, copy=True)
                for new, old in zip(masters, before, strict=True)
            ]
        )
        while len(newer) > (settings.late if step >= settings.sync else 0):
            for param, weight in zip(params, newer.popleft(), strict=True):
                param.data = weight
    return losses


def study() -> Iterator[dict[str, Any]]:
    """The losses of each of `STUDY`, and by how much their mean is above that of the first."""
    first = 0.0
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SIZES))
        for change in STUDY:
            runs = [replace(SMALL, model=folder, seed=seed, **change) for seed in range(SEEDS)]
            losses = [statistics.fmean(train(run)[-STUDIED_STEPS:]) for run in runs]
            first = first or statistics.fmean(losses)
            yield {**change, "losses": losses, "above": statistics.fmean(losses) / first - 1}


def main(settings: Settings) -> None:
    """Train, and print the mean of the last losses."""
    begin()
    used = asdict(SMALL if settings.study else settings)
    report: dict[str, Any] = {
        **machine(),
        "settings": {key: value for key, value in used.items() if key not in ("out", "study")},
    }
    if settings.study:
        report["study"] = []
        for row in study():
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
