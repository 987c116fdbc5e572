"""A checkpoint of ranks keeps each rank's pages where they are: whole or not there, and to be read by any of them."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from pagoda.checkpoint.directory import read_manifest
from pagoda.checkpoint.paged import PAGED
from pagoda.cli.main import main

from .ranks import RankServer
from .scenarios import MOMENTS
from .test_checkpoints_of_ranks import assert_same_state

RECIPE = {"model": "llama", "precision": "fp32", "steps": 3}
Result = dict[str, Any]


def trained(
    ranks: RankServer, count: int, out: Path, steps: range, loads: int | None = None, stage: int = 3
) -> list[Result]:
    """A checkpoint after each of some steps, beside the directories of the ranks."""
    saves = [str(out / f"step-{step}") for step in steps]
    source = None if loads is None else str(out / f"step-{loads}")
    return ranks.run("train_saved", count, out, recipe=RECIPE, saves=saves, loads=source, stage=stage)


def commits(out: Path) -> list[int]:
    """Number of commits in each rank's directory."""
    return [len(list(rank.glob("pagoda-*/commits/*"))) for rank in sorted(out.glob("rank-?"))]


@pytest.fixture(scope="module")
def whole(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Three steps of two ranks that nothing happens to."""
    return trained(ranks, 2, tmp_path_factory.mktemp("whole"), range(1, 4))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_ranks_keep_their_pages_and_adopt_them_again(
    stage: int, ranks: RankServer, whole: list[Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(ranks, 2, tmp_path, range(1, 3), stage=stage)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"], "the one before is gone"
    assert commits(tmp_path) == [1, 1]
    for file in (tmp_path / "step-2").glob("*.safetensors"):
        assert file.stat().st_size <= 4096, "headers only"
    assert main(["inspect", str(tmp_path / "step-2"), "--verify"]) == 0
    assert "every tensor is as it was written" in capsys.readouterr().out
    for result, expected in zip(trained(ranks, 2, tmp_path, range(3, 4), 2, stage), whole, strict=True):
        assert result["copied"] == 0
        assert result["losses"] == expected["losses"][2:]
        assert_same_state(expected["states"]["step-2"], result["states"]["loaded"])
        assert_same_state(expected["states"]["step-3"], result["states"]["step-3"])
        assert result["commits"] == 1
    assert commits(tmp_path) == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("wrote", "reads"), [(3, 3), (2, 3), (3, 1)])
def test_more_ranks_of_any_stage_read_the_pages_of_fewer(
    wrote: int, reads: int, ranks: RankServer, whole: list[Result], tmp_path: Path
) -> None:
    trained(ranks, 2, tmp_path, range(1, 3), stage=wrote)
    for result in trained(ranks, 4, tmp_path, range(3, 4), loads=2, stage=reads):
        assert_same_state(whole[0]["states"]["step-2"], result["states"]["loaded"])
        assert result["commits"] == 1
    assert commits(tmp_path) == [1] * 4


def test_one_process_reads_the_pages_of_ranks_below_the_directory_it_is_given_and_frees_them(
    ranks: RankServer, whole: list[Result], tmp_path: Path
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    trained(ranks, 2, run, range(1, 2))
    moved.mkdir()
    for name in ("rank-0", "rank-1", "step-1"):
        (run / name).rename(moved / name)
    shutil.copytree(moved / "step-1", tmp_path / "copy")
    (result,) = trained(ranks, 1, moved, range(2, 3), loads=1)
    assert_same_state(whole[0]["states"]["step-1"], result["states"]["loaded"])
    assert commits(moved) == [0, 0]
    arguments = {"recipe": RECIPE, "saves": [], "loads": str(tmp_path / "copy")}
    assert ranks.ask("train_saved", 1, run, arguments=arguments) == [1]
    assert "copy cannot be read: the pages of store" in (run / "error-0.txt").read_text()


QUICK = "the checkpoint has its name"


@pytest.mark.parametrize("moment", [m if m == QUICK else pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS])
@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_dies_while_saving_leaves_a_checkpoint_whole_or_none_of_it(
    stage: int, moment: str, ranks: RankServer, whole: list[Result], tmp_path: Path
) -> None:
    saves = [str(tmp_path / f"step-{step}") for step in (1, 2)]
    arguments = {"recipe": RECIPE, "saves": saves, "moment": moment, "stage": stage}
    status = ranks.ask("die_while_saving", 2, tmp_path, arguments=arguments)
    assert None not in status, "a rank hangs"
    assert status[MOMENTS[moment].victim] == -signal.SIGKILL
    found = sorted(path.name for path in tmp_path.glob("step-*"))
    assert found == {
        "the checkpoint has its name": ["step-1", "step-2"],
        "the one before is gone": ["step-2"],
    }.get(moment, ["step-1"])
    last = int(found[-1].removeprefix("step-"))
    results = trained(ranks, 2, tmp_path, range(last + 1, last + 2), last, stage)
    for result, expected in zip(results, whole, strict=True):
        assert result["copied"] == 0
        assert_same_state(expected["states"][f"step-{last}"], result["states"]["loaded"])
        assert_same_state(expected["states"][f"step-{last + 1}"], result["states"][f"step-{last + 1}"])
    paged = sum(PAGED in read_manifest(path) for path in tmp_path.glob("step-*"))
    assert commits(tmp_path) == [paged, paged], "commits of checkpoints that there are, and no others"
