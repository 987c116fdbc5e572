"""The wheel: it builds, installs beside the packages it needs, says its version, and trains."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

import pagoda
from pagoda.__main__ import main

ROOT = Path(pagoda.__file__).parent.parent
SCRIPT = """
import pagoda, torch
from torch import nn
assert "venv" in pagoda.__file__, pagoda.__file__
memory = pagoda.Memory(host="8MiB")
model, optimizer = pagoda.wrap(nn.Linear(8, 8), pagoda.AdamW(lr=1e-2), memory=memory, precision="fp32")
x = torch.ones(4, 8)
losses = []
with optimizer:
    for _ in range(5):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
assert losses[-1] < losses[0], losses
"""


def test_version_is_that_of_the_distribution(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pagoda", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"pagoda {pagoda.__version__}\n"
    assert pagoda.__version__ == version("pagoda-train")


@pytest.mark.slow
def test_the_wheel_installs_and_trains(tmp_path: Path) -> None:
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: object) -> str:
        line = [*map(str, command)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=alone, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    source, wheels, venv = (tmp_path / name for name in ("source", "wheels", "venv"))
    shutil.copytree(ROOT / "pagoda", source / "pagoda", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, source)
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    (wheel,) = wheels.glob("pagoda_train-*.whl")
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv), "platbase": str(venv)}))
    (own / "needed.pth").write_text(sysconfig.get_path("purelib"))  # the line alone: its own .pth files are not read
    assert run(venv / "bin" / "pagoda", "--version").split() == ["pagoda", wheel.name.split("-")[1]]
    run(python, "-P", "-c", SCRIPT)
