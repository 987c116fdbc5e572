"""The loops in `examples/` run on tiny data, and do what they say."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.inline
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(name: str, *words: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        assert not [path for path in tmp_path.iterdir() if path.suffix], "nothing is left but what the SSD tier keeps"
        return capsys.readouterr().out

    return run


def numbers(name: str, printed: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{name} (-?[\d.]+)", printed)]


@pytest.mark.slow
def test_a_loop_like_nanogpts_changes_five_lines_and_learns(run) -> None:
    losses = numbers("loss", run("nanogpt", "11"))
    assert losses[-1] < 0.9 * losses[0]
    changed = [line for line in (EXAMPLES / "nanogpt.py").read_text().splitlines() if line.endswith("# Pagoda")]
    assert len(changed) == 5


def test_an_average_of_the_weights_is_better_than_the_last_ones(run) -> None:
    printed = run("ema", "150")
    assert numbers("their average", printed)[0] < numbers("last weights", printed)[0]


def test_backward_runs_through_backward(run) -> None:
    printed = run("gradient_penalty", "31")
    losses, penalties = numbers("loss", printed), numbers("penalty", printed)
    assert losses[-1] < losses[0]
    assert penalties[-1] < penalties[0] / 4


@pytest.mark.slow
def test_a_fabric_script_in_the_manner_of_litgpt_resumes(run, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    losses = numbers("loss", run("fabric", "4"))
    assert len(losses) == 4
    shutil.rmtree(tmp_path / "fabric-run" / "step-000004")
    printed = run("fabric", "4")
    assert "resumed at step 2" in printed
    assert numbers("loss", printed) == losses[2:]


@pytest.mark.slow
def test_a_script_in_the_manner_of_torchtitan_is_torchs_own_loop_and_resumes(run, tmp_path: Path) -> None:
    torch.compiler.reset()
    expected = numbers("loss", run("titan", "4", "plain"))
    losses = numbers("loss", run("titan", "4"))
    assert losses == expected
    shutil.rmtree(tmp_path / "titan-run" / "step-000004")
    assert numbers("loss", run("titan", "4")) == losses[2:]


@pytest.mark.slow
def test_a_diffusion_model_learns_and_samples(run) -> None:
    printed = run("diffusion", "41")
    losses = numbers("loss", printed)
    assert losses[-1] < 0.7 * losses[0]
    assert abs(numbers("mean", printed)[0]) < 2
