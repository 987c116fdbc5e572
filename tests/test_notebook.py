"""The notebook in examples/: a new user's first run, from data to export, works as it is written."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagoda.simulate.hardware import write_hardware
from tests.forecast.machines import SMALL
from tests.text_files import write_pretrained

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "finetune.ipynb"
SETTINGS = {"PRECISION": "'fp32'", "STEPS": "6"}
"""What is other than on a GPU. The model is a tiny one."""


def code_cells() -> list[str]:
    """The code of the notebook, with `SETTINGS`."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for name, value in SETTINGS.items():
        code = [re.sub(rf"^{name} = .*$", f"{name} = {value}", cell, flags=re.MULTILINE) for cell in code]
    return code


def as_python(cell: str) -> str:
    """A cell in which commands of the shell, `!COMMAND {EXPRESSION}`, are calls, as in Jupyter. What downloads, or
    measures the machine for a minute, is left out."""
    commands = re.compile(r"^!((?:.*\\\n)*.*)$", re.MULTILINE)
    cell = re.sub(r"^(?:%pip|!hf|!pagoda calibrate).*\n?", "", cell, flags=re.MULTILINE)
    return commands.sub(lambda found: f"shell(f'''{found[1]}''')", cell)


def test_its_outputs_are_left_out_and_its_cells_are_complete() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len({*ids})
    assert not [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow
def test_its_cells_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pretrained(tmp_path / "model")
    write_hardware(SMALL, tmp_path / "cache" / "pagoda" / "hardware.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parent.parent))
    monkeypatch.chdir(tmp_path)
    printed = []

    def shell(command: str) -> None:
        command = re.sub(r"^pagoda\b", f"{sys.executable} -m pagoda", command)
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        printed.append(done.stdout)

    names: dict[str, Any] = {"shell": shell}
    for cell in code_cells():
        exec(as_python(cell), names)
    text = "".join(printed)
    assert "Fits." in text, "pagoda plan"
    assert "step 6/6" in text, "pagoda train"
    assert "step 26/26" in text, "resumed"
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "tuned").iterdir()}
    assert (tmp_path / "runs" / "chat" / "report.html").exists()
