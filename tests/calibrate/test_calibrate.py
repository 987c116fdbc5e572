"""A calibration gives every figure, positive and sourced, and leaves nothing behind but its file."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.ranks import RankServer

from pagoda.calibrate import drive
from pagoda.calibrate.machine import calibrate
from pagoda.calibrate.meter import Effort, Meter
from pagoda.cli.main import main
from pagoda.errors import StorageError
from pagoda.memory.ssd.page_file import PageFile
from pagoda.mesh.world import launched
from pagoda.simulate.hardware import Hardware, hardware_file, read_hardware, write_hardware
from pagoda.simulate.machines import MACHINES
from tests.simulate.figures import walk

CPU = torch.device("cpu")
LEAST = Effort(
    figure_s=0.01, params=1 << 20, copy_bytes=32 << 20, tokens=64, width=64, file_bytes=64 << 20, gathered_bytes=1 << 20
)
SHORT = {
    **{f"drive.{name}": least for name, least in (("_ROUNDS", 1), ("_TURNS", 1), ("_WARM_S", 0.0))},
    "drive._MATMUL_SIZE": 128,
    "meter._LEAST_TURNS": 1,
    "bookkeeping._ROWS": 16,
    "cpu._HANDOVERS": 8,
}


def left(directory: Path) -> list[Path]:
    return list(directory.iterdir())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Hardware:
    """Of this machine, in short rounds; nothing is left behind, in torch or in the directory."""
    directory = tmp_path_factory.mktemp("ssd")
    before = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHORT.items():
            patch.setattr(f"pagoda.calibrate.{name}", value)
        hardware = calibrate(directory, CPU, effort=LEAST)
    after = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state()
    assert left(directory) == []
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    return hardware


def test_every_figure_is_positive_and_says_when_and_on_what_it_was_measured(measured: Hardware) -> None:
    figures = dict(walk(measured))
    assert {"copy_bytes_per_s", "gradient_bytes_per_s", "update_params_per_s", "both_bytes_per_s"} <= set(figures)
    for name, figure in walk(measured):
        assert figure.value > 0, name
        assert figure.source.startswith("assumed: " if name == "endurance_bytes" else "measured 2"), name
    assert 0 < figures["cpu_share"].value <= 1


def test_the_file_reads_back_as_it_was_written_and_replaces_the_one_before(measured: Hardware, tmp_path: Path) -> None:
    path = tmp_path / "new" / "hardware.json"
    write_hardware(MACHINES["h100"], path)
    write_hardware(measured, path)
    assert read_hardware(path) == measured
    assert left(path.parent) == [path]


@pytest.mark.slow
def test_without_a_directory_there_is_no_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert calibrate(None, CPU, said.append, LEAST).ssd is None
    assert len(said) >= 4


def failing(after: int, error: BaseException) -> Callable[..., None]:
    """A transfer, or what is done beside it, that fails for good after so many."""
    calls = iter(range(after))

    def transfer(*_: Any) -> None:
        if next(calls, None) is None:
            raise error

    return transfer


@pytest.mark.parametrize(
    ("owner", "name", "after", "error"),
    [
        (PageFile, "pread", 100, StorageError("the drive failed")),
        (PageFile, "pwrite", 0, StorageError("the drive failed")),
        (drive, "_products", 0, KeyboardInterrupt()),
    ],
    ids=["a read", "a write", "interrupted"],
)
def test_a_calibration_that_fails_ends_and_leaves_nothing(
    owner: Any, name: str, after: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threading.active_count()
    monkeypatch.setattr(owner, name, failing(after, error))
    with pytest.raises(type(error)) as ended:
        drive.measure_drive(Meter("a test", LEAST, lambda _: None), tmp_path)
    assert ended.value is error
    assert left(tmp_path) == []
    assert threading.active_count() == threads


def test_a_directory_with_too_little_space_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(StorageError, match=r"and measuring it takes 1\.00 PiB"):
        calibrate(tmp_path, CPU, said.append, Effort(file_bytes=1 << 50))
    assert (said, left(tmp_path)) == ([], [])


def test_what_cannot_be_read_or_written_exits_with_2(
    measured: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hardware.json"
    assert main(["calibrate", "--ssd", str(tmp_path / "none"), "--out", str(out)]) == 2
    error = capfd.readouterr().err
    assert "none does not exist: create it" in error
    assert "Traceback" not in error
    assert not out.exists()
    monkeypatch.setattr("pagoda.calibrate.machine.calibrate", lambda *_: measured)
    out.touch()
    assert main(["calibrate", "--out", str(out / "hardware.json")]) == 2
    assert "cannot be written" in capfd.readouterr().err


def test_the_command_shows_every_figure_and_where_the_file_went(
    measured: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagoda.calibrate.machine.calibrate", lambda *_: measured)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["calibrate"]) == 0
    shown = capfd.readouterr().out
    for label in ("CPU memory bandwidth", "CPU update", "CPU bf16 fastest product", "SSD both at once", "SSD cores"):
        assert label in shown
    assert str(hardware_file()) in shown
    assert read_hardware(hardware_file()) == measured


def calibrate_rank(out: Path) -> None:
    """In a rank."""
    write_hardware(calibrate(None, CPU, effort=LEAST), out / f"{launched().rank}.json")


@pytest.mark.slow
def test_under_torchrun_ranks_measure_what_they_gather_and_the_first_writes(ranks: RankServer, tmp_path: Path) -> None:
    ranks.run("calibrate.test_calibrate:calibrate_rank", 2, tmp_path)
    first, second = (read_hardware(tmp_path / f"{rank}.json") for rank in range(2))
    assert first.gpus_per_node == 2
    assert first.intra_node_bytes_per_s.value > 0
    assert first.inter_node_bytes_per_s is None
    assert first.cpu == second.cpu
