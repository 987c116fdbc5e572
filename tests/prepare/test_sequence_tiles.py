"""Sequence tiles: a layer keeps one piece of its MLP at a time, and computes what it computes whole."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from runtime.conftest import Wrap
from torch import nn

import pagoda
from pagoda.errors import ConfigError
from pagoda.plan.tiles import TILE_TOKENS

TOKENS = 48


def step_of(tiles: Any = None, passes: int = 1, **settings: Any) -> tuple[float, dict[str, torch.Tensor], list[int]]:
    """Loss, gradients, and the tokens of each call of an MLP's first product, in one step in fp32."""
    torch.manual_seed(0)
    model, calls = zoo.llama().train(), []
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.gate_proj.register_forward_hook(lambda _, args, __: calls.append(args[0].shape[1]))  # type: ignore
    how = {"precision": "fp32", **settings}
    model, optimizer = pagoda.wrap(
        model,
        pagoda.AdamW(),
        memory=zoo.RESIDENT,
        tiles=pagoda.Tiles(sequence_tiles=tiles),
        **{"precision": "bf16", **how},
    )
    grads: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: grads.update({name: grads.get(name, 0) + grad}))  # type: ignore
    ids = torch.randint(0, zoo.VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    for index in range(passes):
        loss.backward(retain_graph=index + 1 < passes)
    optimizer.close()
    return loss.item(), grads, calls


def near(grads: dict[str, torch.Tensor], others: dict[str, torch.Tensor], rounding: float = 1e-6) -> bool:
    """Whether gradients are equal but for rounding, relative to the largest of each parameter."""
    return grads.keys() == others.keys() and all(
        float((grad - others[name]).abs().max()) <= rounding * float(others[name].abs().max())
        for name, grad in grads.items()
    )


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_losses_have_the_same_bits_and_gradients_differ_by_rounding(activations: str) -> None:
    loss, grads, _ = step_of(activations=activations)
    tiled, of_tiles, calls = step_of(tiles=5, activations=activations)
    assert tiled == loss
    assert near(of_tiles, grads)
    assert max(calls) == -(-TOKENS // 5)


def test_a_recomputed_layer_runs_its_mlp_twice() -> None:
    """The layer's own recomputation ends before its MLP, whose pieces backward computes one after another."""
    _, _, calls = step_of(tiles=4, activations="recompute")
    assert len(calls) == 2 * 4 * zoo.LAYERS


def test_backward_may_run_again() -> None:
    _, once, _ = step_of(tiles=3, activations="recompute")
    _, twice, _ = step_of(tiles=3, activations="recompute", passes=2)
    assert near(twice, {name: 2 * grad for name, grad in once.items()})


def test_auto_keeps_pieces_as_large_as_is_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.plan.tiles.TILE_TOKENS", 10)
    assert max(step_of(tiles="auto")[2]) == 10


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Gated(FeedForward):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x)


class Layer(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def model_of(kind: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(Layer(kind), Layer(kind))


def test_users_name_the_classes_of_their_own_modules(wrap: Wrap) -> None:
    x = torch.randn(2, 9, 16)
    model = model_of(FeedForward)
    whole = model(x).detach()
    seen: list[int] = []
    model[0].inner.up.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    model, optimizer = wrap(model, precision="fp32", tiles=pagoda.Tiles(sequence_tiles=3, per_token=("FeedForward",)))
    assert torch.equal(model(x), whole)
    with torch.no_grad():
        assert torch.equal(model(x), whole)
    model(x).sum().backward()
    optimizer.step()
    assert {*seen} == {3}


def compiled() -> nn.Module:
    model = model_of(FeedForward)
    model[0].compile()
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], str]] = {
    "unknown": (lambda: model_of(FeedForward), (), r"'0' works on each token alone: inner \(FeedForward\)"),
    "experts": (lambda: zoo.mixtral(), (), "Experts"),
    "two arguments": (lambda: model_of(Gated), ("Gated",), "'0.inner' cannot run .* takes x, gate"),
    "no such class": (lambda: zoo.llama(), ("FeedForward",), "per_token names 'FeedForward'"),
    "compiled": (compiled, ("FeedForward",), "'0' is compiled as a whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_mix_tokens_is_refused_by_name(name: str, wrap: Wrap) -> None:
    build, per_token, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        wrap(build(), precision="fp32", tiles=pagoda.Tiles(sequence_tiles=2, per_token=per_token))


def test_names_of_classes_without_tiles_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs sequence_tiles"):
        pagoda.Tiles(per_token=("FeedForward",))


WINDOW = 128


class Windowed(nn.Module):
    """A layer of a decoder whose tokens attend to the last `WINDOW` tokens.

    It attends block by block, so no mask of tokens times tokens is needed. Windows of transformers on a CPU need one,
    4 GiB for 64K tokens, and are not tested here at that length.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.inner = FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).view(-1, WINDOW, 3, 16).unbind(2)
        key, value = (torch.cat([torch.cat([of[:1], of[:-1]]), of], 1) for of in (key, value))
        at, of = torch.arange(WINDOW)[:, None], torch.arange(2 * WINDOW)
        seen = ((of > at) & (of <= at + WINDOW)).expand(len(query), -1, -1).clone()
        seen[0, :, :WINDOW] = False
        x = x + nn.functional.scaled_dot_product_attention(query, key, value, seen).view_as(x)
        out: torch.Tensor = x + self.inner(x)
        return out


def test_64k_tokens_train_with_windows_and_tiles_as_in_plain_pytorch(tmp_path: Path) -> None:
    """With activations on SSD. A forward has the same bits, and gradients differ by rounding."""
    torch.manual_seed(0)
    plain = nn.Sequential(Windowed(), Windowed())
    model = copy.deepcopy(plain)
    pieces: list[int] = []
    model[1].inner.up.register_forward_hook(lambda _, args, __: pieces.append(args[0].shape[1]))
    model, optimizer = pagoda.wrap(
        model,
        pagoda.AdamW(lr=1e-2),
        precision="fp32",
        memory=pagoda.Memory(host="4MiB", ssd=str(tmp_path)),
        activations="recompute+offload",
        tiles=pagoda.Tiles(sequence_tiles="auto", per_token=("FeedForward",)),
    )
    usual = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    x = torch.randn(1, 1 << 16, 16)
    losses = [[(one(x) - x.roll(1, 1)).square().mean() for one in (plain, model)]]
    for loss, steps in zip(losses[0], (usual, optimizer), strict=True):
        loss.backward()
        steps.step()
    with torch.no_grad():
        losses.append([(one(x) - x.roll(1, 1)).square().mean() for one in (plain, model)])
    assert optimizer.stats.activation_bytes.ssd >= x.nbytes, "inputs of layers went to SSD"
    optimizer.close()
    assert losses[0][0].item() == losses[0][1].item()
    assert losses[1][1].item() == pytest.approx(losses[1][0].item(), rel=1e-5)
    assert max(pieces) <= TILE_TOKENS < x.shape[1]
