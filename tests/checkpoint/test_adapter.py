"""What peft has trained over a model in pages, exported and merged, computes the same when it is loaded again.

`tests/nightly/test_exports.py` has all methods of peft.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import pagoda
from pagoda.checkpoint.directory import read_manifest, write_manifest
from pagoda.checkpoint.export import export

from .hf_models import build, logits, train
from .test_export import in_ram

peft = pytest.importorskip("peft")

METHODS: dict[str, Any] = {
    "trained embedding of a tied model": lambda: lora(modules_to_save=["embed_tokens"]),
    "trained tokens of a tied model": lambda: lora(trainable_token_indices=[3, 5], use_dora=True),
    "no delta of weights": lambda: peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
}


def lora(**settings: Any) -> Any:
    return peft.LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **settings})


def trained(config: Any, **named: Any) -> tuple[Any, Any]:
    model: Any = peft.get_peft_model(build("llama-tied"), config, **named)
    model, optimizer = in_ram(model.train())
    train(model, optimizer, 0, 2)
    return model, optimizer


@pytest.mark.parametrize("method", METHODS)
def test_all_that_an_adapter_has_trained_is_exported_and_merged(method: str, tmp_path: Path) -> None:
    model, optimizer = trained(METHODS[method]())
    expected = logits(model)
    optimizer.save_checkpoint(tmp_path / "step")
    export(tmp_path / "step", tmp_path / "adapter")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(build("llama-tied"), tmp_path / "adapter")), expected)
    export(model, tmp_path / "merged", merge=True)
    optimizer.close()
    for found in (AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), in_ram(pagoda.load(tmp_path / "step"))[0]):
        assert torch.allclose(logits(found), expected, atol=1e-5)


def test_an_adapter_with_another_name_is_exported_and_several_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained(lora(), adapter_name="policy")
    export(model, tmp_path / "policy")
    found = peft.PeftModel.from_pretrained(build("llama-tied"), tmp_path / "policy")
    assert torch.equal(logits(found), logits(model))
    optimizer.close()
    model = peft.get_peft_model(build("llama-tied"), lora())
    model.add_adapter("second", lora())
    model, optimizer = in_ram(model)
    with optimizer, pytest.raises(pagoda.ConfigError, match="adapters default, second"):
        export(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("forged", "said"),
    [
        ({"adapter_names": None}, "does not name its adapter: an earlier version of Pagoda wrote it"),
        ({"megatron_config": {"a": 1}, "megatron_core": "a_strangers_module"}, "adapters of Megatron-Core's layers"),
    ],
)
def test_what_a_checkpoint_says_of_its_adapter_imports_nothing(
    forged: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_strangers_module.py").write_text("raise SystemExit('imported')")
    _, optimizer = trained(lora())
    optimizer.save_checkpoint(tmp_path / "step")
    optimizer.close()
    manifest = read_manifest(tmp_path / "step")
    manifest["model"]["adapter"] |= forged
    write_manifest(tmp_path / "step", manifest)
    for merge in (False, True):
        with pytest.raises(pagoda.ConfigError, match=said):
            export(tmp_path / "step", tmp_path / "out", merge=merge)


def test_prompts_are_exported_and_cannot_be_merged(tmp_path: Path) -> None:
    model, optimizer = trained(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    export(model, tmp_path / "adapter")
    found = peft.PeftModel.from_pretrained(build("llama-tied"), tmp_path / "adapter")
    assert torch.equal(logits(found), logits(model))
    with optimizer, pytest.raises(pagoda.CheckpointError, match="cannot be merged"):
        export(model, tmp_path / "merged", merge=True)


def test_an_adapter_that_is_merged_in_place_is_not_merged_again(tmp_path: Path) -> None:
    model, optimizer = trained(lora())
    with optimizer:
        expected = logits(model)
        with pagoda.gathered(model, modify=True):
            model.merge_adapter()
        with pytest.raises(pagoda.CheckpointError, match="already"):
            export(model, tmp_path / "merged", merge=True)
        export(model, tmp_path / "adapter")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(build("llama-tied"), tmp_path / "adapter")), expected)


def test_what_was_trained_and_peft_would_not_save_is_refused(tmp_path: Path) -> None:
    model = peft.get_peft_model(build("llama-tied"), lora())
    model.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    model, optimizer = in_ram(model)
    train(model, optimizer, 0, 1)
    with optimizer:
        with pytest.raises(pagoda.CheckpointError, match=r"norm\.weight' was trained.*modules_to_save"):
            export(model, tmp_path / "adapter")
        export(model, tmp_path / "merged", merge=True)
        assert torch.allclose(
            logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(model), atol=1e-5
        )


@pytest.mark.parametrize(
    "config",
    [
        lambda: lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    ],
)
def test_the_trainable_state_dict_has_all_that_peft_saves(config: Any, tmp_path: Path) -> None:
    """All names of a tied parameter, and buffers."""
    model, optimizer = trained(config())
    model.save_pretrained(tmp_path, state_dict=pagoda.trainable_state_dict(model))
    assert torch.equal(logits(peft.PeftModel.from_pretrained(build("llama-tied"), tmp_path)), logits(model))
    optimizer.close()
