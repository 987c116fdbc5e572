"""Gradients come to their updates as autograd would have accumulated them, though a disk fails meanwhile."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import nn
from zoo import ALL_ON_SSD, PAGE, least_host, squeeze

import pagoda
from pagoda.config.memory import Memory
from pagoda.errors import BudgetError, StorageError
from pagoda.memory.page import PageRun
from pagoda.memory.ssd.tier import SSDTier
from pagoda.plan.buffers import BOUNCE_ELEMENTS
from pagoda.plan.layout import GRAD
from pagoda.plan.options import Options
from pagoda.plan.placement import STAGING
from pagoda.plan.tiers import Budgets
from pagoda.prepare.construct import describe
from pagoda.runtime import gradients

from .conftest import Wrap
from .loops import assert_same_state, layers, train_layers


class Layer(nn.Module):
    """Backward makes the gradient of its bias long after that of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return x + self.bias if first else x @ self.weight


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in (True, False):
            for layer in self.layers:
                x = layer(x, first)
        return x.sum()


def test_without_ssd_the_units_that_hold_the_buffers_are_named(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients come to buffers one by one, as large ones do: not once all of a unit have been made."""
    monkeypatch.setattr(gradients, "_WORTH_BYTES", 1)
    model, options = Layers(), Options(PAGE, 1, gradient_accumulation_steps=1)
    host = least_host(describe(model), pagoda.AdamW().states("bf16"), Budgets(PAGE), options)
    model, _ = wrap(model, Memory(host=host, page_size=PAGE, unit_limit=1), gradient_accumulation_steps=1)
    assert STAGING in pagoda.plan_of(model).bytes["host"]
    with pytest.raises(BudgetError) as refused:
        model(torch.ones(2, 64, dtype=torch.bfloat16)).backward()
    for text in ("'layers.1'", "'layers.4'", "unit 'layers.0'", "memory.ssd", "gradient_accumulation_steps"):
        assert text in str(refused.value)


def test_several_threads_add_a_gradient_from_a_device_at_the_same_time(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two pieces wait for each other."""
    add, pieces, met = gradients.store_in_ram, count(), Barrier(2)

    def added(*piece: Any) -> list[float]:
        if next(pieces) < 2:
            met.wait(timeout=30)
        return add(*piece)

    monkeypatch.setattr(gradients, "store_in_ram", added)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        linear = nn.Linear(BOUNCE_ELEMENTS // 512, 1300, bias=False)
        model, optimizer = wrap(linear, Memory(device="cpu:32MiB", host="128MiB"), gradient_accumulation_steps=2)
    finally:
        torch.set_num_threads(threads)
    for _ in range(2):
        model(torch.ones(2, BOUNCE_ELEMENTS // 512, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert next(pieces) == 3


def runs_of_gradients(model: nn.Module, optimizer: Any) -> set[PageRun]:
    """Where gradients go on SSD."""
    return {optimizer._engine.store.run_on_ssd(unit.index, GRAD) for unit in pagoda.plan_of(model).units}


@pytest.mark.parametrize("fails", ["once", "for good"])
def test_a_gradient_that_cannot_be_written_is_written_later_or_its_step_dropped(
    fails: str, wrap: Wrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrap(layers(6), squeeze(layers(6), ALL_ON_SSD, tmp_path, unit_limit="64KiB"))
    spilled = runs_of_gradients(model, optimizer)
    store: Callable[..., None] = SSDTier.store
    calls = count()

    def failing(ssd: SSDTier, run: PageRun, *rest: Any) -> None:
        if run in spilled and (next(calls) == 0 or fails == "for good"):
            raise StorageError("the disk is gone")
        store(ssd, run, *rest)

    for layer in model.layers:  # or whether a failure is known before the next gradient would be chance
        layer.register_full_backward_hook(lambda *_: optimizer._engine.accesses.wait_until_idle())
    with monkeypatch.context() as patch:
        patch.setattr(SSDTier, "store", failing)
        if fails == "once":
            train_layers(model, optimizer, 1)
        else:
            with pytest.raises(StorageError, match="the disk is gone"):
                train_layers(model, optimizer, 1)
            optimizer.zero_grad()
            optimizer._engine.accesses.wait_until_idle()
    assert next(calls) > 1
    train_layers(model, optimizer)
    twin = wrap(layers(6))
    train_layers(*twin, 3 if fails == "once" else 2)
    assert_same_state((model, optimizer), twin)


def test_no_update_sees_a_gradient_that_cannot_be_read_back(
    wrap: Wrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrap(layers(6), squeeze(layers(6), ALL_ON_SSD, tmp_path, unit_limit="64KiB"))
    spilled = runs_of_gradients(model, optimizer)
    load: Callable[..., None] = SSDTier.load

    def failing(ssd: SSDTier, run: PageRun, *rest: Any) -> None:
        if run in spilled:
            raise StorageError("the disk is gone")
        load(ssd, run, *rest)

    def step() -> None:
        train_layers(model, optimizer, 1)
        optimizer.synchronize()

    optimizer.save_checkpoint(tmp_path / "saved")
    with monkeypatch.context() as patch:
        patch.setattr(SSDTier, "load", failing)
        with pytest.raises(StorageError, match="the disk is gone"):
            step()
    optimizer.load_checkpoint(tmp_path / "saved")
    train_layers(model, optimizer)
    twin = wrap(layers(6))
    train_layers(*twin)
    assert_same_state((model, optimizer), twin)


def test_a_sparse_gradient_trains_as_the_same_gradient_made_dense(tmp_path: Path) -> None:
    """With repeated tokens, two micro-batches a step, and a norm that clips."""

    def losses(sparse: bool, memory: Memory) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 128, sparse=sparse), nn.Linear(128, 64))
        model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=0.1), memory=memory, max_grad_norm=0.1, precision="bf16")
        found = []
        for tokens in torch.randint(0, 64, (6, 4, 8), generator=torch.Generator().manual_seed(1)):
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            loss.backward()
            found.append(loss.item())
            if len(found) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.close()
        return found

    in_ram = Memory(host="64MiB")
    assert losses(True, in_ram) == losses(False, in_ram) == losses(True, Memory(host="1MiB", ssd=tmp_path))
