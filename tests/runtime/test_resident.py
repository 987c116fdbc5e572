"""`pagoda.resident` keeps all weights leased for forwards without training, with the bits of forwards outside."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn
from zoo import ARENA, ARENA_ALL_ON_SSD, RESIDENT, squeeze

import pagoda
from pagoda.runtime.leases import Fetcher

from .conftest import Wrap

IDS = torch.arange(12).view(2, 6)


def model(layers: int = 2) -> Any:
    torch.manual_seed(0)
    return zoo.llama(layers)


def step(model: Any, optimizer: Any) -> float:
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def written(model: Any) -> torch.Tensor:
    """Tokens that the model generates, and the logits of these."""
    ids = model.generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    with torch.no_grad():
        return torch.cat([ids.float().flatten(), model(input_ids=ids).logits.float().flatten()])


def memory(kind: str, directory: Path) -> pagoda.Memory:
    if kind == "ram":
        return RESIDENT
    least = squeeze(model(), ARENA if kind == "arena" else ARENA_ALL_ON_SSD, directory)
    return replace(least, device="cpu:256KiB")  # as large as all weights


@pytest.mark.parametrize("kind", ["ram", "arena", "ssd", "async"])
def test_forwards_inside_fetch_nothing_and_have_the_bits_of_forwards_outside(
    kind: str, wrap: Wrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"update": "async"} if kind == "async" else {}
    place = memory("ram" if kind == "async" else kind, tmp_path)
    with_block, one = wrap(model(), place, **options)
    without, other = wrap(model(), **options)
    fetched: list[str] = []
    fetch = Fetcher.fetch

    def counting(self: Fetcher, operation: Any, unit: Any, *others: Any) -> Any:
        fetched.append(unit.spec.name)
        return fetch(self, operation, unit, *others)

    monkeypatch.setattr(Fetcher, "fetch", counting)
    for _ in range(2):
        assert step(with_block, one) == step(without, other)
        expected = written(without)  # waits for the updates, as the block does
        with pagoda.resident(with_block):
            fetched.clear()
            assert torch.equal(written(with_block), expected)
            with pagoda.resident(with_block.model.layers[0]):  # is so already
                assert torch.equal(written(with_block), expected)
            assert not fetched
    assert step(with_block, one) == step(without, other)
    zoo.assert_equal(with_block.state_dict(), without.state_dict())


def test_weights_that_do_not_fit_are_refused_with_the_figures(wrap: Wrap, tmp_path: Path) -> None:
    paged, optimizer = wrap(model(layers=6), squeeze(model(layers=6), ARENA, tmp_path))
    refused = r"needs .*KiB on device for the weights of all \d+ units at once, and the plan has .*KiB .* memory.device"
    with pytest.raises(pagoda.BudgetError, match=refused), pagoda.resident(paged):
        pass
    step(paged, optimizer)


def test_what_would_change_weights_or_need_gradients_is_refused_inside(wrap: Wrap) -> None:
    paged, optimizer = wrap(model())
    with pytest.raises(pagoda.UsageError, match="not wrapped"), pagoda.resident(nn.Linear(2, 2)):
        pass
    loss = paged(input_ids=IDS, labels=IDS).loss
    loss.backward()
    with pagoda.resident(paged):
        with pytest.raises(pagoda.UsageError, match=r"with gradients was called inside `with pagoda.resident"):
            paged(input_ids=IDS)
        for change in (
            optimizer.step,
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
            lambda: paged.load_state_dict(paged.state_dict()),
        ):
            with pytest.raises(pagoda.UsageError, match=r"was called inside `with pagoda.resident"):
                change()
    with pytest.raises(pagoda.UsageError, match="was written to"), pagoda.resident(paged), torch.no_grad():
        paged.model.norm.weight.zero_()
    before = written(paged)
    optimizer.step()
    assert not torch.equal(written(paged), before)


def test_a_step_beside_another_threads_block_is_refused_at_once(wrap: Wrap) -> None:
    paged, optimizer = wrap(model())
    paged(input_ids=IDS, labels=IDS).loss.backward()
    inside, refused = threading.Event(), threading.Event()

    def hold() -> None:
        with pagoda.resident(paged):
            inside.set()
            refused.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert inside.wait(10)
        with pytest.raises(pagoda.UsageError, match=r"step\(\) was called inside `with pagoda.resident"):
            optimizer.step()
    finally:
        refused.set()
        holder.join()
    optimizer.step()
