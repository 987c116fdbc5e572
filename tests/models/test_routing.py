"""Routing against a loop over tokens, as Switch Transformer and GShard write it down."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pagoda.errors import ConfigError
from pagoda.models.mixture_shapes import RoutingConfig
from pagoda.models.routing import Routing, capacity, route


def slow_route(logits: torch.Tensor, top_k: int, room: int | None) -> tuple[dict[int, list[tuple[int, float]]], float]:
    """expert -> (entry, gate) of what it takes, and the balance loss; one token at a time."""
    sequences, tokens, experts = logits.shape
    probabilities = logits.double().softmax(-1)
    taken: dict[int, list[tuple[int, float]]] = {expert: [] for expert in range(experts)}
    balance = 0.0
    for b in range(sequences):
        load, firsts = [0] * experts, [0] * experts
        chosen = [
            probabilities[b, s].sort(descending=True, stable=True).indices[:top_k].tolist() for s in range(tokens)
        ]
        for k in range(top_k):
            for s in range(tokens):
                expert = chosen[s][k]
                firsts[expert] += k == 0
                load[expert] += 1
                if room is None or load[expert] <= room:
                    gate = float(probabilities[b, s, expert])
                    if top_k > 1:
                        gate /= sum(float(probabilities[b, s, other]) for other in chosen[s])
                    taken[expert].append(((b * top_k + k) * tokens + s, gate))
        shares = probabilities[b].mean(0)
        balance += experts * sum(firsts[e] / tokens * float(shares[e]) for e in range(experts)) / sequences
    return taken, balance


def as_lists(routing: Routing) -> dict[int, list[int]]:
    parts = routing.entries.split(routing.counts.tolist())
    return {expert: part.tolist() for expert, part in enumerate(parts)}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tokens_go_where_a_loop_over_them_sends_them(data: st.DataObject) -> None:
    sequences, tokens, experts = (data.draw(st.integers(1, most)) for most in (4, 12, 9))
    top_k = data.draw(st.integers(1, min(3, experts)))
    room = data.draw(st.none() | st.integers(1, tokens))
    logits = torch.randn(
        sequences, tokens, experts, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    routing = route(logits, top_k, room)
    taken, balance = slow_route(logits, top_k, room)
    assert as_lists(routing) == {expert: [entry for entry, _ in entries] for expert, entries in taken.items()}
    assert routing.gates.tolist() == pytest.approx(
        [gate for entries in taken.values() for _, gate in entries], rel=1e-5
    )
    assert routing.balance.item() == pytest.approx(balance, rel=1e-5)
    kept = sum(map(len, taken.values())) / (sequences * tokens * top_k)
    assert routing.dropped.item() == pytest.approx(1 - kept, abs=1e-6)


def test_an_expert_takes_no_more_than_its_room_first_choices_first() -> None:
    logits = torch.zeros(1, 4, 3)
    logits[0, :, 0] = torch.tensor([2.0, 2.0, 2.0, 1.0])
    logits[0, :, 1] = torch.tensor([1.0, 1.0, 1.0, 2.0])
    routing = route(logits, top_k=2, room=2)
    # Entries 0-3 are first choices, 4-7 second ones. Token 3's first choice takes expert 1 before tokens 0-2's second.
    assert as_lists(routing) == {0: [0, 1], 1: [3, 4], 2: []}
    assert routing.dropped.item() == pytest.approx(0.5)


def test_room_is_switchs_share_of_a_sequence() -> None:
    assert capacity(tokens=512, experts=8, top_k=1, factor=1.25) == 80
    assert capacity(tokens=512, experts=8, top_k=2, factor=1.25) == 160
    assert capacity(tokens=10, experts=64, top_k=1, factor=1.0) == 1


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_sequences_routing_does_not_depend_on_its_batch(top_k: int) -> None:
    logits = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    whole = as_lists(route(logits, top_k, 3))
    for index in range(3):
        alone = as_lists(route(logits[index : index + 1], top_k, 3))
        first = index * top_k * 8
        for expert, entries in whole.items():
            assert [e - first for e in entries if first <= e < first + top_k * 8] == alone[expert]


def test_an_even_load_has_balance_one_and_one_expert_for_all_has_as_many_as_there_are() -> None:
    even = torch.full((1, 6, 6), -20.0)
    even[0, torch.arange(6), torch.arange(6)] = 20.0
    assert route(even, 1, None).balance.item() == pytest.approx(1.0)
    lopsided = torch.zeros(1, 6, 6)
    lopsided[..., 2] = 40.0
    assert route(lopsided, 1, None).balance.item() == pytest.approx(6.0)


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_router_learns_from_gates_and_from_balance(top_k: int) -> None:
    logits = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    routing = route(logits, top_k, None)
    from_gates = torch.autograd.grad(routing.gates.square().sum(), logits, retain_graph=True)[0]
    from_balance = torch.autograd.grad(routing.balance, logits)[0]
    for grad in (from_gates, from_balance):
        assert grad.isfinite().all()
        assert grad.abs().max() > 0


@pytest.mark.parametrize(
    "settings", [{"top_k": 0}, {"capacity_factor": 0.0}, {"capacity_factor": math.inf}, {"balance_coefficient": -1.0}]
)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RoutingConfig(**settings)  # type: ignore[arg-type]
