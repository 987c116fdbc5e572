"""Experts are paged like anything else: what no token needs is neither fetched nor updated, and no bit changes."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import split, update
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from zoo import (
    ALL_ON_SSD,
    ARENA,
    PAGE,
    PLACEMENTS,
    RESIDENT,
    VOCABULARY,
    Loop,
    Outcome,
    run,
    squeeze,
    take_step,
)

import pagoda
from pagoda.models import MIXTURE_SHAPES
from pagoda.models.mixture import Expert
from pagoda.models.mixture_shapes import RoutingConfig
from pagoda.models.moe import build_mixture
from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.schedule.experts import Steadiness

STEPS = 6
GPT = replace(MIXTURE_SHAPES["gpt-moe-15m"], layers=2, hidden=64, heads=4, ffn=128, vocab=VOCABULARY, seq_len=32)
T5 = replace(MIXTURE_SHAPES["t5-moe-15m"], layers=2, decoder_layers=2, hidden=64, heads=4, ffn=128, vocab=VOCABULARY)


def gpt_moe(**options: Any) -> nn.Module:
    return build_mixture(GPT, **options)


def t5_moe(**options: Any) -> nn.Module:
    return build_mixture(T5, **options)


def mixtral() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(
        vocab_size=VOCABULARY, num_hidden_layers=3, num_local_experts=4, use_cache=False, output_router_logits=True,
        **sizes,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def qwen3_moe() -> nn.Module:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, num_hidden_layers=3, num_experts=8, num_experts_per_tok=2, head_dim=16, use_cache=False,
        **sizes,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt-moe": lambda: gpt_moe(gradient_checkpointing=False),
    "gpt-moe-checkpointed": lambda: gpt_moe(config=RoutingConfig(top_k=1)),
    "t5-moe": lambda: t5_moe(gradient_checkpointing=False),
    "t5-moe-checkpointed": lambda: t5_moe(config=RoutingConfig(top_k=2)),
    "mixtral": mixtral,
    "qwen3-moe": qwen3_moe,
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return BUILDERS[name]().train()


def few_tokens(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
    """Two short sequences a step: most steps leave some experts out, and never the same ones."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (2, 5), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        outcome.losses.append(loss.item())
        take_step(optimizer, outcome)


@cache
def resident(name: str, clip: float | None) -> Outcome:
    return run(built(name), RESIDENT, few_tokens, clip_grad_norm=clip)


def placements() -> list[object]:
    """Each model in half of the placements, such that neighbours share none; the others are slow."""
    return [
        pytest.param(name, placement, id=f"{name}-{placement}", marks=[pytest.mark.slow] if (m + p) % 2 else [])
        for (m, name), (p, placement) in itertools.product(enumerate(BUILDERS), enumerate(PLACEMENTS))
    ]


@pytest.mark.parametrize(("name", "placement"), placements())
def test_placement_does_not_change_a_bit(name: str, placement: str, tmp_path: Path) -> None:
    clip = 0.5 if placement in (ALL_ON_SSD, ARENA) else None
    announced = None if clip else 1
    memory = squeeze(built(name), placement, tmp_path, clipping=clip is not None, announced=announced)
    outcome = run(built(name), memory, few_tokens, clip_grad_norm=clip, accumulation_steps=announced)
    assert ("exp_avg" in outcome.plan.bytes.get("ssd", {})) == (placement != ARENA)  # type: ignore[union-attr]
    outcome.assert_same_bits(resident(name, clip))


def plain(model: nn.Module, loop: Loop) -> Outcome:
    """Training with torch alone, one parameter at a time, by the contract of the update."""
    rule, outcome = pagoda.AdamW(lr=1e-2, weight_decay=0.1), Outcome()
    states: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    for param in dict.fromkeys(model.parameters()):
        weight, low = split(param.detach().clone())
        moments = {name: torch.zeros_like(param.detach()) for name in ("exp_avg", "exp_avg_sq")}
        param.data = weight
        states[param] = {"weight": param.data, "weight_low": low, **moments}
    steps = dict.fromkeys(states, 0)

    class Optimizer:
        stats = pagoda.runtime.stats.StepStats()  # type: ignore[attr-defined]

        def step(self) -> None:
            for param, state in states.items():
                if param.grad is not None:
                    steps[param] += 1
                    update(rule, state, param.grad, rule.scalars(steps[param]))

        def zero_grad(self) -> None:
            model.zero_grad()

    torch.manual_seed(2)
    loop(model, Optimizer(), outcome)
    outcome.weights = model.state_dict()
    outcome.optimizer = {"steps": {name: steps[param] for name, param in model.named_parameters()}}
    return outcome


@pytest.mark.parametrize("name", BUILDERS)
def test_wrapped_training_is_plain_training(name: str) -> None:
    wrapped, by_torch = resident(name, None), plain(built(name), few_tokens)
    assert wrapped.losses == by_torch.losses
    for key, weight in by_torch.weights.items():
        assert torch.equal(weight, wrapped.weights[key]), key
    # An expert that gets no gradient in a step is not updated, as in torch.
    steps = by_torch.optimizer["steps"]
    state: Any = wrapped.optimizer["state"]
    for index, (param, count) in enumerate(steps.items()):  # type: ignore[attr-defined]
        assert (state[index]["step"] if count else 0) == count, param
    if name.startswith(("gpt", "t5")):
        assert len(set(steps.values())) > 1  # type: ignore[attr-defined]


def test_every_expert_is_a_unit_however_small() -> None:
    model, _ = pagoda.wrap(built("gpt-moe"), pagoda.AdamW(), memory=pagoda.Memory(host="64MiB", page_size=PAGE))
    units = [unit.module for unit in pagoda.plan_of(model).units]
    experts = [name for name, module in model.named_modules() if isinstance(module, Expert)]
    assert [name for name in units if ".experts." in name] == experts
    assert len(experts) == GPT.layers * GPT.experts


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_the_merged_experts_of_a_transformers_layer_are_one_unit(name: str) -> None:
    memory = pagoda.Memory(host="64MiB", unit_limit="32KiB", page_size=PAGE)
    model, _ = pagoda.wrap(built(name), pagoda.AdamW(), memory=memory)
    units = {unit.module: [slot.param.name for slot in unit.slots] for unit in pagoda.plan_of(model).units}
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts"
        assert units[experts] == [f"{experts}.gate_up_proj", f"{experts}.down_proj"]


# --- what is fetched --------------------------------------------------------------------------------------


def ran(model: nn.Module) -> set[str]:
    """Names of the experts that have run since: a set that fills."""
    names: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, Expert):
            module.register_forward_hook(lambda *_, name=name: names.add(name))
    return names


def fetched_experts(optimizer: Any) -> set[str]:
    spans = (span.name for span in optimizer.timeline.spans if span.lane in ("h2d", "ssd_read"))
    return {label.partition(" ")[2] for label in spans if label.startswith("fetch ") and ".experts." in label}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("placement", [ARENA, ALL_ON_SSD])
def test_only_the_experts_that_run_are_fetched(placement: str, checkpointing: bool, tmp_path: Path) -> None:
    shape = replace(GPT, experts=16, top_k=1)
    torch.manual_seed(0)
    model = build_mixture(shape, gradient_checkpointing=checkpointing)
    memory = squeeze(model, placement, tmp_path)
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=1e-2), memory=memory)
    names, generator, seen = ran(model), torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        optimizer.trace_next_step()
        names.clear()
        ids = torch.randint(VOCABULARY, (1, 4), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert fetched_experts(optimizer) == names
        assert 0 < len(names) <= 2 * 4
        seen.append(frozenset(names))
    assert len(set(seen)) > 1
    optimizer.close()


@pytest.mark.usefixtures("lanes_keep_up")
def test_routing_that_varies_makes_no_new_plans_and_no_faults() -> None:
    memory = pagoda.Memory(device="cpu:16MiB", host="64MiB", page_size=PAGE)
    model, optimizer = pagoda.wrap(built("gpt-moe-checkpointed"), pagoda.AdamW(lr=1e-2), memory=memory)
    replanned, faults, generator = [], [], torch.Generator().manual_seed(1)
    for _ in range(12):
        ids = torch.randint(VOCABULARY, (2, 5), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        replanned.append(optimizer.stats.replanned)
        faults.append(optimizer.stats.faults)
    assert sum(replanned[1:]) <= 2  # after 4 and 8 steps it is decided which experts a plan counts on
    assert faults[1:] == [0] * 11  # what chosen experts need is known before they are used
    optimizer.close()


@pytest.mark.usefixtures("lanes_keep_up")
def test_experts_that_every_step_uses_are_fetched_ahead(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: nn.Module = build_mixture(replace(GPT, experts=2, top_k=2), gradient_checkpointing=False)
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=1e-2), memory=squeeze(model, ARENA, tmp_path))
    experts = pagoda.plan_of(model).layout.expert_units
    assert len(experts) == 4

    def planned() -> frozenset[int]:
        return experts & {access.unit for access in pagoda.plan_of(model).trace.accesses}

    assert not planned()
    ids = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    for _ in range(8):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert planned() == experts
    assert not optimizer.stats.replanned
    assert optimizer.stats.faults == 0
    optimizer.close()


def test_an_expert_without_a_token_keeps_its_state() -> None:
    model, optimizer = pagoda.wrap(
        built("gpt-moe"), pagoda.AdamW(lr=1e-2, weight_decay=0.5), memory=RESIDENT, clip_grad_norm=1.0
    )
    before, names = {key: value.clone() for key, value in model.state_dict().items()}, ran(model)
    ids = torch.randint(VOCABULARY, (1, 3), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    after, states = model.state_dict(), optimizer.state_dict()["state"]
    for index, (key, _) in enumerate(model.named_parameters()):
        if ".experts." in key:
            used = any(key.startswith(f"{name}.") for name in names)
            assert (index in states) == used, key
            assert used or torch.equal(before[key], after[key]), key
    assert any(not torch.equal(before[key], after[key]) for key in before if ".experts." in key)
    assert 0 < len(names) < GPT.layers * GPT.experts
    optimizer.close()


# --- what a plan counts on --------------------------------------------------------------------------------


def traces(chance: float, units: int, steps: int) -> Iterator[Trace]:
    """Unit 0 is dense, the others are experts that a step uses by chance."""
    draw = random.Random(0)
    for _ in range(steps):
        used = [0, *(unit for unit in range(1, units) if draw.random() < chance)]
        forward = [Access(unit, Phase.FORWARD) for unit in used]
        yield Trace((*forward, *(Access(unit, Phase.BACKWARD) for unit in reversed(used)), STEP))


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.9, 0.99, 1.0])
def test_routing_seldom_changes_what_is_counted_on(chance: float) -> None:
    units, steps = 50, 1000
    steadiness = Steadiness(frozenset(range(1, units)))
    changes = 0
    for trace in traces(chance, units, steps):
        changes += steadiness.observe(trace)
        counted_on = {access.unit for access in steadiness.counted_on(trace).accesses}
        assert not counted_on & steadiness.unsteady
        assert {access.unit for access in steadiness.dense(trace).accesses} == {0, STEP.unit}
        used = {access.unit for access in trace.accesses}
        assert {unit for unit in range(1, units) if steadiness.counts_on(unit)} == steadiness.steady & used
    assert changes <= 8  # of 1000 steps, at most after 4, 8, ..., 512
    if chance in (0.0, 1.0):
        assert changes == chance
        assert len(steadiness.steady) == chance * (units - 1)
