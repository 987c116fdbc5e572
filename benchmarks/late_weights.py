"""What late weights alone cost: plain PyTorch whose gradients are those of the weights some steps ago.

Asynchronous updates of Pagoda change nothing else, so their loss is to be held against this one. Same model, batches,
schedule and clipping as benchmarks/async_update.py, all in memory; every weight is exactly `--late` steps old.

    python benchmarks/late_weights.py [--late 2] [--beta1 0.9] [--warmup 20] [--batch-size 1] [--out FILE.json]
"""

import json
import platform
import statistics
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

from pagoda.models import build_model
from pagoda.process import keep_freed_memory, restart_spinning_briefly
from pagoda.train.config import OptimConfig
from pagoda.train.data import Batches, Rows
from pagoda.train.tokens import open_tokens

FINAL_STEPS = 10
"""The final loss is the mean over so many last steps."""


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
    out: Path | None = None


def train(settings: Settings) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    model = build_model(settings.model, seq_len=settings.seq_len, gradient_checkpointing=True)
    params = list(model.parameters())
    masters = [param.detach().clone() for param in params]
    for param in params:
        param.data = param.data.to(torch.bfloat16)
    config = OptimConfig(lr=settings.lr, warmup_steps=settings.warmup)
    optimizer = torch.optim.AdamW(masters, config.lr, (settings.beta1, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: config.lr_factor(step, settings.steps))
    batches = Batches(rows=Rows.of(open_tokens("stdlib"), settings.seq_len), batch_size=settings.batch_size)
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
        newer.append([master.to(torch.bfloat16) for master in masters])
        if len(newer) > settings.late:
            for param, weight in zip(params, newer.popleft(), strict=True):
                param.data = weight
    return losses


def main(settings: Settings) -> None:
    """Train, and print the mean of the last losses."""
    restart_spinning_briefly()
    keep_freed_memory()
    losses = train(settings)
    report = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "settings": {key: value for key, value in asdict(settings).items() if key != "out"},
        "final_loss": statistics.fmean(losses[-FINAL_STEPS:]),
        "losses": [round(loss, 4) for loss in losses],
    }
    print({key: value for key, value in report.items() if key != "losses"})
    if settings.out is not None:
        settings.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings))
