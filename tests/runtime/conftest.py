"""Wrapped models that are closed after a test, and tests kept apart from one another."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from zoo import RESIDENT

import pagoda
from pagoda.autograd.accesses import Accesses
from pagoda.optim import Rule
from pagoda.optimizer import PagedOptimizer

Wrap = Callable[..., tuple[nn.Module, PagedOptimizer]]


@pytest.fixture
def wrap() -> Iterator[Wrap]:
    """Wraps a model, and closes it after the test."""
    opened: list[PagedOptimizer] = []

    def wrap(
        model: nn.Module, memory: pagoda.Memory = RESIDENT, lr: float = 1e-2, rule: Rule | None = None, **options: Any
    ) -> tuple[nn.Module, PagedOptimizer]:
        rule = rule or pagoda.AdamW(lr=lr, weight_decay=0.1)
        model, optimizer = pagoda.wrap(model, rule, memory=memory, **{"precision": "bf16", **options})
        opened.append(optimizer)
        return model, optimizer

    yield wrap
    for optimizer in opened:
        optimizer.close()


@pytest.fixture
def lanes_keep_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute comes to a unit only once lanes have done all that they were given, however busy the machine is."""
    access = Accesses._access

    def patient(self: Accesses, *of: Any) -> Any:
        self.wait_until_idle()
        return access(self, *of)

    monkeypatch.setattr(Accesses, "_access", patient)


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    """A test that was interrupted inside a forward does not pack what the next one saves."""
    yield
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
