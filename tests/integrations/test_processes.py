"""Integrations in processes of their own: on ranks, killed, and beyond the memory that they are given."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from integrations.programs import HOST_BYTES

TESTS = Path(__file__).parents[1]


def start(name: str, out: Path, *words: str, ranks: int = 1) -> Any:
    """What a program of `integrations.programs` returned on rank 0, or the number of the signal that ended it."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *torchrun, "integrations.programs", name, str(out), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode < 0:
        return -done.returncode
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "result.json").read_text())


def test_on_two_ranks_it_is_the_stock_trainer_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    found = start("trainers_of_ranks", tmp_path, ranks=2)
    assert found["paged"] == found["stock"]
    assert found["paged norms"] == pytest.approx(found["stock norms"], rel=1e-6)
    assert found["resumed"] == found["paged"]
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.dtype is torch.float32


@pytest.mark.slow
def test_accelerate_on_two_ranks_is_the_stock_one_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    found = start("accelerate_on_ranks", tmp_path, ranks=2)
    assert found["paged"][::2] == found["stock"][::2]
    assert found["paged"][1::2] == pytest.approx(found["stock"][1::2], rel=1e-6)
    assert found["loaded"] == found["paged"][4:]


@pytest.mark.slow
def test_lightning_on_two_ranks_is_the_stock_one_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "ssd").mkdir()
    found = start("lightning_on_ranks", tmp_path, ranks=2)
    assert found["paged"] == found["stock"]
    assert len(found["resumed"]) == 2
    assert found["resumed"][0] < found["paged"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO", "Accelerate", "Lightning", "Fabric"])
def test_a_killed_run_goes_on_as_one_that_was_not(kind: str, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = start("killed", tmp_path / "whole", kind)
    assert start("killed", tmp_path / "killed", kind, "kill") == signal.SIGKILL
    resumed = start("killed", tmp_path / "killed", kind, "resume")
    assert resumed == whole[-len(resumed) :]
    assert len(resumed) in (len(whole) - 2, len(whole) - 4, len(whole))


@pytest.mark.slow
def test_beyond_memory_it_takes_what_it_is_given_and_resumes_once_killed(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = start("beyond_memory", tmp_path / "whole")
    assert whole["state"] > 8 * HOST_BYTES
    assert whole["grown"] < HOST_BYTES + (32 << 20), "pages; gradients on their way, activations, pieces of files"
    assert start("beyond_memory", tmp_path / "killed", "kill") == signal.SIGKILL
    resumed = start("beyond_memory", tmp_path / "killed", "resume")
    assert resumed["losses"] == whole["losses"]
    files = [(tmp_path / name / "saved" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]
