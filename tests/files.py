"""What files hold, and damage to it, for tests."""

from pathlib import Path


def content_of(directory: Path) -> dict[str, bytes]:
    """The bytes of every file below a directory, by its path there."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def flip(path: Path, at: int = -1) -> None:
    """Flip a bit of a byte of a file; once more, and it is as before."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
