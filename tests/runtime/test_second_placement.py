"""The second placement: after some steps, states move to the memory that these have left, and no bit changes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_once
from zoo import PAGE, RESIDENT, Outcome, Recipe, batch, least, loss_of, train

import pagoda
from pagoda import budgets, engine
from pagoda.plan.placement import LEASES
from pagoda.plan.tiers import DEVICE, HOST, SSD
from pagoda.runtime.device import Device
from pagoda.schedule.event_log import replay

RECIPES = {
    "clipped": Recipe("plain"),
    "accumulated": Recipe("plain", accumulation=2, announced=True),
    "during backward": Recipe("plain", clip=None, announced=True, frozen=True),
    "checkpointed": Recipe("llama", checkpointing=True, precision="fp32"),
    "8bit": Recipe("gpt2", moments="8bit"),
    "offloaded": Recipe("plain", activations="offload"),
    "as it fits": Recipe("plain", activations="auto"),
}


@cache
def resident(recipe: Recipe) -> Outcome:
    return train(recipe, RESIDENT)


def adapting(device: str | None = "4MiB", host: str | int | None = "64MiB", ssd: Path | None = None) -> pagoda.Memory:
    return pagoda.Memory(
        device=None if device is None else f"cpu:{device}",
        host=host,
        ssd=None if ssd is None else f"{ssd}:64MiB",
        unit_limit="64KiB",
        page_size=PAGE,
        adapt_after=2,
    )


def watched(recipe: Recipe, said: dict[int, str], each: Callable[[int, Any, Any], None] | None = None) -> Any:
    """The usual loop, which notes what moved after which step. `each` is called after every step."""

    def loop(model: Any, optimizer: Any, outcome: Outcome) -> None:
        generator = torch.Generator().manual_seed(1)
        for step in range(1, recipe.steps + 1):
            for _ in range(recipe.accumulation):
                loss = loss_of(model(**batch(recipe.model, generator)))
                (loss / recipe.accumulation).backward()
                outcome.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            outcome.norms.append(optimizer.stats.grad_norm)
            if optimizer.stats.moved is not None:
                said[step] = optimizer.stats.moved
            if each is not None:
                each(step, model, optimizer)

    return loop


@pytest.mark.parametrize("drive", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES])
def test_what_steps_leave_of_the_device_becomes_home_to_states(recipe: str, drive: bool, tmp_path: Path) -> None:
    made, said = RECIPES[recipe], {}
    host = least(made, "all-on-ssd", tmp_path, unit_limit="64KiB").host_bytes * 2 if drive else "64MiB"
    outcome = train(made, adapting(host=host, ssd=tmp_path if drive else None), watched(made, said))
    outcome.assert_same_bits(resident(made))
    plan = outcome.plan
    assert plan.placement.resident
    assert plan.budgets.device > 2 << 20
    assert set(said) == {2}
    assert said[2].startswith("After 2 steps, activations and all else but pages had taken ")
    assert " of states from host to device" in said[2]
    assert said[2] == plan.reasons[-1]
