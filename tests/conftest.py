"""What keeps tests strict, fast and independent of the machine's own hardware file.

Poison mode: freed frames hold NaN, so a lease used after its end shows. Hypothesis tries the same few examples every
time, so that a failure is the change's own; `make test-all` (HYPOTHESIS_PROFILE=random) looks for new ones, among more.
`tests/mutants.py` asks only whether a test fails (HYPOTHESIS_PROFILE=unshrunk), not for the smallest example.
GPU kernels run in Triton's interpreter where there is no GPU. Files of tests lie in RAM where it has room for them; the
fixture `on_drive` is for tests that need a drive.
"""

import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["PAGODA_POISON"] = "1"
# Empty for each session: what another one measured or tokenized must not change what tests see.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="pagoda-tests-cache-")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS has other bits in each run

import multiprocess  # noqa: F401  -- it keeps what `__main__` is when it is imported: not a page that a test runs

from pagoda.process import keep_freed_memory, spin_briefly

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process that tests start would compile all modules again
sys.dont_write_bytecode = False
gc.disable()  # until all tests are collected: what imports make stays
_RAM = Path("/dev/shm")
_FOLDER = ""
"""Files of this session, and of processes that run tests for it."""
if "PYTEST_DEBUG_TEMPROOT" not in os.environ and os.access(_RAM, os.W_OK) and shutil.disk_usage(_RAM).free > 4 << 30:
    _FOLDER = os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="pagoda-tests-", dir=_RAM)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
keep_freed_memory()
spin_briefly()  # before torch is imported, here and in the processes that tests start

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import Phase, settings  # noqa: E402
from ranks.ranks import ranks, seed_no_accelerators  # noqa: E402, F401

if not torch.cuda.is_available():
    seed_no_accelerators()
    # Before anything imports Triton: GPU kernels then run on the CPU, in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("fixed", derandomize=True, max_examples=25, deadline=None)
settings.register_profile("unshrunk", settings.get_profile("fixed"), phases=(Phase.explicit, Phase.generate))
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files in which all tests are slow are not imported where slow tests are not wanted."""
    if "not slow" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return re.search(r"\npytestmark = \[?pytest\.mark\.slow", collection_path.read_text()) is not None or None


def pytest_unconfigure() -> None:
    """The session's cache, and its files in RAM, are gone with the session."""
    for folder in filter(None, (os.environ["XDG_CACHE_HOME"], _FOLDER)):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_finish() -> None:
    """Garbage collection looks at what tests make alone, not at all that was imported; some tests call for it often."""
    gc.freeze()
    gc.set_threshold(20_000)  # a tenth of the time of tests went into garbage collection, which found next to nothing
    gc.enable()


@pytest.fixture(scope="session")
def _drive() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="pagoda-tests-")  # no object that a forked child's end would remove it with
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def on_drive(_drive: str) -> Path:
    """A directory of this test that is not in RAM, where there is a drive."""
    return Path(tempfile.mkdtemp(dir=_drive))


@pytest.fixture(autouse=True)
def _lanes_have_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in tests are so small that all work on them would be done by the thread that has it; races would not show.
    Tests marked `inline`, and processes that tests start, work as users' do."""
    from pagoda.runtime import lanes

    if request.node.get_closest_marker("inline") is None:
        monkeypatch.setattr(lanes, "INLINE_BYTES", 0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models train many times faster on one thread, most of all where tests share cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_lane_is_left(request: pytest.FixtureRequest) -> None:
    """The test before has left no thread of a lane behind, which a later one that looks for threads would find. A
    checkpoint may still be being written."""
    until = time.monotonic() + 30
    while (new := _lanes() - _left) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    _left.update(new)
    assert not new, f"{_before[-1]} has not closed a lane"
    _before.append(request.node.nodeid)


_before = ["an import"]
_left: set[threading.Thread] = set()


def _lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("pagoda-")}
