"""Activation policies: none changes a bit of training, and what they keep and offload is accounted for."""

import errno
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.loops import every_step, learn
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import (
    ALL_ON_SSD,
    PAGE,
    RESIDENT,
    VOCABULARY,
    Block,
    Outcome,
    Recipe,
    batch,
    least,
    llama,
    loss_of,
    run,
    take_step,
    train,
)

import pagoda
from pagoda.autograd.activations.places import SsdPlace
from pagoda.config.training import ActivationMode
from pagoda.plan.activations import ActivationPlan, Policy, StepSizes, bucket_of, choose, peak_of

LAYERS = 2 * len(Policy)


def two_steps(memory: pagoda.Memory, activations: ActivationMode) -> Any:
    """What the last of two steps kept, and what was planned."""
    torch.manual_seed(0)
    wrapped, optimizer = pagoda.wrap(
        llama(LAYERS).train(),
        pagoda.AdamW(),
        memory=memory,
        max_grad_norm=1.0,
        activations=activations,
        precision="bf16",
    )
    for _ in range(2):
        ids = torch.randint(VOCABULARY, (1, 64))
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    planned = pagoda.plan_of(wrapped).activations
    measured = optimizer.stats.activation_bytes
    optimizer.close()
    return measured, planned


def test_what_graphs_keep_is_what_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every policy and a mix, from the sizes that keeping everything has shown as well as from its own."""
    mix = tuple(Policy) * 2
    on_ssd = pagoda.Memory(host="256MiB", ssd=f"{tmp_path}:1GiB", page_size=PAGE)
    in_ram = pagoda.Memory(host="256MiB", device="cpu:8MiB", page_size=PAGE)
    kept, planned = two_steps(on_ssd, "keep")
    sizes = planned.sizes
    assert kept.kept == saved_by_plain_torch()
    monkeypatch.setattr(
        "pagoda.autograd.activations.graph_memory.choose",
        lambda sizes, room: ActivationPlan(mix, peak_of(sizes, mix, room.host), sizes),
    )
    cases: tuple[tuple[ActivationMode, pagoda.Memory], ...] = (
        ("recompute", on_ssd),
        ("offload", in_ram),
        ("recompute+offload", on_ssd),
        ("auto", in_ram),
        ("auto", on_ssd),
    )
    for activations, memory in cases:
        measured, planned = two_steps(memory, activations)
        policies = mix if activations == "auto" else (Policy(activations),) * len(sizes.blocks)
        assert planned.policies == policies
        foreseen = peak_of(sizes, policies, 1 << 40 if memory is in_ram else 0)
        for forecast in (planned.peak, foreseen):
            assert measured.total == pytest.approx(forecast.total, rel=0.05), (activations, measured, forecast)
            assert measured.kept <= 1.05 * forecast.kept, (activations, measured, forecast)
            assert (measured.host, measured.ssd) == (forecast.host, forecast.ssd)


def saved_by_plain_torch() -> int:
    """Bytes of the storages that a graph saves without Pagoda, weights and buffers not counted."""
    torch.manual_seed(0)
    plain = llama(LAYERS).to(torch.bfloat16).train()
    own = {tensor.untyped_storage()._cdata for tensor in (*plain.parameters(), *plain.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    ids = torch.randint(VOCABULARY, (1, 64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        plain(input_ids=ids, labels=ids).loss  # noqa: B018
    return sum(storage.nbytes() for storage in storages.values())


def wrapped_llama(activations: ActivationMode, budget: int) -> tuple[nn.Module, Any]:
    """Where "auto" chooses, it has a budget."""
    memory = replace(RESIDENT, activations=budget if activations == "auto" else None)
    model = Recipe("llama").build()
    return pagoda.wrap(
        model, pagoda.AdamW(), memory=memory, max_grad_norm=1.0, activations=activations, precision="bf16"
    )


def test_lengths_that_vary_keep_to_the_budget_and_share_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket of lengths is planned for once; its sizes may be those of its shortest, and its longest fits too."""
    chosen: list[StepSizes] = []
    monkeypatch.setattr(
        "pagoda.autograd.activations.graph_memory.choose",
        lambda sizes, room: chosen.append(sizes) or choose(sizes, room),
    )
    lengths = random.Random(0).choices(range(24, 64), k=18)
    losses: dict[str, list[float]] = {}
    kept: dict[str, list[int]] = {}
    budget, replanned = 0, 0
    for activations in ("recompute", "keep", "auto"):
        model, optimizer = wrapped_llama(activations, budget)
        losses[activations], kept[activations], plans = [], [], {}
        for length in lengths if activations != "recompute" else [max(lengths)]:
            ids = torch.arange(length).remainder(VOCABULARY).expand(2, -1)
            loss = loss_of(model(input_ids=ids, labels=ids))
            loss.backward()
            optimizer.step()
            losses[activations].append(loss.item())
            kept[activations].append(optimizer.stats.activation_bytes.kept)
            bucket = bucket_of([(2, length)])
            policies = pagoda.plan_of(model).activations.policies
            assert plans.setdefault(bucket, policies) == policies, "a bucket is planned for once"
            replanned += activations == "auto" and optimizer.stats.replanned
        optimizer.close()
        budget = int(1.5 * kept["recompute"][0])
    assert losses["auto"] == losses["keep"]
    assert max(kept["auto"]) <= budget < max(kept["keep"])
    assert len(chosen) == len(plans) < len(lengths) / 2
    assert replanned <= 1, "weights move as they did, whatever the length"
    assert any(len(set(policies)) > 1 for policies in plans.values()), "a mix is better than one policy for all"


def test_auto_keeps_to_a_budget_with_several_graphs_at_once() -> None:
    """As a stage of a pipeline has them; a graph that is dropped leaves its room to others."""
    ids = torch.arange(64).view(2, 32) % VOCABULARY
    budget = 0
    losses: dict[str, list[float]] = {}
    modes: tuple[ActivationMode, ...] = ("recompute", "keep", "auto")
    for activations in modes:
        model, optimizer = wrapped_llama(activations, budget)
        kept, losses[activations] = [], []
        for step in range(3):
            model(input_ids=ids, labels=ids)  # without backward
            waiting: list[torch.Tensor] = []
            for do in "FFBFBFBB" if step else "FBFBFBFB":
                if do == "F":
                    waiting.append(model(input_ids=ids, labels=ids).loss)
                    losses[activations].append(waiting[-1].item())
                else:
                    waiting.pop(0).backward()
            optimizer.step()
            kept.append(optimizer.stats.activation_bytes.kept)
        policies = {str(policy) for policy in pagoda.plan_of(model).activations.policies}
        optimizer.close()
        if activations != "auto":
            budget += kept[-1] // 2  # between the two
    assert max(kept) <= budget
    assert policies == {"keep", "recompute"}
    assert losses["auto"] == losses["keep"]


def test_a_tensor_that_was_changed_after_it_was_saved_is_an_error_as_in_torch(tmp_path: Path) -> None:
    class Square(nn.Module):
        """Saves what it squares."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square()

    saved: list[torch.Tensor] = []
    for activations in ("keep", "offload"):
        memory = pagoda.Memory(host="64MiB", ssd=f"{tmp_path}:1GiB", page_size=PAGE)
        model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), Square()) for _ in range(3)))
        model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=memory, precision="fp32", activations=activations)
        handle = model[1][0].register_forward_hook(lambda _m, _a, output: saved.append(output))
        loss = model(torch.ones(64, 64)).sum()
        saved.pop().detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        handle.remove()
        optimizer.close()


def test_pages_of_graphs_that_are_dropped_are_used_again(tmp_path: Path) -> None:
    memory = pagoda.Memory(host="64MiB", ssd=f"{tmp_path}:1GiB", page_size=PAGE)
    model, optimizer = pagoda.wrap(
        llama().train(), pagoda.AdamW(), memory=memory, max_grad_norm=1.0, activations="offload", precision="bf16"
    )
    ids = torch.zeros(2, 16, dtype=torch.long)
    peaks = []
    for _ in range(3):
        for _ in range(2):
            model(input_ids=ids, labels=ids)  # without backward
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        peaks.append(optimizer.stats.activation_bytes.ssd)
    one = pagoda.plan_of(model).activations.peak.ssd
    assert one <= peaks[0] <= 2 * one, "a graph lives until its outputs are replaced"
    assert peaks[1:] == peaks[:1] * 2
    optimizer.close()


def test_a_backward_reads_back_nothing_of_a_later_forward() -> None:
    """In a pipeline, backwards run in the order of their forwards."""
    memory = pagoda.Memory(host="64MiB", device="cpu:8MiB", page_size=PAGE)
    model, optimizer = pagoda.wrap(llama().train(), pagoda.AdamW(), memory=memory, activations="offload")
    ids = torch.zeros(2, 16, dtype=torch.long)
    with optimizer:
        optimizer.trace_next_step()
        first, later = (model(input_ids=ids, labels=ids).loss for _ in range(2))
        first.backward()
        optimizer.step()
        assert not later.isnan()
        assert optimizer.timeline is not None
        spans = [span for span in optimizer.timeline.spans if span.name == "return activation"]
        blocks = pagoda.plan_of(model).activations.sizes.blocks
    of_one = sum(part.movable for block in blocks for part in block.saved(Policy.OFFLOAD))
    assert 0 < sum(span.nbytes for span in spans) <= of_one


class Halves(nn.Module):
    """Each of its blocks is in a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Sequential(Block(32), Block(32)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.halves[0][0].norm.weight.dtype)
        for half in self.halves:
            x = checkpoint(half, x, use_reentrant=False)
        return x.float().square().mean()


@pytest.mark.parametrize("around", [False, True])
def test_blocks_inside_a_checkpoint_of_the_users_are_recomputed_with_it(around: bool) -> None:
    def loop(model: Any, optimizer: Any, outcome: Outcome) -> None:
        for _ in range(2):
            x = torch.ones(2, 4, 32)
            learn(checkpoint(model, x, use_reentrant=False) if around else model(x), outcome)
            take_step(optimizer, outcome)

    outcomes = []
    for activations in ("keep", "recompute", "auto"):
        torch.manual_seed(0)
        outcomes.append(run(Halves(), RESIDENT, loop, activations=activations))
        outcomes[-1].assert_same_bits(outcomes[0])


def test_autocast_does_not_change_with_the_policy(tmp_path: Path) -> None:
    recipe = Recipe("gpt2", precision="fp32", steps=2, layers=2, activations="recompute+offload")

    @every_step
    def loop(model: nn.Module, generator: torch.Generator, outcome: Outcome, _step: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(**batch("gpt2", generator)))
        learn(loss, outcome)

    memory = replace(least(recipe, ALL_ON_SSD, tmp_path), activations="300KiB")
    train(recipe, memory, loop).assert_same_bits(train(replace(recipe, activations="keep"), RESIDENT, loop))


def test_settings_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    model = Recipe("llama").build()
    with pytest.raises(pagoda.ConfigError, match="nowhere to offload"):
        pagoda.wrap(model, pagoda.AdamW(), memory=RESIDENT, activations="offload", precision="bf16")
    with pytest.raises(pagoda.ConfigError, match="recompute, offload"):
        pagoda.wrap(model, pagoda.AdamW(), memory=RESIDENT, activations="drop", precision="bf16")
    own = Recipe("llama", checkpointing=True).build()
    with pytest.raises(pagoda.UsageError, match="gradient_checkpointing_disable"):
        pagoda.wrap(own, pagoda.AdamW(), memory=RESIDENT, activations="recompute", precision="bf16")


def test_activations_that_do_not_fit_their_budget_are_refused_once_that_has_shown(tmp_path: Path) -> None:
    once = Recipe("llama", steps=1, activations="auto")
    memory = replace(RESIDENT, activations=50_000)
    with pytest.raises(pagoda.BudgetError, match=r"even with every block recomputed, and memory\.activations"):
        train(replace(once, steps=2), memory)
    train(once, memory).assert_same_bits(train(replace(once, activations="keep"), RESIDENT))


def test_offloading_more_than_there_is_room_for_is_refused(tmp_path: Path) -> None:
    recipe = Recipe("llama", steps=2, activations="offload")
    memory = least(recipe, ALL_ON_SSD, tmp_path)
    plan = train(recipe, memory).plan
    state = plan.peak_bytes["ssd"] - plan.activations.peak.ssd
    with pytest.raises(pagoda.BudgetError, match=r"No room to offload activations.*memory\.ssd"):
        train(recipe, replace(memory, ssd=f"{tmp_path}:{state + 8 * PAGE}"))


def test_a_full_drive_is_an_error_of_the_forward_after_which_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space on SSD is reserved when activations need it."""
    recipe = Recipe("llama", steps=2, activations="offload")
    reserve = os.posix_fallocate

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def loop(model: Any, optimizer: Any, outcome: Outcome) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(recipe.steps):
            inputs = batch(recipe.model, generator)
            if not outcome.losses:
                monkeypatch.setattr(os, "posix_fallocate", full)
                with pytest.raises(pagoda.StorageError, match=r"is too full.*free some space"):
                    model(**inputs)
                monkeypatch.setattr(os, "posix_fallocate", reserve)
            learn(loss_of(model(**inputs)), outcome)
            take_step(optimizer, outcome)

    offloaded = train(recipe, least(recipe, ALL_ON_SSD, tmp_path), loop)
    offloaded.assert_same_bits(train(replace(recipe, activations="keep"), RESIDENT))


@pytest.mark.parametrize("outage", [1, 2])
def test_writes_of_activations_that_fail_are_one_error_and_leave_the_whole_step_to_be_taken(
    outage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`step()` writes the activations that somebody has held until then."""
    recipe = Recipe("plain", steps=2, activations="offload")
    write, failures = SsdPlace.write, iter(range(0))
    more = ["Another 1 of the writes failed with it."] * (outage - 1)

    def write_or_fail(*arguments: Any) -> None:
        if next(failures, None) is not None:
            time.sleep(0.1)  # until compute waits for it, after it has started others
            raise pagoda.StorageError("the drive has failed")
        write(*arguments)

    def loop(model: Any, optimizer: Any, outcome: Outcome) -> None:
        nonlocal failures
        held: list[torch.Tensor] = []
        for block in model.blocks:
            block.register_forward_hook(lambda _module, _inputs, output: held.append(output))
        generator = torch.Generator().manual_seed(1)
        for _ in range(recipe.steps):
            inputs = batch(recipe.model, generator)
            learn(loss_of(model(**inputs)), outcome)
            later = loss_of(model(**inputs))
            held.clear()
            if pagoda.plan_of(model).options.may_offload:
                failures = iter(range(outage))
                with pytest.raises(pagoda.StorageError, match="the drive has failed") as raised:
                    optimizer.step()
                assert next(failures, None) is None
                assert getattr(raised.value, "__notes__", []) == more
            take_step(optimizer, outcome)
            del later

    monkeypatch.setattr(SsdPlace, "write", write_or_fail)
    offloaded = train(recipe, least(recipe, ALL_ON_SSD, tmp_path), loop)
    offloaded.assert_same_bits(train(replace(recipe, activations="keep"), RESIDENT, loop))
