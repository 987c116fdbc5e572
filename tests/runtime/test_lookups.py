"""Embeddings that the CPU looks up while a device of its own computes.

`tests/test_matrix.py` has them with all other settings. Here: which embeddings, what moves, and what is refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import Plain

import pagoda

ROWS, WIDTH = 4096, 32
WEIGHTS = 2 * ROWS * WIDTH
"""Bytes of the embedding's weights in bf16."""
DEVICE = WEIGHTS // 2
"""Bytes of a device that cannot hold the embedding, but everything else."""
RAM = pagoda.Memory(host="64MiB", page_size=4096)


class Classifier(nn.Module):
    """Most of its parameters are in its embedding."""

    def __init__(self, **embedding: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, padding_idx=0, **embedding)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def arena(**settings: Any) -> pagoda.Memory:
    return pagoda.Memory(device=f"cpu:{DEVICE}", host="64MiB", page_size=4096, unit_limit="8KiB", **settings)


def wrapped(memory: pagoda.Memory, **settings: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return pagoda.wrap(
        Classifier(), pagoda.AdamW(lr=1e-2, weight_decay=0.1), memory=memory, **{"precision": "bf16", **settings}
    )


def steps(model: nn.Module, optimizer: Any, first: int, stop: int) -> list[float]:
    """Losses and norms. torch clips."""
    figures = []
    for step in range(first, stop):
        draw = torch.Generator().manual_seed(step)
        for _ in range(2):
            ids = torch.randint(0, ROWS // 2, (8, 16), generator=draw)
            loss = nn.functional.cross_entropy(model(ids).float(), torch.randint(0, 10, (8,), generator=draw))
            (loss / 2).backward()
            figures.append(loss.item())
        figures.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return figures


def test_an_embedding_that_the_device_cannot_hold_is_looked_up_and_a_checkpoint_resumes_in_ram(tmp_path: Path) -> None:
    model, optimizer = wrapped(RAM)
    whole = steps(model, optimizer, 0, 4)
    optimizer.close()
    model, optimizer = wrapped(arena())
    plan = pagoda.plan_of(model)
    assert [unit.module for unit in plan.units if unit.on_host] == ["embed"]
    assert any("The CPU looks up 'embed', because the device has no room" in reason for reason in plan.reasons)
    assert sum(plan.bytes["device"].values()) <= DEVICE
    figures = steps(model, optimizer, 0, 2)
    assert max(optimizer.stats.bytes_moved[lane] for lane in ("h2d", "d2h")) < WEIGHTS // 2
    assert optimizer.stats.peak_bytes["device"] <= DEVICE
    with torch.no_grad():
        assert model.embed.weight.norm() > 0  # read outside its forward
    optimizer.save_checkpoint(tmp_path / "saved")
    optimizer.close()
    for memory in (RAM, arena(embedding_limit="1KiB")):
        model, optimizer = wrapped(memory)
        optimizer.load_checkpoint(tmp_path / "saved")
        assert figures + steps(model, optimizer, 2, 4) == whole
        optimizer.close()


def test_an_embedding_keeps_its_buffers_hooks_and_frozen_weights() -> None:
    class Scaled(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(ROWS, WIDTH)
            self.register_buffer("scale", torch.tensor(3.0))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * self.scale.to(self.weight.dtype)

    def run(memory: pagoda.Memory) -> tuple[list[float], int]:
        torch.manual_seed(0)
        model, seen = Classifier(), []
        model.embed = Scaled().requires_grad_(False)
        model.embed.register_forward_hook(lambda _module, _given, rows: seen.append(rows.numel()))
        model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=1e-2), memory=memory, precision="bf16")
        figures = steps(model, optimizer, 0, 2)
        optimizer.close()
        return figures, sum(seen)

    assert run(arena(embedding_limit="16KiB")) == run(RAM)


class Adding(nn.Module):
    """A layer with an embedding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) + self.table(ids).mean(1))


class OfLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(len(ids), WIDTH, dtype=self.layers[0].linear.weight.dtype)
        for layer in self.layers:
            x = layer(x, ids)
        return x


def test_embeddings_inside_layers_are_looked_up_again_when_backward_recomputes_them() -> None:
    def run(memory: pagoda.Memory) -> list[float]:
        torch.manual_seed(0)
        model, optimizer = pagoda.wrap(
            OfLayers(), pagoda.AdamW(lr=1e-2), memory=memory, activations="recompute", precision="bf16"
        )
        tables = [unit.module for unit in pagoda.plan_of(model).units if unit.on_host]
        assert tables == ([] if memory is RAM else [f"layers.{index}.table" for index in range(3)])
        figures = steps(model, optimizer, 0, 2)
        optimizer.close()
        return figures

    assert run(arena()) == run(arena(embedding_limit="16KiB")) == run(RAM)


def tied() -> nn.Module:
    return Plain(blocks=1)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


@pytest.mark.parametrize(
    ("model", "memory", "tiles", "why"),
    [
        (tied, arena(embedding_limit="4KiB"), None, "'embed' is larger .*: 'head' computes with its weights too"),
        (tied, arena(embedding_limit="4KiB"), "4KiB", "'head' computes with its weights too"),
        (lambda: Classifier(max_norm=1.0), arena(embedding_limit="4KiB"), None, "max_norm"),
        (lambda: nn.Embedding(ROWS, WIDTH), arena(embedding_limit="4KiB"), None, "it is the model itself"),
        (Named, arena(embedding_limit="4KiB"), None, "no parameters to compute with"),
        (Classifier, pagoda.Memory(host="64MiB", embedding_limit="4KiB"), None, "the CPU computes everything"),
    ],
)
def test_what_the_cpu_cannot_look_up_is_refused_by_name(
    model: Callable[[], nn.Module], memory: pagoda.Memory, tiles: str | None, why: str
) -> None:
    in_tiles = None if tiles is None else pagoda.Tiles(tile_limit=tiles)
    with pytest.raises(pagoda.ConfigError, match=why):
        pagoda.wrap(model(), pagoda.AdamW(), memory=memory, tiles=in_tiles, precision="bf16")


def test_a_device_too_small_for_an_embedding_that_must_be_there_refuses_it() -> None:
    class Tied(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(WIDTH, ROWS, bias=False)
            self.again.weight = self.embed.weight

    with pytest.raises(pagoda.BudgetError) as refused:
        pagoda.wrap(Tied(), pagoda.AdamW(), memory=arena(), precision="bf16")
    assert refused.value.tier == "device"
