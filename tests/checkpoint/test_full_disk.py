"""A disk that is really full: what was reserved can still be used, what was not is refused, and nothing is lost."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import pagoda
from pagoda.errors import StorageError

from .test_resume import HALF, LLAMA, Run, assert_resumes, on_ssd, uninterrupted

SIZE = 24 << 20


def mounts(target: Path, *command: str) -> None:
    """Mounts something, or skips the test with the reason why that cannot be done here."""
    try:
        subprocess.run([*command, str(target)], check=True, capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        pytest.skip(f"a small disk cannot be made: there is no {error.filename}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"a small disk cannot be mounted: {error.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with a folder for pages."""
    target, image = tmp_path / "disk", tmp_path / "image"
    target.mkdir()
    with image.open("wb") as file:
        file.truncate(SIZE)
    mounts(image, "mkfs.ext4", "-q", "-O", "^has_journal")
    mounts(target, "mount", "-o", "loop", str(image))
    try:
        (target / "ssd").mkdir()
        yield target
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True, timeout=60)


def fill(disk: Path) -> None:
    """Take all the space there is left."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_training_goes_on_when_a_checkpoint_finds_no_space_and_the_one_before_loads(disk: Path) -> None:
    run = Run(LLAMA, on_ssd(LLAMA, disk / "ssd")).train(0, HALF)
    run.save(disk / "first")
    fill(disk)
    run.train(HALF, HALF + 1)  # its pages were reserved
    with pytest.raises(StorageError, match="No space left"):
        run.save(disk / "second")
    assert not (disk / "second").exists()
    run.optimizer.save_checkpoint(disk / "third", wait=False)
    with pytest.raises(StorageError, match="No space left"):
        run.optimizer.wait_for_checkpoint()
    run.train(HALF + 1, 2 * HALF).finish().assert_continues_as(uninterrupted(LLAMA))
    assert_resumes(disk / "first")


def test_a_run_that_needs_more_than_is_left_is_refused_before_it_starts(disk: Path) -> None:
    memory = on_ssd(LLAMA, disk / "ssd")
    fill(disk)
    with pytest.raises((StorageError, pagoda.BudgetError), match=r"too full|needs at least"):
        Run(LLAMA, memory)
    assert not list((disk / "ssd").iterdir())
