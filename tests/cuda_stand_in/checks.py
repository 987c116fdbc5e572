"""What only the stand-in can show: that it finds what it is there for, races between GPUs, and how a step copies.

The first tests fork, which torch does not survive once it has run backward on a GPU: they stay the first.
"""

import ctypes
import gc
import hashlib
import json
import os
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import ended, fork
from runtime.test_cuda import BOTH, FEW, HOME, SSD, memory, on_gpu, train
from torch import nn
from zoo import VOCABULARY, Recipe, batch, loss_of

import pagoda
from cuda_stand_in.collectives import install_collectives
from cuda_stand_in.plugin import native
from pagoda import engine
from pagoda.memory import cuda
from pagoda.runtime.driver import Driver

pytestmark = pytest.mark.gpu


def look(out: Path) -> None:
    """Each thing that is wrong, and that it is seen; the last is to read memory of the GPU as if it were RAM."""
    x = torch.arange(6.0, device="cuda").view(2, 3)
    x.t().mul_(2)
    assert (x @ x.t()).tolist() == [[20.0, 56.0], [56.0, 200.0]]
    layer = nn.Linear(3, 2).cuda()
    layer(x).sum().backward()
    assert layer.weight.grad.is_cuda
    assert torch.equal(layer.weight.grad.cpu(), x.cpu().sum(0).expand(2, 3))
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2, 3)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * native.DEVICE_BYTES, dtype=torch.uint8, device="cuda")
    assert native.take_races() == []

    side, event = torch.cuda.Stream(), torch.cuda.Event()

    def on_side(tensor: torch.Tensor) -> None:
        with torch.cuda.stream(side):
            tensor.add_(1)

    x.mul_(2)
    on_side(x)
    assert any("write by aten::add on stream 1 is not ordered after" in race for race in native.take_races())
    event.record(side)
    torch.cuda.current_stream().wait_event(event)
    x.mul_(2)  # ordered by the event
    assert native.take_races() == []
    event.record()
    event.synchronize()
    on_side(x)  # ordered by the host, which has waited
    assert native.take_races() == []
    side.synchronize()

    y = torch.ones(1000, device="cuda")
    on_side(y.sum())  # a result that is freed while the side stream may still be at work on it ...
    z = y.sum()  # ... is given to the stream that had it
    assert native.take_races()
    torch.cuda.synchronize()
    native.take_races(), native.take_counts()

    ram = torch.zeros(4)
    ram.to("cuda")
    ram.to("cuda", non_blocking=True)
    ram.pin_memory().to("cuda", non_blocking=True).cpu()
    counts = {"h2d that waits": 1, "h2d of RAM that is not pinned": 1, "h2d": 1, "d2h that waits": 1}
    assert native.take_counts() == counts
    with pytest.raises(RuntimeError, match="record_stream"):
        z.record_stream(torch.Stream(stream_id=1, device_index=0, device_type=1))
    out.touch()
    ctypes.string_at(x.data_ptr(), 1)


def test_it_sees_what_it_is_there_for(tmp_path: Path) -> None:
    assert ended(fork(partial(look, tmp_path / "seen"))) == -signal.SIGSEGV
    assert (tmp_path / "seen").exists()


STEPS, PARTS, RANKS = 2, 2, 2


def mixture() -> tuple[nn.Module, Any]:
    """Experts of which each of two ranks has half, with room for few of them on the device."""
    from transformers import MixtralConfig, MixtralForCausalLM

    mesh = pagoda.open_mesh(expert_parallel=2)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(mesh.rank)
    model = MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, use_cache=False, **sizes, **heads))
    # transformers' default kernel calls histc with integers, which the CPU's kernels do not take.
    model.set_experts_implementation("batched_mm")
    memory = pagoda.Memory(device="384KiB", host="64MiB", page_size=4096)
    return pagoda.wrap(model, pagoda.AdamW(), memory=memory, mesh=mesh, max_grad_norm=1.0, precision="bf16")


def divided(stage: int | None) -> tuple[nn.Module, Any]:
    """A model whose state is divided, or that each process has by itself, with room for few units on the device."""
    mesh = None if stage is None else pagoda.open_mesh(stage=stage)
    memory = pagoda.Memory(device="336KiB", host="64MiB", page_size=4096, unit_limit="64KiB")
    model = Recipe("llama").build()
    return pagoda.wrap(model, pagoda.AdamW(), memory=memory, precision="fp32", mesh=mesh, max_grad_norm=1.0)


def trained(model: nn.Module, optimizer: Any, rank: int, size: int) -> dict[str, Any]:
    """A hash of the weights after some steps, of which each rank takes its share of the micro-batches; and races."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for part in range(PARTS):
            inputs = batch("llama", generator)
            if part % size == rank:
                (loss_of(model(**on_gpu(inputs))) * size / PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = hashlib.sha256(b"".join(value.cpu().view(torch.uint8).numpy() for value in model.state_dict().values()))
    optimizer.close()
    return {"weights": weights.hexdigest(), "races": native.take_races()}


def be_rank(rank: int, port: int, stage: int, out: Path) -> None:
    torch.set_num_threads(1)
    alone = trained(*divided(None), rank=0, size=1)
    place = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in place.items()})
    install_collectives(native)
    llama = trained(*divided(stage), rank=rank, size=RANKS)
    (out / str(rank)).write_text(json.dumps([alone, llama, trained(*mixture(), rank=rank, size=RANKS)]))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_send_from_gpu_to_gpu_give_the_bits_of_one_without_a_race(stage: int, tmp_path: Path) -> None:
    """And experts on the GPUs of two ranks get their tokens. Forks, so no backward on a GPU may come before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [fork(partial(be_rank, rank, port, stage, tmp_path)) for rank in range(RANKS)]
    assert [ended(child) for child in children] == [0] * RANKS
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(RANKS)]
    assert [of_model["races"] for of_rank in found for of_model in of_rank] == [[]] * 3 * RANKS
    assert len({of_model["weights"] for alone, llama, _ in found for of_model in (alone, llama)}) == 1


def test_operations_go_into_the_queues_of_the_device_whatever_stream_their_thread_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread for collectives is on one of its own, and it may be the one to give frames back."""
    monkeypatch.setenv("PAGODA_POISON", "1")
    process = Driver._process

    def elsewhere(driver: Driver) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            process(driver)

    monkeypatch.setattr(Driver, "_process", elsewhere)
    train(Recipe("llama"), FEW, tmp_path)


def test_threads_that_add_a_gradient_share_buffers_without_a_race() -> None:
    """The same bits as from RAM."""
    weights = []
    for at in ("64MiB", "cpu:64MiB"):
        torch.manual_seed(0)
        linear = nn.Linear(2048, 1300, bias=False)
        model, optimizer = pagoda.wrap(
            linear,
            pagoda.AdamW(),
            memory=pagoda.Memory(device=at, host="256MiB"),
            gradient_accumulation_steps=3,
            precision="bf16",
        )
        x = torch.randn(3, 2048, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
        x = x if at.startswith("cpu") else x.cuda()
        for _ in range(2):
            for _ in range(3):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.state_dict()["weight"])
        optimizer.close()
    assert torch.equal(*(weight.cpu() for weight in weights))


@pytest.mark.parametrize("placement", [FEW, SSD, BOTH, HOME])
def test_a_step_copies_pinned_memory_alone_and_waits_for_no_copy(placement: str, tmp_path: Path) -> None:
    recipe = Recipe("llama")
    with pagoda.deferred_init():
        model = recipe.build()
    tiers = memory(placement, tmp_path, recipe)
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=tiers, max_grad_norm=1.0, precision="bf16")
    inputs = on_gpu(batch("llama", torch.Generator().manual_seed(1)))
    for step in range(4):
        if step == 2:
            native.take_counts()
        loss_of(model(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    counts = native.take_counts()
    assert counts.pop("aten::_local_scalar_dense", 0) <= 2  # transformers looks into each forward's positions
    assert counts["d2h"] > 0
    assert set(counts) <= {"h2d", "d2h"}
    weight = next(model.parameters())
    assert weight.norm().item() > 0
    torch.nn.init.zeros_(weight)
    assert not weight.any()
    optimizer.close()


def test_no_copy_crosses_from_one_page_locked_piece_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "REGISTERED_BYTES", 10 * 4096)
    test_a_step_copies_pinned_memory_alone_and_waits_for_no_copy(BOTH, tmp_path)


def test_ram_that_cannot_be_page_locked_is_refused_and_the_next_launch_works(tmp_path: Path) -> None:
    recipe = Recipe("llama")
    gc.collect()
    before, usual = native.pinned(), native.most_pinned(1 << 20)
    try:
        with pytest.raises(pagoda.BudgetError, match="page-lock"):
            pagoda.wrap(recipe.build(), pagoda.AdamW(), memory=memory(FEW, tmp_path, recipe), precision="bf16")
    finally:
        native.most_pinned(usual)
    assert torch.ones(3, device="cuda").sum().item() == 3
    gc.collect()
    assert native.pinned() == before


def test_ram_is_unlocked_when_wrap_fails_after_it_was_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise pagoda.StorageError("the drive is gone")

    recipe = Recipe("llama")
    gc.collect()
    before = native.pinned()
    monkeypatch.setattr(engine, "open_lanes", fail)
    with pytest.raises(pagoda.StorageError, match="gone"):
        pagoda.wrap(recipe.build(), pagoda.AdamW(), memory=memory(FEW, tmp_path, recipe), precision="bf16")
    gc.collect()
    assert native.pinned() == before
