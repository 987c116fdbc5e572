"""The estimate of activations walks through a step: the loss, the layers of backward, and the embedding at its end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagoda.forecast.activations import ActivationEstimate, activations_of
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.model_description import ModelDescription, describe_model
from tests.tiny import write_model

HIDDEN, FFN, VOCAB = 64, 128, 4096
HEAD = 4 * HIDDEN * VOCAB
ON_THEIR_WAY = 2 * 4 * HIDDEN * FFN
"""The two largest gradients of a layer."""


def described(folder: Path, tied: bool = True, **changes: Any) -> ModelDescription:
    model = write_model(folder, hidden_size=HIDDEN, intermediate_size=FFN, vocab_size=VOCAB, tie_word_embeddings=tied)
    return describe_model(PlanConfig(model=model, max_length=16, **changes), count_flops=False)


def estimated(folder: Path, tokens: int, tied: bool = True, **changes: Any) -> ActivationEstimate:
    return activations_of(run_of(tokens), described(folder, tied, **changes))


def run_of(tokens: int, **settings: Any) -> PlanConfig:
    usual = {"precision": "fp32", "activations": "recompute", "chunked_loss": False}
    return PlanConfig(model="", max_length=tokens, per_device_train_batch_size=1, **{**usual, **settings})


def test_a_tied_head_waits_for_the_embedding_while_gradients_of_a_layer_are_on_their_way(tmp_path: Path) -> None:
    assert estimated(tmp_path, tokens=2).total == 2 * HEAD + ON_THEIR_WAY + 3 * 4 * HIDDEN * 2
    assert "at the end of backward" in str(estimated(tmp_path, tokens=2))


@pytest.mark.parametrize("tied", [True, False])
def test_the_largest_gradient_waits_once_around_a_loss_that_takes_more(tmp_path: Path, tied: bool) -> None:
    many = estimated(tmp_path, tokens=1024, tied=tied)
    assert many.total == many.saved + many.logits + HEAD + ON_THEIR_WAY * tied
    assert "of gradients on their way" in str(many)


def test_a_head_of_its_own_waits_for_nothing(tmp_path: Path) -> None:
    few = estimated(tmp_path, tokens=2, tied=False)
    assert few.total == few.saved + few.logits + HEAD < 2 * HEAD


def test_frozen_parameters_have_no_gradients(tmp_path: Path) -> None:
    adapters = estimated(tmp_path, tokens=2, lora_r=2)
    assert adapters.total < HEAD // 2


def test_sequence_tiles_take_the_width_of_the_mlp_out_of_the_peak(tmp_path: Path) -> None:
    tokens, piece = 1024, 64
    configs = run_of(tokens), run_of(tokens, sequence_tiles=16)
    assert [(config.tile_tokens, config.piece_tokens) for config in configs] == [(tokens, tokens), (tokens, piece)]
    model = described(tmp_path, precision="fp32")
    whole, tiled = (activations_of(config, model) for config in configs)
    of_mlp, of_norms = 4 * 5 * FFN, 4 * 4 * HIDDEN
    assert whole.working - tiled.working == (tokens - piece) * (of_mlp + of_norms)
    kept = [activations_of(replace(config, activations="keep"), model) for config in configs]
    assert kept[0].saved - kept[1].saved == model.layers * tokens * (of_mlp + of_norms)
    assert (kept[0].working, kept[1].working) == (0, piece * (of_mlp + of_norms))
