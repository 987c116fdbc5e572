"""What a step on a GPU does with copies: a test that only the stand-in can make, as it counts them."""

from pathlib import Path

import pytest
import torch
from runtime.test_cuda import BOTH, FEW, HOME, SSD, memory, on_gpu
from zoo import Recipe, batch, loss_of

import pagoda
from cuda_stand_in.plugin import native

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("placement", [FEW, SSD, BOTH, HOME])
def test_a_step_copies_pinned_memory_alone_and_waits_for_no_copy(placement: str, tmp_path: Path) -> None:
    recipe = Recipe("llama")
    with pagoda.init():
        model = recipe.build()
    tiers = memory(placement, tmp_path, recipe)
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=tiers, clip_grad_norm=1.0)
    inputs = on_gpu(batch("llama", torch.Generator().manual_seed(1)))
    for step in range(4):
        if step == 2:
            native.take_counts()
        loss_of(model(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    counts = native.take_counts()
    assert counts.pop("aten::_local_scalar_dense", 0) <= 2  # transformers looks into each forward's positions
    assert counts["d2h"] > 0
    assert set(counts) <= {"h2d", "d2h"}
    with pytest.raises(pagoda.UsageError, match=r"outside the forward.*gathered"):
        torch.nn.init.zeros_(next(model.parameters()))
    optimizer.close()
