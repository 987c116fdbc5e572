from collections.abc import Iterator

import pytest
import torch

from pagoda.forecast import describe
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.flops import forward_flops, weightless
from pagoda.forecast.model_description import describe_model
from pagoda.models import build_model
from pagoda.models.papers import gpt_of_step

BATCH, LENGTH = 2, 64
TOKENS = BATCH * LENGTH


def counted(name: str) -> tuple[torch.nn.Module, dict[str, float]]:
    with weightless():
        model = build_model(name, seq_len=LENGTH)
        return model, forward_flops(model, BATCH, LENGTH)


def matrices(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, int]]:
    """Every module that multiplies tokens by a matrix."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and not isinstance(module, torch.nn.Embedding):
            yield name, module, weight.numel()


@pytest.mark.parametrize("name", ["llama-15m", "gpt-3x192"])
def test_a_matrix_costs_two_flops_a_token_and_element_and_attention_is_the_full_square(name: str) -> None:
    model, flops = counted(name)
    hidden = model.config.hidden_size
    expected = {module: 2.0 * TOKENS * numel for module, _, numel in matrices(model)}
    outputs = [n for n in expected if n.endswith(("attn.c_proj", "self_attn.o_proj"))]
    assert len(outputs) == model.config.num_hidden_layers
    for output in outputs:
        expected[output] += 4.0 * TOKENS * LENGTH * hidden
    flops.pop("model.rotary_emb", None)  # the positions of a Llama were a product of matrices until transformers 5.17
    assert flops == expected
    assert flops["lm_head"] == 2.0 * TOKENS * hidden * model.config.vocab_size
    assert model.training


def test_a_gpt_that_is_built_costs_what_its_shape_says() -> None:
    shape = gpt_of_step(1)
    assert sum(counted(shape.name)[1].values()) == sum(describe.forward_flops(shape, TOKENS, LENGTH).values())


def test_experts_cost_as_much_whole_as_in_tiles() -> None:
    """Also where they are one unit, as under Muon: transformers' kernel cannot run without values."""
    configs = (
        PlanConfig(model="mixtral-15m", per_device_train_batch_size=2, max_length=32, optim=name, precision="bf16")
        for name in ("muon", "adamw")
    )
    whole, tiles = map(describe_model, configs)
    assert sum(whole.forward_flops.values()) == pytest.approx(sum(tiles.forward_flops.values()))
    assert len(whole.forward_flops) < len(tiles.forward_flops)
