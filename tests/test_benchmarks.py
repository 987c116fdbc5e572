"""The programs of benchmarks/ start: their imports are there, and their command lines can be read."""

import runpy
from pathlib import Path
from unittest.mock import patch

import pytest

PROGRAMS = sorted(
    path for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py") if "__main__" in path.read_text()
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_benchmark_shows_its_help(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(program), "--help"])
    with patch.dict("os.environ"), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out
