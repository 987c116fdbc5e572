"""On an NVIDIA GPU: the same promises as with an arena in RAM that stands in for one."""

import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradient_uses
import pytest
import state_uses
import torch
import zoo
from torch import nn
from zoo import MODELS, PAGE, UNIT_LIMIT, Batch, Outcome, Recipe, batch, loss_of, run, take_step

import pagoda
from pagoda.memory.cuda import CudaArena
from pagoda.runtime.device import CudaDevice
from pagoda.schedule import updates

from .test_device import COPIED, WHOLE, assert_updated_on_device, device_bytes, memory as in_ram

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FEW, SSD, PASSING, BOTH, HOME = "few", "ssd", "passing", "both", "home"
"""In the least device memory: states in RAM; on SSD; updated on the device, all of them or half; half at home there."""
LOOKED_UP = "looked-up"
"""On SSD, except that the CPU looks up the embedding in RAM."""
PASSING_AND_HOME = "passing-and-home"
"""Half at home there, and all others updated there."""
OTHERS = {
    "bf16 moments": Recipe("llama", precision="fp32", moments="bf16"),
    "8bit moments": Recipe("llama", moments="8bit"),
    "during backward": Recipe("llama", clip=None, announced=True, frozen=True),
    "fp32 gradients": Recipe("llama", precision="bf16+fp32", accumulation=2),
    "bf16 gradients": Recipe("llama", precision="fp32+bf16", accumulation=2),
}


def memory(placement: str, directory: Path, recipe: Recipe) -> pagoda.Memory:
    """Everything leased at once, or what `placement` says."""
    share = {PASSING: 1.0, PASSING_AND_HOME: 1.0, BOTH: 0.5}.get(placement, 0.0)
    homes = 0.5 * (placement in (HOME, PASSING_AND_HOME))
    same = in_ram(recipe, share, homes, ssd=directory if placement in (SSD, LOOKED_UP) else None)
    device = "64MiB" if placement == "all" else str(device_bytes(recipe, homes, ring=share > 0))
    looked_up = "1KiB" if placement == LOOKED_UP else None
    return replace(same, device=device, split=same.split if share or homes else None, embedding_limit=looked_up)


def train(recipe: Recipe, placement: str, directory: Path, **settings: Any) -> Outcome:
    return zoo.train(recipe, memory(placement, directory, recipe), zoo.usual_loop(recipe, on_gpu), **settings)


def on_gpu(inputs: Batch) -> Batch:
    return {name: value.cuda() for name, value in inputs.items()}


def settled() -> int:
    """Bytes of the GPU that tensors hold, once threads of lanes have dropped what they copied."""
    before = -1
    while (now := torch.cuda.memory_allocated()) != before:
        before = now
        time.sleep(0.01)
    return now


def allocated_at_rest() -> int:
    """Bytes of the GPU that tensors hold when nothing runs. cuBLAS would keep its workspaces for ever."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return settled()


@pytest.fixture(params=["1", ""], ids=["poison", "as users run it"])
def _poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_POISON", request.param)


@pytest.fixture
def _deterministic() -> Iterator[None]:
    """Strict: with `warn_only`, torch's fused attention stays as it is, and its gradients differ from run to run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_same_everywhere(recipe: Recipe, placement: str, directory: Path, **settings: Any) -> Outcome:
    outcome = train(recipe, placement, directory, **settings)
    outcome.assert_same_bits(train(recipe, "all", directory, **settings))
    return outcome


@pytest.mark.usefixtures("_poison", "_deterministic")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "checkpoint"])
@pytest.mark.parametrize("placement", [FEW, SSD, PASSING, BOTH, HOME])
@pytest.mark.parametrize("model", sorted(MODELS.keys() - {"mixtral"}))  # the stand-in has no grouped products
def test_placement_does_not_change_a_bit(model: str, placement: str, checkpointing: bool, tmp_path: Path) -> None:
    precision = "own" if model == "mixed" else "bf16"
    recipe = Recipe(model, checkpointing=checkpointing, accumulation=2, precision=precision)
    outcome = assert_same_everywhere(recipe, placement, tmp_path)
    if placement == PASSING:
        assert_updated_on_device(outcome, 1.0)


@pytest.mark.usefixtures("_poison", "_deterministic")
def test_an_embedding_that_the_cpu_looks_up_trains_as_one_on_the_device(tmp_path: Path) -> None:
    """It adds the gradients of a row in the order of tokens, a GPU may add them in another one."""
    recipe = Recipe("qwen3", precision="fp32", accumulation=2)
    outcome, on_device = (train(recipe, placement, tmp_path) for placement in (LOOKED_UP, "all"))
    assert [unit.module for unit in outcome.plan.units if unit.on_host] == ["model.embed_tokens"]
    name = "model.embed_tokens.weight"
    for ours, theirs in (
        (torch.tensor(outcome.losses), torch.tensor(on_device.losses)),
        (outcome.weights[name].cpu(), on_device.weights[name].cpu()),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_an_embedding_that_the_cpu_looks_up_is_read_and_written_in_ram(tmp_path: Path) -> None:
    """The device may have no room for it."""
    recipe = Recipe("qwen3", precision="fp32")
    model, optimizer = pagoda.wrap(
        recipe.build(), pagoda.AdamW(), memory=memory(LOOKED_UP, tmp_path, recipe), precision="bf16"
    )
    weight = model.get_input_embeddings().weight
    twos = torch.full(weight.shape, 2.0)
    with pagoda.gathered(weight, modify=True), torch.no_grad():
        weight.copy_(weight.sign() * twos)
    with torch.no_grad():
        weight.mul_(twos)
        assert weight.abs().min() == 4
    optimizer.close()


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("placement", [FEW, SSD, BOTH, HOME])
@pytest.mark.parametrize("others", OTHERS)
def test_nor_does_it_with_other_settings(others: str, placement: str, tmp_path: Path) -> None:
    assert_same_everywhere(OTHERS[others], placement, tmp_path)


@pytest.mark.usefixtures("_poison", "_deterministic")
@pytest.mark.parametrize("drive", [False, True], ids=["ram", "drive"])
def test_nor_does_a_second_placement_by_what_the_first_steps_leave_free(drive: bool, tmp_path: Path) -> None:
    recipe = Recipe("llama", accumulation=2)
    reference = train(recipe, "all", tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        few = memory(SSD if drive else FEW, tmp_path, recipe)
        adapting = replace(few, device="2GiB", adapt_after=2, ssd=few.ssd)
        patched.setattr(sys.modules[__name__], "memory", lambda *_: adapting)
        outcome = train(recipe, FEW, tmp_path)
    outcome.assert_same_bits(reference)
    assert len(outcome.plan.placement.resident) == len(outcome.plan.units) - 1
    assert outcome.plan.reasons[-1].startswith("After 2 steps, ")


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", COPIED)
def test_rules_that_take_parameters_whole_have_the_same_bits_in_one_place(
    name: str, precision: str, tmp_path: Path
) -> None:
    """On the CPU, wherever states live; and on the GPU, wherever they live."""
    recipe = Recipe("llama", rule=WHOLE[name], precision=precision, accumulation=2)
    assert_same_everywhere(recipe, SSD, tmp_path)
    passing = train(recipe, PASSING, tmp_path)
    passing.assert_same_bits(train(recipe, PASSING_AND_HOME, tmp_path))
    assert not any(step["update"] for step in passing.moved)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("placement", [SSD, PASSING, BOTH, HOME])
def test_adafactor_has_the_same_bits_on_the_cpu_and_the_gpu(placement: str, tmp_path: Path) -> None:
    assert_same_everywhere(Recipe("llama", rule=WHOLE["adafactor"], accumulation=2), placement, tmp_path)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("placement", [FEW, PASSING, BOTH, HOME])
def test_nor_do_asynchronous_updates(placement: str, tmp_path: Path) -> None:
    assert_same_everywhere(Recipe("llama", accumulation=2), placement, tmp_path, update="async")


@pytest.mark.parametrize("model", ["llama", "conv"])
def test_training_agrees_with_the_cpu_within_rounding(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions have it by default
    recipe = Recipe(model, precision="fp32")

    cpu = zoo.train(recipe, pagoda.Memory(host="64MiB"))
    gpu = train(recipe, FEW, tmp_path)
    assert gpu.losses == pytest.approx(cpu.losses, rel=1e-3)


@pytest.mark.usefixtures("_poison", "_deterministic")
@pytest.mark.parametrize("placement", ["all", SSD, HOME])
def test_while_all_weights_are_resident_forwards_have_the_same_bits(placement: str, tmp_path: Path) -> None:
    recipe = Recipe("llama")
    place = replace(memory(placement, tmp_path, recipe), device="64MiB")
    model, optimizer = pagoda.wrap(recipe.build(), pagoda.AdamW(), memory=place, precision="bf16")
    inputs = on_gpu(batch("llama", torch.Generator().manual_seed(1)))
    for _ in range(2):
        loss_of(model(**inputs)).backward()
        optimizer.step()
        with torch.no_grad():
            outside = [loss_of(model(**inputs)) for _ in range(2)]
            optimizer.zero_grad()
            with pagoda.resident(model):
                inside = [loss_of(model(**inputs)) for _ in range(2)]
        assert all(map(torch.equal, inside, outside))
    optimizer.close()


class Pair(nn.Module):
    """Two layers side by side, the second on a stream of its own."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        self.here, self.beside = nn.Linear(128, 128), nn.Linear(128, 128)
        self.scale = nn.Parameter(torch.eye(128)) if function else None

    def forward(self, here: torch.Tensor, beside: torch.Tensor, stream: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scale is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            beside = torch.tanh(self.beside(beside) if self.scale is None else beside @ self.scale)
        return torch.tanh(self.here(here)), beside


class Branches(nn.Module):
    """Its pairs make two branches, which are joined at the end."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair(function) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        made = [(x, x)]  # kept until the streams are joined
        side.wait_stream(main)
        for pair in self.pairs:
            made.append(pair(*made[-1], side))
        main.wait_stream(side)
        return sum(made[-1]).square().mean()


@pytest.mark.parametrize("unit", ["layer", "pair", "function"])
def test_weights_that_are_read_on_a_stream_of_their_own_are_not_overwritten_meanwhile(unit: str) -> None:
    def loop(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        for _ in range(3):
            loss = model(torch.ones(4, 128, device="cuda"))
            loss.backward()
            outcome.losses.append(loss.item())
            take_step(optimizer, outcome)

    outcomes = []
    for device in ("64MiB", "640KiB"):
        torch.manual_seed(0)
        memory = pagoda.Memory(
            device=device, host="64MiB", page_size=4096, unit_limit="80KiB" if unit == "layer" else "240KiB"
        )
        outcomes.append(run(Branches(unit == "function"), memory, loop, precision="fp32"))
    outcomes[1].assert_same_bits(outcomes[0])


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_units_whose_weights_live_there_are_updated_before_the_norm_is_known(
    clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has two versions of their weights."""
    monkeypatch.setattr(updates, "CALM_STEPS", 0)
    recipe = Recipe("llama", clip=clip, announced=True)
    outcome = assert_same_everywhere(recipe, PASSING_AND_HOME, tmp_path)
    assert outcome.plan.bytes["device"]["versions"]


def test_work_as_compute_is_on_the_stream_that_was_made_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though compute turns to another one meanwhile."""
    device, first, other = CudaDevice(torch.device("cuda", 0)), torch.cuda.current_stream(), torch.cuda.Stream()
    fence = CudaDevice.fence

    def turn_to_the_other(device: CudaDevice) -> Any:
        with torch.cuda.stream(other):
            device.computing()
        return fence(device)

    turn_to_the_other(device)
    device.computing()
    monkeypatch.setattr(CudaDevice, "fence", turn_to_the_other)
    with device.as_compute():
        assert torch.cuda.current_stream() == first


def test_a_gpu_without_room_is_refused() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(pagoda.BudgetError, match=r"memory\.device"):
        CudaArena(2 * torch.cuda.mem_get_info()[1], device)


def test_a_device_budget_that_is_too_small_is_refused_before_anything_is_taken(tmp_path: Path) -> None:
    recipe = Recipe("llama")
    before = allocated_at_rest()  # what earlier tests have left
    small = pagoda.Memory(device=str(PAGE), host="64MiB", page_size=PAGE, unit_limit=UNIT_LIMIT)
    with pytest.raises(pagoda.BudgetError) as refused:
        pagoda.wrap(recipe.build(), pagoda.AdamW(), memory=small, precision="bf16")
    assert refused.value.tier == "device"
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("placement", [FEW, SSD, BOTH, HOME])
def test_fifty_steps_take_no_memory_that_the_first_did_not(placement: str, tmp_path: Path) -> None:
    """Pages come from one arena: in steady state torch asks CUDA for nothing, and nothing is left when all is over."""
    at_first = allocated_at_rest()
    torch.cuda.empty_cache()
    recipe = Recipe("llama")
    model = recipe.build()
    model, optimizer = pagoda.wrap(
        model, pagoda.AdamW(), memory=memory(placement, tmp_path, recipe), max_grad_norm=1.0, precision="bf16"
    )
    inputs = on_gpu(batch("llama", torch.Generator().manual_seed(1)))
    allocated, asked = [], []
    for _ in range(50):
        loss_of(model(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        torch.cuda.synchronize()
        allocated.append(settled())
        stats = torch.cuda.memory_stats()
        asked.append((stats["num_device_alloc"], stats["num_alloc_retries"], stats["reserved_bytes.all.peak"]))
    assert asked[24] == asked[-1]  # a gradient is freed when its copy has ended, so the peak varies a little at first
    assert allocated[3] == allocated[-1]
    optimizer.close()
    del model, optimizer, inputs
    assert allocated_at_rest() <= at_first


def test_peak_memory_of_the_device_is_the_plans_pages_and_activations(tmp_path: Path) -> None:
    """The arena is all that Pagoda takes, but for sums of squares."""
    recipe = Recipe("llama")
    before = allocated_at_rest()
    model = recipe.build()
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=memory(BOTH, tmp_path, recipe), precision="bf16")
    taken = torch.cuda.memory_allocated() - before
    planned = pagoda.plan_of(model).peak_bytes["device"]
    placeholders = 512 * (len(list(model.parameters())) + len(list(model.buffers())) + 64)
    assert planned <= taken <= planned + placeholders + (1 << 20)
    optimizer.close()


def test_a_profile_names_what_pagoda_does(tmp_path: Path) -> None:
    recipe = Recipe("llama")
    model = recipe.build()
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=memory(BOTH, tmp_path, recipe), precision="bf16")
    inputs = on_gpu(batch("llama", torch.Generator().manual_seed(1)))
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, experimental_config=everything) as profile:
        loss_of(model(**inputs)).backward()
        optimizer.step()
        optimizer.synchronize()
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert {"pagoda::h2d", "pagoda::d2h", "pagoda::update", "pagoda::device_update"} <= names
    optimizer.close()


@pytest.mark.parametrize("home", [0.0, 1.0], ids=["in-ram", "on-the-device"])
@pytest.mark.parametrize("use", ["norms", "with weights", "noise", "mask", "sign", "a row", "numbers"])
def test_gradients_are_read_and_written_as_by_torch_alone(use: str, home: float) -> None:
    split = pagoda.Split(device_home_share=home, device_update_share=home)
    memory = pagoda.Memory(device="8MiB", host="8MiB", split=split)
    rule = pagoda.SGD(**gradient_uses.RULE)
    model, optimizer = pagoda.wrap(gradient_uses.Net(), rule, memory=memory, precision="fp32")
    with optimizer:
        found = gradient_uses.train(gradient_uses.Training(model, optimizer), use)
    expected = gradient_uses.plainly(use, device="cuda")
    for mine, other in zip(found[-8:], expected[-8:], strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("home", [0.0, 1.0], ids=["in-ram", "on-the-device"])
@pytest.mark.parametrize("use", ["looked at", "resampled", "zeroed", "popped", "new tensors", "count", "between"])
def test_states_are_read_and_written_as_by_torch_alone(use: str, home: float) -> None:
    split = pagoda.Split(device_home_share=home, device_update_share=home)
    memory = pagoda.Memory(device="8MiB", host="8MiB", split=split)
    rule = state_uses.RULES["adamw"]()
    model, optimizer = pagoda.wrap(gradient_uses.Net(), rule, memory=memory, precision="fp32")
    with optimizer:
        found = state_uses.train(gradient_uses.Training(model, optimizer), use)
    plain = gradient_uses.Net().to("cuda")
    of = gradient_uses.Training(plain, torch.optim.AdamW(plain.parameters(), **rule.defaults()))
    expected = state_uses.train(of, use)
    for mine, other in zip(found[-8:], expected[-8:], strict=True):
        torch.testing.assert_close(mine, other)
    devices = [{key: value.device for key, value in entry.items()} for entry in expected[-9].values()]
    assert [{key: value.device for key, value in entry.items()} for entry in found[-9].values()] == devices
