"""metrics.jsonl keeps each step once, whatever cuts it short or damages it."""

import errno
import json
import math
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pagoda.errors import StorageError
from pagoda.runtime.stats import StepStats
from pagoda.train.metrics import STEP_FORM, Line, MetricsFile, read_metrics
from pagoda.train.step_metrics import of_step

KEYS = {
    "step", "loss", "grad_norm", "lr", "aux_loss", "step_s", "tokens_per_s", "stall_s",
    "bytes_moved", "peak_bytes", "tier_use", "accesses", "hit_rate", "faults", "activation_bytes", "loss_scale",
    "skipped", "updates_kept", "updates_called_off", "staleness",
}  # fmt: skip
STATS = StepStats(stall_s={"h2d": 0.1}, bytes_moved={"h2d": 4096}, peak_bytes={"host": 8192})
METRICS: Line = of_step(STATS, 0.0, step=1, loss=2.5, lr=3e-4, aux_loss=None, step_s=0.5, tokens_per_s=1024.0)


def write_steps(path: Path, steps: range, after_step: int = 0) -> None:
    with closing(MetricsFile(path, after_step)) as file:
        for step in steps:
            file.write({**METRICS, "step": step})


def steps_in(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_a_line_has_exactly_the_documented_keys_and_null_for_what_is_not_finite(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "m")) as file:
        for step, loss in enumerate((1 / 3, math.nan, math.inf), 1):
            file.write({**METRICS, "step": step, "loss": loss})
        lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert lines[0].keys() == KEYS
    assert [line["loss"] for line in lines] == [1 / 3, None, None]


def test_resuming_drops_the_steps_after_the_checkpoint_and_keeps_the_rest_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_steps(path, range(1, 8))
    before = path.read_text().splitlines()
    write_steps(path, range(5, 7), after_step=4)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]
    assert path.read_text().splitlines()[:4] == before[:4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"[1]", b"[" * 100_000, b"{}"])
def test_a_damaged_line_and_one_cut_short_by_a_crash_take_no_other_with_them(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "m"
    write_steps(path, range(1, 6))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage + b"\n", *lines[3:]]))
    assert steps_in(path) == [1, 2, 4, 5]
    for cut in (0, 1, 100):
        path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
        write_steps(path, range(5, 7), after_step=4)
        assert steps_in(path) == [1, 2, 4, 5, 6]


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss", "low"), ("loss", math.inf), ("step_s", 10**400), ("peak_bytes", {"host": None}), ("step", True)],
)
def test_a_line_with_another_type_is_left_out_where_that_would_be_drawn(
    tmp_path: Path, key: str, value: object
) -> None:
    write_steps(tmp_path / "m", range(1, 3))
    first, second = (tmp_path / "m").read_text().splitlines()
    (tmp_path / "m").write_text(f"{json.dumps({**json.loads(first), key: value})}\n{second}\n")
    assert [line["step"] for line in read_metrics(tmp_path / "m", STEP_FORM)] == [2]


class Short:
    """A file that takes a few bytes at a time, as the system may."""

    def __init__(self, file: Any) -> None:
        self._file, self.close = file, file.close

    def write(self, data: bytes) -> int:
        written: int = self._file.write(bytes(data)[:100])
        return written


def test_a_short_write_loses_no_part_of_a_line(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "m")) as file:
        file._file = Short(file._file)
        file.write(METRICS)
        assert json.loads((tmp_path / "m").read_text()) == METRICS


def test_lines_that_could_not_be_synced_are_written_anew_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[str, int] = {}
    """Path -> size when it was last synced. Linux drops what a sync could not write."""
    fails = True

    def sync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if fails and path.endswith("/m"):
            raise OSError(errno.ENOSPC, "No space left on device")
        synced[path] = os.fstat(descriptor).st_size

    with closing(MetricsFile(tmp_path / "m")) as file:
        monkeypatch.setattr(os, "fsync", sync)
        file.write({**METRICS, "step": 1})
        file.flush(sync=True)
        assert not synced
        fails = False
        file.write({**METRICS, "step": 2})
        size = (tmp_path / "m").stat().st_size
        assert size in [number for path, number in synced.items() if not path.endswith("/m")], "it is written anew"
        file.write({**METRICS, "step": 3})
    assert steps_in(tmp_path / "m") == [1, 2, 3]


def test_a_full_disk_is_named_once_and_no_line_is_lost_when_there_is_room_again(tmp_path: Path) -> None:
    warnings: list[str] = []
    with closing(MetricsFile(tmp_path / "m", warn=warnings.append)) as file, open("/dev/full", "ab", 0) as full:
        right, file._file = file._file, full
        for step in (1, 2):
            file.write({**METRICS, "step": step})
            file.flush(sync=True)
        assert len(warnings) == 1
        assert "m cannot be written: No space left on device. The run continues" in warnings[0]
        file._file = right
        file.write({**METRICS, "step": 3})
        assert steps_in(tmp_path / "m") == [1, 2, 3]
        assert len(warnings) == 2
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="not a regular file"):
        MetricsFile(tmp_path / "pipe")
