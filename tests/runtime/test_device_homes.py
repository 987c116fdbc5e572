"""Units whose states have their home on the device: the same bits, no transfers, and every byte in its ledger."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from zoo import PAGE, RESIDENT, UNIT_LIMIT, Outcome, Recipe, batch, loss_of, train

import pagoda
from pagoda.plan.layout import GRAD

from .test_device_updates import layout_of, resident, ring_bytes


def device_bytes(recipe: Recipe, homes: float, ring: bool) -> int:
    """Bytes of leases, of a ring if there is one, and of `homes` of all states and gradients."""
    layout = layout_of(recipe)
    states = sum(layout.total_pages(name) for name in (*(s.name for s in layout.states), GRAD)) * PAGE
    return layout.lease_pages(ahead=2) * PAGE + ring_bytes(layout) * ring + int(homes * states)


def memory(
    recipe: Recipe, homes: float, host: str = "64MiB", ssd: Path | None = None, update_share: float = 0.0
) -> pagoda.Memory:
    """A device with room for leases, a ring, and `homes` of all states and gradients."""
    return pagoda.Memory(
        device=f"cpu:{device_bytes(recipe, homes, ring=update_share > 0)}",
        host=host,
        ssd=None if ssd is None else f"{ssd}:1GiB",
        page_size=PAGE,
        unit_limit=UNIT_LIMIT,
        split=pagoda.Split(device_home_share=1.0, device_update_share=update_share),
    )


def assert_at_home(outcome: Outcome) -> None:
    """Some units live on the device, and neither their states nor their gradients took any link."""
    plan = outcome.plan
    assert plan is not None
    lives = plan.placement.resident
    assert 0 < len(lives) < len(plan.units)
    layout = plan.layout
    for state in (*(s.name for s in layout.states), GRAD):
        there = sum(layout.pages(plan.units[index], state) for index in lives) * PAGE
        assert plan.bytes["device"].get(state, 0) == there
    others = [u for u in plan.units if u.index not in lives]
    gradients = sum(u.trainable_numel for u in others) * layout.itemsize(GRAD)
    passing = [u for u in plan.units if u.index in plan.placement.updated_on_device]
    states = sum(s.nbytes(u.trainable_numel) for u in passing for s in layout.states)
    assert outcome.peak_bytes["device"] <= plan.peak_bytes["device"]
    assert not set(lives) & set(plan.placement.updated_on_device)
    for step in outcome.moved:
        assert step["d2h"] <= 2 * (gradients + states) + states


def test_device_ram_and_ssd_are_home_to_one_model_whose_updates_run_everywhere(tmp_path: Path) -> None:
    recipe = Recipe("llama", accumulation=2, layers=6)
    layout = layout_of(recipe)
    states = sum(layout.total_pages(state.name) for state in layout.states) * PAGE
    outcome = train(recipe, memory(recipe, 0.3, str(int(states * 0.8)), tmp_path, update_share=1.0))
    outcome.assert_same_bits(resident(recipe))
    assert_at_home(outcome)
    assert outcome.plan is not None
    assert {tier for (_, state), tier in outcome.plan.placement.homes.items() if state != GRAD} == {
        "device",
        "host",
        "ssd",
    }
    assert outcome.plan.placement.updated_on_device


def test_a_model_that_ram_alone_cannot_hold_fits_ram_and_the_device() -> None:
    recipe = Recipe("llama")
    layout = layout_of(recipe)
    states = sum(layout.total_pages(name) for name in (*(s.name for s in layout.states), GRAD)) * PAGE
    with_homes = memory(recipe, 0.6, str(int(states * 0.7)))
    outcome = train(recipe, with_homes)
    outcome.assert_same_bits(resident(recipe))
    with pytest.raises(pagoda.BudgetError):
        train(recipe, replace(with_homes, split=pagoda.Split()))
    chosen = train(recipe, replace(with_homes, split=None))
    chosen.assert_same_bits(resident(recipe))
    assert_at_home(chosen)


def test_a_checkpoint_of_states_on_the_device_resumes_in_ram(tmp_path: Path) -> None:
    recipe = Recipe("llama")

    def losses(where: pagoda.Memory, resume: Path | None, save: Path | None) -> list[float]:
        model, optimizer = pagoda.wrap(recipe.build(), pagoda.AdamW(lr=1e-2), memory=where)
        generator = torch.Generator().manual_seed(1)
        batches = [batch(recipe.model, generator) for _ in range(6)]
        if resume is not None:
            optimizer.load_checkpoint(resume)
        found = []
        for index, inputs in enumerate(batches[3:] if resume is not None else batches):
            loss = loss_of(model(**inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if save is not None and index == 2:
                optimizer.save_checkpoint(save, wait=False)
        optimizer.close()
        return found

    on_device = memory(recipe, 0.5)
    whole = losses(on_device, None, tmp_path / "saved")
    assert losses(RESIDENT, tmp_path / "saved", None) == whole[3:]
    assert losses(on_device, tmp_path / "saved", None) == whole[3:]
