"""Runs tests that need a GPU with the stand-in; a race fails the test in which it is found.

`COPIES=1` prints how often, in each test, a copy or an operation made its caller wait.
"""

import os
from collections.abc import Iterator

# Before torch is imported, as in conftest.
from pagoda.process import keep_freed_memory, spin_briefly

keep_freed_memory()
spin_briefly()
os.environ["TRITON_INTERPRET"] = "1"  # no driver is asked for a GPU

from cuda_stand_in.cuda import install  # noqa: E402

native = install()

import pytest  # noqa: E402


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    native.take_races()
    native.take_counts()
    yield
    races, counts = native.take_races(), native.take_counts()
    if os.environ.get("COPIES"):
        print(f"\n{item.nodeid}: {counts}")
    assert not races, "\n".join(races)
