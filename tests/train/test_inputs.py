"""A run says whether a model keeps the documents of a sequence apart, and is right."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

import pagoda
from pagoda.errors import ConfigError
from pagoda.mesh.mesh import open_mesh
from pagoda.train.data import Batches, Rows
from pagoda.train.inputs import example, keep_apart
from pagoda.train.tokenizer import Tokenizer
from pagoda.train.tokens import open_tokens
from tests.text_files import CHATML, chats, tokenizer, write_lines
from tests.train.test_data import tokens_of


def test_an_example_shows_what_the_loss_counts_in_the_first_document_alone(tmp_path: Path) -> None:
    tokenizer(CHATML).save_pretrained(tmp_path)
    own = Tokenizer(tmp_path)
    data = write_lines(tmp_path / "a.jsonl", [{"messages": chat} for chat in chats(3)[1:]])
    rows = Rows.of(open_tokens(str(data), own, tmp_path / "cache"), 512)
    first, *shown = example(rows, own)
    assert "between « and »" in first
    assert shown[-3:] == ["<|im_start|>assistant", "«It is 2, as anyone can count.<|im_end|>", "»"]
    assert "\n".join(shown).count("«") == 2


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}
EXPERTS = {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {
    "num_experts": 2,
    "mamba_d_state": 4,
    "use_mamba_kernels": False,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
KV = {"num_key_value_heads": 2}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({"intermediate_size": 64}, "attention ends where a document does"),
    "mixtral": (EXPERTS, "attention ends where a document does"),
    "gpt_oss": ({**EXPERTS, "head_dim": 8}, "reads earlier documents"),
    "opt": ({"ffn_dim": 64, "word_embed_proj_dim": 32}, "reads earlier documents"),
    "jamba": ({"num_key_value_heads": 2, **MAMBA}, "reads earlier documents"),
    "bert": ({"intermediate_size": 64, "is_decoder": False}, "reads earlier documents"),
    "bloom": ({}, "takes no position_ids"),
}


def said_of(model: Any, rows: Rows, precision: str) -> tuple[str, Batches, Batches | None]:
    """The message, and the batches to train and to evaluate on."""
    positions = model.config.model_type != "bloom"
    batches = Batches(rows=rows, batch_size=2, positions=positions)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = model.eval().to(dtype)

    def logits(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(**batch).logits.float()
        return found

    config = SimpleNamespace(precision=precision, memory=pagoda.Memory())
    passes: Any = SimpleNamespace(config=config, model=model, logits=logits)
    shown = io.StringIO()
    kept = keep_apart(passes, batches, batches, open_mesh(), Console(file=shown, width=200))
    return shown.getvalue(), *kept


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_documents_stay_apart_where_the_run_says_so(kind: str, precision: str) -> None:
    more, message = MODELS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **more}))
    for length in (2, 24):
        rows = Rows.of(tokens_of(np.arange(2 * length) % 60 + 1, ends=[*range(2, 2 * length + 1, 2)]), length)
        said, batches, evaluated = said_of(model, rows, precision)
        assert message in said
        assert evaluated is not None
        assert batches.positions == evaluated.positions == ("attention ends" in said)
    untold = Rows.of(tokens_of(range(48)), 24)  # documents of bytes, which nothing separates
    assert said_of(model, untold, precision)[0] == ""


@pytest.mark.parametrize("kind", ["mistral", "llama"])
def test_a_mask_of_a_long_row_is_refused_if_there_is_no_memory_for_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, why = {"mistral": ({"sliding_window": 8, **KV}, "a window of 8"), "llama": ({}, "is 'eager'")}[kind]
    monkeypatch.setattr("pagoda.train.inputs.free_ram", lambda: 5 * 2 * 20**2)
    monkeypatch.setattr("pagoda.train.inputs.SHORT_TOKENS", 4)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **MODELS["llama"][0], **more}))
    rows = Rows.of(tokens_of(np.arange(96) % 60 + 1, ends=[*range(6, 97, 6)]), 24)
    if kind == "llama":
        model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match=f"--max-length 24 needs .* a mask .*{why}.* Use --max-length 20 or less"):
        said_of(model, rows, "fp32")


def test_documents_of_a_long_row_stay_apart_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.train.inputs.SHORT_TOKENS", 4)
    monkeypatch.setattr("pagoda.prepare.documents.SHORT_TOKENS", 4)
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**SIZES, **MODELS["llama"][0]}))
    rows = Rows.of(tokens_of(np.arange(96) % 60 + 1, ends=[*range(6, 97, 6)]), 24)
    assert "attention ends where a document does" in said_of(model, rows, "fp32")[0]
    assert "_attn_implementation" not in model.config.to_dict()
