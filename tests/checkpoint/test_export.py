"""What is exported, transformers loads, with the weights and logits of the model that was trained."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import pagoda
from pagoda.checkpoint import export as module
from pagoda.checkpoint.export import INDEX, export
from pagoda.checkpoint.reader import Checkpoint
from pagoda.checkpoint.tensors import TensorFile
from pagoda.cli.main import main
from pagoda.config.training import Precision
from pagoda.runtime.store import Store

from .hf_models import MODELS, build, logits, train, wrapped


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


@pytest.mark.parametrize("place", ["ram", "ssd"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_is_exported_with_equal_logits(name: str, place: str, tmp_path: Path) -> None:
    checkpoint, expected = saved_run(name, place, tmp_path)
    done = export(checkpoint, tmp_path / "out", max_shard_bytes=20_000)
    assert len(done.files) > 1
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert model.dtype is torch.bfloat16
    assert model.config.get_text_config().use_cache is True
    assert torch.equal(logits(model), expected)
    again, optimizer = wrapped(pagoda.load(checkpoint), place, tmp_path)
    assert torch.equal(logits(again), expected), "and so does pagoda.load, of the checkpoint itself"
    optimizer.close()


@pytest.mark.parametrize("name", MODELS)
def test_files_are_those_that_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    checkpoint, _ = saved_run(name, "ram", tmp_path)
    export(checkpoint, tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    fresh = build(name).to(torch.bfloat16)
    fresh.load_state_dict(model.state_dict())
    fresh.save_pretrained(tmp_path / "theirs")
    mine, theirs = stored(tmp_path / "ours"), stored(tmp_path / "theirs")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    configs = [json.loads((tmp_path / who / "config.json").read_text()) for who in ("ours", "theirs")]
    assert configs[0] == {key: value for key, value in configs[1].items() if key != "use_cache"}
    assert (tmp_path / "ours" / "generation_config.json").exists()


def test_the_master_is_exported_exactly(saved: Path, tmp_path: Path) -> None:
    done = export(saved, tmp_path / "out", dtype="fp32")
    assert done.dtype is torch.float32
    assert done.files == ["model.safetensors"]
    assert not (tmp_path / "out" / INDEX).exists()
    tensors = stored(tmp_path / "out")
    assert "lm_head.weight" not in tensors, "tied"
    with Checkpoint(saved) as checkpoint:
        for name, spec in checkpoint.specs("weight").items():
            high = checkpoint.tensor("weight", name).whole().view(torch.int16).int()
            low = checkpoint.tensor("weight_low", name).whole().int()
            assert torch.equal(tensors[name].view(torch.int32), (high << 16) + low)
            assert tensors[name].shape == spec.shape
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype is torch.float32


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.float32), ("bf16", torch.bfloat16)])
def test_a_model_trained_in_fp32_is_exported_in_either(
    dtype: str | None, expected: torch.dtype, tmp_path: Path
) -> None:
    checkpoint, seen = saved_run("gpt2", "ram", tmp_path, "fp32")
    export(checkpoint, tmp_path / "out", dtype=dtype)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype is expected
    if expected is torch.float32:
        assert torch.equal(logits(model), seen)


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


def test_no_piece_is_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts cut apart too: RAM does not follow the size of tensors."""
    checkpoint, _ = saved_run("mixtral", "ram", tmp_path)
    read, most, whole = TensorFile.read, 0, 0
    piece = 512

    def measured(self: TensorFile, name: str, start: int, count: int) -> torch.Tensor:
        nonlocal most, whole
        most, whole = max(most, count), whole + count
        return read(self, name, start, count)

    monkeypatch.setattr(module, "chunks", lambda n: [(at, min(piece, n - at)) for at in range(0, n, piece)])
    monkeypatch.setattr(TensorFile, "read", measured)
    export(checkpoint, tmp_path / "out")
    assert most <= piece
    assert whole == sum(t.numel() for t in stored(tmp_path / "out").values()), "and each element is read once"


def test_a_flipped_bit_is_found_and_nothing_is_left(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "weight.safetensors"
    data = bytearray(weights.read_bytes())
    data[-20] ^= 4
    weights.write_bytes(data)
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


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_a_wrapped_model_is_exported_from_its_pages_as_from_a_checkpoint(
    name: str, dtype: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped(build(name), "ssd", tmp_path, "bf16")
    train(model, optimizer, 0, 2)
    optimizer.save_checkpoint(tmp_path / "step")
    export(tmp_path / "step", tmp_path / "of step", dtype=dtype, max_shard_bytes=20_000)
    read, most = Store.read, 0

    def measured(self: Store, unit: int, state: str, start: int, count: int) -> torch.Tensor:
        nonlocal most
        most = max(most, count)
        return read(self, unit, state, start, count)

    monkeypatch.setattr(module, "chunks", lambda n: [(at, min(512, n - at)) for at in range(0, n, 512)])
    monkeypatch.setattr(Store, "read", measured)
    export(model, tmp_path / "of model", dtype=dtype, max_shard_bytes=20_000)
    assert most == 512, "RAM does not follow the size of tensors"
    files = [{path.name: path.read_bytes() for path in (tmp_path / of).iterdir()} for of in ("of step", "of model")]
    assert files[0] == files[1]
    optimizer.close()


def test_a_disk_without_room_is_refused_and_nothing_left(saved: Path, tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(pagoda.StorageError, match=r"out could not be written: .*File too large.*Free space"):
            export(saved, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("instant", [1, 5])
def test_a_killed_export_leaves_no_directory_and_can_be_run_again(saved: Path, tmp_path: Path, instant: int) -> None:
    """Killed as it syncs the file of that number: weights, index, configurations."""
    out = tmp_path / "out"
    child = os.fork()
    if child == 0:
        fsync, syncs = os.fsync, 0

        def counted(descriptor: int) -> None:
            nonlocal syncs
            if syncs == instant:
                os.kill(os.getpid(), signal.SIGKILL)
            syncs += 1
            fsync(descriptor)

        os.fsync = counted
        export(saved, out, max_shard_bytes=10_000)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not out.exists()
    done = export(saved, out, max_shard_bytes=10_000)
    assert len(done.files) > 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    AutoModelForCausalLM.from_pretrained(out)


def test_the_command_exports_a_checkpoint(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(saved), str(tmp_path / "out"), "--dtype", "fp32", "--max-shard-size", "20KiB"]) == 0
    assert "float32, in" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype is torch.float32
    assert main(["export", str(saved), str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "other")]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
