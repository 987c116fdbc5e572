"""`pagoda plan` knows every flag of `pagoda train` that what a run takes, or how long, may follow from."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from pagoda.forecast.config import PlanConfig
from pagoda.train.config import TrainConfig

OF_A_RUN = {
    # What it trains on, and where it writes.
    "data", "steps", "seed", "out", "resume", "checkpoint_every", "save_at_end", "trace_step",
    # Which values states take, not how many.
    "optim.lr", "optim.betas", "optim.eps", "optim.weight_decay", "optim.decay", "optim.warmup_steps",
    "optim.schedule", "optim.min_lr_ratio",
    # Not planned.
    "lora.rank", "lora.alpha", "lora.dropout", "lora.targets",
}  # fmt: skip
OF_A_MACHINE = {"hardware", "nodes", "gpus_per_node", "max_model", "json", "plot"}


def flags(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, type) of every flag."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from flags(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            yield prefix + field.name, hint


def test_a_run_and_its_plan_are_asked_for_alike() -> None:
    train, plan = dict(flags(TrainConfig)), dict(flags(PlanConfig))
    assert train.keys() - OF_A_RUN == plan.keys() - OF_A_MACHINE
    assert train.keys() >= OF_A_RUN
    optional = {"model", "plan"}
    for name in train.keys() & plan.keys() - optional:
        assert train[name] == plan[name], name
