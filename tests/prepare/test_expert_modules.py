"""Experts as modules of their own compute what transformers' modules do."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, SwitchTransformersConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from pagoda.prepare.experts import ExpertStack, SwitchRouter
from pagoda.prepare.operator_tiles import Tiling

TOKENS, HIDDEN, EXPERTS = 18, 64, 8


@pytest.fixture(autouse=True)
def stable_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers sorts tokens by expert in no fixed order, which is that of the sums in the gradients of weights."""
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))


def stack(implementation: str = "grouped_mm", dtype: torch.dtype = torch.float32) -> Any:
    """A module that holds a stack of experts."""
    torch.manual_seed(0)
    config: Any = MixtralConfig(num_local_experts=EXPERTS, intermediate_size=48, hidden_size=HIDDEN)
    config._experts_implementation = implementation
    experts = MixtralExperts(config)
    for param in experts.parameters():
        nn.init.normal_(param, std=0.1)
    return nn.ModuleDict({"experts": experts}).to(dtype)


def gradients(
    model: Any, chosen: torch.Tensor, dtype: torch.dtype, counts: torch.Tensor | bool = True
) -> dict[str, torch.Tensor]:
    """Of the tokens, their weights and the stack's parameters, and the output. `counts`: which choices do."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(chosen.shape, generator=generator).to(dtype).requires_grad_()
    experts = model["experts"]
    out = experts(tokens, chosen, weights * counts)
    out.float().square().sum().backward()
    found = {"out": out.detach(), "tokens": tokens.grad, "weights": weights.grad}
    for name in ("gate_up_proj", "down_proj"):
        parts = experts.parts(name) if isinstance(experts, ExpertStack) else [(experts.get_parameter(name), 0)]
        found[name] = torch.cat([param.grad for param, _ in parts])
    return found


def choices(top_k: int, among: int = EXPERTS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.stack([torch.randperm(among, generator=generator)[:top_k] for _ in range(TOKENS)])


@pytest.mark.parametrize("tile", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_in_tiles_gives_the_bits_of_the_stack(dtype: torch.dtype, tile: int | None) -> None:
    chosen = choices(3, among=EXPERTS - 2)  # two experts get no token, and gradients of zeros
    whole = gradients(stack(dtype=dtype), chosen, dtype)
    model = stack(dtype=dtype)
    tiling = Tiling(model, None if tile is None else tile * 3 * 48 * HIDDEN)
    assert isinstance(model["experts"], ExpertStack)
    assert len(model["experts"].pieces()) == (EXPERTS if tile is None else 3)
    cut = gradients(model, chosen, dtype)
    for name, value in whole.items():
        assert torch.equal(cut[name], value), name
    assert not cut["down_proj"][-2:].any()
    tiling.undo()
    assert not isinstance(model["experts"], ExpertStack)


def test_a_number_past_the_experts_adds_nothing() -> None:
    chosen = choices(3)
    chosen[::4, 1] = EXPERTS
    whole = gradients(stack("eager"), chosen.clamp(max=EXPERTS - 1), torch.float32, counts=chosen < EXPERTS)
    model = stack()
    Tiling(model)
    cut = gradients(model, chosen, torch.float32)
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value)


def test_a_switch_router_computes_in_fp32_and_keeps_its_weight_as_it_is() -> None:
    logits = []
    hidden = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    config = SwitchTransformersConfig(d_model=HIDDEN, d_ff=48, num_experts=EXPERTS, router_jitter_noise=0.0)
    for cut in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"mlp": SwitchTransformersSparseMLP(config)}).bfloat16()
        if cut:
            Tiling(model)
        router = model["mlp"].router
        router.classifier.register_forward_hook(lambda _, given, made: logits.append(made))
        router(hidden)
        assert router.classifier.weight.dtype is (torch.bfloat16 if cut else torch.float32)
        assert isinstance(router.classifier, SwitchRouter) == cut
    assert logits[1].dtype is torch.float32
    assert torch.equal(*logits)


def tiled() -> Any:
    model = stack()
    Tiling(model)
    return model["experts"]


def test_what_keeps_the_weights_is_told_what_runs_and_what_gets_zeros() -> None:
    told: list[Any] = []
    experts = tiled()
    names = {tile: int(name) for name, tile in experts.tiles.items()}
    experts.coming = lambda runs, idle: told.append(([names[t] for t in runs], [names[t] for t in idle]))
    chosen = torch.tensor([[5, 2], [2, 7]])
    experts(torch.randn(2, HIDDEN), chosen, torch.ones(2, 2))
    assert told == [([2, 5, 7], [0, 1, 3, 4, 6])]


@pytest.mark.parametrize("routed", [[[5, 2], [2, 7]], [[0, 1], [6, 3]], [[7, 4], [4, 7]]])
def test_gradients_come_in_one_order_whatever_routers_choose(routed: list[list[int]]) -> None:
    """So ranks that choose other experts reduce each unit once."""
    experts = tiled()
    order: list[int] = []
    for name, tile in experts.tiles.items():
        tile.down_proj.register_hook(lambda _, number=int(name): order.append(number))
    experts(torch.randn(2, HIDDEN), torch.tensor(routed), torch.ones(2, 2)).sum().backward()
    assert order == [7, 6, 5, 4, 3, 2, 1, 0]


def test_the_zeros_of_experts_without_tokens_take_no_memory_before_they_are_accumulated() -> None:
    experts = tiled()
    out = experts(torch.randn(2, HIDDEN), torch.tensor([[0], [1]]), torch.ones(2, 1))
    idle = experts.tiles["5"].down_proj
    (grad,) = torch.autograd.grad(out.sum(), [idle])
    assert grad.shape == idle.shape
    assert not grad.any()
    assert grad.untyped_storage().nbytes() == grad.element_size()
