"""Experts divided over real processes: the gradients are those of one process on the whole batch."""

import os
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from pagoda.models import MIXTURE_SHAPES
from pagoda.models.mixture_shapes import RoutingConfig
from pagoda.models.moe import build_mixture
from pagoda.models.papers import PaperShape
from pagoda.parallel.experts import ExpertExchange

GPT = replace(MIXTURE_SHAPES["gpt-moe-15m"], layers=2, hidden=32, heads=4, ffn=64, vocab=96, seq_len=32)
T5 = replace(MIXTURE_SHAPES["t5-moe-15m"], layers=1, decoder_layers=1, hidden=32, heads=4, ffn=64, vocab=96)
SEQUENCES, LENGTH = 2, 12
"""Of each rank."""
RELATIVE = 2e-5
"""How far fp32 gradients may be apart: the same sums, in another order."""


def _process(rank: int, world: int, port: int, work: Callable[[], None]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        work()
    finally:
        dist.destroy_process_group()


def on_ranks(world: int, work: Callable[[], None]) -> None:
    """Run a function of this module on so many processes; raises what one of them raises."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_process, (world, port, work), nprocs=world)  # type: ignore[attr-defined, no-untyped-call]


def exchange_of(expert_parallel: int) -> tuple[ExpertExchange, dist.ProcessGroup]:
    """This rank's exchange, and the group of ranks that have the same experts."""
    world, rank = dist.get_world_size(), dist.get_rank()
    dividing = [dist.new_group(list(range(i, i + expert_parallel))) for i in range(0, world, expert_parallel)]
    sharing = [dist.new_group(list(range(i, world, expert_parallel))) for i in range(expert_parallel)]
    exchange = ExpertExchange(dividing[rank // expert_parallel], lambda _, work: work())
    return exchange, sharing[rank % expert_parallel]


def batch() -> torch.Tensor:
    """The batch of all ranks."""
    shape = (SEQUENCES * dist.get_world_size(), LENGTH)
    return torch.randint(96, shape, generator=torch.Generator().manual_seed(1))


def gradients_of_one_rank(model: nn.Module) -> tuple[dict[str, torch.Tensor | None], float]:
    ids = batch()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {name: param.grad for name, param in model.named_parameters()}, loss.item()


def gradients_of_ranks(model: nn.Module, sharing: dist.ProcessGroup) -> tuple[dict[str, torch.Tensor | None], float]:
    """This rank's part of the batch; gradients of the ranks that have a parameter, divided by the number of all ranks,
    and the mean loss."""
    rank = dist.get_rank()
    ids = batch()[rank * SEQUENCES : (rank + 1) * SEQUENCES]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for name, param in model.named_parameters():
        group = sharing if ".experts." in name else dist.group.WORLD
        assert group is not None
        has = torch.tensor(float(param.grad is not None))
        dist.all_reduce(has, group=group)
        if has:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return {name: param.grad for name, param in model.named_parameters()}, mean.item() / dist.get_world_size()


def compare(shape: PaperShape, expert_parallel: int, config: RoutingConfig, *, checkpointing: bool) -> None:
    exchange, sharing = exchange_of(expert_parallel)
    torch.manual_seed(0)
    whole = build_mixture(shape, config, gradient_checkpointing=checkpointing)
    mine = build_mixture(shape, config, gradient_checkpointing=checkpointing, exchange=exchange)
    mine.load_state_dict({name: value for name, value in whole.state_dict().items() if name in mine.state_dict()})
    assert sum(".experts." in name for name, _ in mine.named_parameters()) * expert_parallel == sum(
        ".experts." in name for name, _ in whole.named_parameters()
    )
    expected, loss = gradients_of_one_rank(whole)
    gradients, mean = gradients_of_ranks(mine, sharing)
    assert mean == pytest.approx(loss, rel=1e-6)
    for name, grad in gradients.items():
        other = expected[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert (grad - other).norm() <= RELATIVE * other.norm(), name


def compare_all() -> None:
    world = dist.get_world_size()
    compare(GPT, world, RoutingConfig(), checkpointing=True)
    compare(T5, world, RoutingConfig(), checkpointing=False)
    compare(GPT, 2, RoutingConfig(top_k=1, capacity_factor=0.75), checkpointing=False)
    send_all_to_one()


def send_all_to_one() -> None:
    """A rank whose experts get no token takes part all the same, in backward too."""
    exchange, _ = exchange_of(dist.get_world_size())
    torch.manual_seed(0)
    model = build_mixture(replace(GPT, layers=1), RoutingConfig(top_k=1, capacity_factor=8.0), exchange=exchange)
    for name, param in model.named_parameters():
        if "router" in name:
            nn.init.zeros_(param)
            param.requires_grad_(False)
    ids = batch()[:SEQUENCES]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    has_gradient = {name.rpartition(".experts.")[0] for name, p in model.named_parameters() if p.grad is not None}
    of_ranks: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(of_ranks, has_gradient)
    assert sum("blocks.0.mlp" in of_rank for of_rank in of_ranks) == 1
    with torch.no_grad():
        assert model.eval()(input_ids=ids, labels=ids).dropped == 0


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_rank_on_the_whole_batch(ranks: int) -> None:
    on_ranks(ranks, compare_all)
