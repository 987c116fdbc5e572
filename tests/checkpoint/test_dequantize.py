"""Quantized files give the model that transformers dequantizes from them, one piece at a time."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from transformers.integrations.finegrained_fp8 import Fp8Quantize, _dequantize_fp8_weight
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import pagoda
from pagoda.checkpoint import dequantize
from pagoda.checkpoint.dequantize import dequantized
from pagoda.checkpoint.export import export
from pagoda.checkpoint.lazy import constant
from pagoda.checkpoint.pretrained import SINGLE
from pagoda.checkpoint.waiting import is_waiting
from pagoda.errors import CheckpointError, ConfigError
from pagoda.parameters.quantized import packed
from pagoda.prepare.quantize import quantize_layers

from .hf_models import build, train, wrapped

COMMON: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def with_tensors(directory: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    """Give a directory other tensors, and the settings with which they are quantized."""
    safetensors.torch.save_file(tensors, directory / SINGLE, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def bitsandbytes(model: str = "mixtral", **settings: Any) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        pytest.importorskip("bitsandbytes")
        build(model, seed=5).to(torch.bfloat16).save_pretrained(directory / "plain")
        config = transformers.BitsAndBytesConfig(**settings)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            directory / "plain", quantization_config=config, dtype=torch.bfloat16
        )
        loaded.save_pretrained(directory)

    return write


def mxfp4(directory: Path) -> None:
    torch.manual_seed(5)
    config = transformers.GptOssConfig(
        **COMMON, intermediate_size=32, num_local_experts=4, num_key_value_heads=2, head_dim=16
    )
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tensors = safetensors.torch.load_file(directory / SINGLE)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
    with_tensors(directory, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def float8(block: list[int] | None, scale_dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        torch.manual_seed(5)
        model = transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(
                **COMMON, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
                n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=32,
                qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
            )
        )  # fmt: skip
        model.to(torch.bfloat16).save_pretrained(directory)
        tensors = safetensors.torch.load_file(directory / SINGLE)
        settings = transformers.FineGrainedFP8Config(weight_block_size=block)
        quantizer = Fp8Quantize(FineGrainedFP8HfQuantizer(settings))
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            made = quantizer.convert({name: [tensors.pop(name)]})
            tensors |= {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = tensors[name].to(scale_dtype)
        assert any(".experts.0." in name and "_scale_inv" in name for name in tensors)
        with_tensors(directory, tensors, settings.to_dict())

    return write


FILES: dict[str, Callable[[Path], None]] = {
    "mxfp4": mxfp4,
    "fp8": float8([32, 32]),
    "fp8-powers-of-two": float8([32, 32], torch.float8_e8m0fnu),
    "fp8-whole": float8(None),
    "nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "int8": bitsandbytes(load_in_8bit=True),
}


@pytest.fixture(scope="module", params=FILES)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with quantized weights."""
    directory = tmp_path_factory.mktemp("quantized")
    FILES[request.param](directory)
    return directory


def plain(directory: Path) -> nn.Module:
    """The model that transformers dequantizes, in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.dequantize(dtype=torch.float32) if getattr(model, "is_quantized", False) else model


def test_training_starts_from_what_transformers_dequantizes_and_an_export_is_not_quantized(
    quantized: Path, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = pagoda.load(quantized, dtype=torch.float32)
    assert all(is_waiting(param) for name, param in loaded.named_parameters() if name.endswith("q_proj.weight"))
    model, optimizer = wrapped(loaded, "ssd", tmp_path, "fp32")
    masters, expected = pagoda.ModelState(model).state_dict(), plain(quantized).state_dict()
    assert masters.keys() == expected.keys()
    assert not [name for name in masters if not torch.equal(masters[name], expected[name])]
    export(model, tmp_path / "out")
    assert train(model, optimizer, 0, 1)
    optimizer.close()
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())


def test_no_piece_is_larger_than_an_expert_or_a_block_of_rows(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, counts = dequantize._computed, list[int]()

    def measured(function: Any, parts: Any, like: torch.Tensor) -> Any:
        counts.append(like.numel())
        return computed(function, parts, like)

    monkeypatch.setattr(dequantize, "_computed", measured)
    monkeypatch.setattr(dequantize, "_PIECE_ELEMENTS", 1)
    pagoda.load(quantized)
    assert max(counts) <= 96 * 64, "of all experts of a layer there are 4 * 64 * 64 elements"


@pytest.mark.parametrize("shape", [(72, 40), (32, 33), (1, 70), (3, 40, 24)])
def test_blocks_at_the_edge_of_a_matrix_may_be_smaller(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(*shape[:-2], -(-shape[-2] // 16), -(-shape[-1] // 16))
    stored = {"up.weight": constant(weight), "up.weight_scale_inv": constant(scale)}
    found = dequantized({"quant_method": "fp8", "weight_block_size": [16, 16]}, stored)
    assert torch.equal(found["up.weight"].whole(), _dequantize_fp8_weight(weight, scale, [16, 16], torch.float32))


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoint.md").read_text()
    section = page.partition("### Quantized files")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    FILES["mxfp4"](tmp_path / "gpt-oss-20b")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"pagoda": pagoda}
    exec(code, names)
    assert train(names["model"], names["optimizer"], 0, 1)
    names["optimizer"].close()


def test_tensors_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    float8([32, 32])(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / SINGLE)
    name = next(name for name in tensors if name.endswith("_scale_inv"))
    safetensors.torch.save_file({**tensors, name: torch.ones(7, 7)}, tmp_path / SINGLE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=name.removesuffix("_scale_inv")):
        pagoda.load(tmp_path)
    del tensors[name]
    safetensors.torch.save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"as torch\.float8_e4m3fn; weights must be"):
        pagoda.load(tmp_path)


def test_other_methods_are_refused_by_name(tmp_path: Path) -> None:
    build("llama-untied").save_pretrained(tmp_path)
    with_tensors(tmp_path, safetensors.torch.load_file(tmp_path / SINGLE), {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match=r"quantized with 'gptq'.*mxfp4, fp8, bitsandbytes.*original model"):
        pagoda.load(tmp_path)


@pytest.mark.parametrize("name", ["llama-untied", "gpt2"])
def test_weights_in_4_bits_are_kept_as_they_are_under_adapters(name: str, tmp_path: Path) -> None:
    dequantize_4bit = pytest.importorskip("bitsandbytes.functional").dequantize_4bit
    bitsandbytes(name, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)(tmp_path)
    model = pagoda.load(tmp_path)
    quantize_layers(model, "4bit", torch.bfloat16, torch.device("cpu"))
    expected = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    kept = {name: param for name, param in model.named_parameters() if type(param).__name__ == "Params4bit"}
    assert kept
    for key, param in kept.items():
        stored = packed(param)
        assert torch.equal(stored.data, expected[key].data), key
        assert torch.equal(*(dequantize_4bit(each.data, each.quant_state) for each in (stored, expected[key]))), key


def test_a_layer_that_is_transposed_in_the_files_is_turned_back(tmp_path: Path) -> None:
    bitsandbytes("gpt2", load_in_8bit=True)(tmp_path)
    original = build("gpt2", seed=5).state_dict()
    for name, values in pagoda.load(tmp_path).state_dict().items():
        assert (values - original[name]).abs().max() < 0.02, name
