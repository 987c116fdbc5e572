"""A paper's shape becomes a module tree with its parameters, and FLOPs that belong to them."""

import math
from dataclasses import replace

import pytest

from pagoda.forecast.describe import EMBEDDING, HEAD, exchanged_elements, forward_flops, module_spec
from pagoda.models.papers import PAPER_SHAPES, PaperShape, gpt_shape
from pagoda.plan.units import ModuleSpec, discover

GPT = PAPER_SHAPES["gpt-1b"]
T5 = PAPER_SHAPES["t5-27b"]
EXPERTS = replace(PAPER_SHAPES["t5-moe-1.2t"], layers=2, decoder_layers=1, experts=8, top_k=2)
GPT_EXPERTS = replace(GPT, layers=2, experts=4, top_k=1)
SMALL = [gpt_shape(2e7), EXPERTS, GPT_EXPERTS]


def ends(module: ModuleSpec) -> list[ModuleSpec]:
    return [end for child in module.children for end in ends(child)] if module.children else [module]


def child_names(module: ModuleSpec) -> list[str]:
    return [child.name for child in module.children]


@pytest.mark.parametrize("name", PAPER_SHAPES)
def test_a_tree_has_the_parameters_of_its_shape(name: str) -> None:
    shape = PAPER_SHAPES[name]
    params = list(module_spec(shape).walk())
    assert sum(param.numel for param in params) == shape.params
    assert len({param.name for param in params}) == len(params)


@pytest.mark.parametrize("shape", [*SMALL, T5], ids=lambda shape: shape.name)
def test_parameters_are_held_by_modules_without_children_and_named_after_them(shape: PaperShape) -> None:
    root = module_spec(shape)
    for end in ends(root):
        assert all(param.name.rpartition(".")[0] == end.name for param in end.params)
    assert sum(len(end.params) for end in ends(root)) == len(list(root.walk()))


def test_a_gpt_is_embedding_blocks_norm_and_head() -> None:
    root = module_spec(replace(GPT, layers=2))
    assert child_names(root) == [EMBEDDING, "blocks", "norm", HEAD]
    blocks = root.children[1]
    assert child_names(blocks) == ["blocks.0", "blocks.1"]
    assert child_names(blocks.children[0]) == ["blocks.0.attention", "blocks.0.mlp"]
    assert root.children[-1].params == ()  # tied


def test_experts_are_modules_of_their_own_that_become_units() -> None:
    root = module_spec(EXPERTS)
    expert = 2 * 2 * EXPERTS.hidden * EXPERTS.ffn
    units = [unit.module for unit in discover(root, expert, itemsize=2)]
    assert [name for name in units if name.startswith("encoder.1.mlp.experts")] == [
        f"encoder.1.mlp.experts.{index}" for index in range(EXPERTS.experts)
    ]


def test_a_decoder_attends_to_the_encoder() -> None:
    decoder = module_spec(EXPERTS).children[2]
    assert child_names(decoder.children[1]) == ["decoder.0.attention", "decoder.0.cross", "decoder.0.mlp"]


@pytest.mark.parametrize("tiles", [1, 4, 16])
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_tiles_cut_matrices_and_change_neither_parameters_nor_flops(shape: PaperShape, tiles: int) -> None:
    root = module_spec(shape, tiles)
    assert sum(param.numel for param in root.walk()) == shape.params
    flops = forward_flops(shape, 1024, 512, tiles)
    assert sum(flops.values()) == pytest.approx(sum(forward_flops(shape, 1024, 512).values()))
    largest = max(param.numel for param in root.walk() if not param.name.startswith(EMBEDDING))
    assert largest == 4 * shape.hidden**2 * (shape.ffn // (4 * shape.hidden)) // tiles


def test_tiles_that_do_not_divide_the_widths_are_refused() -> None:
    for tiles in (0, 7):
        with pytest.raises(ValueError, match="tiles do not divide"):
            module_spec(GPT, tiles)


@pytest.mark.parametrize("name", [name for name in PAPER_SHAPES if name.startswith(("gpt", "zero"))])
def test_a_gpts_flops_are_megatrons_formula(name: str) -> None:
    shape = PAPER_SHAPES[name]
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


@pytest.mark.parametrize("parallel", [1, 2, 4])
@pytest.mark.parametrize("shape", [EXPERTS, GPT_EXPERTS], ids=["t5", "gpt"])
def test_a_rank_has_its_part_of_the_experts_all_else_and_as_much_to_compute(shape: PaperShape, parallel: int) -> None:
    whole, here = (list(module_spec(shape, 1, ranks).walk()) for ranks in (1, parallel))
    experts, experts_here = ([p.numel for p in params if ".experts." in p.name] for params in (whole, here))
    assert sum(experts_here) * parallel == sum(experts)
    assert [p for p in here if ".experts." not in p.name] == [p for p in whole if ".experts." not in p.name]
    flops = math.fsum(forward_flops(shape, 64, 32, 1, parallel).values())
    assert flops == pytest.approx(math.fsum(forward_flops(shape, 64, 32).values()))


def test_tokens_leave_for_the_experts_of_other_ranks_from_every_block() -> None:
    sent = exchanged_elements(EXPERTS, tokens=100, expert_parallel=4)
    assert list(sent) == [f"{block}.mlp.experts" for block in ("encoder.0", "encoder.1", "decoder.0")]
    assert set(sent.values()) == {100 * EXPERTS.top_k * EXPERTS.hidden * 3 // 4}
    assert exchanged_elements(EXPERTS, tokens=100, expert_parallel=1) == {}


@pytest.mark.parametrize("parallel", [2, 3])
def test_experts_that_ranks_do_not_divide_are_refused(parallel: int) -> None:
    for shape in (GPT, replace(GPT_EXPERTS, experts=5)):
        with pytest.raises(ValueError, match="experts"):
            module_spec(shape, 1, parallel)


@pytest.mark.parametrize("limit", [0, 1 << 20, 1 << 30])
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_units_share_out_all_flops_but_the_heads(shape: PaperShape, limit: int) -> None:
    flops = forward_flops(shape, 1024, 512)
    units = discover(module_spec(shape), limit, itemsize=2)
    assert list(flops) == [end.name for end in ends(module_spec(shape))]
    held = {slot.param.name.rpartition(".")[0] for unit in units for slot in unit.slots}
    shared = math.fsum(number for module, number in flops.items() if module in held)
    assert shared + flops[HEAD] == pytest.approx(math.fsum(flops.values()))
