"""Activation policies: none changes a bit of training, and what they keep and offload is accounted for."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration
from zoo import (
    ALL_ON_SSD,
    ARENA,
    ARENA_ALL_ON_SSD,
    MODELS,
    RESIDENT,
    VOCABULARY,
    Outcome,
    Recipe,
    run,
    squeeze,
    usual_loop,
)

import pagoda
from pagoda.plan.activations import ActivationMode

OFFLOADS = ("offload", "recompute+offload")
POLICIES = ("keep", "recompute", *OFFLOADS, "auto")


def t5_with_dropout() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
            dropout_rate=0.1,
        )
    )


MODELS["t5-dropout"] = t5_with_dropout


def train(recipe: Recipe, memory: pagoda.Memory, activations: ActivationMode = "keep", loop: Any = None) -> Outcome:
    return run(
        recipe.build(),
        memory,
        loop or usual_loop(recipe),
        precision=recipe.precision,
        clip_grad_norm=recipe.clip,
        accumulation_steps=recipe.accumulation if recipe.announced else None,
        activations=activations,
    )


@cache
def plain(recipe: Recipe) -> Outcome:
    return train(recipe, RESIDENT)


def memory_for(recipe: Recipe, placement: str, directory: Path, activations: ActivationMode) -> pagoda.Memory:
    memory = squeeze(
        recipe.build(),
        placement,
        directory,
        announced=recipe.accumulation if recipe.announced else None,
        clipping=recipe.clip is not None,
        activations=activations,
    )
    # Of the smallest arena, so little is free that "auto" has to choose.
    return replace(memory, activations="200KiB")


CASES = [
    *(("gpt2", ALL_ON_SSD, activations) for activations in POLICIES),
    *(("gpt2", ARENA, activations) for activations in POLICIES),
    *(("t5-dropout", ALL_ON_SSD, activations) for activations in POLICIES),
    *(("conv", ARENA_ALL_ON_SSD, activations) for activations in POLICIES),
    *(("llama", ARENA_ALL_ON_SSD, activations) for activations in ("offload", "auto")),
]


@pytest.mark.parametrize(("model", "placement", "activations"), CASES)
def test_no_policy_changes_a_bit(model: str, placement: str, activations: ActivationMode, tmp_path: Path) -> None:
    recipe = Recipe(model, accumulation=2, steps=3)
    outcome = train(recipe, memory_for(recipe, placement, tmp_path, activations), activations)
    outcome.assert_same_bits(plain(recipe))
    assert outcome.plan is not None
    assert outcome.plan.activations is not None
    peak = outcome.plan.activations.peak
    if activations in OFFLOADS:
        assert (peak.host if placement == ARENA else peak.ssd) > 0


def compiled(recipe: Recipe, in_place: bool) -> nn.Module:
    model = recipe.build()
    layers = model.model.layers
    for index, layer in enumerate(layers):
        if in_place:
            layer.compile(backend="aot_eager")
        else:
            layers[index] = torch.compile(layer, backend="aot_eager")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "module.compile"])
def test_blocks_may_be_compiled(in_place: bool, tmp_path: Path) -> None:
    recipe = Recipe("llama", steps=3)
    reference = run(compiled(recipe, in_place), RESIDENT, usual_loop(recipe), clip_grad_norm=0.5)
    for activations in POLICIES:
        memory = squeeze(compiled(recipe, in_place), ARENA_ALL_ON_SSD, tmp_path, activations=activations)
        memory = replace(memory, activations="200KiB")
        outcome = run(
            compiled(recipe, in_place), memory, usual_loop(recipe), clip_grad_norm=0.5, activations=activations
        )
        outcome.assert_same_bits(reference)
        assert outcome.plan is not None
        if activations in OFFLOADS:
            assert outcome.plan.activations.peak.ssd > 0  # type: ignore[union-attr]
