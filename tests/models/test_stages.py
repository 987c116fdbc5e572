"""The stages of a pipeline: even parts of a model, under its own names."""

import random
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda.errors import ConfigError
from pagoda.models import build_model
from pagoda.models.stages import layers_of_stages, to_stage
from pagoda.prepare.construct import deferred_init
from tests.tiny import write_model

UNTIED = {"tie_word_embeddings": False}


def test_no_other_stages_have_a_smaller_largest_one() -> None:
    draw = random.Random(0)
    for _ in range(60):
        sizes = [draw.randint(1, 9) for _ in range(draw.randint(1, 8))]
        stages, before, after = draw.randint(1, len(sizes)), draw.randint(0, 20), draw.randint(0, 20)
        weights = [before, *sizes, after]
        """What is before the layers, and after them, stays with the layer next to it."""

        def largest(starts: tuple[int, ...], weights: list[int] = weights) -> int:
            cuts = [0, *(start + 1 for start in starts), len(weights)]
            return max(sum(weights[a:b]) for a, b in pairwise(cuts))

        found = layers_of_stages(sizes, before, after, stages)
        assert [layer for layers in found for layer in layers] == [*range(len(sizes))]
        assert len(found) == stages
        assert all(found)
        others = combinations(range(1, len(sizes)), stages - 1)
        assert largest(tuple(layers.start for layers in found[1:])) == min(map(largest, others))


def test_stages_have_the_parameters_of_the_model_and_one_after_another_its_logits(tmp_path: Path) -> None:
    name = write_model(tmp_path / "model", **UNTIED, num_hidden_layers=5, model_type="qwen3", head_dim=16)
    built = []
    for _ in range(4):
        torch.manual_seed(0)
        built.append(build_model(name, seq_len=16))
    whole: Any = built[-1]
    stages: list[Any] = built[:3]
    for stage, model in enumerate(stages):
        assert to_stage(model, stage, 3) == [range(2), range(2, 4), range(4, 5)]
    names = [[*model.state_dict()] for model in stages]
    assert sorted(name for of_stage in names for name in of_stage) == sorted(whole.state_dict())
    ids = torch.randint(256, (2, 16))
    with torch.no_grad():
        hidden = stages[0].base_model(input_ids=ids).last_hidden_state
        hidden = stages[1].base_model(inputs_embeds=hidden).last_hidden_state
        assert torch.equal(stages[2](inputs_embeds=hidden).logits, whole(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "one parameter for model.embed_tokens.weight and lm_head.weight, which stages cannot share"),
        ({**UNTIED, "num_hidden_layers": 1}, "has 1 layers: choose fewer stages"),
        ({**UNTIED, "model_type": "granite", "embedding_multiplier": 12.0}, "changes hidden states outside its layers"),
        ({**UNTIED, "model_type": "falcon", "vocab_size": 256}, "does not run without parts that other stages have"),
        ({**UNTIED, "model_type": "mixtral", "output_router_logits": True}, "a load-balancing loss of all layers"),
    ],
)
def test_a_model_without_stages_is_refused(model: dict[str, Any], message: str, tmp_path: Path) -> None:
    with deferred_init():
        built = build_model(write_model(tmp_path / "model", **model), seq_len=16)
    with pytest.raises(ConfigError, match=message):
        to_stage(built, 0, 2)
