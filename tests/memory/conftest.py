"""What tests of this folder are given."""

from pathlib import Path

import pytest
from garbage import only_of_this_test


@pytest.fixture(scope="session", autouse=True)
def _collections_look_at_this_folders_objects() -> None:
    """Many tests here collect garbage to see what is left."""
    only_of_this_test()


@pytest.fixture
def tmp_path(on_drive: Path) -> Path:
    """Files here are read and written as on a drive."""
    return on_drive


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
