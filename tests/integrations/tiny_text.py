"""A model and data on which trainers of transformers run in milliseconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import pagoda

VOCABULARY = 64


def model(**changes: Any) -> LlamaForCausalLM:
    """A Llama of 25,000 parameters, the same each time."""
    torch.manual_seed(0)
    config = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes}))


def memory(directory: Path, host: str = "300KiB", unit_limit: str = "32KiB") -> pagoda.Memory:
    """RAM that holds a part of the model's state, and an SSD for the rest."""
    directory.mkdir(exist_ok=True)
    return pagoda.Memory(host=host, ssd=f"{directory}:64MiB", page_size=4096, unit_limit=unit_limit)


def samples(count: int = 20) -> list[dict[str, torch.Tensor]]:
    """Sequences in which the next token is a function of the last one."""
    found = []
    for first in range(count):
        ids = torch.tensor([(first * 5 + 7 * at) % VOCABULARY for at in range(12)])
        found.append({"input_ids": ids, "labels": ids})
    return found


def arguments(out: Path, kind: type[TrainingArguments] = TrainingArguments, **changes: Any) -> Any:
    """Six steps on the CPU, of one batch of two samples each, without clipping."""
    settings = {"per_device_train_batch_size": 2, "max_steps": 6, "learning_rate": 1e-2, "max_grad_norm": 0.0}
    settings |= {"logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return kind(output_dir=str(out), **{**settings, **changes})


class Calls(transformers.TrainerCallback):
    """Calls functions when events come."""

    def __init__(self, **functions: Callable[[Any], None]) -> None:
        for name, function in functions.items():
            setattr(self, name, lambda args, state, control, _call=function, **_: _call(state))


def warmed(optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler that has two others inside: of a rate that rises, and of one that falls."""
    kinds = torch.optim.lr_scheduler
    parts = [kinds.LinearLR(optimizer, 0.1, 1.0, 2), kinds.ExponentialLR(optimizer, 0.5)]
    return kinds.SequentialLR(optimizer, parts, [2])


def logged(trainer: transformers.Trainer, *names: str) -> list[float]:
    """What a trainer has logged under these names, in order."""
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]
