"""What keeps the tests of this folder fast, and apart from one another."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models train many times faster on one thread, most of all where tests share cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    """A test that was interrupted inside a forward does not pack what the next one saves."""
    yield
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
