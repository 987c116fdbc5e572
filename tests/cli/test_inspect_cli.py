"""`pagoda inspect` shows what is kept on an SSD, and finds what is damaged."""

import shutil
from pathlib import Path

import pytest

from pagoda.cli.main import main
from tests.cli.workspace import Saved
from tests.memory.ssd_parts import PAGE


def test_stores_commits_checkpoints_and_space_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = Saved(tmp_path)
    checkpoints = saved.run / "checkpoints"
    assert main(["inspect", str(checkpoints)]) == 0
    assert "no page store" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none")]) == 2
    shutil.rmtree(checkpoints / "step-1")
    assert main(["inspect", str(saved.ssd)]) == 0
    shown = capsys.readouterr().out
    assert "12 slots of 4.00 KiB" in shown
    assert f"16.00 KiB of {checkpoints}/step-1 (missing: see pagoda gc)\n" in shown
    assert f"16.00 KiB of {checkpoints}/step-2\n" in shown
    assert "20.00 KiB kept by commits, 28.00 KiB free" in shown


def test_verify_reads_every_committed_page_and_names_the_damaged_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ssd = Saved(tmp_path).ssd
    assert main(["inspect", str(ssd), "--verify"]) == 0
    assert capsys.readouterr().out.count("every page is as it was written") == 2
    pages = next(ssd.glob("*/pages"))
    with pages.open("r+b") as file:
        file.seek(2 * PAGE + 5)
        file.write(b"\xff")
    assert main(["inspect", str(ssd), "--verify"]) == 1
    shown = capsys.readouterr().out
    assert shown.count(f"page 2: {pages} at offset {2 * PAGE}") == 2
    assert shown.count("1 damaged") == 2
    next(ssd.glob("*/commits/*")).write_bytes(b"no table")
    assert main(["inspect", str(ssd)]) == 1
    assert "truncated or damaged" in capsys.readouterr().out
