"""What files hold, and damage to it, for tests."""

import errno
from pathlib import Path
from typing import Any

import pytest

from pagoda.checkpoint import snapshot


def content_of(directory: Path) -> dict[str, bytes]:
    """The bytes of every file below a directory, by its path there."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def flip(path: Path, at: int = -1) -> None:
    """Flip a bit of a byte of a file; once more, and it is as before."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def fill_disk(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next checkpoints find no room for their manifests."""
    write, left = snapshot.write_manifest, [times]

    def full(*args: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    monkeypatch.setattr(snapshot, "write_manifest", full)
