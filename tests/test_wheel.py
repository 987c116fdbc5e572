"""The wheel: it builds, installs beside the packages it needs, says its version, and trains."""

import re
import sys
import sysconfig
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from nightly import installs

import pagoda
from pagoda.__main__ import main

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
    """With the packages of this environment: `tests/nightly/installs.py` installs them, too."""
    built, venv = installs.wheel(tmp_path, "--no-build-isolation"), tmp_path / "venv"
    installs.run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    python = str(venv / "bin" / "python")
    installs.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", str(built)])
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv), "platbase": str(venv)}))
    (own / "needed.pth").write_text(sysconfig.get_path("purelib"))  # the line alone: its own .pth files are not read
    printed = installs.run([str(venv / "bin" / "pagoda"), "--version"], tmp_path)
    assert printed.split() == ["pagoda", built.name.split("-")[1]]
    installs.run([python, "-P", "-c", SCRIPT], tmp_path)


def test_nightly_installations_have_the_bounds_of_torch_and_transformers() -> None:
    """The least and the newest version of each, with each Python that the package names."""
    project = tomllib.loads((installs.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = " ".join((*project["dependencies"], *extras["transformers"]))
    newest = re.findall(r"^(torch|transformers)==(\S+)$", (installs.ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pins = {f"{name}=={version}" for name, version in newest}
    pins |= {
        f"{name}=={bound}.0" for name, bound in re.findall(r"(torch|transformers)>=(2\.\d+|5\.[1-9]\d*)", required)
    }
    workflow = yaml.safe_load((installs.ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    matrix = workflow["jobs"]["install"]["strategy"]["matrix"]
    assert {pin for packages in matrix["packages"] for pin in packages.split() if "==" in pin} == pins
    pythons = {name.rpartition(" ")[2] for name in project["classifiers"] if name.startswith("Programming Language")}
    assert {*matrix["python"]} == pythons
    assert project["version"] == yaml.safe_load((installs.ROOT / "CITATION.cff").read_text())["version"]
