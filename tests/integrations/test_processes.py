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
from forked import end_with_parent
from ranks.ranks import ROOT, RankServer

from integrations.programs import HOST_BYTES, KILL, RESUME

PROGRAMS = "integrations.programs"
pytestmark = pytest.mark.slow
UNDER_TORCHRUN = """
import json, os, sys
from pathlib import Path
from integrations.programs import lightning_on_ranks

found = lightning_on_ranks(Path(sys.argv[1]))
if os.environ["RANK"] == "0":
    Path(sys.argv[1], "result.json").write_text(json.dumps(found))
"""


def on_two_ranks(ranks: RankServer, program: str, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = ranks.run(f"{PROGRAMS}:{program}", 2, out)[0]
    return found


def test_on_two_ranks_it_is_the_stock_trainer_on_two_ranks(ranks: RankServer, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    found = on_two_ranks(ranks, "trainers_of_ranks", tmp_path)
    assert found["paged"] == found["stock"]
    assert found["paged norms"] == pytest.approx(found["stock norms"], rel=1e-6)
    assert found["resumed"] == found["paged"]
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.dtype is torch.float32


def test_dpo_on_two_ranks_is_trls_own_on_two_ranks(ranks: RankServer, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    found = on_two_ranks(ranks, "dpo_on_ranks", tmp_path)
    assert len(found["paged"]) == 4
    assert found["paged"] == pytest.approx(found["stock"], rel=1e-6)


def test_accelerate_on_two_ranks_is_the_stock_one_on_two_ranks(ranks: RankServer, tmp_path: Path) -> None:
    found = on_two_ranks(ranks, "accelerate_on_ranks", tmp_path)
    assert found["paged"][1::3] == found["stock"][1::3]
    assert found["paged"] == pytest.approx(found["stock"], rel=1e-6)
    assert found["loaded"] == found["paged"][6:]
    assert found["read by all"]
    assert "rank 0 is at reading weight of unit" in found["read by one"]
    assert (
        "rank 1 is at the end of hooks on saving, which must not read a model on one rank alone" in found["read by one"]
    )
    assert "rank 0 is at accelerator.save_state(), rank 1 is at" in found["saved by one"]


def test_lightning_on_two_ranks_is_the_stock_one_on_two_ranks(tmp_path: Path) -> None:
    """Started by torchrun itself, by whose environment Lightning knows its ranks."""
    pytest.importorskip("lightning")
    (tmp_path / "run.py").write_text(UNDER_TORCHRUN)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(tmp_path / "run.py"), str(tmp_path)]
    subprocess.run(
        command, env={**environment, "GLOO_SOCKET_IFNAME": "lo"}, check=True, timeout=300, preexec_fn=end_with_parent
    )
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["paged"] == found["stock"]
    assert len(found["resumed"]) == 2
    assert found["resumed"][0] < found["paged"][-1]


@pytest.mark.parametrize(("count", "passes"), [(1, 1), (2, 1), (2, 2)])
def test_with_images_trl_has_its_own_losses_also_where_one_rank_has_text_alone(
    count: int, passes: int, ranks: RankServer, tmp_path: Path
) -> None:
    """The tower is frozen if steps have one pass. On one rank, weights are on an SSD; on two, they divide them, and one
    rank's batches have no image."""
    for package in ("trl", "datasets", "PIL"):
        pytest.importorskip(package)
    host, stage = ("320KiB", None) if count == 1 else ("4MiB", 3)
    arguments = {"host": host, "stage": stage, "passes": passes}
    found = ranks.run("integrations.images:with_images", count, tmp_path, **arguments)[0]
    assert found["paged"] == (found["stock"] if passes == 1 else pytest.approx(found["stock"], rel=1e-6))
    assert count == 2 or found["weights"]["ssd"]


def killed_and_resumed(ranks: RankServer, program: str, out: Path, **arguments: Any) -> tuple[Any, Any]:
    """What a run returns that nothing happens to, and one that was killed and goes on."""
    (whole,) = ranks.run(f"{PROGRAMS}:{program}", 1, out / "whole", way="", **arguments)
    arguments = {**arguments, "way": KILL}
    assert ranks.ask(f"{PROGRAMS}:{program}", 1, out / "killed", arguments=arguments) == [-signal.SIGKILL]
    (resumed,) = ranks.run(f"{PROGRAMS}:{program}", 1, out / "killed", **{**arguments, "way": RESUME})
    return whole, resumed


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO", "Accelerate", "Lightning", "Fabric"])
def test_a_killed_run_goes_on_as_one_that_was_not(kind: str, ranks: RankServer, tmp_path: Path) -> None:
    whole, resumed = killed_and_resumed(ranks, "losses_of", tmp_path, kind=kind)
    assert resumed == whole[-len(resumed) :]
    assert len(resumed) in (len(whole) - 2, len(whole) - 4, len(whole))


def test_beyond_memory_it_takes_what_it_is_given_and_resumes_once_killed(ranks: RankServer, tmp_path: Path) -> None:
    whole, resumed = killed_and_resumed(ranks, "beyond_memory", tmp_path)
    assert whole["state"] > 8 * HOST_BYTES
    # Beside pages: gradients on their way, activations, a layer's first values, pieces of files, what malloc keeps.
    assert whole["grown"] < HOST_BYTES + (48 << 20)
    assert resumed["losses"] == whole["losses"]
    files = [(tmp_path / name / "saved" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]
