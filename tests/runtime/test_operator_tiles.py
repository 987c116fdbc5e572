"""Layers in tiles: they train where they do not fit, start from the same weights and keep their names and shapes."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from pairwise import each_once
from torch import nn

import pagoda
from pagoda.checkpoint.export import export
from pagoda.models.tiles import Tiled, row_blocks

WIDTH, ROWS = 64, 4096
LARGE = 2 * WIDTH * ROWS  # bytes in bf16
TILE = "4KiB"
TILED = pagoda.Tiles(tile_limit="32KiB")


class Wide(nn.Module):
    """One layer much larger than the others, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, ROWS), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(torch.tanh(self.first(x.to(self.first.weight.dtype)))).unflatten(-1, (-1, WIDTH)).sum(-2)
        return self.last(torch.tanh(wide)).float().square().mean()


def loop(model: nn.Module, optimizer: Any, outcome: zoo.Outcome) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        loss = model(torch.randn(8, WIDTH, generator=generator))
        loss.backward()
        outcome.losses.append(loss.item())
        zoo.take_step(optimizer, outcome)


def wide() -> Any:
    torch.manual_seed(0)
    return Wide()


def test_a_layer_of_four_times_the_device_trains() -> None:
    memory = pagoda.Memory(device=f"cpu:{LARGE // 4}", host="64MiB", page_size=4096)
    with pytest.raises(pagoda.BudgetError, match=r"'wide' alone takes 520\.00 KiB.*tile_limit"):
        pagoda.wrap(wide(), pagoda.AdamW(), memory=memory)
    tiled = zoo.run(wide(), memory, loop, tiles=TILED, clip_grad_norm=1.0)
    assert 0 < tiled.peak_bytes["device"] <= LARGE // 4
    tiled.assert_same_bits(zoo.run(wide(), zoo.RESIDENT, loop, tiles=TILED, clip_grad_norm=1.0))


def test_training_is_that_of_the_whole_layer_within_rounding() -> None:
    outcomes = [
        zoo.run(wide(), zoo.RESIDENT, loop, lr=1e-3, tiles=pagoda.Tiles(tile_limit=limit), precision="fp32")
        for limit in (None, "32KiB")
    ]
    whole, tiled = outcomes
    assert tiled.losses[0] == whole.losses[0]
    assert tiled.losses == pytest.approx(whole.losses, rel=1e-5)
    assert tiled.norms == pytest.approx(whole.norms, rel=1e-5)
    assert [*tiled.weights] == [*whole.weights]
    for name, weight in whole.weights.items():
        moved = (tiled.weights[name].float() - weight.float()).norm() / weight.float().norm()
        assert moved < 1e-5, name


@pytest.mark.parametrize("build", [zoo.Plain, lambda: zoo.t5(layers=1)], ids=["plain", "t5"])
def test_weights_start_as_those_of_the_untiled_model(build: Callable[[], nn.Module]) -> None:
    """Tied and untied, drawn by the model's own initialisers in `wrap` or before."""
    for lazily in (True, False):
        found = []
        for limit in (None, TILE):
            torch.manual_seed(0)
            with pagoda.init() if lazily else nullcontext():
                model = build()
            model, optimizer = pagoda.wrap(
                model, pagoda.AdamW(), memory=zoo.RESIDENT, tiles=pagoda.Tiles(tile_limit=limit)
            )
            found.append(model.state_dict())
            assert any(isinstance(module, Tiled) for module in model.modules()) == (limit is not None)
            optimizer.close()
        whole, tiled = found
        zoo.assert_equal(tiled, whole)
        same = {key: [other for other in whole if whole[other] is value] for key, value in whole.items()}
        assert same == {key: [other for other in whole if tiled[other] is tiled[key]] for key in whole}


def wrapped(limit: str | None, moments: Any = "fp32") -> tuple[nn.Module, Any]:
    torch.manual_seed(7)
    model = zoo.llama(2).train()
    return pagoda.wrap(
        model, pagoda.AdamW(lr=1e-2, moments=moments), memory=zoo.RESIDENT, tiles=pagoda.Tiles(tile_limit=limit)
    )


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    zoo.loss_of(model(**zoo.batch("llama", torch.Generator().manual_seed(seed)))).backward()
    optimizer.step()
    optimizer.zero_grad()


@each_once(moments=["fp32", "8bit"], limits=[(TILE, None), (TILE, "8KiB")])
def test_a_checkpoint_resumes_in_other_tiles_or_none(
    limits: tuple[str | None, str | None], moments: Any, tmp_path: Path
) -> None:
    first, second = (wrapped(limit, moments=moments) for limit in limits)
    step(*first, seed=0)
    first[1].save_checkpoint(tmp_path / "first")
    second[1].load_checkpoint(tmp_path / "first")
    second[1].save_checkpoint(tmp_path / "second")
    saved = first[0].state_dict(), second[0].state_dict()
    zoo.assert_equal(*saved)
    first[1].load_checkpoint(tmp_path / "second")
    for run in (first, second):
        step(*run, seed=1)
    for key, value in first[0].state_dict().items():
        other = second[0].state_dict()[key].float()
        assert (other - value.float()).norm() < 0.05 * value.float().norm(), key
    for _, optimizer in (first, second):
        optimizer.close()


def test_exports_and_loads_by_the_names_of_the_model(tmp_path: Path) -> None:
    model, optimizer = wrapped(TILE)
    step(model, optimizer, seed=0)
    weights = model.state_dict()
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    optimizer.close()
    export(tmp_path / "checkpoint", tmp_path / "exported", dtype="fp32")
    loaded, optimizer = pagoda.wrap(
        pagoda.load(tmp_path / "exported"), pagoda.AdamW(), memory=zoo.RESIDENT, tiles=pagoda.Tiles(tile_limit="8KiB")
    )
    zoo.assert_equal(loaded.state_dict(), weights)
    optimizer.close()


def test_takes_state_dicts_of_the_whole_model_and_names_what_is_wrong() -> None:
    model, optimizer = wrapped(TILE)
    weights = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    zoo.assert_equal(model.state_dict(), weights)
    del weights["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"model\.layers\.0\.mlp\.up_proj\.weight"\. $'):
        model.load_state_dict(weights)
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.layers\.0\.mlp\.up_proj\.weight"):
        model.load_state_dict(weights)
    optimizer.close()


def test_groups_of_settings_name_whole_parameters() -> None:
    model = wide()
    others = [param for param in model.parameters() if param is not model.wide.weight]
    groups = [{"params": [model.wide.weight], "lr": 0.0}, {"params": others}]
    model, optimizer = pagoda.wrap(
        model,
        pagoda.AdamW(lr=1e-2, weight_decay=0.0),
        memory=zoo.RESIDENT,
        tiles=TILED,
        param_groups=groups,
    )
    before = model.state_dict()
    loop(model, optimizer, zoo.Outcome())
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {*before} - {"wide.weight"}
    optimizer.close()


def test_what_shares_its_weight_or_has_hooks_before_forward_stays_whole() -> None:
    class Own(nn.Linear):
        """A layer that may do anything."""

    shared, hooked = wide(), wide()
    shared.other = Own(1, 1)
    shared.other.weight, shared.other.bias = shared.wide.weight, shared.wide.bias
    hooked.wide.register_forward_pre_hook(lambda module, args: None)
    for model, reason in ((shared, "'other', a Own, may do more"), (hooked, "'wide' has hooks before its forward")):
        with pytest.warns(UserWarning, match=f"leaves layer 'wide' whole: {reason}"):
            _, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=zoo.RESIDENT, tiles=TILED)
        assert not any(isinstance(module, Tiled) for module in model.modules())
        optimizer.close()


def test_hooks_after_forward_run_after_that_of_the_tiles() -> None:
    """transformers gives the embedding of a checkpointed model such a hook."""
    torch.manual_seed(0)
    model: Any = zoo.llama(2)
    model.gradient_checkpointing_enable()
    seen: list[torch.Size] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=zoo.RESIDENT, tiles=pagoda.Tiles(tile_limit=TILE))
    assert isinstance(model.get_input_embeddings(), Tiled)
    step(model, optimizer, seed=0)
    assert len(seen) == 1
    handle.remove()
    step(model, optimizer, seed=1)
    assert len(seen) == 1
    optimizer.close()


@pytest.mark.parametrize(
    ("rows", "width", "most"), [(1000, 64, 4096), (1000, 100, 4096), (7, 3, 4), (512, 512, 1 << 20)]
)
def test_tiles_cover_the_rows_at_aligned_starts(rows: int, width: int, most: int) -> None:
    blocks = row_blocks(rows, (width,), most)
    assert [row for start, stop in blocks for row in range(start, stop)] == [*range(rows)]
    assert all(start * width % 256 == 0 for start, _ in blocks)
    assert all((stop - start) * width <= max(most, 256 * width) for start, stop in blocks)
