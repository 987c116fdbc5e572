"""The configuration of a run: what it refuses, what a resumed run may change, learning rates and optimizers."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pagoda.config.memory import Memory
from pagoda.errors import ConfigError
from pagoda.optim import SGD, AdamW, Lion
from pagoda.train import OptimConfig, TrainConfig

BASE = TrainConfig(
    model="llama-15m", max_steps=20, per_device_train_batch_size=4, max_length=128, output_dir=Path("run")
)


def test_a_configuration_survives_json() -> None:
    changes: dict[str, Any] = {"model": 'a "ä" \U0001f5fc\n', "gradient_accumulation_steps": 64, "gradients": "bf16"}
    changes |= {"memory": Memory(host="64MiB", ssd="/ssd:1GiB"), "learning_rate": 1 / 3, "betas": (0.9, 0.999)}
    changes |= {"max_grad_norm": 0.0, "packing": False, "output_dir": Path("/a/b"), "resume_from_checkpoint": "last"}
    config = replace(BASE, **changes)
    assert TrainConfig.from_settings(json.loads(json.dumps(config.settings()))) == config


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"max_steps": -1}, "max_steps is -1"),
        ({"max_steps": 1 << 31}, "max_steps is 2147483648"),
        ({"per_device_train_batch_size": -1}, "per_device_train_batch_size"),
        ({"max_length": 1}, "max_length"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0; it must be above 0, or 0 for no clipping"),
        ({"max_grad_norm": None}, "max_grad_norm"),
        ({"seed": -1}, "seed"),
        ({"save_steps": -1}, "save_steps"),
        ({"early_stopping_patience": 1, "eval_share": 0.0}, "--early-stopping-patience compares evaluations"),
        ({"eval_share": 0.1, "eval_data": "stdlib"}, "not both"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"betas": [0.9, 1.0]}, "betas"),
        ({"min_lr_ratio": 2}, "min_lr_ratio"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"steps": 4, "optim": {}}, "unknown settings: 'steps'"),
        ({"optim": {"lr": 1e-3}}, "optim"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "give --load-in-4bit or --load-in-8bit, not both"),
        ({"memory": 3}, "Memory"),
        ({"max_steps": "many"}, "max_steps as 'many', which is a value of the wrong type"),
        ({"max_steps": True}, "max_steps as True"),
        ({"max_steps": 10**30}, "max_steps as 1000"),
        ({"model": "\0"}, "model as '.x00'"),
        ({"output_dir": ["run"]}, "output_dir as"),
        ({"precision": "fp8"}, "precision as 'fp8'"),
        ({"betas": [0.9]}, "betas as"),
        ({"lora_target_modules": [1]}, "lora_target_modules as"),
        ({"max_steps": 0, "num_train_epochs": math.inf}, "num_train_epochs is inf"),
    ],
)
def test_a_setting_out_of_range_is_named(change: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        TrainConfig.from_settings({**BASE.settings(), **change})


def test_json_that_is_no_configuration_is_refused() -> None:
    for settings_of_none in (None, "", [], {"max_steps": 20}):
        with pytest.raises(ConfigError):
            TrainConfig.from_settings(settings_of_none)


def test_a_resumed_run_may_change_what_does_not_decide_its_bits() -> None:
    memory = Memory(host="1GiB", device="cpu:512MiB")
    free = {"max_steps": 40, "output_dir": Path("moved"), "data": "elsewhere", "save_steps": 5}
    replace(BASE, **free, memory=memory, resume_from_checkpoint="last").check_resumes(BASE, Path("checkpoint-2"))
    for change, names in (
        ({"model": "gpt2"}, "from checkpoint-2 .*--model gpt2 .the checkpoint has llama-15m"),
        ({"seed": 1}, "--seed"),
        ({"max_grad_norm": 0.0}, "--max-grad-norm 0"),
        ({"learning_rate": 1e-3}, r"--learning-rate 0.001"),
        ({"precision": "fp32"}, "--precision"),
    ):
        with pytest.raises(ConfigError, match=names):
            replace(BASE, **change).check_resumes(BASE, Path("checkpoint-2"))


def test_the_learning_rate_warms_up_then_stays_or_follows_the_cosine_to_its_minimum() -> None:
    optim = OptimConfig(warmup_steps=4, min_lr_ratio=0.1)
    factors = [optim.lr_factor(step, 20) for step in range(20)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(a >= b for a, b in pairwise(factors[4:]))
    assert factors[-1] == optim.lr_factor(25, 20) == pytest.approx(0.1)
    constant = OptimConfig(lr_scheduler_type="constant", warmup_steps=2)
    assert [constant.lr_factor(step, 4) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_an_optimizer_is_built_from_what_is_given_and_its_own_defaults() -> None:
    assert OptimConfig(learning_rate=1e-3).build_rule(7) == AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, seed=7)
    given = OptimConfig(learning_rate=1e-3, weight_decay=0.2, optim_args=("momentum=0.9",))
    assert given.build_rule(7, "sgd") == SGD(lr=1e-3, weight_decay=0.2, momentum=0.9)
    assert OptimConfig(learning_rate=1e-3).build_rule(7, "lion") == Lion(lr=1e-3)
    with pytest.raises(ConfigError, match=r"moments is '8bit'; it must be fp32"):
        OptimConfig(moments="8bit").build_rule(0, "adam")
    with pytest.raises(ConfigError, match="sgd has no betas"):
        OptimConfig(betas=(0.9, 0.99)).build_rule(0, "sgd")
