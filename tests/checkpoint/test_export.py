"""What is exported, transformers loads, with the weights and logits of the model that was trained."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from files import flip
from torch import nn
from transformers import AutoModelForCausalLM, Mamba2Config

import pagoda
from pagoda.checkpoint import export as module
from pagoda.checkpoint.export import INDEX, export
from pagoda.checkpoint.reader import SavedCheckpoint
from pagoda.checkpoint.tensors import TensorFile
from pagoda.cli.main import main
from pagoda.config.training import Precision
from pagoda.runtime.store import Store

from .hf_models import build, logits, train, wrapped


def saved_run(name: str, place: str, root: Path, precision: str = "bf16") -> tuple[Path, torch.Tensor]:
    """A checkpoint of a model after two steps, and its logits."""
    model, optimizer = wrapped(build(name), place, root, precision)
    train(model, optimizer, 0, 2)
    optimizer.save_checkpoint(root / "step")
    seen = logits(model)
    optimizer.close()
    return root / "step", seen


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tied Llama."""
    return saved_run("llama-tied", "ram", tmp_path_factory.mktemp("saved"))[0]


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the files, by the safetensors library."""
    return {
        name: t for path in directory.glob("*.safetensors") for name, t in safetensors.torch.load_file(path).items()
    }


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("llama-tied", "ssd"),
        ("gpt2", "ram"),
        ("qwen3-moe", "ssd"),
        pytest.param("llama-untied", "ram", marks=pytest.mark.slow),
        pytest.param("mixtral", "ssd", marks=pytest.mark.slow),
    ],
)
def test_an_export_is_what_save_pretrained_writes_of_a_checkpoint_or_of_pages_and_has_equal_logits(
    name: str, place: str, tmp_path: Path
) -> None:
    model, optimizer = wrapped(build(name), place, tmp_path)
    train(model, optimizer, 0, 2)
    optimizer.save_checkpoint(tmp_path / "step")
    dtypes: tuple[Precision, ...] = ("fp32", "bf16")
    for dtype in dtypes:
        for source, out in ((tmp_path / "step", "of step"), (model, "of model")):
            done = export(source, tmp_path / dtype / out, dtype=dtype, max_shard_bytes=20_000)
            assert len(done.files) > 1
        files = [{path.name: path.read_bytes() for path in out.iterdir()} for out in (tmp_path / dtype).iterdir()]
        assert files[0] == files[1]
    expected = logits(model)
    optimizer.close()
    exported, info = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16" / "of step", output_loading_info=True)
    assert not any(info.values())
    assert exported.dtype is torch.bfloat16
    assert exported.config.get_text_config().use_cache is True
    assert torch.equal(logits(exported), expected)
    again, optimizer = wrapped(pagoda.load(tmp_path / "step"), place, tmp_path)
    assert torch.equal(logits(again), expected), "and so does pagoda.load, of the checkpoint itself"
    optimizer.close()
    fresh = build(name).to(torch.bfloat16)
    fresh.load_state_dict(exported.state_dict())
    fresh.save_pretrained(tmp_path / "theirs")
    mine, theirs = stored(tmp_path / "bf16" / "of step"), stored(tmp_path / "theirs")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    configs = [json.loads((tmp_path / who / "config.json").read_text()) for who in ("bf16/of step", "theirs")]
    assert configs[0] == {**configs[1], "use_cache": True}, "training turned it off"
    assert (tmp_path / "bf16" / "of step" / "generation_config.json").exists()


def test_the_master_is_exported_exactly(saved: Path, tmp_path: Path) -> None:
    done = export(saved, tmp_path / "out", dtype="fp32")
    assert done.dtype is torch.float32
    assert done.files == ["model.safetensors"]
    assert not (tmp_path / "out" / INDEX).exists()
    tensors = stored(tmp_path / "out")
    assert "lm_head.weight" not in tensors, "tied"
    with SavedCheckpoint(saved) as checkpoint:
        for name, spec in checkpoint.specs("weight").items():
            high = checkpoint.tensors["weight"][name].whole().view(torch.int16).int()
            low = checkpoint.tensors["weight_low"][name].whole().int()
            assert torch.equal(tensors[name].view(torch.int32), (high << 16) + low)
            assert tensors[name].shape == spec.shape
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype is torch.float32


def test_a_model_trained_in_fp32_is_exported_in_either(tmp_path: Path) -> None:
    checkpoint, seen = saved_run("gpt2", "ram", tmp_path, "fp32")
    export(checkpoint, tmp_path / "fp32")
    export(checkpoint, tmp_path / "bf16", dtype="bf16")
    with pytest.raises(pagoda.ConfigError, match="dtype is 'fp16'; use one of bf16, fp32"):
        export(checkpoint, tmp_path / "fp16", dtype="fp16")
    whole, half = (AutoModelForCausalLM.from_pretrained(tmp_path / dtype) for dtype in ("fp32", "bf16"))
    assert (whole.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(logits(whole), seen)


def test_shards_stay_below_the_limit_and_the_index_lists_them(saved: Path, tmp_path: Path) -> None:
    limit = 10_000
    done = export(saved, tmp_path / "out", max_shard_bytes=limit)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert sorted(set(index["weight_map"].values())) == done.files
    assert index["metadata"]["total_size"] == done.nbytes
    for number, file in enumerate(done.files, 1):
        assert file == f"model-{number:05d}-of-{len(done.files):05d}.safetensors"
        tensors = safetensors.torch.load_file(tmp_path / "out" / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == tensors.keys()
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit


@pytest.mark.parametrize(("source", "place"), [("checkpoint", "ram"), ("model", "ssd")])
def test_no_piece_is_larger_than_a_chunk(
    source: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With experts cut apart too: RAM does not follow the size of tensors."""
    model, optimizer = wrapped(build("mixtral"), place, tmp_path)
    optimizer.save_checkpoint(tmp_path / "step")
    reader = TensorFile if source == "checkpoint" else Store
    read, counts, piece = reader.read, list[int](), 512

    def measured(*args: Any) -> torch.Tensor:
        counts.append(args[-1])
        return read(*args)

    monkeypatch.setattr(module, "chunks", lambda n: [(at, min(piece, n - at)) for at in range(0, n, piece)])
    monkeypatch.setattr(reader, "read", measured)
    export(tmp_path / "step" if source == "checkpoint" else model, tmp_path / "out")
    optimizer.close()
    assert max(counts) == piece
    assert sum(counts) == sum(t.numel() for t in stored(tmp_path / "out").values()), "and each element is read once"


def test_a_flipped_bit_is_found_and_nothing_is_left(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "damaged")
    flip(tmp_path / "damaged" / "weight.safetensors", -20)
    with pytest.raises(pagoda.CheckpointError, match=r"weight\.safetensors is damaged"):
        export(tmp_path / "damaged", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_a_model_that_is_not_of_transformers_has_its_own_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    _, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=pagoda.Memory(host="8MiB"), precision="fp32")
    optimizer.save_checkpoint(tmp_path / "step")
    for source, out in ((tmp_path / "step", tmp_path / "of step"), (model, tmp_path / "of model")):
        export(source, out)
        assert [path.name for path in out.iterdir()] == ["model.safetensors"]
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in stored(out).items())
        assert stored(out).keys() == model.state_dict().keys()
    optimizer.close()


def test_a_model_whose_config_has_infinity_is_exported(tmp_path: Path) -> None:
    config = Mamba2Config(vocab_size=32, hidden_size=16, num_heads=4, head_dim=8, n_groups=1, num_hidden_layers=1)
    assert math.inf in config.time_step_limit
    model, optimizer = pagoda.wrap(AutoModelForCausalLM.from_config(config), pagoda.AdamW(), precision="fp32")
    with optimizer:
        export(model, tmp_path / "out")
        expected = model.state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tuple(found.config.time_step_limit) == config.time_step_limit
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())


def exports(model: nn.Module, optimizer: Any, root: Path) -> dict[str, torch.Tensor]:
    """The logits of what is exported from the model and from its checkpoint, loaded by transformers and by Pagoda."""
    optimizer.save_checkpoint(root / "step")
    found = {}
    for name, source in (("pages", model), ("checkpoint", root / "step")):
        export(source, root / name)
        found[f"{name}, transformers"] = logits(AutoModelForCausalLM.from_pretrained(root / name))
        found[f"{name}, pagoda"] = logits(in_ram(pagoda.load(root / name))[0])
    found["resumed"] = logits(in_ram(pagoda.load(root / "step"))[0])
    return found


def in_ram(model: nn.Module) -> Any:
    memory = pagoda.Memory(host="256MiB", unit_limit="16KiB", page_size=4096)
    return pagoda.wrap(model, pagoda.AdamW(lr=1e-2), memory=memory, precision="fp32")


@pytest.mark.parametrize("config_says", ["tied", "untied"])
def test_a_head_is_exported_as_it_is_whatever_the_config_says(config_says: str, tmp_path: Path) -> None:
    model: Any = build(f"llama-{config_says}")
    if config_says == "tied":
        model.lm_head = nn.Linear(32, 96, bias=False)
    else:
        model.lm_head.weight = model.model.embed_tokens.weight
    model, optimizer = in_ram(model)
    train(model, optimizer, 0, 1)
    expected = logits(model)
    for door, found in exports(model, optimizer, tmp_path).items():
        assert torch.equal(found, expected), door
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "pages").config.tie_word_embeddings is False
    optimizer.close()


def test_what_a_model_built_from_the_config_would_lack_is_not_dropped(tmp_path: Path) -> None:
    """By the config, the added layer could not be loaded again, so only its own names have it."""
    peft = pytest.importorskip("peft")
    with_adapter, with_head, with_layer = (build("llama-tied") for _ in range(3))
    with_adapter.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    with_head.value = nn.Linear(32, 1)
    with_layer.lm_head = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 96))
    for changed, message in (
        (with_adapter, "as by add_adapter"), (with_head, r"'value\.bias'.*own_names"), (with_layer, "lm_head"),
    ):  # fmt: skip
        model, optimizer = in_ram(changed)
        with optimizer:
            optimizer.save_checkpoint(tmp_path / "step")
            for source in (model, tmp_path / "step"):
                with pytest.raises(pagoda.CheckpointError, match=message):
                    export(source, tmp_path / "out")
            export(model, tmp_path / "own", own_names=True)
            assert stored(tmp_path / "own").keys() == {name for name, _ in model.named_parameters()}
        shutil.rmtree(tmp_path / "step")
        shutil.rmtree(tmp_path / "own")


def test_the_command_exports_a_checkpoint(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(saved), str(tmp_path / "out"), "--dtype", "fp32", "--max-shard-size", "20KiB"]) == 0
    assert "float32, in" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype is torch.float32
    for out in (tmp_path / "out", "."):
        assert main(["export", str(saved), str(out)]) == 2
        assert "exists already" in capsys.readouterr().err
