"""Loss and state of optimizers beside AdamW's.

The same model, data and seed with each optimizer at a learning rate of its own, on the built-in text. Figures of a run:
the mean loss over its last tenth, what the plan says that a parameter takes, and what the ledger has for it.

    python benchmarks/optimizers.py --out benchmarks/results/optimizers.json
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

import pagoda
from pagoda.calibrate.meter import cpu_name
from pagoda.models.build import build_model
from pagoda.process import keep_freed_memory, restart_spinning_briefly
from pagoda.train.config import OptimConfig
from pagoda.train.data import STDLIB, Batches, ByteText
from training import train_on_text

OPTIMIZERS = {
    "adamw": OptimConfig(lr=1e-3),
    "adafactor": OptimConfig(lr=3e-2),
    "lion": OptimConfig(lr=2e-4, weight_decay=0.5),
    "muon": OptimConfig(lr=1e-3, betas=(0.9, 0.95)),
}


@dataclass(frozen=True)
class Figure:
    """One optimizer's run."""

    optimizer: str
    lr: float
    last_tenth: float
    """Mean loss over the last tenth of the steps."""
    stated: float
    """Bytes a parameter, as the plan says."""
    ledger: float
    """Bytes of the homes of states, padding included, by parameter."""
    step_s: float


def figure_of(name: str, optim: OptimConfig, arguments: argparse.Namespace, batches: Batches) -> Figure:
    torch.manual_seed(arguments.seed)
    with pagoda.init():
        model = build_model(arguments.model, seq_len=arguments.seq_len, gradient_checkpointing=False)
    rule = optim.build(arguments.seed, name)
    model, optimizer = pagoda.wrap(model, rule, memory=pagoda.Memory(host="2GiB"), clip_grad_norm=1.0)
    plan = pagoda.plan_of(model)
    warmup = arguments.steps // 20
    losses, seconds = train_on_text(
        model, optimizer, batches, lambda step: min(1.0, (step + 1) / max(1, warmup)), arguments.steps
    )
    homes = sum(of_tier.get(state.name, 0) for of_tier in plan.bytes.values() for state in plan.layout.states)
    return Figure(
        name,
        optim.lr,
        statistics.fmean(losses[-max(1, len(losses) // 10) :]),
        sum(plan.layout.bytes_per_parameter.values()),
        homes / plan.parameters,
        seconds,
    )


def main() -> None:
    restart_spinning_briefly()
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-15m")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    console = Console(width=120)
    text = ByteText.open(STDLIB)
    batches = Batches(text=text, batch_size=arguments.batch_size, seq_len=arguments.seq_len, seed=arguments.seed)
    figures = []
    for name, optim in OPTIMIZERS.items():
        figures.append(figure_of(name, optim, arguments, batches))
        console.print(figures[-1])
    if arguments.out is not None:
        report = {
            "machine": f"{cpu_name()}, {arguments.threads} threads",
            "torch": torch.__version__,
            "settings": {k: v for k, v in vars(arguments).items() if k not in ("out", "threads")},
            "figures": [asdict(figure) for figure in figures],
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
