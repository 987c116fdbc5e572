"""LoRA with peft: adapters train, frozen weights stream, and neither costs what it does not need."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from integrations.tiny_text import VOCABULARY, model as llama
from peft import LoraConfig, PeftModel, get_peft_model
from reference import InMemory
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from zoo import PAGE, assert_equal, least_host, losses_of

import pagoda
from pagoda.integrations import Paging
from pagoda.plan.options import Options
from pagoda.plan.tiers import Budgets
from pagoda.prepare.construct import describe

from .conftest import Wrap

STEPS, LAYERS = 3, 4
RULE = pagoda.AdamW(lr=1e-2, weight_decay=0.1)
TARGETS = ["q_proj", "v_proj", "down_proj"]


def base() -> nn.Module:
    return llama(hidden_size=96, intermediate_size=192, num_hidden_layers=LAYERS)


def adapted() -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights="gaussian")
    return get_peft_model(base(), config).train()


def ids(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids(step), labels=ids(step)).loss
    return loss


def on_ssd(directory: Path) -> pagoda.Memory:
    """The least RAM that the adapted model trains in, computing in an arena of its own."""
    model = adapted()
    frozen = sum(p.numel() * 4 for p in model.parameters() if not p.requires_grad)
    options = Options(PAGE, 64 << 10, clipping=True)
    root, states = describe(model), RULE.states("fp32")
    arena = 512 << 10
    host = least_host(root, states, Budgets(PAGE, arena, 1 << 40), options)
    assert host < frozen / 2
    return pagoda.Memory(device=f"cpu:{arena}", host=host, ssd=f"{directory}:1GiB", page_size=PAGE, unit_limit="64KiB")


def train_in_memory(model: Any) -> list[float]:
    """peft's model and nothing of Pagoda but the rule."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = InMemory(params, RULE)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        norm = torch.stack([p.grad.double().square().sum() for p in params]).sum().sqrt().item()
        optimizer.step(min(1.0, 1.0 / (norm + 1e-6)))
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_adapters_over_weights_larger_than_ram_train_to_the_bits_of_peft_in_memory(tmp_path: Path) -> None:
    """Frozen weights cost their weights alone, and peft loads what was trained into a plain model."""
    plain = adapted()
    expected = train_in_memory(plain)
    model, optimizer = pagoda.wrap(adapted(), RULE, memory=on_ssd(tmp_path), precision="fp32", max_grad_norm=1.0)
    losses = losses_of(partial(loss_of, model), optimizer, STEPS)
    assert losses == expected
    assert losses[-1] != losses[0]
    trained = pagoda.trainable_state_dict(model)
    assert len(trained) == 2 * LAYERS * len(TARGETS)
    assert_equal(trained, {name: plain.get_parameter(name) for name in trained})
    plan = pagoda.plan_of(model)
    assert optimizer.stats.peak_bytes["host"] <= plan.peak_bytes["host"]
    assert all(p.grad is None for p in model.parameters())

    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = sum(p.numel() for p in model.parameters())
    assert adapters < weights / 10
    held = {state: sum(tier.get(state, 0) for tier in plan.bytes.values()) for state in ("weight", "exp_avg", "grad")}
    padding = len(plan.units) * PAGE + 1024 * sum(p.requires_grad for p in model.parameters())
    assert held["exp_avg"] <= 4 * adapters + padding
    assert held["grad"] <= 4 * adapters + padding
    assert held["weight"] >= 4 * weights
    # Nothing of a step is written but the adapters' pages and their moments.
    assert optimizer.stats.bytes_moved["ssd_write"] < held["weight"] / 2

    model.save_pretrained(tmp_path / "adapter", state_dict=trained)
    loaded: Any = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    assert_equal(trained, {name: loaded.get_parameter(name) for name in trained})
    model.eval()
    with torch.no_grad():
        assert torch.equal(loss_of(loaded.eval(), 9), loss_of(model, 9))
    optimizer.close()


LORA = partial(LoraConfig, r=4, target_modules=TARGETS)
PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
METHODS: dict[str, Callable[[], Any]] = {
    "lora": partial(LORA, target_modules=[*TARGETS, "embed_tokens"]),
    "modules_to_save": partial(LORA, modules_to_save=["lm_head", "embed_tokens"], init_lora_weights="gaussian"),
    "tokens": partial(LORA, trainable_token_indices=[1, 2]),
    "dora": partial(LORA, use_dora=True),
    "pissa": partial(LORA, init_lora_weights="pissa"),
    "olora": partial(LORA, init_lora_weights="olora"),
    "adalora": partial(peft.AdaLoraConfig, target_modules=TARGETS, total_step=10),
    "road": partial(peft.RoadConfig, target_modules=TARGETS, group_size=4),
    "prefix": partial(peft.PrefixTuningConfig, **PROMPT),
}
_SLOW = ("lora", "tokens", "olora", "road")


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in METHODS]
)
def test_adapters_over_weights_in_files_start_as_over_weights_in_ram(method: str, tmp_path: Path) -> None:
    """Also those that start from base weights, or change them: peft reads them from the files."""
    base().save_pretrained(tmp_path)
    torch.manual_seed(1)
    plain = get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path).train(), METHODS[method]())
    torch.manual_seed(1)
    model = get_peft_model(pagoda.load(tmp_path), METHODS[method]())
    model, optimizer = pagoda.wrap(model, RULE, memory=pagoda.Memory(host="64MiB"), precision="fp32")
    assert_equal(model.state_dict(), plain.state_dict())
    with torch.no_grad():
        assert torch.equal(loss_of(model.eval(), 0), loss_of(plain.eval(), 0))
    loss_of(model.train(), 1).backward()
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("unit_limit", ["1KiB", "64MiB"])
def test_adapters_of_fused_experts_have_the_bits_of_peft_in_memory(unit_limit: str) -> None:
    """peft parametrizes the experts in each forward. They are shown then, or hidden, by the size of units."""

    def adapted_experts() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        lora = LoraConfig(r=2, target_modules=[], target_parameters=both)
        return get_peft_model(MixtralForCausalLM(config), lora).train()

    expected = train_in_memory(adapted_experts())
    memory = pagoda.Memory(host="8MiB", unit_limit=unit_limit, page_size=PAGE)
    model, optimizer = pagoda.wrap(adapted_experts(), RULE, memory=memory, precision="fp32", max_grad_norm=1.0)
    assert losses_of(partial(loss_of, model), optimizer, STEPS) == expected
    optimizer.close()


class Attending(nn.Module):
    """An `nn.MultiheadAttention`, and a layer that is saved whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend, self.head = nn.Embedding(16, 16), nn.MultiheadAttention(16, 2), nn.Linear(16, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        return self.head(self.attend(x, x, x)[0])


def attending() -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["attend"], modules_to_save=["head"], init_lora_weights=False)
    return get_peft_model(Attending(), config).train()


def attended(model: Any, step: int) -> torch.Tensor:
    squares: torch.Tensor = model(ids(step) % 16).square().mean()
    return squares


@pytest.mark.parametrize("way", ["wrap", "all parameters", "trained parameters"])
@pytest.mark.filterwarnings("ignore:.*cannot be in pages")
def test_adapters_of_an_attention_whose_weights_peft_replaces_have_the_bits_of_peft(way: str, tmp_path: Path) -> None:
    """peft makes these weights anew in each forward and each time that parameters are listed, also after resuming."""

    def in_pages() -> Any:
        model, memory = attending(), pagoda.Memory(host="8MiB", unit_limit="1KiB", page_size=PAGE)
        if way == "wrap":
            return pagoda.wrap(model, pagoda.Optim(torch.optim.SGD, lr=0.1), memory=memory, precision="fp32")
        params = [p for p in model.parameters() if way == "all parameters" or p.requires_grad]
        return model, Paging(memory=memory).take_over(model, torch.optim.SGD(params, lr=0.1), "fp32")

    plain = attending()
    first = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    expected = losses_of(partial(attended, plain), first, 2 * STEPS)
    model, optimizer = in_pages()
    assert losses_of(partial(attended, model), optimizer, STEPS) == expected[:STEPS]
    optimizer.save_checkpoint(tmp_path / "step")
    optimizer.close()
    model, optimizer = in_pages()
    optimizer.load_checkpoint(tmp_path / "step")
    assert losses_of(lambda n: attended(model, STEPS + n), optimizer, STEPS) == expected[STEPS:]
    assert_equal(model.state_dict(), plain.state_dict())
    with pagoda.gathered(model, modify=True):
        merged = model.merge_and_unload()
    assert torch.equal(attended(merged, 9), attended(plain.merge_and_unload(), 9))
    optimizer.close()


def test_weights_that_peft_replaces_are_warned_of_and_compute_in_the_precision_of_the_run() -> None:
    with pytest.warns(UserWarning, match=r"attend\.base_layer\.in_proj_weight'.* cannot be in pages"):
        model, optimizer = pagoda.wrap(attending(), pagoda.AdamW(), memory=pagoda.Memory(host="8MiB"), precision="bf16")
    losses_of(partial(attended, model), optimizer, 1)
    optimizer.close()


def test_adalora_allocates_ranks_between_backward_and_step_and_is_told_so_after_it(wrap: Wrap) -> None:
    """With the losses of plain PyTorch."""
    losses: list[list[float]] = [[], []]
    batch = {"input_ids": torch.arange(40).view(2, 20), "labels": torch.arange(40).view(2, 20)}
    for paged in (False, True):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        steps = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": 6}
        config = peft.AdaLoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **steps)
        model: Any = get_peft_model(base, config)
        optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        if paged:
            model, optimizer = wrap(model, rule=pagoda.Optim(torch.optim.SGD, lr=0.1), precision="fp32")
        for step in range(5):
            loss = model(**batch).loss
            loss.backward()
            model.base_model.update_and_allocate(step)
            optimizer.step()
            optimizer.zero_grad()
            losses[paged].append(loss.item())
    assert losses[0] == losses[1]
    model(**batch).loss.backward()
    optimizer.step()
    with pytest.raises(pagoda.UsageError, match="update_and_allocate"):
        model.base_model.update_and_allocate(3)
