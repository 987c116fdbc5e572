from pathlib import Path

import pytest
import torch

from pagoda.errors import ConfigError
from pagoda.models import SHAPES, build_model
from pagoda.models.papers import gpt_of_step
from tests.tiny import write_model

PARAMETERS = {
    "llama-15m": 15_191_712,
    "llama-110m": 109_529_856,
    "llama-215m": 215_380_992,
    "llama-1b": 1_038_682_112,
    "llama-3b": 2_917_051_392,
    "llama-5b": 5_093_167_104,
    "llama-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "mistral-small-24b": 23_572_403_200,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "mixtral-15m": 14_855_616,
    "mixtral-120m": 115_843_968,
    "mixtral-1b": 949_586_688,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-moe-15m": 14_883_648,
    "qwen3-moe-30b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "t5-moe-15m": 14_264_832,
    "t5-moe-120m": 114_262_656,
    "t5-moe-1b": 1_001_595_648,
}

SMALLER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def parameters(name: str) -> int:
    """Of a built-in shape, tied ones counted once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(name, seq_len=16).parameters())


def checkpoints(model: torch.nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def write_config(directory: Path, **changes: object) -> str:
    return write_model(directory, **{**SMALLER, **changes})


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_shape_has_its_published_parameter_count(large: bool) -> None:
    assert SHAPES.keys() == PARAMETERS.keys()
    chosen = {name: count for name, count in PARAMETERS.items() if (count > 1.2e9) == large}
    assert {name: parameters(name) for name in chosen} == chosen


def test_a_directory_builds_what_its_config_says_and_checkpoints_do_not_reenter(tmp_path: Path) -> None:
    directory = write_config(tmp_path, dtype="bfloat16")
    plain = build_model(directory, seq_len=16)
    assert not checkpoints(plain)
    assert plain.config.num_hidden_layers == 2
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.float32}
    checkpointed = build_model(directory, seq_len=16, gradient_checkpointing=True)
    assert checkpoints(checkpointed)
    ids = torch.arange(16)[None]
    # Reentrant checkpointing of inputs without gradients would lose the layers' gradients.
    checkpointed(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in checkpointed.parameters())


def test_what_names_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'llama-15m'\?.*ORG/NAME"):
        build_model("lama-15m", seq_len=16)
    with pytest.raises(ConfigError, match="200 is not a multiple of 64"):
        build_model("gpt-2x200", seq_len=16)
    with pytest.raises(ConfigError, match=r"config\.json"):
        build_model(str(tmp_path), seq_len=16)
    for text in ("not json", "{}", '{"model_type": "no-such-model"}', '{"model_type": "vit"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError):
            build_model(str(tmp_path), seq_len=16)


def test_a_sequence_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-length 128 or less"):
        build_model(write_config(tmp_path), seq_len=129)
    with pytest.raises(ConfigError, match="1024 positions"):
        build_model("gpt2", seq_len=1025)


def test_a_gpt_of_layers_and_width_is_the_one_that_is_planned_with_positions_for_every_sequence() -> None:
    shape = gpt_of_step(9)
    assert parameters(shape.name) == shape.params
    with torch.device("meta"):
        assert build_model("gpt-2x192", seq_len=2048).config.max_position_embeddings == 2048
