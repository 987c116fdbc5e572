"""Models become trees of modules with their parameters, and FLOPs that belong to them, without being built whole."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from pairwise import each_once
from transformers import Gemma3Config

from pagoda.forecast import flops as counting
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.describe import HEAD, exchanged_elements, forward_flops, module_spec, tiled
from pagoda.forecast.model_description import describe_model
from pagoda.models import build_model
from pagoda.models.papers import PAPER_SHAPES, PaperShape, gpt_of_step
from pagoda.plan.units import ModuleSpec, discover, forward_uses, layers_of
from pagoda.prepare.construct import describe
from pagoda.prepare.operator_tiles import Tiling
from tests.tiny import write_model

GPT = PAPER_SHAPES["gpt-1b"]
T5 = PAPER_SHAPES["t5-27b"]
EXPERTS = replace(PAPER_SHAPES["t5-moe-1.2t"], layers=2, decoder_layers=1, experts=8, top_k=2)
GPT_EXPERTS = replace(GPT, layers=2, experts=4, top_k=1)
SMALL = [gpt_of_step(3), EXPERTS, GPT_EXPERTS]


def ends(module: ModuleSpec) -> list[ModuleSpec]:
    return [end for child in module.children for end in ends(child)] if module.children else [module]


@pytest.mark.parametrize("name", PAPER_SHAPES)
def test_a_tree_has_the_parameters_of_its_shape_and_a_gpts_flops_are_megatrons_formula(name: str) -> None:
    shape = PAPER_SHAPES[name]
    root = module_spec(shape)
    params = list(root.walk())
    assert sum(param.numel for param in params) == shape.params
    assert len({param.name for param in params}) == len(params)
    assert all(param.name.rpartition(".")[0] == end.name for end in ends(root) for param in end.params)
    if shape.family == "gpt" and not shape.experts:
        batch, seq, hidden = 4, shape.seq_len, shape.hidden
        expected = 24 * batch * seq * shape.layers * hidden**2 * (1 + seq / (6 * hidden))
        expected += 2 * batch * seq * hidden * shape.vocab
        assert math.fsum(forward_flops(shape, batch * seq, seq).values()) == pytest.approx(expected)


def test_a_dense_model_does_two_flops_per_parameter_and_token() -> None:
    for shape in (PAPER_SHAPES["gpt3-175b"], T5):
        per_token = math.fsum(forward_flops(shape, 1, 1).values())
        assert per_token == pytest.approx(2 * shape.params, rel=0.01)


@pytest.mark.parametrize("shape", [EXPERTS, GPT_EXPERTS], ids=["t5", "gpt"])
def test_a_token_meets_top_k_experts(shape: PaperShape) -> None:
    flops = forward_flops(shape, 1, 1)
    experts = math.fsum(value for name, value in flops.items() if ".experts." in name)
    blocks = shape.layers + shape.decoder_layers
    assert experts == pytest.approx(blocks * shape.top_k * 2 * 2 * shape.hidden * shape.ffn)


@each_once(parallel=[2, 4], shape=[EXPERTS, GPT_EXPERTS])
def test_a_rank_has_its_part_of_the_experts_all_else_and_as_much_to_compute(shape: PaperShape, parallel: int) -> None:
    whole, here = (list(module_spec(shape, ranks).walk()) for ranks in (1, parallel))
    experts, experts_here = ([p.numel for p in params if ".experts." in p.name] for params in (whole, here))
    assert sum(experts_here) * parallel == sum(experts)
    assert [p for p in here if ".experts." not in p.name] == [p for p in whole if ".experts." not in p.name]
    flops = math.fsum(forward_flops(shape, 64, 32, parallel).values())
    assert flops == pytest.approx(math.fsum(forward_flops(shape, 64, 32).values()))


def test_tokens_leave_for_the_experts_of_other_ranks_from_every_block() -> None:
    chosen = 100 * EXPERTS.top_k * EXPERTS.hidden
    sent = exchanged_elements(module_spec(EXPERTS, 4), chosen, ranks=4)
    assert list(sent) == [f"{block}.mlp.experts" for block in ("encoder.0", "encoder.1", "decoder.0")]
    assert set(sent.values()) == {100 * EXPERTS.top_k * EXPERTS.hidden * 3 // 4}
    assert exchanged_elements(module_spec(EXPERTS), chosen, ranks=1) == {}


@each_once(limit=[0, 1 << 20, 1 << 30], shape=SMALL)
def test_units_share_out_all_flops_but_the_heads(shape: PaperShape, limit: int) -> None:
    flops = forward_flops(shape, 1024, 512)
    units = discover(module_spec(shape), limit, itemsize=2)
    assert list(flops) == [end.name for end in ends(module_spec(shape))]
    held = {slot.param.name.rpartition(".")[0] for unit in units for slot in unit.slots}
    shared = math.fsum(number for module, number in flops.items() if module in held)
    assert shared + flops[HEAD] == pytest.approx(math.fsum(flops.values()))


@pytest.mark.parametrize("name", ["gpt-1b", "t5-27b"])
def test_what_is_too_large_is_cut_and_nothing_is_lost(name: str) -> None:
    shape, most = PAPER_SHAPES[name], 4_000_000
    root, flops = module_spec(shape), forward_flops(shape, 512, 512)
    cut, counted = tiled(root, flops, most)
    assert sum(param.numel for param in cut.walk()) == shape.params
    assert max(param.numel for param in cut.walk()) <= most
    assert math.fsum(counted.values()) == pytest.approx(math.fsum(flops.values()))
    whole = {param.name: param for param in root.walk()}
    for tile in (module for module in ends(cut) if module.apart):
        for param in tile.params:
            assert param.part.shape == whole[param.part.whole].shape
            assert counted[tile.name] >= 0
    units = discover(cut, most * 2, 2)
    assert max(unit.numel for unit in units) <= most * 1.01
    embedding = [use.unit for use in forward_uses(cut, units) if "tiles" in use.module and "embedding" in use.module]
    assert embedding[0] == 0
    tied = forward_uses(cut, units)[-1]
    assert "token.tiles" in units[tied.unit].module, "the head uses the embedding's tiles"


@pytest.mark.parametrize(("name", "most"), [("gpt-5x192", 200_000), ("mixtral-15m", None)])
def test_a_built_in_shape_is_described_as_all_of_its_layers_would_be(name: str, most: int | None) -> None:
    with counting.weightless():
        whole = build_model(name, seq_len=32)
        Tiling(whole, most)
        flops, root = counting.forward_flops(whole, 2, 32), describe(whole)
    limit = None if most is None else 2 * most
    described = describe_model(
        PlanConfig(model=name, per_device_train_batch_size=2, max_length=32, tile_limit=limit, precision="bf16")
    )
    assert described.root == root
    assert list(described.forward_flops.items()) == list(flops.items())
    assert described.layers == len(layers_of(root))


def test_the_layers_of_an_encoder_and_a_decoder_count_and_those_of_a_tower_for_images_do_not(tmp_path: Path) -> None:
    assert describe_model(PlanConfig(model="t5-moe-15m", max_length=32), count_flops=False).layers == 4 + 4
    text = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "head_dim": 8}
    vision = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    Gemma3Config(text_config=text, vision_config=vision).save_pretrained(tmp_path)
    assert describe_model(PlanConfig(model=str(tmp_path), max_length=32), count_flops=False).layers == 2


def test_a_model_is_built_once_for_what_its_description_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    monkeypatch.setattr("pagoda.models.build_model", lambda name, **of: built.append(name) or build_model(name, **of))
    one, wider = (write_model(tmp_path / name, hidden_size=size) for name, size in (("a", 88), ("c", 96)))
    first = describe_model(PlanConfig(model=one, max_length=32, precision="bf16"))
    assert (
        describe_model(PlanConfig(model=one, max_length=32, gradient_accumulation_steps=2, precision="bf16")) == first
    )
    assert built == [one]
    others = (
        PlanConfig(model=wider, max_length=32, precision="bf16"),
        PlanConfig(model=one, max_length=16, precision="bf16"),
        PlanConfig(model=one, max_length=32, per_device_train_batch_size=2, precision="bf16"),
    )
    assert all(describe_model(other).step_flops != first.step_flops for other in others)
    adapted = describe_model(PlanConfig(model=one, max_length=32, lora_r=2, precision="bf16"))
    assert adapted.params > first.params
    assert built == [one, wider, one, one]
    write_model(tmp_path / "a", hidden_size=104)
    assert describe_model(PlanConfig(model=one, max_length=32, precision="bf16")).hidden == 104


@pytest.mark.parametrize("name", ["gpt-13b", "t5-58b"])
def test_layers_are_the_outermost_rows(name: str) -> None:
    shape = PAPER_SHAPES[name]
    layers = layers_of(module_spec(shape))
    assert len(layers) == shape.layers + shape.decoder_layers
    assert not any(".mlp" in layer.name for layer in layers)
