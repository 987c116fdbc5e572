"""`pagoda inspect` shows what is kept on an SSD, and finds what is damaged."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from pagoda.cli.main import main
from pagoda.memory.arena import Arena
from tests.memory.ssd_parts import Tier, make_checkpoint

PAGE = 4096


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    """A directory with one store: two commits of four pages, of which one page changed in between."""
    directory = tmp_path / "ssd"
    directory.mkdir()
    with Tier({directory: None}, 4, PAGE, 8) as tier:
        run = tier.alloc(4)
        data = Arena(4 * PAGE).view(0, 4 * PAGE)
        for step in (1, 2):
            data[:] = bytes((k + k // PAGE) % 251 for k in range(4 * PAGE))
            tier.store(run, 0, data if step == 1 else data[:PAGE])
            with closing(tier.freeze_all()) as frozen:
                frozen.commit(*make_checkpoint(tmp_path / "run" / f"step-{step}"))
    return directory


def test_stores_commits_checkpoints_and_space_are_shown(
    ssd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert "no page store" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none")]) == 2
    shutil.rmtree(tmp_path / "run" / "step-1")
    assert main(["inspect", str(ssd)]) == 0
    shown = capsys.readouterr().out
    assert "12 slots of 4.00 KiB" in shown
    assert f"16.00 KiB of {tmp_path}/run/step-1 (not there: see pagoda gc)\n" in shown
    assert f"16.00 KiB of {tmp_path}/run/step-2\n" in shown
    assert "20.00 KiB kept by commits, 28.00 KiB free" in shown


def test_verify_reads_every_committed_page_and_names_the_damaged_ones(
    ssd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
