"""RAM that CUDA has page-locked: what a fake of CUDA's runtime is asked for."""

import gc
import os
from types import SimpleNamespace

import pytest
import torch

from pagoda.errors import BudgetError
from pagoda.memory import cuda
from pagoda.memory.cuda import PinnedArena, copy_async

from .test_arena import linux_only, mapping_at

MIB = 2**20


class Runtime:
    """What is registered, and how often the last error was asked for."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.asked = 0
        self.most = 2**60
        """The most bytes that may be registered together."""
        self.mapped_at_end: list[bool] = []

    def register(self, address: int, nbytes: int, flags: int) -> int:
        if sum(self.registered.values()) + nbytes > self.most:
            return 2
        self.registered[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        self.mapped_at_end.append(mapping_at(address) is not None)
        del self.registered[address]
        return 0

    def last_error(self) -> int:
        self.asked += 1
        return 2


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    names = SimpleNamespace(cudaHostRegister=runtime.register, cudaHostUnregister=runtime.unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: names)
    process = SimpleNamespace(cudaGetLastError=runtime.last_error)
    monkeypatch.setattr(cuda, "ctypes", SimpleNamespace(CDLL=lambda name: process))
    monkeypatch.setattr(cuda, "REGISTERED_BYTES", 4 * MIB)
    return runtime


def test_large_memory_is_page_locked_in_pieces_that_drivers_accept(runtime: Runtime) -> None:
    arena = PinnedArena(9 * MIB)
    assert list(runtime.registered.values()) == [4 * MIB, 4 * MIB, MIB]
    assert list(runtime.registered) == [arena.address, arena.address + 4 * MIB, arena.address + 8 * MIB]
    arena.close()
    arena.close()
    assert not runtime.registered
    assert not cuda._seams


def test_no_copy_crosses_from_one_piece_to_the_next(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = PinnedArena(9 * MIB)
    host = arena.tensor(2 * MIB, 3 * MIB + 1, torch.bfloat16)
    values = (torch.arange(3 * MIB + 1) % 251).to(torch.bfloat16)
    copied, copy_ = [], torch.Tensor.copy_

    def noted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        copied.append(((target.data_ptr() - arena.address) / MIB, target.nbytes))
        return copy_(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    copy_async(host, values)
    assert copied == [(2, 2 * MIB), (4, 4 * MIB), (8, 2)]
    assert host.equal(values)
    arena.close()


def test_a_refusal_leaves_nothing_locked_and_no_error_for_the_next_launch(runtime: Runtime) -> None:
    runtime.most = 6 * MIB
    with pytest.raises(BudgetError, match=r"page-lock 9\.00 MiB .*memory\.host") as refused:
        PinnedArena(9 * MIB)
    assert refused.value.tier == "host"
    assert not runtime.registered
    assert runtime.asked == 1


@linux_only
def test_memory_that_nobody_closes_is_unlocked_before_it_is_unmapped(runtime: Runtime) -> None:
    arena = PinnedArena(9 * MIB)
    address = arena.address
    del arena
    gc.collect()
    assert not runtime.registered
    assert runtime.mapped_at_end == [True] * 3
    assert mapping_at(address) is None


def test_a_forked_child_unlocks_nothing(runtime: Runtime) -> None:
    arena = PinnedArena(MIB)
    if (child := os.fork()) == 0:
        arena.close()
        os._exit(len(runtime.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    arena.close()
