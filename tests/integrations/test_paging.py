"""A framework's optimizer class and its settings become a rule that does the same."""

import torch

from pagoda.integrations.paging import rule_of
from pagoda.optim.adamw import AdamW
from pagoda.optim.torch_optimizer import Optim


def test_torchs_adamw_is_pagodas_own() -> None:
    settings = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1, weight_decay=0.2).defaults
    rule = rule_of(torch.optim.AdamW, settings)
    assert isinstance(rule, AdamW)
    assert rule.defaults()["lr"] == 0.1
    assert rule.defaults()["weight_decay"] == 0.2


def test_an_adamw_with_amsgrad_stays_torchs_with_its_setting() -> None:
    rule = rule_of(torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "maximize": False, "fused": True})
    assert isinstance(rule, Optim)
    assert rule.defaults()["amsgrad"] is True
