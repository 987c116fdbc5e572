"""Batch tiling gives what accumulation gives and moves weights once; what cannot be tiled is refused."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from pairwise import each_once
from runtime.conftest import Wrap
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

import pagoda

SAMPLES, WIDTH = 8, 64


class Block(nn.Module):
    """A layer with several inputs and outputs, only some of which have a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoints = True
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, shift: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor], *, flag: bool = False
    ) -> dict[str, Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x) + shift)) * scales[0] * scales[1]

        assert flag
        x = checkpoint(run, x, use_reentrant=False) if self.checkpoints else run(x)
        return {"x": x, "table": shift * 2, "flag": flag}


class Model(nn.Module):
    """Its loss is a sum over samples of what none of them shares, so gradients are sums over samples."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shift = torch.linspace(-1, 1, 2 * WIDTH, dtype=x.dtype)
        for layer in self.layers:
            out = layer(x, shift, (mask, torch.full((1, 1), 0.5, dtype=x.dtype)), flag=True)
            x, shift = out["x"], out["table"] / 2
        return (x.float().square() / WIDTH).sum()


def data(generator: torch.Generator, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, 4, WIDTH, generator=generator)
    return x.bfloat16(), torch.rand(samples, 1, 1, generator=generator).bfloat16()


def train(
    memory: pagoda.Memory, *, tiles: int | str | None = None, passes: int = 1, layers: int = 4, **wrap: Any
) -> zoo.Outcome:
    torch.manual_seed(0)

    def loop(model: nn.Module, optimizer: Any, outcome: zoo.Outcome) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            tensors = data(generator, SAMPLES)
            for of_pass in zip(*(tensor.chunk(passes) for tensor in tensors), strict=True):
                model(*of_pass).backward()
            zoo.take_step(optimizer, outcome)

    return zoo.run(Model(layers).train(), memory, loop, tiles=pagoda.Tiles(batch_tiles=tiles), **wrap)


@each_once(tiles=[2, 8], clip=[None, 0.5])
def test_has_the_bits_of_ordinary_accumulation(tiles: int, clip: float | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiled = train(zoo.RESIDENT, tiles=tiles, max_grad_norm=clip)
    tiled.assert_same_bits(train(zoo.RESIDENT, passes=tiles, max_grad_norm=clip))


def test_weights_move_once_for_all_micro_batches(tmp_path: Path) -> None:
    memory = zoo.squeeze(Model(6), zoo.ARENA, tmp_path, unit_limit="36KiB")
    moved = [
        sum(step["h2d"] for step in train(memory, layers=6, **how).moved) for how in ({"passes": 8}, {"tiles": 8}, {})
    ]
    assert moved[1] < 1.2 * moved[2]  # where a prefetch falls in time may differ
    assert moved[0] > 6 * moved[1]


RECIPES = {name: zoo.Recipe(name, checkpointing=True) for name in ("gpt2", "t5", "conv")}


@pytest.mark.parametrize("name", RECIPES)
def test_models_of_every_kind_are_tiled(name: str, wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer sees one sample at a time, and losses are those of the untiled model but for rounding."""
    monkeypatch.setattr(zoo, "BATCH", 4)
    losses, sizes = [], []
    for tiles in (None, 4):
        model = RECIPES[name].build().eval()  # dropout draws other numbers for a tile
        blocks = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
        part = next(part for part in blocks[0].modules() if isinstance(part, nn.Linear | nn.Conv2d | nn.LayerNorm))
        part = part if name != "gpt2" else blocks[0].ln_1
        model.train()
        for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
            dropout.p = 0.0
        model, optimizer = wrap(model, tiles=pagoda.Tiles(batch_tiles=tiles))
        seen: set[int] = set()
        handle = part.register_forward_pre_hook(lambda _, args, seen=seen: seen.add(len(args[0])))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = zoo.loss_of(model(**zoo.batch(name, torch.Generator().manual_seed(5))))
        seen.clear()
        loss.backward()  # what is recomputed, without the probe
        handle.remove()
        optimizer.step()
        losses.append((loss.item(), optimizer.stats.grad_norm))
        sizes.append(seen)
    assert sizes == [{4}, {1}]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_auto_keeps_micro_batches_as_large_as_is_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.plan.tiles.TILE_TOKENS", 10)
    train(zoo.RESIDENT, tiles="auto").assert_same_bits(train(zoo.RESIDENT, tiles=4))


@pytest.fixture
def wrap(wrap: Wrap) -> Wrap:
    """In fp32, where losses of other batches are near."""
    return partial(wrap, precision="fp32")


class Alone(nn.Module):
    """A layer that cannot be tiled, of one kind or another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else nn.Identity()
        self.register_buffer("seen", torch.zeros(()))
        self.attention = nn.MultiheadAttention(WIDTH, 2) if kind == "sequence first" else None

    def forward(self, x: torch.Tensor, extra: Any = None, cu_seqlens: torch.Tensor | None = None) -> Any:
        x = self.norm(x + self.linear(x))
        if self.kind == "fixed size":
            x = x.view(SAMPLES, WIDTH)
        if self.kind == "buffer":
            self.seen += x.detach().abs().mean()
        if self.kind == "replaced buffer":
            self.seen = self.seen + 1
        return (x, x.mean()) if self.kind == "mean" else (x, Written()) if self.kind == "object" else x


class Written:
    """What a forward could write to."""


EXTRA = {
    "cache": Written(),
    "table": torch.ones(WIDTH, WIDTH),  # a batch of as many samples as a sample has elements tells nothing
}
REASONS = {
    kind: rf"'layers\.0'.*{reason}.*batch_tiles"
    for kind, reason in {
        "batch norm": "batch norm 'norm'",
        "cache": "an argument is a Written",
        "table": r"shape \(64, 64\).*another dimension",
        "buffer": "buffer 'seen'",
        "replaced buffer": "buffer 'seen'",
        "mean": r"output of shape \(\)",
        "object": "an output is a Written",
        "sequence first": "'attention' takes a sequence as the first dimension",
        "packed": "by its argument 'cu_seqlens', its rows are parts of sequences",
        "fixed size": "its forward of 2 of 8 rows failed .*shape",
    }.items()
} | {"no batch": "the batch is unknown"}


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Alone(kind) for _ in range(2))
        self.extra = EXTRA.get(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            out = layer(x, self.extra, torch.tensor([0, 3, SAMPLES]) if layer.kind == "packed" else None)
            x = out[0] if isinstance(out, tuple) else out
        return x.square().mean()


@pytest.mark.parametrize("kind", REASONS)
def test_what_cannot_be_tiled_is_refused_and_says_why(kind: str, wrap: Wrap) -> None:
    x = torch.randn(*{"table": (WIDTH, WIDTH, WIDTH), "no batch": (WIDTH,)}.get(kind, (SAMPLES, WIDTH)))
    with pytest.raises(pagoda.ConfigError, match=REASONS[kind]):
        wrap(Stack(kind), tiles=pagoda.Tiles(batch_tiles=4))[0](x)


@pytest.mark.parametrize("kind", ["batch norm", "cache"])
def test_auto_runs_whole_what_cannot_be_tiled_and_the_plan_says_so(
    kind: str, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.plan.tiles.TILE_TOKENS", 2)
    results = []
    x = torch.randn(SAMPLES, WIDTH)
    for tiles in (None, "auto"):
        torch.manual_seed(0)
        model, optimizer = wrap(Stack(kind), tiles=pagoda.Tiles(batch_tiles=tiles))
        reason = {"batch norm": "batch norm 'norm'", "cache": "an argument is a Written"}[kind]
        with pytest.warns(UserWarning, match=reason) if tiles else warnings.catch_warnings():
            loss = model(x)
        loss.backward()
        optimizer.step()
        said = [reason for reason in pagoda.plan_of(model).reasons if "whole" in reason]
        assert len(said) == (2 if tiles else 0)
        results.append((loss.item(), optimizer.stats.grad_norm))
    assert results[0] == results[1]


def test_a_batch_norm_that_uses_the_statistics_it_has_is_tiled(wrap: Wrap) -> None:
    losses = []
    x = torch.randn(SAMPLES, WIDTH)
    for tiles in (None, 4):
        torch.manual_seed(0)
        model = Stack("batch norm")
        for layer in model.layers:
            layer.norm.eval()
        losses.append(wrap(model, tiles=pagoda.Tiles(batch_tiles=tiles))[0](x).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_hugging_face_model_that_caches_by_default_is_tiled_and_one_that_is_given_a_cache_refused(wrap: Wrap) -> None:
    losses = []
    for use_cache in (False, True):
        model = zoo.Recipe("llama").build()
        model.config.use_cache = use_cache
        seen: list[int] = []
        model.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))  # noqa: B023
        model, _ = wrap(model, tiles=pagoda.Tiles(batch_tiles=2))
        with pytest.warns(UserWarning, match="no key-value cache") if use_cache else warnings.catch_warnings():
            loss = zoo.loss_of(model(**zoo.batch("llama", torch.Generator().manual_seed(5))))
        assert seen == [1, 1]
        losses.append(loss.item())
    assert losses[0] == losses[1]
    cache = DynamicCache()  # that attention would read
    for layer in range(zoo.LAYERS):
        cache.update(torch.randn(2, 2, 3, 16), torch.randn(2, 2, 3, 16), layer)
    model, _ = wrap(zoo.Recipe("llama").build(), tiles=pagoda.Tiles(batch_tiles=2))
    with pytest.raises(pagoda.ConfigError, match="an argument is a DynamicCache"):
        model(**zoo.batch("llama", torch.Generator().manual_seed(5)), past_key_values=cache)


def test_refuses_what_has_no_blocks_and_counts_that_are_none(wrap: Wrap) -> None:
    with pytest.raises(pagoda.ConfigError, match="repeated layers"):
        wrap(nn.Linear(4, 4), tiles=pagoda.Tiles(batch_tiles=2))
    with pytest.raises(pagoda.ConfigError, match="batch_tiles is 0"):
        wrap(Model(), tiles=pagoda.Tiles(batch_tiles=0))
