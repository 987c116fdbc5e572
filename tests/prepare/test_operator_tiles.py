"""Layers in tiles: they train where they do not fit, start from the same weights and keep their names and shapes."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from pairwise import each_once
from runtime.conftest import Wrap
from runtime.loops import learn
from torch import nn

import pagoda
from pagoda.checkpoint.export import export
from pagoda.prepare.tiles import Tiled

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
        learn(loss, outcome)
        zoo.take_step(optimizer, outcome)


def wide() -> Any:
    torch.manual_seed(0)
    return Wide()


def test_a_layer_of_four_times_the_device_trains() -> None:
    memory = pagoda.Memory(device=f"cpu:{LARGE // 4}", host="64MiB", page_size=4096)
    with pytest.raises(pagoda.BudgetError, match=r"'wide' alone takes 520\.00 KiB.*tile_limit"):
        pagoda.wrap(wide(), pagoda.AdamW(), memory=memory, precision="bf16")
    tiled = zoo.run(wide(), memory, loop, tiles=TILED, max_grad_norm=1.0)
    assert 0 < tiled.peak_bytes["device"] <= LARGE // 4
    tiled.assert_same_bits(zoo.run(wide(), zoo.RESIDENT, loop, tiles=TILED, max_grad_norm=1.0))


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
def test_weights_start_as_those_of_the_untiled_model(build: Callable[[], nn.Module], wrap: Wrap) -> None:
    """Tied and untied, drawn by the model's own initialisers in `wrap` or before."""
    for lazily in (True, False):
        found = []
        for limit in (None, TILE):
            torch.manual_seed(0)
            with pagoda.deferred_init() if lazily else nullcontext():
                model = build()
            found.append(wrap(model, tiles=pagoda.Tiles(tile_limit=limit))[0].state_dict())
            assert any(isinstance(module, Tiled) for module in model.modules()) == (limit is not None)
        whole, tiled = found
        zoo.assert_equal(tiled, whole)
        same = {key: [other for other in whole if whole[other] is value] for key, value in whole.items()}
        assert same == {key: [other for other in whole if tiled[other] is tiled[key]] for key in whole}


def llama() -> Any:
    torch.manual_seed(7)
    return zoo.llama(2).train()


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    zoo.loss_of(model(**zoo.batch("llama", torch.Generator().manual_seed(seed)))).backward()
    optimizer.step()
    optimizer.zero_grad()


@each_once(moments=["fp32", "8bit"], limits=[(TILE, None), (TILE, "8KiB")])
def test_a_checkpoint_resumes_in_other_tiles_or_none(
    limits: tuple[str | None, str | None], moments: Any, wrap: Wrap, tmp_path: Path
) -> None:
    rule = pagoda.AdamW(lr=1e-2, moments=moments)
    first, second = (wrap(llama(), rule=rule, tiles=pagoda.Tiles(tile_limit=limit)) for limit in limits)
    step(*first, seed=0)
    first[1].save_checkpoint(tmp_path / "first")
    second[1].load_checkpoint(tmp_path / "first")
    second[1].save_checkpoint(tmp_path / "second")
    zoo.assert_equal(first[0].state_dict(), second[0].state_dict())
    first[1].load_checkpoint(tmp_path / "second")
    for run in (first, second):
        step(*run, seed=1)
    for key, value in first[0].state_dict().items():
        other = second[0].state_dict()[key].float()
        assert (other - value.float()).norm() < 0.05 * value.float().norm(), key


def test_the_moments_of_a_bias_in_tiles_are_restored_to_any_tiles(wrap: Wrap, tmp_path: Path) -> None:
    """Each tile has floors of its own, and a checkpoint joins them."""
    tiles = [pagoda.Tiles(tile_limit=limit) for limit in ("20KiB", None)]
    rule = pagoda.AdamW(lr=1e-2, moments="8bit")
    model, optimizer = wrap(wide(), rule=rule, tiles=tiles[0])
    loop(model, optimizer, zoo.Outcome())
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    state = pagoda.OptimizerState(optimizer).state_dict()
    for each in tiles:
        _, other = wrap(wide(), rule=rule, tiles=each)
        other.load_checkpoint(tmp_path / "checkpoint")
        zoo.assert_equal(pagoda.OptimizerState(other).state_dict()["state"], state["state"])


def test_exports_loads_and_state_dicts_have_the_names_of_the_whole_model(wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = wrap(llama(), tiles=pagoda.Tiles(tile_limit=TILE))
    weights = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    with pagoda.gathered(next(model.parameters()), modify=True):  # of one tile's unit, which is then ahead of others
        pass
    found = model.state_dict()
    zoo.assert_equal(found, weights)
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "exported", dtype="fp32")
    loaded, _ = wrap(pagoda.load(tmp_path / "exported"), tiles=pagoda.Tiles(tile_limit="8KiB"))
    zoo.assert_equal(loaded.state_dict(), weights)
    del weights["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"model\.layers\.0\.mlp\.up_proj\.weight"\. $'):
        model.load_state_dict(weights)
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.layers\.0\.mlp\.up_proj\.weight"):
        model.load_state_dict(weights)


def test_groups_of_settings_name_whole_parameters(wrap: Wrap) -> None:
    model = wide()
    others = [param for param in model.parameters() if param is not model.wide.weight]
    groups = [{"params": [model.wide.weight], "lr": 0.0}, {"params": others}]
    rule = pagoda.AdamW(lr=1e-2, weight_decay=0.0)
    model, optimizer = wrap(model, rule=rule, tiles=TILED, param_groups=groups)
    before = model.state_dict()
    loop(model, optimizer, zoo.Outcome())
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {*before} - {"wide.weight"}


def test_a_rule_that_takes_whole_parameters_is_refused(wrap: Wrap) -> None:
    with pytest.raises(pagoda.ConfigError, match=r"Muon\) does not work with tile_limit: a tile is a part of a param"):
        wrap(wide(), rule=pagoda.Muon(lr=1e-2), tiles=TILED)


def test_what_shares_its_weight_or_has_hooks_before_forward_stays_whole(wrap: Wrap) -> None:
    class Own(nn.Linear):
        """A layer that may do anything."""

    shared, held, beside, hooked = wide(), wide(), wide(), wide()
    shared.other = Own(1, 1)
    shared.other.weight, shared.other.bias = shared.wide.weight, shared.wide.bias
    held.other = nn.Module()
    held.other.kernel = held.wide.weight
    beside.other = nn.Linear(1, 1)
    beside.other.kernel = beside.wide.weight
    hooked.wide.register_forward_pre_hook(lambda module, args: None)
    for model, reason in (
        (shared, "'other', a Own, may do more"),
        (held, "'other', a Module, may do more"),
        (beside, "'other', a Linear, may do more"),
        (hooked, "'wide' has hooks before its forward"),
    ):
        with pytest.warns(UserWarning, match=f"leaves layer 'wide' whole: {reason}"):
            wrap(model, tiles=TILED)
        assert not any(isinstance(module, Tiled) for module in model.modules())


def test_hooks_after_forward_run_after_that_of_the_tiles(wrap: Wrap) -> None:
    """transformers gives the embedding of a checkpointed model such a hook."""
    model = llama()
    model.gradient_checkpointing_enable()
    seen: list[torch.Size] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: seen.append(out.shape))
    wrapped = wrap(model, tiles=pagoda.Tiles(tile_limit=TILE))
    assert isinstance(model.get_input_embeddings(), Tiled)
    step(*wrapped, seed=0)
    assert len(seen) == 1
    handle.remove()
    step(*wrapped, seed=1)
    assert len(seen) == 1


PARAMETER_HOOKS: dict[str, Callable[[nn.Parameter, Callable[..., Any]], object]] = {
    "hook": lambda param, hook: param.register_hook(hook),
    "hook-after-accumulation": lambda param, hook: param.register_post_accumulate_grad_hook(hook),
    "hook-of-several": lambda param, hook: torch.autograd.graph.register_multi_grad_hook([param], hook),
    "hook-on-the-node": lambda param, hook: (
        HELD.append(node := torch.autograd.graph.get_gradient_edge(param).node) or node.register_prehook(hook)
    ),
}
MODULE_HOOKS: dict[str, Callable[[nn.Module, Callable[..., Any]], object]] = {
    "before-forward": lambda layer, hook: layer.register_forward_pre_hook(hook),
    "after-forward": lambda layer, hook: layer.register_forward_hook(hook),
    "before-backward": lambda layer, hook: layer.register_full_backward_pre_hook(hook),
    "after-backward": lambda layer, hook: layer.register_full_backward_hook(hook),
    "before-state-dict": lambda layer, hook: layer.register_state_dict_pre_hook(hook),
    "after-state-dict": lambda layer, hook: layer.register_state_dict_post_hook(hook),
    "before-loading": lambda layer, hook: layer.register_load_state_dict_pre_hook(hook),
    "after-loading": lambda layer, hook: layer.register_load_state_dict_post_hook(hook),
}
HELD: list[Any] = []
"""Nodes of autograd, which live as long as someone holds them."""


@pytest.mark.parametrize("name", [*PARAMETER_HOOKS, *MODULE_HOOKS])
def test_a_layer_with_hooks_runs_them_as_often_as_without_tiles(name: str, wrap: Wrap) -> None:
    def calls(**options: Any) -> int:
        HELD.clear()
        seen: list[object] = []
        model: Any = Wide()
        register, of = (PARAMETER_HOOKS, model.wide.weight) if name in PARAMETER_HOOKS else (MODULE_HOOKS, model.wide)
        register[name](of, lambda *_: seen.append(name))  # type: ignore[index]
        model, optimizer = wrap(model, precision="fp32", **options)
        model(torch.ones(2, WIDTH)).backward()
        optimizer.step()
        model.load_state_dict(model.state_dict())
        assert isinstance(model.wide, Tiled) == (bool(options) and name == "after-forward")
        return len(seen)

    with pytest.warns(UserWarning, match="'wide'") if name != "after-forward" else nullcontext():
        assert calls(tiles=TILED) == calls() == 1


def test_hooks_on_a_weight_in_tiles_are_refused_and_freezing_it_freezes_its_parts(wrap: Wrap) -> None:
    model, optimizer = wrap(Wide(), precision="fp32", tiles=TILED)
    for ask in (
        lambda weight: weight.register_hook(print),
        lambda weight: weight.register_post_accumulate_grad_hook(print),
        lambda weight: setattr(weight, "grad", None),
        lambda weight: weight.grad,
    ):
        model(torch.ones(2, WIDTH)).backward()
        with pytest.raises(pagoda.UsageError, match=r"'wide\.weight' has no .*, because its layer is cut into tiles"):
            ask(model.wide.weight)
    optimizer.zero_grad()
    before = model.state_dict()["wide.weight"]
    model.wide.weight.requires_grad_(False)
    model(torch.ones(2, WIDTH)).backward()
    optimizer.step()
    assert torch.equal(model.state_dict()["wide.weight"], before)
    assert not model.wide.weight.requires_grad
    model.wide.weight.requires_grad = True
    model(torch.ones(2, WIDTH)).backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["wide.weight"], before)
