"""What tests of this folder are given."""

from pathlib import Path

import pytest


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    """An empty SSD directory."""
    directory = tmp_path / "ssd"
    directory.mkdir()
    return directory
