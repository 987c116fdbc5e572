"""On an NVIDIA GPU: the same promises as with an arena in RAM that stands in for one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import MODELS, PAGE, UNIT_LIMIT, Outcome, Recipe, batch, loss_of, run, take_step

import pagoda
from pagoda.memory.cuda import CudaArena
from pagoda.optim.adamw import AdamW
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import Options, make_plan
from pagoda.runtime.construct import describe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

STEPS = 5


def memory(placement: str, directory: Path, model: nn.Module) -> pagoda.Memory:
    """Everything leased at once, or in the least device memory with states in RAM or on SSD."""
    layout = make_plan(describe(model), AdamW().states("bf16"), Budgets(1 << 40), Options(PAGE, 128 << 10)).layout
    least = layout.lease_pages(ahead=1) * PAGE
    return pagoda.Memory(
        device="64MiB" if placement == "all" else str(least),
        host="64MiB",
        ssd=f"{directory}:1GiB" if placement == "ssd" else None,
        page_size=PAGE,
        unit_limit=UNIT_LIMIT,
    )


def train(recipe: Recipe, placement: str, directory: Path) -> Outcome:
    def loop(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            for _ in range(recipe.accumulation):
                inputs = {name: value.cuda() for name, value in batch(recipe.model, generator).items()}
                loss = loss_of(model(**inputs))
                (loss / recipe.accumulation).backward()
                outcome.losses.append(loss.item())
            take_step(optimizer, outcome)

    model = recipe.build()
    return run(model, memory(placement, directory, model), loop, precision=recipe.precision, clip_grad_norm=recipe.clip)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "checkpoint"])
@pytest.mark.parametrize("placement", ["few", "ssd"])
@pytest.mark.parametrize("model", MODELS)
def test_placement_does_not_change_a_bit(model: str, placement: str, checkpointing: bool, tmp_path: Path) -> None:
    recipe = Recipe(model, checkpointing=checkpointing, accumulation=2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        outcome = train(recipe, placement, tmp_path)
        outcome.assert_same_bits(train(recipe, "all", tmp_path))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("model", ["llama", "conv"])
def test_training_agrees_with_the_cpu_within_rounding(model: str, tmp_path: Path) -> None:
    recipe = Recipe(model, precision="fp32")

    def on_cpu(wrapped: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            loss = loss_of(wrapped(**batch(model, generator)))
            loss.backward()
            outcome.losses.append(loss.item())
            take_step(optimizer, outcome)

    cpu = run(recipe.build(), pagoda.Memory(host="64MiB"), on_cpu, precision="fp32", clip_grad_norm=recipe.clip)
    gpu = train(recipe, "few", tmp_path)
    assert gpu.losses == pytest.approx(cpu.losses, rel=1e-3)


def test_a_gpu_without_room_is_refused() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(pagoda.BudgetError, match=r"memory\.device"):
        CudaArena(2 * torch.cuda.mem_get_info()[1], device)


def test_steady_steps_allocate_no_device_memory(tmp_path: Path) -> None:
    """All leases come from one arena: what torch has reserved stays as it was after the first steps."""
    model = Recipe("llama").build()
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=memory("few", tmp_path, model), clip_grad_norm=1.0)
    generator = torch.Generator().manual_seed(1)
    reserved = []
    for _ in range(200):
        inputs = {name: value.cuda() for name, value in batch("llama", generator).items()}
        loss_of(model(**inputs)).backward()
        optimizer.step()
        reserved.append(torch.cuda.memory_reserved())
    optimizer.close()
    assert reserved[3] == reserved[-1]
