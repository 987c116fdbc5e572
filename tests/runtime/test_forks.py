"""A forked process has no part in training: it cannot train, and nothing that it does, or its end, changes anything."""

import atexit
import gc
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import end_with_parent, fork
from garbage import only_of_this_test
from torch import nn
from torch.utils.data import DataLoader, Dataset
from zoo import ALL_ON_SSD, squeeze

import pagoda
from pagoda.memory.arena import Arena
from pagoda.memory.ssd.lock import lock_directories
from pagoda.optimizer import PagedOptimizer
from pagoda.runtime.lanes import Handle

from .conftest import Wrap
from .loops import USES, WIDTH, Layers, loss_of_layers

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]
SOON_S = 20


@pytest.fixture(autouse=True)
def _collections_look_at_what_a_test_makes() -> None:
    only_of_this_test()


def ends_well(work: Callable[[], object]) -> None:
    """`work` ends in a forked process, soon and without an error; so does the process, with all that Python does then.

    Its output is this process's.
    """
    assert _status(fork(work)) == 0


def _status(child: int) -> int:
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the forked process hangs")


def on_ssd(directory: Path) -> pagoda.Memory:
    return squeeze(Layers(), ALL_ON_SSD, directory, clipping=False)


def test_a_forked_process_that_uses_the_model_is_refused(wrap: Wrap, tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    model, optimizer = wrap(Layers(), on_ssd(tmp_path / "ssd"))
    loss_of_layers(model).backward()
    optimizer.step()
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    loss_of_layers(model).backward()
    optimizer._engine.saver._job = Handle("checkpoint")  # one is being written
    optimizer._engine.gradients.untaken()[0].pending.append(Handle("d2h"))  # and a gradient is on its way

    def use_all() -> None:
        for name, use in USES.items():
            print(name, file=sys.stderr, flush=True)
            with pytest.raises(pagoda.UsageError, match="forked from the one that called"):
                use(model, optimizer, tmp_path)

    ends_well(use_all)
    optimizer._engine.saver._job = None
    optimizer._engine.gradients.untaken()[0].pending.pop()
    optimizer.step()
    assert optimizer.load_checkpoint(tmp_path / "checkpoint") == {}


@pytest.mark.parametrize("end", ["close", "drop"])
def test_what_a_forked_process_does_to_its_copy_is_nothing_to_the_one_that_trains(end: str, tmp_path: Path) -> None:
    outcomes = []
    for forks in (True, False):
        torch.manual_seed(0)
        model, optimizer = pagoda.wrap(Layers(), pagoda.AdamW(), memory=on_ssd(tmp_path), precision="bf16")

        def leave(model: nn.Module = model, optimizer: PagedOptimizer = optimizer) -> None:
            if end == "close":
                optimizer.close()
                with optimizer:
                    pass
            else:
                optimizer._engine.store.ssd._store._lock.close()
                optimizer._engine._dropped()  # as the collector calls both
            atexit._run_exitfuncs()

        for step in range(2):
            loss_of_layers(model).backward()
            optimizer.step()
            if forks and step == 0:
                ends_well(leave)
                with pytest.raises(pagoda.StorageError, match="in use by"):
                    lock_directories([tmp_path])
        outcomes.append(model.state_dict())
        optimizer.close()
        assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(value, outcomes[1][name]) for name, value in outcomes[0].items())


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return torch.full((WIDTH,), float(index))


def test_workers_of_a_data_loader_bring_batches_while_a_model_is_trained(wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = wrap(Layers(), on_ssd(tmp_path))
    seen = 0
    for batch in DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
        model(batch, [0, 1, 2]).backward()
        optimizer.step()
        seen += len(batch)
    assert seen == 8
    with pytest.raises(pagoda.StorageError, match="in use by"):
        lock_directories([tmp_path])
    optimizer.close()
    lock_directories([tmp_path]).close()


def test_a_directory_is_free_when_its_process_ends_though_a_forked_one_lives_on(tmp_path: Path) -> None:
    ready, go = os.pipe(), os.pipe()
    holder = os.fork()
    if holder == 0:
        lock = lock_directories([tmp_path])
        if os.fork() == 0:
            end_with_parent(False)
            os.write(ready[1], b"xx")
            os.read(go[0], 1)
        else:
            os.read(ready[0], 1)
        os._exit(0 if lock else 1)
    try:
        assert _status(holder) == 0
        os.read(ready[0], 1)
        lock_directories([tmp_path]).close()
    finally:
        os.write(go[1], b"x")
        for end in (*ready, *go):
            os.close(end)


def test_a_forked_process_unmaps_nothing_where_memory_of_its_own_may_lie() -> None:
    size = 64 << 20
    holder = [Arena(size)]
    address = holder[0].address

    def reuse() -> None:
        holes = [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(4)]
        at = [torch.frombuffer(hole, dtype=torch.uint8, count=1).data_ptr() for hole in holes]
        assert any(abs(where - address) < size for where in at), "the kernel maps where there is room"
        holder.clear()
        gc.collect()
        for hole in holes:
            hole[:] = bytes(size)

    ends_well(reuse)


def test_a_process_forked_from_one_that_trains_can_use_a_model_of_its_own(wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = wrap(Layers())

    def use() -> None:
        own, its = pagoda.wrap(Layers(), pagoda.AdamW(), memory=on_ssd(tmp_path), precision="bf16")
        with its, torch.no_grad():
            loss_of_layers(own)
            assert set(own.state_dict()) == set(Layers().state_dict())

    ends_well(use)
    assert list(tmp_path.iterdir()) == []
    loss_of_layers(model).backward()
    optimizer.step()
