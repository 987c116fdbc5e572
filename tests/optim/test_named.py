"""Rules by the names and options of the command line."""

import pytest
import torch
from lion_pytorch import Lion as TheirLion

from pagoda.errors import ConfigError
from pagoda.optim import SGD, Adafactor, AdamW, Optim
from pagoda.optim.named import RULES, parsed_options, rule_named


def test_options_are_numbers_words_and_tuples() -> None:
    numbers = {"momentum": 0.9, "nesterov": True, "beta1": None, "ns_steps": 6}
    assert parsed_options(("momentum=0.9", "nesterov=True", "beta1=none", "ns_steps=6")) == numbers
    others = {"eps": (1e-30, 1e-3), "adjust_lr_fn": "original"}
    assert parsed_options(("eps=(1e-30, 1e-3)", "adjust_lr_fn=original")) == others


@pytest.mark.parametrize("option", ["momentum", "=3", "two words=1"])
def test_an_option_that_is_no_setting_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parsed_options([option])


def test_every_name_makes_its_rule() -> None:
    for name, kind in RULES.items():
        rule = rule_named(name, {"lr": 0.5})
        assert isinstance(rule, kind)
        assert rule.defaults()["lr"] == 0.5
    assert rule_named("sgd", {"momentum": 0.9}) == SGD(momentum=0.9)
    assert rule_named("adamw", {"moments": "8bit"}) == AdamW(moments="8bit")
    assert rule_named("adafactor", {"beta1": 0.9}) == Adafactor(beta1=0.9)


def test_a_class_of_torch_or_of_any_module_is_adapted() -> None:
    adagrad, lion = rule_named("Adagrad", {"lr": 0.5}), rule_named("lion_pytorch:Lion", {"lr": 0.5})
    assert isinstance(adagrad, Optim)
    assert isinstance(lion, Optim)
    assert (adagrad.kind, lion.kind) == (torch.optim.Adagrad, TheirLion)
    assert adagrad.defaults()["lr"] == 0.5


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("adamm", {}, "adamm is unknown: use one of adamw"),
        ("Optimizer:", {}, "cannot be imported"),
        ("no_such_module:Lion", {}, "No module named"),
        ("lion_pytorch:Tiger", {}, "Tiger"),
        ("torch:nn", {}, "is unknown"),
        ("lion", {"momentum": 0.9}, "lion has no momentum: it has lr, betas, weight_decay"),
        ("Adagrad", {"momentum": 0.9}, "unexpected keyword argument 'momentum'"),
        ("LBFGS", {}, "closure"),
    ],
)
def test_what_is_no_optimizer_is_refused(name: str, settings: dict[str, float], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        rule_named(name, settings)
