"""Experts divided over real processes: the gradients are those of one process on the whole batch."""

import os
import socket
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from pagoda.experts.parallel import ExpertExchange
from pagoda.transforms.operator_tiles import Tiling

SEQUENCES, LENGTH = 2, 12
"""Of each rank."""
RELATIVE = 2e-5
"""How far fp32 gradients may be apart: the same sums, in another order."""


def mixtral(top_k: int = 2) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(
        vocab_size=96, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=top_k, use_cache=False, **sizes
    )
    torch.manual_seed(0)
    return MixtralForCausalLM(config)


def switch(capacity: int = 2) -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    config = SwitchTransformersConfig(
        vocab_size=96, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=capacity,
        decoder_start_token_id=0, use_cache=False, dropout_rate=0.0, router_jitter_noise=0.0, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    return SwitchTransformersForConditionalGeneration(config)


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


def compare(build: Callable[[], nn.Module], expert_parallel: int, *, checkpointing: bool) -> None:
    exchange, sharing = exchange_of(expert_parallel)
    whole, mine = build(), build()
    Tiling(whole)
    Tiling(mine, exchange=exchange)
    for model in (whole, mine):
        if checkpointing:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        model.train()
    of_whole, here = ([name for name, _ in m.named_parameters() if ".experts." in name] for m in (whole, mine))
    assert {*here} < {*of_whole}
    assert len(here) * expert_parallel == len(of_whole)
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
    compare(mixtral, world, checkpointing=True)
    compare(switch, world, checkpointing=False)
    compare(mixtral, 2, checkpointing=False)
    compare(switch, 2, checkpointing=True)
    send_all_to_one()


def send_all_to_one() -> None:
    """A rank whose experts get no token takes part all the same, in backward too."""
    exchange, _ = exchange_of(dist.get_world_size())
    model = switch(capacity=LENGTH)
    Tiling(model, exchange=exchange)
    for name, param in model.named_parameters():
        if "router" in name:
            nn.init.zeros_(param)
            param.requires_grad_(False)
    ids = batch()[:SEQUENCES]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    used = any(param.grad is not None for name, param in model.named_parameters() if ".experts." in name)
    of_ranks = [False] * dist.get_world_size()
    dist.all_gather_object(of_ranks, used)
    assert sum(of_ranks) == 1


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_rank_on_the_whole_batch(ranks: int) -> None:
    on_ranks(ranks, compare_all)
