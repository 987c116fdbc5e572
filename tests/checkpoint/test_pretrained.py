"""A directory that `save_pretrained` wrote is trained from as `from_pretrained` would, streamed to its tier."""

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from pairwise import each_once
from transformers import AutoModelForCausalLM, LlamaModel, T5ForConditionalGeneration
from zoo import t5

import pagoda
from pagoda.checkpoint import pretrained, state
from pagoda.checkpoint.pretrained import INDEX, SINGLE
from pagoda.checkpoint.tensors import TensorFile
from pagoda.checkpoint.waiting import is_waiting
from tests.tiny import command

from .hf_models import build, ids, train, wrapped


def saved(name: str, root: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB") -> Path:
    """A directory with a model of random weights."""
    build(name, seed=5).to(dtype).save_pretrained(root / "hf", max_shard_size=max_shard_size)
    return root / "hf"


def first_loss(directory: Path, dtype: torch.dtype) -> float:
    """Of plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).train()
    loss: torch.Tensor = model(input_ids=ids(), labels=ids()).loss
    return loss.item()


@each_once(name=["llama-untied", "gpt2", "mixtral"], max_shard_size=["1GB", "20KB"], place=["ram", "ssd"])
def test_training_starts_where_transformers_does(name: str, max_shard_size: str, place: str, tmp_path: Path) -> None:
    directory = saved(name, tmp_path, torch.bfloat16, max_shard_size)
    assert (directory / INDEX).exists() == (max_shard_size == "20KB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = pagoda.load(directory)
    assert any(is_waiting(param) for param in loaded.parameters()), "not in RAM yet"
    model, optimizer = wrapped(loaded, place, tmp_path)
    losses = train(model, optimizer, 0, 2)
    optimizer.close()
    assert losses[0] == first_loss(directory, torch.bfloat16)
    assert losses[1] != losses[0]


@each_once(dtype=[torch.float32, torch.float16, torch.bfloat16], precision=["bf16", "fp32"])
def test_the_master_is_what_the_files_say(dtype: torch.dtype, precision: str, tmp_path: Path) -> None:
    directory = saved("mixtral", tmp_path, dtype, "20KB")
    model, optimizer = wrapped(pagoda.load(directory), "ssd", tmp_path, precision)
    masters = pagoda.ModelState(model).state_dict()
    optimizer.close()
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected = dict(plain.named_parameters())
    assert masters.keys() == expected.keys()
    assert all(torch.equal(masters[key], expected[key]) for key in masters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_each_parameter_has_the_dtype_that_transformers_gives_it(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """T5 keeps `wo` in fp32 in a model in fp16."""
    for stored in (torch.float16, torch.bfloat16):
        t5(2).to(stored).save_pretrained(tmp_path / "t5")
        expected = T5ForConditionalGeneration.from_pretrained(tmp_path / "t5", dtype="auto" if dtype is None else dtype)
        loaded = pagoda.load(tmp_path / "t5", dtype=dtype)
        found = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
        assert found == {name: tensor.dtype for name, tensor in expected.state_dict().items()}
        assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_no_piece_is_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged experts are never in RAM as a whole, nor is any other large tensor."""
    directory = saved("mixtral", tmp_path)
    read, piece, counts = TensorFile.read, 512, list[int]()

    def measured(self: TensorFile, name: str, start: int, count: int) -> torch.Tensor:
        counts.append(count)
        return read(self, name, start, count)

    for module in (pretrained, state):
        monkeypatch.setattr(module, "chunks", lambda n: [(at, min(piece, n - at)) for at in range(0, n, piece)])
    monkeypatch.setattr(TensorFile, "read", measured)
    model, optimizer = wrapped(pagoda.load(directory), "ssd", tmp_path)
    optimizer.close()
    assert max(counts) <= piece
    assert sum(counts) == sum(param.numel() for param in model.parameters())


def test_a_class_may_be_given(tmp_path: Path) -> None:
    directory = saved("llama-untied", tmp_path)
    with pytest.warns(UserWarning, match=r"does not use 'lm_head\.weight' from the files"):
        model = pagoda.load(directory, model_class=LlamaModel)
    assert type(model) is LlamaModel
    assert {name for name, param in model.named_parameters() if is_waiting(param) and "weight" in name}


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Add, replace or (None) remove tensors of a single-file model; `__` in a keyword stands for a dot."""
    found = safetensors.torch.load_file(directory / SINGLE)
    for key, value in tensors.items():
        name = key.replace("__", ".")
        if value is None:
            del found[name]
        else:
            found[name] = value
    safetensors.torch.save_file(found, directory / SINGLE, {"format": "pt"})


def test_missing_and_unexpected_tensors_are_warned_of(tmp_path: Path) -> None:
    directory = saved("llama-untied", tmp_path)
    change(directory, lm_head__weight=None, model__norm__weight=None, extra=torch.zeros(2))
    with pytest.warns(UserWarning, match=r"lack 'lm_head\.weight', 'model\.norm\.weight'.*|not use 'extra'") as seen:
        loaded = pagoda.load(directory)
    assert len(seen) == 2
    model, optimizer = wrapped(loaded, "ram", tmp_path)
    state = model.state_dict()
    assert state["model.norm.weight"].eq(1).all()
    assert 0.01 < state["lm_head.weight"].float().std() < 0.03, "initialised"
    assert torch.equal(state["model.embed_tokens.weight"], build("llama-untied", 5).state_dict()[
        "model.embed_tokens.weight"].bfloat16())  # fmt: skip
    optimizer.close()


def test_a_tied_weight_may_be_stored_under_either_name_or_both(tmp_path: Path) -> None:
    directory = saved("llama-tied", tmp_path)
    expected = first_loss(directory, torch.bfloat16)
    embedding = safetensors.torch.load_file(directory / SINGLE)["model.embed_tokens.weight"]
    for tensors in ({"lm_head__weight": embedding}, {"model__embed_tokens__weight": None}):
        change(directory, **tensors)
        model, optimizer = wrapped(pagoda.load(directory), "ram", tmp_path)
        assert abs(train(model, optimizer, 0, 1)[0] - expected) < 0.02
        optimizer.close()
    change(directory, model__embed_tokens__weight=embedding + 1)
    with pytest.raises(pagoda.ConfigError, match=r"different values for .*set tie_word_embeddings to false"):
        pagoda.load(directory)


def test_tensors_that_fit_neither_the_model_nor_each_other_are_refused(tmp_path: Path) -> None:
    directory = saved("llama-tied", tmp_path)
    change(directory, model__norm__weight=torch.ones(31))
    with pytest.raises(pagoda.ConfigError, match=r"'model\.norm\.weight' is \[31\] in the files and \[32\] in the"):
        pagoda.load(directory)
    directory = saved("mixtral", tmp_path)
    found = safetensors.torch.load_file(directory / SINGLE)
    name = next(name for name in found if name.endswith("experts.2.w1.weight"))
    change(directory, **{name: torch.ones(7, 32)})
    with pytest.raises(pagoda.CheckpointError, match=r"\[1, 7, 32\] cannot be joined"):
        pagoda.load(directory)


def test_odd_settings_of_a_directory_are_refused_by_name(tmp_path: Path) -> None:
    directory = saved("llama-tied", tmp_path)
    config, generation = directory / "config.json", directory / "generation_config.json"
    whole = json.loads(config.read_text())
    for odd in (3, "LlamaForCausalLM", [None], [["a"]], {"a": 1}, ["AutoConfig"], ["pipeline"]):
        config.write_text(json.dumps({**whole, "architectures": odd}))
        with pytest.raises(pagoda.ConfigError, match=r"hf.*architectures"):
            pagoda.load(directory)
    config.write_text(json.dumps(whole))
    for text in ("[]", "3", "{", '{"compile_config": 3}', "[" * 99_999):
        generation.write_text(text)
        with pytest.raises(pagoda.ConfigError, match=r"generation_config.json cannot be read: .*move it away"):
            pagoda.load(directory)
    generation.unlink()
    pagoda.load(directory)


def test_directories_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    directory = saved("llama-tied", tmp_path)
    weights = directory / SINGLE
    cut = weights.read_bytes()[:-10]
    weights.write_bytes(cut)
    with pytest.raises(pagoda.CheckpointError, match=r"model\.safetensors is truncated or damaged"):
        pagoda.load(directory)
    weights.unlink()
    with pytest.raises(pagoda.ConfigError, match="hf has no weights"):
        pagoda.load(directory)
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(pagoda.ConfigError, match=r"pytorch_model\.bin, but only safetensors.*save_pretrained"):
        pagoda.load(directory)
    outside, nul = '{"weight_map": {"a": "../other.safetensors"}}', '{"weight_map": {"a": "\\u0000"}}'
    for index in ("{", "[]", '{"weight_map": {}}', outside, nul, "[" * 99_999 + "]" * 99_999):
        (directory / INDEX).write_text(index)
        with pytest.raises(pagoda.ConfigError, match=re.escape(INDEX)):
            pagoda.load(directory)
    (directory / INDEX).unlink()
    safetensors.torch.save_file({"something": torch.zeros(2)}, weights)
    with pytest.raises(pagoda.ConfigError, match="no weights for a LlamaForCausalLM: its files have 'something'"):
        pagoda.load(directory)
    for dtype in torch.float8_e4m3fn, torch.int8:
        safetensors.torch.save_file({"lm_head.weight": torch.zeros(2).to(dtype)}, weights)
        with pytest.raises(pagoda.ConfigError, match=rf"'lm_head.weight' as {dtype}; weights must be"):
            pagoda.load(directory)
    (directory / "config.json").unlink()
    with pytest.raises(pagoda.ConfigError, match=r"with a Hugging Face config\.json"):
        pagoda.load(directory)


def test_the_command_trains_from_weights_or_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("pages of a book " * 200)
    model = build("llama-tied", seed=5)
    model.resize_token_embeddings(256, mean_resizing=False)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "alone")
    train = f"train --data {tmp_path / 'text.txt'} --per-device-train-batch-size 2 --max-length 16 --memory.host 8MiB"

    def said(model: str, flags: str) -> str:
        run = f"--model {tmp_path / model} --output-dir {tmp_path / 'run-of'}-{model}"
        assert command(f"{train} --plan usual {run} {flags}") == 0
        return capsys.readouterr().out

    assert re.search(r"Weights: .*hf, .* KiB in \d+ files", said("hf", "--max-steps 1"))
    assert "Weights" not in said("hf", "--max-steps 2 --resume-from-checkpoint last")
    assert "Weights: random, seed 0" in said("alone", "--max-steps 1")
