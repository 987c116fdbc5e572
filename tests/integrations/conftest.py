"""Frameworks keep state for a whole process; here each test has its own."""

import os
from collections.abc import Iterator

import pytest
import torch
from garbage import only_of_this_test

from pagoda.integrations import checkpoints


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    only_of_this_test()  # accelerate collects garbage several times in a run
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last checkpoint that cannot be written is not retried for long."""
    monkeypatch.setattr(checkpoints, "PATIENCE_S", 2.0)
    monkeypatch.setattr(checkpoints, "RETRY_S", 0.05)
