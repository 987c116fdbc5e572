"""A manifest with any of its fields forged is one clear error, or harmless: never a crash, a hang or another file."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_once
from torch import nn

import pagoda
from pagoda.checkpoint.directory import write_manifest
from pagoda.checkpoint.reader import SavedCheckpoint
from pagoda.cli.main import main
from pagoda.errors import CheckpointError, PagodaError
from pagoda.memory.identity import MANIFEST
from tests.memory.ssd_parts import make_directory

FORGED = (None, True, -1, 2**70, 1.5, float("inf"), "", "../x", "/etc/passwd\0", [], {}, [[]], [{}], {"x": {}})
"""Put in the place of every value."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))


def wrapped(ssd: Path) -> tuple[nn.Module, Any]:
    """On SSD as far as that goes, with weights that lag."""

    def wrap(**memory: Any) -> tuple[nn.Module, Any]:
        pages = pagoda.Memory(ssd=str(ssd), unit_limit=8192, page_size=4096, **memory)
        return pagoda.wrap(model(), pagoda.AdamW(lr=1e-3), memory=pages, precision="fp32", update="async")

    with pytest.raises(pagoda.BudgetError) as refused:
        wrap(host=4096)
    return wrap(host=refused.value.needed_bytes, ssd_checkpoints=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with pages on SSD, of a run that has ended."""
    root = tmp_path_factory.mktemp("forged")
    net, optimizer = wrapped(make_directory(root / "ssd"))
    net(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.save_checkpoint(root / "step-1", {"note": [1]})
    optimizer.close()
    return root / "step-1"


def said(checkpoint: Path) -> dict[str, Any]:
    content = json.loads((checkpoint / MANIFEST).read_text())
    return {key: value for key, value in content.items() if key not in ("format", "version", "hash")}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a manifest; of lists only to the first one."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def forged(content: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    content = copy.deepcopy(content)
    at: Any = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return content


@pytest.mark.parametrize("each", [len(FORGED), pytest.param(1, marks=pytest.mark.slow)])
def test_a_checkpoint_with_any_field_forged_is_read_or_refused(each: int, saved: Path, tmp_path: Path) -> None:
    """One of the values at each place, another at the next one; all of them in the nightly run."""
    content, tried, refused = said(saved), 0, 0
    assert "paged" in content
    assert "late" in content
    _, optimizer = wrapped(make_directory(tmp_path / "ssd"))
    try:
        for number, path in enumerate(places(content)):
            for value in FORGED[number % each :: each]:
                case = tmp_path / "case"
                shutil.copytree(saved, case)
                write_manifest(case, forged(content, path, value))
                tried += 1
                try:
                    optimizer.load_checkpoint(case)
                except PagodaError:
                    refused += 1
                assert main(["inspect", str(case), "--verify"]) in (0, 1, 2)
                shutil.rmtree(case)
        optimizer.load_checkpoint(saved)
    finally:
        optimizer.close()
    assert tried > 800 // each
    assert refused > tried // 2


def test_parts_of_the_pages_that_contradict_each_other_are_refused(saved: Path, tmp_path: Path) -> None:
    content = said(saved)
    unit = ("paged", "ranks", 0, "units", 0)
    state, run = next(iter(content["paged"]["ranks"][0]["units"][0]["extents"].items()))
    cases: list[tuple[tuple[Any, ...], Any]] = [
        ((*unit, "layout"), 1000),
        ((*unit, "extents", state), [run[0] + 10**6, run[1]]),
        ((*unit, "spans", state), [[8, 4, 0]]),
        ((*unit, "spans"), {}),
        (("paged", "layouts", 0, "parameters", 0, 2), [10**9, 10**9]),
        (("paged", "dtypes", state), "F17"),
        (("tiles",), {"0.weight": {"shape": [32, 32], "parts": []}}),
        (("tiles",), {"x": {"shape": [32, 32], "parts": ["0.weight", "no such"]}}),
        (("shards",), {"x": {"shape": [32, 32], "dim": 5, "parts": ["0.weight"]}}),
        (("shards",), {"x": {"shape": [32, 31], "dim": 1, "parts": ["0.weight", "2.weight"]}}),
        (("shards",), {"x": {"shape": [4, 32], "dim": 0, "parts": ["0.weight", "2.weight"]}}),
        (("hashes", "buffers", "1.running_mean"), [[5, "0" * 16], [3, "0" * 16]]),
        (("states",), ["weight", "weight"]),
        (("states",), ["../weight"]),
        (("states",), ["buffers"]),
        (("states",), ["weight", ""]),
    ]
    for path, value in cases:
        case = tmp_path / "case"
        shutil.copytree(saved, case)
        write_manifest(case, forged(content, path, value))
        assert main(["inspect", str(case), "--verify"]) == 1, f"{path}: {value}"
        shutil.rmtree(case)


@each_once(file=[MANIFEST, "weight.safetensors", "buffers.safetensors"], kind=["pipe", "directory", "socket"])
def test_what_is_no_file_is_an_error_and_does_not_hang(file: str, kind: str, saved: Path, tmp_path: Path) -> None:
    case = tmp_path / "step"
    shutil.copytree(saved, case)
    (case / file).unlink()
    if kind == "pipe":
        os.mkfifo(case / file)
    elif kind == "directory":
        (case / file).mkdir()
    else:
        os.mknod(case / file, 0o600 | 0o140000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        SavedCheckpoint(case)
    assert main(["inspect", str(case)]) == 1


@pytest.mark.slow
def test_a_forged_record_of_the_model_is_one_error_of_export(saved: Path, tmp_path: Path) -> None:
    llama: dict[str, Any] = {"class": "LlamaForCausalLM", "config": {"model_type": "llama"}}
    records = [
        *(record for record in FORGED if record is not None),  # that is a model without a record
        {"class": 1},
        {**llama, "config": []},
        {**llama, "config": {"model_type": []}},
        {**llama, "class": 3},
    ]
    for record in (*records, llama, {**llama, "adapter": {"peft_type": "x"}}, {**llama, "adapter": []}):
        case = tmp_path / "case"
        shutil.copytree(saved, case)
        write_manifest(case, {**said(saved), "model": record})
        assert main(["export", str(case), str(tmp_path / "out")]) == 2, record
        assert not (tmp_path / "out").exists()
        shutil.rmtree(case)
