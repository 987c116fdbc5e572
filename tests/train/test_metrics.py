import json
import math
import os
from io import FileIO
from pathlib import Path

import pytest

from pagoda.errors import StorageError
from pagoda.train.metrics import MetricsFile, StepMetrics, read_metrics

KEYS = [
    "step", "loss", "grad_norm", "lr", "aux_loss", "step_s", "tokens_per_s", "stall_s",
    "bytes_moved", "peak_bytes", "accesses", "prefetch_hit_rate", "faults", "activation_bytes", "loss_scale",
    "skipped", "updates_kept", "updates_undone", "staleness",
]  # fmt: skip


def metrics_of(step: int, loss: float = 1 / 3) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=None,
        lr=3e-4,
        step_s=0.5,
        tokens_per_s=1024.0,
        stall_s={"h2d": 0.1},
        bytes_moved={"h2d": 4096},
        peak_bytes={"host": 8192},
        prefetch_hit_rate=1.0,
        faults=0,
    )


def write_steps(path: Path, steps: range, after_step: int = 0) -> None:
    with MetricsFile(path, after_step) as file:
        for step in steps:
            file.write(metrics_of(step))


def test_a_line_has_exactly_the_documented_keys(tmp_path: Path) -> None:
    write_steps(tmp_path / "m", range(1, 2))
    assert list(json.loads((tmp_path / "m").read_text())) == KEYS


def test_a_line_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m") as file:
        file.write(metrics_of(1))
        assert [line["step"] for line in read_metrics(tmp_path / "m")] == [1]


def test_a_full_disk_is_a_storage_error_that_says_how_to_go_on(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m") as file, open("/dev/full", "ab", buffering=0) as full:
        file._file = full
        with pytest.raises(StorageError, match=r"m cannot be written: No space left.*resume"):
            file.write(metrics_of(1))


def test_resuming_drops_the_steps_after_the_checkpoint_and_keeps_the_rest_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_steps(path, range(1, 8))
    before = path.read_text().splitlines()
    write_steps(path, range(5, 7), after_step=4)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5, 6]
    assert path.read_text().splitlines()[:4] == before[:4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m"
    write_steps(path, range(1, 5))
    path.write_bytes(path.read_bytes()[:-cut])
    write_steps(path, range(4, 6), after_step=3)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_null(tmp_path: Path, loss: float) -> None:
    assert json.loads(metrics_of(1, loss).to_json())["loss"] is None


class Short:
    """A file that takes a few bytes at a time, as the system may."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        return self._file.write(bytes(data)[:100])

    def close(self) -> None:
        self._file.close()


def test_a_short_write_loses_no_part_of_a_line(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m") as file:
        file._file = Short(file._file)  # type: ignore[assignment,arg-type]
        for step in range(1, 4):
            file.write(metrics_of(step))
    assert (tmp_path / "m").read_text().splitlines() == [metrics_of(step).to_json() for step in range(1, 4)]


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"\0" * 40, b"[1]", b"[" * 100_000, b"{}"])
def test_a_damaged_line_takes_no_other_with_it(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "m"
    write_steps(path, range(1, 6))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage + b"\n", *lines[3:]]))
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 4, 5]
    write_steps(path, range(5, 7), after_step=4)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 4, 5, 6]


def test_metrics_that_are_no_ordinary_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m")
    with pytest.raises(StorageError, match="not a regular file"):
        MetricsFile(tmp_path / "m")
