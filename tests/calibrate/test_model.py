"""A model's compute is measured without the model, and torch is left as it was."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from pagoda.calibrate.model import ComputeProfile, ComputeProfiler, Round, profile_of
from pagoda.errors import ConfigError
from tests.tiny import write_model


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A model whose layers outweigh its head, so that their time stands out of noise."""
    return write_model(tmp_path, vocab_size=128, hidden_size=256, intermediate_size=1024, num_hidden_layers=6)


def profiled(model: str, precision: str = "fp32") -> ComputeProfile:
    profiler = ComputeProfiler(model, batch_size=2, seq_len=128, precision=precision, gradient_checkpointing=True)
    return profiler.measure(budget_s=0.2)


def of_torch() -> tuple[object, ...]:
    return torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()


def test_all_takes_time_torch_is_as_before_and_no_tensor_stays(small: str) -> None:
    """Some CPUs multiply bf16 fifty times slower than fp32."""
    with torch.no_grad():
        before, drawn = of_torch(), torch.get_rng_state()
        profile = profiled(small)
        assert of_torch() == before
        assert torch.equal(torch.get_rng_state(), drawn)
    assert min(*profile.layer, *profile.embedding) > 0
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is nn.Parameter and each.shape == (1024, 256)]


def test_differences_are_taken_within_a_round_and_never_below_zero() -> None:
    def round_(few: float, more: float, alone: float) -> Round:
        return (few, 2 * few), (more, 2 * more), (alone, 2 * alone)

    noisy = [round_(3.0, 7.0, 0.5), round_(30.0, 34.0, 0.5), round_(3.0, 1.0, 0.5)]
    profile = profile_of(noisy, layers=3)
    assert profile == ComputeProfile(layer=(2.0, 4.0), head=(0.5, 1.0), embedding=(0.5, 1.0))
    assert profile_of([round_(3.0, 1.0, 9.0)], layers=3).head == (0, 0)


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown model"):
        profiled("llama-0")
    with pytest.raises(ConfigError, match="fp8"):
        profiled("llama-15m", "fp8")
    with pytest.raises(ConfigError, match="positions"):
        ComputeProfiler("gpt2", batch_size=1, seq_len=4096)
