"""What keeps tests strict and fast. Poison mode: freed frames hold NaN, so a lease used after its end shows."""

import os
from collections.abc import Iterator

os.environ["PAGODA_POISON"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models train many times faster on one thread, most of all where tests share cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
