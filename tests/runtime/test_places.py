"""Places for offloaded activations: never more than there is room for, and what was written comes back."""

from pathlib import Path

import pytest
import torch

from pagoda.errors import CorruptPageError
from pagoda.memory.arena import Arena
from pagoda.runtime.activations.places import SsdPlace
from pagoda.runtime.device import PAST, Device

PAGE = 4096


def on_ssd(directories: dict[Path, int | None]) -> SsdPlace:
    """A place with room for 64 pages, and two buffers of 4 pages in each direction."""
    for directory in directories:
        directory.mkdir()
    arena = Arena(16 * PAGE)
    buffers = [arena.view(4 * number * PAGE, 4 * PAGE) for number in range(4)]
    return SsdPlace(64 * PAGE, PAGE, Device(), directories, buffers)


@pytest.mark.parametrize("drives", [1, 2])
def test_what_was_written_to_ssd_comes_back(drives: int, tmp_path: Path) -> None:
    directories = {tmp_path / str(n): None for n in range(drives)}
    place = on_ssd(directories)
    nbytes = 10 * PAGE - 100
    data, into = torch.randint(256, (nbytes,), dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    pieces = place.alloc(nbytes)
    hashes = place.write(pieces, data, PAST)
    place.read(pieces, hashes, into, PAST)
    assert torch.equal(into, data)
    hashes[0][3] += 1
    with pytest.raises(CorruptPageError):
        place.read(pieces, hashes, into, PAST)
    assert not any(list(directory.iterdir()) for directory in directories), "the files have no names"
    place.close()


def test_a_limit_of_each_drive_holds(tmp_path: Path) -> None:
    place = on_ssd({tmp_path / "a": 2 * PAGE, tmp_path / "b": 7 * PAGE})
    assert place.alloc(10 * PAGE) is None
    assert place.alloc(9 * PAGE) is not None
    assert place.alloc(1) is None
    place.close()
