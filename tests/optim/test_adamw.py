"""The settings, and the scalars of one step."""

import math

import numpy as np
import pytest
import torch

from pagoda.errors import ConfigError
from pagoda.optim import AdamW, Hyper, Scalars, gradient_dtype


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", -1e-3),
        ("lr", math.nan),
        ("lr", math.inf),
        ("lr", "1e-3"),
        ("betas", (0.9,)),
        ("betas", (1.0, 0.999)),
        ("betas", (0.9, -0.1)),
        ("betas", (math.nan, 0.999)),
        ("eps", 0.0),
        ("eps", 1e-60),
        ("weight_decay", -0.1),
        ("weight_decay", True),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        AdamW(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("step", 0), ("grad_scale", math.nan), ("grad_scale", math.inf)])
def test_a_step_that_cannot_be_taken_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Hyper(**{"rule": AdamW(), "step": 1, field: value})


@pytest.mark.parametrize(("field", "value"), [("lr", -1.0), ("betas", [1.0, 0.9]), ("eps", 0.0)])
def test_a_group_with_which_no_step_can_be_taken_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        AdamW().with_group({**AdamW().defaults(), field: value})


def test_an_unknown_precision_is_refused() -> None:
    for refuse in (gradient_dtype, AdamW().states):
        with pytest.raises(ConfigError, match="bf16, fp16, fp32"):
            refuse("fp8")


def test_bf16_costs_12_bytes_a_parameter_and_so_does_fp32() -> None:
    for precision in ("bf16", "fp32"):
        states = AdamW().states(precision)
        assert sum(spec.dtype.itemsize for spec in states) == 12
        assert states[0].dtype is gradient_dtype(precision)
    assert [spec.name for spec in AdamW().states("bf16")] == ["weight", "weight_low", "exp_avg", "exp_avg_sq"]
    assert [spec.name for spec in AdamW().states("fp32")] == ["weight", "exp_avg", "exp_avg_sq"]


def test_defaults_are_those_of_torch() -> None:
    torch_defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
    assert AdamW().defaults() == {name: torch_defaults[name] for name in AdamW().defaults()}


def test_a_rule_takes_a_param_group_as_schedulers_and_json_leave_it() -> None:
    group = {**AdamW(weight_decay=0.1).defaults(), "lr": torch.tensor(0.25), "betas": [0.8, 0.9], "params": []}
    rule = AdamW(moments="8bit", seed=3)
    assert rule.with_group(group) == AdamW(lr=0.25, betas=(0.8, 0.9), weight_decay=0.1, moments="8bit", seed=3)


def test_scalars_are_rounded_once_from_float64() -> None:
    scalars = AdamW(lr=3e-4, weight_decay=0.1).scalars(3, grad_scale=1 / 3)
    exact = Scalars(
        grad_scale=1 / 3,
        decay=1 - 3e-4 * 0.1,
        beta1=0.9,
        one_minus_beta1=1 - 0.9,
        beta2=0.999,
        one_minus_beta2=1 - 0.999,
        bias2_sqrt=math.sqrt(1 - 0.999**3),
        eps=1e-8,
        step_size=3e-4 / (1 - 0.9**3),
    )
    assert scalars == tuple(float(np.float32(value)) for value in exact)
    assert all(type(value) is float for value in scalars)
