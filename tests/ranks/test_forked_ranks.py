"""Ranks that are forked from a process that has used torch, as Accelerate's `debug_launcher` does."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import ended, fork
from torch import nn

import pagoda
from pagoda.errors import ConfigError, RankError
from pagoda.mesh.world import World, launched
from pagoda.optimizer import PagedOptimizer
from pagoda.ranks.transport import Transport

SECONDS = 12
"""After which a rank that still waits is killed."""


def in_two_forks(work: Callable[[int], object], out: Path, **environment: str) -> list[int]:
    """The exit status of each rank that does `work`. All have the same environment."""

    def run(rank: int) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        os.environ.update(WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo", **environment)
        dist.init_process_group("gloo", rank=rank, store=dist.FileStore(str(out / "store"), 2), world_size=2)
        work(rank)

    return [ended(child) for child in [fork(lambda rank=rank: run(rank)) for rank in range(2)]]  # type: ignore[misc]


def wrapped() -> tuple[nn.Module, PagedOptimizer]:
    torch.manual_seed(os.getpid())
    return pagoda.wrap(nn.Linear(8, 4), pagoda.AdamW(lr=0.1), memory=pagoda.Memory(host="16MiB"))


@pytest.mark.parametrize("local_size", ["1", "2"])
def test_ranks_whose_environment_has_rank_0_for_each_are_those_of_the_process_group(
    local_size: str, tmp_path: Path
) -> None:
    def train(rank: int) -> None:
        model, optimizer = wrapped()
        for _ in range(2):
            model(torch.full((2, 8), 1.0 + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.save(model.state_dict(), tmp_path / f"{rank}.pt")
        optimizer.close()

    assert in_two_forks(train, tmp_path, RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE=local_size) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_rank_that_cannot_send_does_not_wait_for_the_others_to_close(tmp_path: Path) -> None:
    def start(rank: int) -> None:
        if rank == 0:
            Transport.trade = lost  # type: ignore[assignment, method-assign]
        try:
            wrapped()
        except RankError as error:
            (tmp_path / f"{rank}.txt").write_text(str(error))

    def lost(transport: Transport, *_: object) -> None:
        raise transport.lost(None, RuntimeError("Pair is not connected"))

    assert in_two_forks(start, tmp_path, RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2") == [0, 0]
    assert "Pair is not connected" in (tmp_path / "0.txt").read_text()
    assert "Rank 0 (process" in (tmp_path / "1.txt").read_text()


def test_a_rank_of_several_nodes_that_torch_numbers_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert launched() == World(1, 4, 1, 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    with pytest.raises(ConfigError, match="RANK is 1 in the environment, but this process is rank 2"):
        launched()
