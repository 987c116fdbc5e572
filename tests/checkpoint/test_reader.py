"""A checkpoint is read by state and name; what is missing or damaged is found when it is opened."""

import os
from pathlib import Path

import pytest
import torch

from pagoda.checkpoint.directory import write_manifest
from pagoda.checkpoint.reader import BUFFERS, Checkpoint
from pagoda.checkpoint.tensors import TensorSpec, TensorWriter, hash_table
from pagoda.errors import CheckpointError
from pagoda.memory.arena import tensor_bytes
from pagoda.memory.identity import new_checkpoint_id

WEIGHT = {"a": torch.arange(6.0).bfloat16().view(2, 3), "b": torch.ones(4).bfloat16()}
LOW = {"a": torch.arange(6, dtype=torch.int16).view(2, 3)}
TABLE = {"table": torch.tensor([True, False])}


def write(directory: Path, states: list[str] | None = None, low: dict[str, torch.Tensor] = LOW) -> Path:
    """A small checkpoint, with `states` and the tensors of weight_low as given."""
    directory.mkdir()
    hashes = {}
    for state, tensors in (("weight", WEIGHT), ("weight_low", low), (BUFFERS, TABLE)):
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        file = TensorWriter(directory / f"{state}.safetensors", specs)
        for name, tensor in tensors.items():
            file.write(name, 0, tensor_bytes(tensor))
        file.finish()
        hashes[state] = hash_table(specs, [file.pieces])
    states = ["weight", "weight_low"] if states is None else states
    content = {
        "id": new_checkpoint_id(),
        "states": states,
        "parameters": ["a", "b"],
        "hashes": hashes,
        "steps": {"a": 3},
        "param_groups": [],
        "rng": {},
        "rank_rng": [],
        "extra": {},
    }
    write_manifest(directory, content)
    return directory


def test_states_and_buffers_are_read_in_pieces(tmp_path: Path) -> None:
    with Checkpoint(write(tmp_path / "step")) as checkpoint:
        assert checkpoint.states == {"weight": torch.bfloat16, "weight_low": torch.int16}
        assert checkpoint.manifest["steps"] == {"a": 3}
        assert list(checkpoint.specs("weight")) == ["a", "b"]
        assert checkpoint.specs(BUFFERS) == {"table": TensorSpec("table", torch.bool, (2,))}
        assert checkpoint.tensors["weight"]["a"].read(1, 3).tolist() == [1, 2, 3]
        assert checkpoint.tensors["weight_low"]["a"].read(4, 2).tolist() == [4, 5]
        assert checkpoint.tensors[BUFFERS]["table"].read(0, 2).tolist() == [True, False]
        with pytest.raises(IndexError, match=r"elements 5 to 7 of a tensor of shape \[2, 3\]"):
            checkpoint.tensors["weight"]["a"].read(5, 2)


@pytest.mark.parametrize("states", [["../weight"], [1], [BUFFERS], ["weight", ""]])
def test_a_manifest_cannot_name_other_files(states: list[str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'states' is|states\[0\] is 1"):
        Checkpoint(write(tmp_path / "step", states))


def test_a_state_of_several_dtypes_is_refused_and_no_file_stays_open(tmp_path: Path) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=r"its weight_low is \['torch\.bfloat16', 'torch\.int16'\]"):
        Checkpoint(write(tmp_path / "step", low={**LOW, "b": WEIGHT["b"]}))
    assert len(os.listdir("/proc/self/fd")) == opened
