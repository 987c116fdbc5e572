"""Settings of rules: which are refused, what param groups change, the scalars of one step, and the bytes of states."""

import math

import numpy as np
import pytest
import torch
from lion_pytorch import Lion as TheirLion

from pagoda.errors import ConfigError
from pagoda.optim import SGD, Adafactor, Adam, AdamW, Lion, Muon, Rule, SignSGD
from pagoda.optim.rule import DTYPES, Hyper

from .blocks import RULES

REFUSED: dict[type[Rule], dict[str, tuple[object, ...]]] = {
    AdamW: {
        "lr": (-1e-3, math.nan, math.inf, "1e-3"),
        "betas": (0.9, (0.9,), (1.0, 0.999), (0.9, -0.1), (math.nan, 0.999)),
        "eps": (0.0, 1e-60),
        "weight_decay": (-0.1, True),
        "moments": ("int4",),
        "seed": ("x", 1.5),
    },
    Adam: {"eps": (0.0,)},
    SGD: {"lr": (-1.0,), "momentum": (math.nan,), "dampening": ("much",), "nesterov": (True, "no")},
    SignSGD: {"lr": (-1,), "weight_decay": (math.nan,)},
    Lion: {"betas": ((0.9, 1.0),), "weight_decay": (-1,)},
    Adafactor: {
        "lr": (-1.0,),
        "beta2_decay": (0.1,),
        "eps": (1e-8, (None, None)),
        "d": (0.5,),
        "weight_decay": (-1.0,),
        "beta1": (1.0,),
        "relative_step": ("no",),
        "scale_parameter": (None,),
    },
    Muon: {
        "momentum": (1.0,),
        "nesterov": ("no",),
        "ns_steps": (0, 2.0),
        "ns_coefficients": ((1, 2, "x"),),
        "adjust_lr_fn": ("other",),
        "betas": ((1, 0),),
        "adamw_eps": (0,),
        "adamw_for": ("*embed*",),
        "lr": (-1,),
    },
}


@pytest.mark.parametrize(("rule", "field"), [(rule, field) for rule, fields in REFUSED.items() for field in fields])
def test_a_setting_out_of_range_is_refused_by_name(rule: type[Rule], field: str) -> None:
    for value in REFUSED[rule][field]:
        with pytest.raises(ConfigError, match=f"({rule.name}|AdamW) {field}"):
            rule(**{field: value})


@pytest.mark.parametrize("key", ["amsgrad", "maximize"])
def test_a_setting_of_torchs_classes_that_a_rule_does_not_have_is_refused(key: str) -> None:
    """And ignored where torch has it switched off, as in its state dicts. Keys of the user's own are ignored too."""
    group = {**AdamW().defaults(), key: False, "name": "mine"}
    assert AdamW().with_group(group) == AdamW()
    with pytest.raises(ConfigError, match=f"{key}.*pagoda.Optim"):
        AdamW().with_group({**group, key: True})


@pytest.mark.parametrize(("field", "value"), [("step", 0), ("grad_scale", math.nan), ("grad_scale", math.inf)])
def test_a_step_that_cannot_be_taken_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Hyper(**{"rule": AdamW(), "step": 1, field: value})


GROUPS = [
    (AdamW, "lr", -1.0),
    (AdamW, "lr", "x"),
    (AdamW, "lr", {}),
    (AdamW, "betas", [1.0, 0.9]),
    (AdamW, "eps", 0.0),
    (SGD, "momentum", 0.9),
]


@pytest.mark.parametrize(("rule", "field", "value"), [*GROUPS, (Adafactor, "beta1", 0.9)])
def test_a_group_with_which_no_step_can_be_taken_is_refused(rule: type[Rule], field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        rule().with_group({**rule().defaults(), field: value})


def test_a_rule_takes_a_param_group_as_schedulers_and_json_leave_it() -> None:
    group = {**AdamW(weight_decay=0.1).defaults(), "lr": torch.tensor(0.25), "betas": [0.8, 0.9], "params": []}
    rule = AdamW(moments="8bit", seed=3)
    assert rule.with_group(group) == AdamW(lr=0.25, betas=(0.8, 0.9), weight_decay=0.1, moments="8bit", seed=3)
    assert SGD(momentum=0.5).with_group({**SGD(momentum=0.9).defaults(), "lr": 1}) == SGD(momentum=0.9, lr=1.0)


@pytest.mark.parametrize("rule", [AdamW, Adam, SGD, Lion, Adafactor], ids=lambda rule: rule.name)
def test_defaults_are_those_of_torch(rule: type[Rule]) -> None:
    kind = TheirLion if rule is Lion else getattr(torch.optim, rule.name)
    theirs, mine = kind([torch.nn.Parameter(torch.zeros(1))]).defaults, rule().defaults()
    own = {"beta1", "relative_step", "scale_parameter"} if rule is Adafactor else set()
    assert {n: v for n, v in mine.items() if n not in own} == {n: theirs[n] for n in mine if n in theirs}


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="bf16, fp16, fp32"):
        AdamW().states("fp8")


def test_what_each_rule_takes_a_parameter() -> None:
    for precision in ("bf16", "fp32"):
        taken = [sum(s.dtype.itemsize / s.per for s in rule.states(precision)) for rule in RULES.values()]
        assert taken == [12, 8, 6 + 1 / 32, 12, 4, 8, 8, 4, 8]
        assert AdamW().states(precision)[0].dtype is DTYPES[precision]
    assert [spec.name for spec in AdamW().states("bf16")] == ["weight", "weight_low", "exp_avg", "exp_avg_sq"]
    assert [spec.name for spec in AdamW().states("fp32")] == ["weight", "exp_avg", "exp_avg_sq"]


def test_scalars_are_rounded_once_from_float64() -> None:
    scalars = AdamW(lr=3e-4, weight_decay=0.1).scalars(3, grad_scale=1 / 3)
    betas = 0.9, 1 - 0.9, 0.999, 1 - 0.999
    exact = (1 / 3, 1 - 3e-4 * 0.1, *betas, math.sqrt(1 - 0.999**3), 1e-8, 3e-4 / (1 - 0.9**3))
    assert scalars == tuple(float(np.float32(value)) for value in exact)
