"""Models in GGUF files: training starts from the values that transformers reads, tensor by tensor."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from zoo import RESIDENT, assert_equal

import pagoda
from pagoda.checkpoint.gguf import gguf_tensors
from pagoda.checkpoint.pretrained import weight_files
from pagoda.errors import CheckpointError, ConfigError
from pagoda.models.build import model_directory
from pagoda.models.gguf import settings_of
from tests.tiny import command

gguf: Any = pytest.importorskip("gguf", reason="pip install 'pagoda-train[gguf]'")
HIDDEN, LAYERS = 64, 2
SIZES = {"vocab_size": 300, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
MODELS: dict[str, tuple[str, Any]] = {
    "llama": ("llama", lambda: transformers.LlamaConfig(**SIZES)),
    "tied": ("llama", lambda: transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True})),
    "qwen2": ("qwen2", lambda: transformers.Qwen2Config(**SIZES)),
    "gemma2": ("gemma2", lambda: transformers.Gemma2Config(**{**SIZES, "tie_word_embeddings": True})),
    "qwen3moe": ("qwen3moe", lambda: transformers.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)),
}
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]


def write(file: Path, name: str, form: str = "F32") -> None:
    """A GGUF file with random values under llama.cpp's names, and a byte-level tokenizer."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    architecture, config = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(config())
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(300)
    if name == "qwen3moe":
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    others = [chr(256 + at) for at in range(256 - len(BYTES))]
    tokens = [*map(chr, BYTES), *others, "ab", *(f"<{at}>" for at in range(43))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 43)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    generator, kind = np.random.default_rng(0), getattr(gguf.GGMLQuantizationType, form)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    names = get_gguf_hf_weights_map(model, TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={}))
    for stored, target in names.items():
        if name in ("tied", "gemma2") and stored == "output.weight":
            continue
        shape = shapes[target]
        if "gate_exps" in stored or "up_exps" in stored:
            shape = (shape[0], shape[1] // 2, shape[2])
        own = stored if stored.endswith(("weight", "bias")) else f"{stored}.weight"
        values = generator.standard_normal(shape).astype(np.float32) * 0.1
        packs = form != "F32" and len(shape) > 1
        writer.add_tensor(own, gguf.quantize(values, kind) if packs else values, raw_dtype=kind if packs else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("name", "form"), [(name, "F32") for name in MODELS] + [("llama", "F16"), ("llama", "Q8_0"), ("qwen3moe", "Q4_0")]
)
def test_training_starts_from_the_values_of_transformers(name: str, form: str, tmp_path: Path) -> None:
    """Query and key are turned, norms shifted, experts joined, and blocks dequantized, as by `from_pretrained`."""
    write(tmp_path / "model.gguf", name, form)
    config = transformers.GgufConfig(dequantize=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, quantization_config=config
    )
    for given in (tmp_path, tmp_path / "model.gguf"):  # a directory with one, or the file
        model = pagoda.load(given)
        assert type(model) is type(plain)
        assert model.config.to_dict().items() >= {"vocab_size": 300, "hidden_size": HIDDEN}.items()
        model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=RESIDENT, precision="fp32")
        assert_equal(model.state_dict(), plain.state_dict())
        optimizer.close()


def test_a_tensor_is_in_memory_only_while_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "llama", "Q8_0")
    with pagoda.deferred_init():
        model = transformers.AutoModelForCausalLM.from_config(MODELS["llama"][1]())
    settings_of(tmp_path / "model.gguf")
    tensors = gguf_tensors(model, tmp_path / "model.gguf")
    largest = max(tensor.nbytes for tensor in tensors.values())
    total = sum(tensor.nbytes for tensor in tensors.values())
    tracemalloc.start()
    try:
        for tensor in tensors.values():
            tensor.whole()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * largest < total


def test_the_command_trains_and_generates_from_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokenizer too is in the file; the run keeps a copy that transformers reads."""
    write(tmp_path / "model.gguf", "llama", "Q8_0")
    (tmp_path / "text.txt").write_text("a line of text\n" * 200)
    run = tmp_path / "run"
    model, small = f"--model {tmp_path / 'model.gguf'} --max-length 16", "--memory.host 64MiB"
    sizes = f"--per-device-train-batch-size 1 --max-steps 2 {small} --precision fp32 --plan usual"
    assert command(f"train {model} --data {tmp_path / 'text.txt'} --output-dir {run} {sizes}") == 0
    assert "Weights: " in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "tokenizer")
    whole = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert tokenizer("a line")["input_ids"] == whole("a line")["input_ids"]
    assert command(f"generate {tmp_path} --prompt a --max-new-tokens 2 {small}") == 0
    assert command(f"plan {model} --json --hardware h100") == 0


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", "llama")
    good = (tmp_path / "a.gguf").read_bytes()
    for name, content, told in (
        ("b.gguf", b"GGUF", r"b\.gguf cannot be read as a GGUF file"),
        ("c.gguf", good.replace(b"llama", b"other"), "GGUF model with architecture other is not supported"),
        ("d-00001-of-00002.gguf", good, "llama-gguf-split --merge"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=told):
            pagoda.load(tmp_path / name)
        (tmp_path / name).unlink()
    (tmp_path / "e.gguf").write_bytes(good)
    with pytest.raises(ConfigError, match=r"has 2 GGUF files, a\.gguf and others: name one"):
        model_directory(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"its weights in a\.gguf: name that file"):  # and not random ones
        weight_files(tmp_path)
    (tmp_path / "e.gguf").write_bytes(good[: -len(good) // 4])
    with pytest.raises((ConfigError, CheckpointError), match=r"e\.gguf"):
        pagoda.wrap(pagoda.load(tmp_path / "e.gguf"), pagoda.AdamW(), memory=RESIDENT)
