"""Stacks of experts in tiles: what is trained is the stack, and a tile is fetched when a router has chosen of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import pagoda
from pagoda.checkpoint.export import export
from pagoda.models import MIXTURE_SHAPES, expert_tiles
from pagoda.models.expert_tiles import TiledExperts
from pagoda.models.moe import build_mixture
from pagoda.models.tiles import TiledLinear
from pagoda.plan.layout import WEIGHT
from pagoda.transforms.operator_tiles import Tiling

SIZES = {
    "vocab_size": zoo.VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "use_cache": False,
}
CONFIGS: dict[str, Any] = {
    "mixtral": lambda: MixtralConfig(num_local_experts=4, intermediate_size=96, **SIZES),
    "qwen3-moe": lambda: Qwen3MoeConfig(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, **SIZES),
    "gpt-oss": lambda: GptOssConfig(
        num_local_experts=8, num_experts_per_tok=2, intermediate_size=128, **{**SIZES, "hidden_size": 256}
    ),
}
MODELS = {"mixtral": MixtralForCausalLM, "qwen3-moe": Qwen3MoeForCausalLM, "gpt-oss": GptOssForCausalLM}
ONE_EXPERT = {"mixtral": 3 * 64 * 96, "qwen3-moe": 3 * 64 * 48, "gpt-oss": 3 * 128 * 256 + 512}
STEPS = 4


def built(name: str, implementation: str = "grouped_mm") -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    model = MODELS[name](config)
    model.set_experts_implementation(implementation)
    return model.train()


def limit(name: str, experts: int, precision: str = "bf16") -> int:
    """A tile limit for so many experts in a tile."""
    return experts * ONE_EXPERT[name] * (2 if precision == "bf16" else 4)


def few_tokens(model: nn.Module, optimizer: Any, outcome: zoo.Outcome) -> None:
    """Two short sequences a step: most steps leave some experts out."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(zoo.VOCABULARY, (2, 3), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        outcome.losses.append(loss.item())
        zoo.take_step(optimizer, outcome)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", CONFIGS)
def test_training_is_that_of_the_stack_within_rounding(
    name: str, implementation: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of experts without tokens: their moments fade and their weights decay, as in the stack."""
    idle: list[torch.Tensor] = []
    with_zeros = expert_tiles._with_zero_gradients
    monkeypatch.setattr(
        expert_tiles, "_with_zero_gradients", lambda x, params: idle.extend(params) or with_zeros(x, params)
    )
    whole, tiled = (
        zoo.run(
            built(name, implementation),
            zoo.RESIDENT,
            few_tokens,
            lr=1e-3,
            precision=precision,
            tiles=pagoda.Tiles(tile_limit=tiles),
        )
        for tiles in (None, limit(name, 1, precision))
    )
    assert idle
    rounding = 2e-6 if precision == "fp32" else 4e-3
    assert tiled.losses == pytest.approx(whole.losses, rel=10 * rounding)
    assert tiled.norms == pytest.approx(whole.norms, rel=10 * rounding)
    assert [*tiled.weights] == [*whole.weights]
    for key, weight in whole.weights.items():
        moved = (tiled.weights[key].float() - weight.float()).norm() / weight.float().norm()
        assert moved < 10 * rounding, key


def test_gradients_of_a_stack_are_those_of_its_tiles() -> None:
    """Of every expert, zeros for those that no token chose, and of the router's weights."""
    results = []
    for tiles in (1 << 40, 2 * ONE_EXPERT["qwen3-moe"]):
        model = built("qwen3-moe", "eager")
        tiling = Tiling(model, tiles)
        experts = model.model.layers[0].mlp.experts
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randn(5, 64, generator=generator).requires_grad_()
        chosen = torch.tensor([[0, 5, 3], [5, 0, 7], [3, 0, 5], [0, 7, 5], [8, 5, 0]])  # 8 is none of them
        weights = torch.rand(5, 3, generator=generator).requires_grad_()
        assert isinstance(experts, TiledExperts) == (tiles < 1 << 40)
        out = experts(tokens, chosen, weights)
        out.square().sum().backward()
        parts = experts.parts("down_proj") if isinstance(experts, TiledExperts) else [(experts.down_proj, 0)]
        grads = torch.cat([param.grad for param, _ in parts])
        results.append((out.detach(), tokens.grad, weights.grad, grads))
        tiling.undo()
    for whole, tiled in zip(*results, strict=True):
        torch.testing.assert_close(tiled, whole)
    unused = results[1][3][[1, 2, 4, 6]]
    assert not unused.any()


@pytest.mark.parametrize("name", CONFIGS)
def test_placement_does_not_change_a_bit(name: str, tmp_path: Path) -> None:
    """Recomputed as well, where only one tile is needed at a time."""
    wrap = {"tiles": pagoda.Tiles(tile_limit=limit(name, 1)), "activations": "recompute", "clip_grad_norm": 0.5}
    memory = zoo.squeeze(built(name), zoo.ARENA_ALL_ON_SSD, tmp_path, activations="recompute")
    outcome = zoo.run(built(name), memory, few_tokens, **wrap)
    assert all(any(step[lane] for step in outcome.moved) for lane in ("h2d", "ssd_read", "ssd_write"))
    outcome.assert_same_bits(zoo.run(built(name), zoo.RESIDENT, few_tokens, **wrap))


def test_updates_under_backward_give_the_same_bits(tmp_path: Path) -> None:
    wrap = {"tiles": pagoda.Tiles(tile_limit=limit("mixtral", 1)), "activations": "recompute"}
    memory = zoo.squeeze(built("mixtral"), zoo.ARENA_ALL_ON_SSD, tmp_path, announced=1, clipping=False)
    outcome = zoo.run(built("mixtral"), memory, few_tokens, accumulation_steps=1, **wrap)
    outcome.assert_same_bits(zoo.run(built("mixtral"), zoo.RESIDENT, few_tokens, **wrap))


def test_a_stack_larger_than_the_device_trains_and_only_chosen_tiles_are_fetched() -> None:
    stack = 8 * ONE_EXPERT["qwen3-moe"] * 2
    memory = pagoda.Memory(device=f"cpu:{stack // 2}", host="64MiB", page_size=zoo.PAGE, unit_limit="16KiB")
    with pytest.raises(pagoda.BudgetError, match=r"experts' alone takes"):
        pagoda.wrap(built("qwen3-moe"), pagoda.AdamW(), memory=memory)
    model, optimizer = pagoda.wrap(
        built("qwen3-moe"),
        pagoda.AdamW(),
        memory=memory,
        tiles=pagoda.Tiles(tile_limit=limit("qwen3-moe", 1)),
        activations="recompute",
    )
    plan = pagoda.plan_of(model)
    tiles = [unit for unit in plan.units if ".tiles." in unit.module]
    assert len(tiles) == 2 * 8
    assert max(plan.layout.pages(unit, WEIGHT) for unit in tiles) * zoo.PAGE <= stack // 8 + zoo.PAGE
    ran: set[str] = set()
    for name, module in model.named_modules():
        if name in {unit.module for unit in tiles}:
            module.register_forward_hook(lambda *_, name=name: ran.add(name))
    ids = torch.tensor([[1, 1]])
    optimizer.trace_next_step()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    labels = (span.name for span in optimizer.timeline.spans if span.lane == "h2d")
    fetched = {label.partition(" ")[2] for label in labels if label.startswith("fetch ") and ".tiles." in label}
    assert fetched == ran
    assert 0 < len(ran) < len(tiles)
    optimizer.close()


def test_names_and_shapes_are_those_of_the_stack(tmp_path: Path) -> None:
    """State dicts, checkpoints that resume without tiles, exports and what they load as."""

    def wrapped(tiles: int | None, model: nn.Module | None = None) -> tuple[nn.Module, Any]:
        return pagoda.wrap(
            model or built("mixtral"), pagoda.AdamW(lr=1e-2), memory=zoo.RESIDENT, tiles=pagoda.Tiles(tile_limit=tiles)
        )

    def same(one: nn.Module, other: nn.Module) -> None:
        first, second = one.state_dict(), other.state_dict()
        assert {*first} == {*second}
        for key, value in first.items():
            assert torch.equal(second[key], value), key

    whole, tiled = wrapped(None), wrapped(limit("mixtral", 1))
    assert not any(isinstance(module, TiledExperts) for module in whole[0].modules())
    assert sum(isinstance(module, TiledExperts) for module in tiled[0].modules()) == 2
    same(whole[0], tiled[0])
    few_tokens(tiled[0], tiled[1], zoo.Outcome())
    tiled[1].save_checkpoint(tmp_path / "tiled")
    whole[1].load_checkpoint(tmp_path / "tiled")
    same(whole[0], tiled[0])
    tiled[0].load_state_dict({key: value / 2 for key, value in whole[0].state_dict().items()})
    assert torch.equal(
        tiled[0].state_dict()["model.layers.1.mlp.experts.down_proj"],
        whole[0].state_dict()["model.layers.1.mlp.experts.down_proj"] / 2,
    )
    for _, optimizer in (whole, tiled):
        optimizer.close()
    export(tmp_path / "tiled", tmp_path / "exported", dtype="fp32")
    loaded = [wrapped(tiles, pagoda.load(tmp_path / "exported")) for tiles in (None, limit("mixtral", 2))]
    same(*(model for model, _ in loaded))
    for _, optimizer in loaded:
        optimizer.close()


def test_experts_of_the_built_in_mixtures_are_tiled_layer_by_layer() -> None:
    small = replace(
        MIXTURE_SHAPES["gpt-moe-15m"], layers=2, hidden=64, heads=4, ffn=128, vocab=zoo.VOCABULARY, seq_len=32
    )
    outcomes = []
    for tiles in (None, "8KiB"):
        torch.manual_seed(0)
        model = build_mixture(small, gradient_checkpointing=False)
        outcomes.append(
            zoo.run(model, zoo.RESIDENT, few_tokens, lr=1e-3, precision="fp32", tiles=pagoda.Tiles(tile_limit=tiles))
        )
        layers = [module for name, module in model.named_modules() if ".experts." in name]
        assert any(isinstance(module, TiledLinear) for module in layers) == (tiles is not None)
    whole, tiled = outcomes
    assert tiled.losses == pytest.approx(whole.losses, rel=1e-5)
    assert tiled.norms == pytest.approx(whole.norms, rel=1e-5)
    assert [*tiled.weights] == [*whole.weights]
