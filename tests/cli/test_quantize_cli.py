"""`pagoda train --load-in-4bit`: adapters over weights in 4 or 8 bits, with the losses of transformers."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeConfig, TorchAoConfig

import pagoda
from pagoda.cli.main import main
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.model_description import describe_model
from pagoda.prepare.quantize import PACKAGES
from pagoda.train.metrics import read_metrics
from tests.cli.workspace import Workspace, curve
from tests.tiny import write_weights

ADAPTED = ("--lora-r", "4", "--lora-target-modules", "q_proj", "v_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    return write_weights(tmp_path_factory.mktemp("base"), **sizes)


@pytest.fixture
def work(model: Path, tmp_path: Path) -> Workspace:
    usual: dict[str, Any] = {"max_steps": 4, "max_length": 16, "precision": "fp32", "learning_rate": 1e-2}
    usual["memory__host"] = "1MiB"
    (tmp_path / "eval.txt").write_text("pack my box with five dozen liquor jugs. " * 12)
    usual |= {"lr_scheduler_type": "constant", "eval_data": tmp_path / "eval.txt", "eval_steps": 4}
    return Workspace(tmp_path, model, **usual, save_steps=2)


def as_transformers_has_it(bits: str) -> Any:
    if bits == "8bit":
        return TorchAoConfig(importlib.import_module("torchao.quantization").Int8WeightOnlyConfig())
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **nf4)


@pytest.mark.parametrize("bits", PACKAGES)
def test_losses_are_those_of_the_model_that_transformers_quantizes_and_a_resumed_run_has_the_same_bits(
    bits: str, model: Path, work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(PACKAGES[bits])
    from peft import PeftModel

    whole = work.train("whole", *ADAPTED, **{f"load_in_{bits}": True}, max_eval_samples=256)
    assert "Quantized: " in capsys.readouterr().out
    work.train("cut", *ADAPTED, max_steps=2, **{f"load_in_{bits}": True})
    assert main(work.resuming("cut", "--max-steps", "4")) == 0
    assert curve(work.metrics("cut")) == curve(whole)
    assert main(["export", str(work.root / "whole"), str(work.root / "adapter")]) == 0

    generate = ["generate", str(work.root / "whole"), "--prompt", "pack my", "--max-new-tokens", "6"]
    capsys.readouterr()
    assert main(generate) == 0
    written = capsys.readouterr().out
    config = as_transformers_has_it(bits)
    plain = AutoModelForCausalLM.from_pretrained(model, quantization_config=config, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, str(work.root / "adapter")).requires_grad_(False)
    wrapped, optimizer = pagoda.wrap(adapted, pagoda.AdamW(), precision="fp32", memory=pagoda.Memory(host="64MiB"))
    text = (work.root / "eval.txt").read_bytes()
    ids = torch.tensor([*text[: len(text) // 16 * 16]]).view(-1, 16)
    with torch.no_grad():
        after = wrapped.eval()(input_ids=ids, labels=ids).loss.item()
        (found,) = wrapped.generate(torch.tensor([[*b"pack my"]]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        with wrapped.disable_adapter():
            before = wrapped(input_ids=ids, labels=ids).loss.item()
    optimizer.close()
    evals = read_metrics(work.root / "whole" / "evals.jsonl")
    assert [line["loss"] for line in evals] == pytest.approx([before, after], rel=1e-6)
    assert after < before
    assert written == bytes(found.tolist()).decode(errors="replace") + "\n"


@pytest.mark.parametrize("bits", PACKAGES)
def test_a_run_takes_what_is_planned_and_has_nothing_to_merge(
    bits: Literal["4bit", "8bit"], model: Path, work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(PACKAGES[bits])
    work.train("run", *ADAPTED, max_steps=1, **{f"load_in_{bits}": True}, precision="bf16", memory__host="16MiB")
    units = json.loads((work.root / "run" / "plan.json").read_text())["units"]
    asked: dict[str, Any] = {"model": str(model), "max_length": 16, "precision": "bf16"}
    adapted = {**asked, "lora_r": 4, "lora_target_modules": ("q_proj", "v_proj")}
    whole, planned = (describe_model(PlanConfig(**adapted, **more)) for more in ({}, {f"load_in_{bits}": True}))
    assert planned.root.numel == sum(unit["parameters"] for unit in units)
    assert planned.root.numel < whole.root.numel / (2.5 if bits == "4bit" else 1.5)
    assert planned.params == whole.params
    of_model = describe_model(PlanConfig(**asked)).params
    assert f"Plan: {of_model:,} parameters" in capsys.readouterr().out
    assert main(["export", str(work.root / "run"), str(work.root / "out"), "--merge"]) == 2
    assert re.search(r"quantized weights, .*without --merge.*merge_and_unload", capsys.readouterr().err)
    assert not (work.root / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("bits", PACKAGES)
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "experts.gate_up_proj", "experts.down_proj")])
def test_experts_are_quantized_and_streamed_with_the_bits_of_those_in_memory_and_take_what_is_planned(
    bits: Literal["4bit", "8bit"], targets: tuple[str, ...], work: Workspace
) -> None:
    pytest.importorskip(PACKAGES[bits])
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    config = Qwen3MoeConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=8, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(work.root / "moe")
    usual: dict[str, Any] = {"model": work.root / "moe", **{f"load_in_{bits}": True}, "memory__host": "64MiB"}
    flags = ("--lora-r", "4", "--lora-target-modules", *targets)
    kept = work.train("kept", *flags, **usual)
    assert curve(work.train("streamed", *flags, **usual, memory__device="cpu:400KiB")) == curve(kept)
    work.train("cut", *flags, **usual, max_steps=2)
    assert main(work.resuming("cut", "--max-steps", "4")) == 0
    assert curve(work.metrics("cut")) == curve(kept)

    units = json.loads((work.root / "kept" / "plan.json").read_text())["units"]
    adapted: dict[str, Any] = {"lora_r": 4, "lora_target_modules": targets, f"load_in_{bits}": True}
    asked = PlanConfig(model=str(work.root / "moe"), max_length=16, precision="fp32", **adapted)
    planned = describe_model(asked).root
    assert planned.numel == sum(unit["parameters"] for unit in units)
    of_experts = sum(bool(re.search(r"\.experts(\.base_layer)*\.\d+$", unit["name"])) for unit in units)
    assert len([*planned.experts()]) == of_experts == 2 * 8


@pytest.mark.slow
def test_a_model_that_is_in_4_bits_already_trains_from_its_packed_weights_or_from_their_values(
    model: Path, work: Workspace
) -> None:
    pytest.importorskip("bitsandbytes")
    quantized = shutil.copytree(model, work.root / "quantized")
    config = as_transformers_has_it("4bit")
    AutoModelForCausalLM.from_pretrained(model, quantization_config=config, dtype=torch.float32).save_pretrained(
        quantized
    )
    usual: dict[str, Any] = {"max_steps": 1, "memory__host": "16MiB"}
    (expected,) = work.train("expected", *ADAPTED, "--load-in-4bit", **usual)
    (packed,) = work.train("packed", *ADAPTED, "--load-in-4bit", **usual, model=quantized)
    (values,) = work.train("values", *ADAPTED, **usual, model=quantized)
    assert packed["loss"] == expected["loss"]
    assert values["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_without_bitsandbytes_the_message_says_how_to_get_it(
    work: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert main(work.args("run", *ADAPTED, "--load-in-4bit")) == 2
    assert "--load-in-4bit needs bitsandbytes: pip install 'pagoda-train[quantized]'" in capsys.readouterr().err
