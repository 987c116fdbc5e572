"""A calibration gives every figure, positive and sourced, and leaves nothing behind but its file."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda.calibrate import Effort, calibrate, drive
from pagoda.calibrate.meter import Meter
from pagoda.calibrate.table import figure_table
from pagoda.cli.main import main
from pagoda.errors import StorageError
from pagoda.memory.ssd.file import PageFile
from pagoda.simulate.hardware import Hardware, hardware_file, read_hardware, write_hardware
from pagoda.simulate.machines import MACHINES
from tests.simulate.figures import walk

CPU = torch.device("cpu")
LEAST = Effort(
    figure_s=0.01,
    params=1 << 20,
    copy_bytes=32 << 20,
    tokens=64,
    width=64,
    file_bytes=256 << 20,
    gathered_bytes=1 << 20,
)


def left(directory: Path) -> list[Path]:
    return list(directory.iterdir())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Hardware:
    """Of this machine; nothing is left behind, in torch or in the directory."""
    directory = tmp_path_factory.mktemp("ssd")
    before = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state()
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


def test_the_file_is_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hardware_file() == tmp_path / "pagoda" / "hardware.json"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert hardware_file() == Path.home() / ".cache" / "pagoda" / "hardware.json"


def test_a_table_lists_every_figure(measured: Hardware) -> None:
    for hardware in (measured, *MACHINES.values()):
        assert figure_table(hardware).row_count == len(list(walk(hardware)))


@pytest.mark.slow
def test_without_a_directory_there_is_no_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert calibrate(None, CPU, said.append, LEAST).ssd is None
    assert len(said) >= 4


def failing(after: int, error: BaseException) -> Callable[..., None]:
    """A transfer that fails for good after so many."""
    calls = iter(range(after))

    def transfer(*_: Any) -> None:
        if next(calls, None) is None:
            raise error

    return transfer


@pytest.mark.parametrize(("verb", "after"), [("pread", 100), ("pwrite", 0)])
def test_a_drive_that_fails_ends_the_calibration_and_leaves_nothing(
    verb: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threading.active_count()
    monkeypatch.setattr(PageFile, verb, failing(after, StorageError("the drive failed")))
    with pytest.raises(StorageError, match="the drive failed"):
        drive.measure_drive(Meter("a test", LEAST, lambda _: None), tmp_path)
    assert left(tmp_path) == []
    assert threading.active_count() == threads


def test_interrupted_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()

    def interrupt(_: float) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(drive, "_products", interrupt)
    with pytest.raises(KeyboardInterrupt):
        drive.measure_drive(Meter("a test", LEAST, lambda _: None), tmp_path)
    assert left(tmp_path) == []
    assert threading.active_count() == threads


def test_a_directory_with_too_little_space_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(StorageError, match=r"and measuring it takes 1\.00 PiB"):
        calibrate(tmp_path, CPU, said.append, Effort(file_bytes=1 << 50))
    assert (said, left(tmp_path)) == ([], [])


def test_a_missing_directory_exits_with_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hardware.json"
    assert main(["calibrate", "--ssd", str(tmp_path / "none"), "--out", str(out)]) == 2
    error = capfd.readouterr().err
    assert "none is not there: create it" in error
    assert "Traceback" not in error
    assert not out.exists()


def test_a_file_that_cannot_be_written_exits_with_2(
    measured: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagoda.calibrate.calibrate", lambda *_: measured)
    (tmp_path / "file").touch()
    assert main(["calibrate", "--out", str(tmp_path / "file" / "hardware.json")]) == 2
    assert "cannot be written" in capfd.readouterr().err


def test_the_command_shows_every_figure_and_where_the_file_went(
    measured: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagoda.calibrate.calibrate", lambda *_: measured)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["calibrate"]) == 0
    shown = capfd.readouterr().out
    for label in ("CPU memory bandwidth", "CPU update", "CPU bf16 fastest product", "SSD both at once", "SSD cores"):
        assert label in shown
    assert str(hardware_file()) in shown
    assert read_hardware(hardware_file()) == measured


@pytest.mark.slow
def test_under_torchrun_ranks_measure_what_they_gather_and_the_first_writes(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from pagoda.calibrate import calibrate\n"
        "from pagoda.distributed.world import launched\n"
        "from pagoda.simulate.hardware import write_hardware\n"
        "from tests.calibrate.test_calibrate import LEAST\n"
        "hardware = calibrate(None, torch.device('cpu'), effort=LEAST)\n"
        "write_hardware(hardware, Path(sys.argv[1]) / f'{launched().rank}.json')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*command, str(script), str(tmp_path)], env=environment, check=True, timeout=300)
    first, second = (read_hardware(tmp_path / f"{rank}.json") for rank in range(2))
    assert first.gpus_per_node == 2
    assert first.intra_node_bytes_per_s is not None
    assert first.intra_node_bytes_per_s.value > 0
    assert first.inter_node_bytes_per_s is None
    assert first.cpu == second.cpu
