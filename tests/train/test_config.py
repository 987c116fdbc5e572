import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, strategies as st

from pagoda.config.memory import Memory
from pagoda.config.training import ActivationMode
from pagoda.errors import ConfigError
from pagoda.optim import SGD, AdamW, Lion
from pagoda.train import OptimConfig, TrainConfig

BASE = TrainConfig(model="llama-15m", steps=20, batch_size=4, seq_len=128, out=Path("run"))

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)  # as arguments have it

configs = st.builds(
    TrainConfig,
    model=TEXT,
    data=TEXT,
    steps=st.integers(1, 10**6),
    batch_size=st.integers(1, 512),
    seq_len=st.integers(2, 10**5),
    accumulation_steps=st.integers(1, 64),
    precision=st.sampled_from(["bf16", "fp16", "fp32"]),
    gradients=st.sampled_from([None, "bf16", "fp32"]),
    memory=st.builds(Memory, host=st.none() | st.just("64MiB"), ssd=st.none() | st.just("/ssd:1GiB")),
    optim=st.builds(OptimConfig, lr=st.floats(1e-8, 1), betas=st.just((0.9, 0.999))),
    clip_grad_norm=st.none() | st.floats(1e-3, 10),
    activations=st.sampled_from(get_args(ActivationMode)),
    seed=st.integers(0, 2**32 - 1),
    out=st.sampled_from([Path("run"), Path("/a/b")]),
    resume=st.booleans(),
    checkpoint_every=st.integers(0, 100),
)


@given(configs)
def test_a_configuration_survives_json(config: TrainConfig) -> None:
    assert TrainConfig.from_settings(config.settings()) == config


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"batch_size": -1}, "batch_size"),
        ({"seq_len": 1}, "seq_len"),
        ({"accumulation_steps": 0}, "accumulation_steps"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm"),
        ({"seed": -1}, "seed"),
        ({"checkpoint_every": -1}, "checkpoint_every"),
        ({"optim": {"lr": 0}}, r"optim\.lr"),
        ({"optim": {"lr": math.nan}}, r"optim\.lr"),
        ({"optim": {"betas": [0.9, 1.0]}}, r"optim\.betas"),
        ({"optim": {"min_lr_ratio": 2}}, r"optim\.min_lr_ratio"),
        ({"optim": {"weight_decay": -1}}, r"optim\.weight_decay"),
        ({"optims": {}}, "unknown settings: optims"),
        ({"memory": 3}, "Memory"),
        ({"steps": "many"}, "wrong type"),
    ],
)
def test_a_setting_out_of_range_is_named(change: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        TrainConfig.from_settings({**BASE.settings(), **change})


@pytest.mark.parametrize("settings", [None, "", [], {"model": "gpt2"}])
def test_json_that_is_no_configuration_is_refused(settings: object) -> None:
    with pytest.raises(ConfigError):
        TrainConfig.from_settings(settings)


def test_a_resumed_run_may_change_what_does_not_decide_its_bits() -> None:
    changed = replace(
        BASE,
        steps=40,
        out=Path("moved"),
        data="elsewhere",
        resume=True,
        checkpoint_every=5,
        memory=Memory(host="1GiB", device="cpu:512MiB"),
    )
    changed.check_resumes(BASE)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model": "gpt2"}, "--model gpt2 .the run has llama-15m"),
        ({"batch_size": 8}, "--batch-size 8 .the run has 4"),
        ({"seed": 1}, "--seed"),
        ({"clip_grad_norm": None}, "--clip-grad-norm None"),
        ({"optim": OptimConfig(lr=1e-3)}, r"--optim\.lr 0.001"),
        ({"precision": "fp32"}, "--precision"),
    ],
)
def test_a_resumed_run_cannot_change_its_bits(change: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        replace(BASE, **change).check_resumes(BASE)  # type: ignore[arg-type]


def test_the_learning_rate_warms_up_then_follows_the_cosine_to_its_minimum() -> None:
    optim = OptimConfig(warmup_steps=4, min_lr_ratio=0.1)
    factors = [optim.lr_factor(step, 20) for step in range(20)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(a >= b for a, b in pairwise(factors[4:]))
    assert factors[-1] == pytest.approx(0.1)
    assert optim.lr_factor(25, 20) == pytest.approx(0.1)


def test_a_constant_learning_rate_stays_at_the_peak() -> None:
    optim = OptimConfig(schedule="constant", warmup_steps=2)
    assert [optim.lr_factor(step, 4) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_an_optimizer_is_built_from_what_is_given_and_its_own_defaults() -> None:
    assert OptimConfig(lr=1e-3).build(7) == AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, seed=7)
    given = OptimConfig(lr=1e-3, weight_decay=0.2, options=("momentum=0.9",))
    assert given.build(7, "sgd") == SGD(lr=1e-3, weight_decay=0.2, momentum=0.9)
    assert OptimConfig(lr=1e-3).build(7, "lion") == Lion(lr=1e-3)
    with pytest.raises(ConfigError, match=r"optim\.moments is '8bit'; it must be fp32"):
        OptimConfig(moments="8bit").build(0, "adam")
    with pytest.raises(ConfigError, match="sgd has no betas"):
        OptimConfig(betas=(0.9, 0.99)).build(0, "sgd")
