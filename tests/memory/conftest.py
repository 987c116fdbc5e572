"""What tests of this folder are given."""

from pathlib import Path

import pytest


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    """An empty SSD directory."""
    directory = tmp_path / "ssd"
    directory.mkdir()
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Where the first checkpoint of a run goes."""
    return tmp_path / "run" / "step-1"
