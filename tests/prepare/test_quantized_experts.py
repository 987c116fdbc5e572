"""Frozen experts in 4 and 8 bits, each fetched alone: the bits of the same experts in memory."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

import pagoda
from pagoda.errors import ConfigError
from pagoda.prepare.quantize import PACKAGES, quantize, targets_of

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
EXPERTS = 8
CONFIGS = {
    "qwen3": Qwen3MoeConfig(moe_intermediate_size=64, intermediate_size=128, num_experts=EXPERTS, **SIZES),
    "gpt-oss": GptOssConfig(intermediate_size=64, num_local_experts=EXPERTS, **SIZES),
}
TARGETS = ("q_proj", "v_proj")
IDS = torch.randint(128, (3, 2, 24), generator=torch.Generator().manual_seed(2))


def quantized(bits: str, name: str = "qwen3") -> nn.Module:
    """A model with adapters over quantized experts."""
    pytest.importorskip(PACKAGES[bits])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    quantize(model, bits, torch.float32, torch.device("cpu"))
    torch.manual_seed(1)
    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(TARGETS))).train()
    return adapted


def trained(model: nn.Module, optimizer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for ids in IDS:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items() if "lora" in name}


def wrapped(model: nn.Module, **memory: Any) -> tuple[nn.Module, Any]:
    return pagoda.wrap(
        model, pagoda.AdamW(lr=1e-2), precision="fp32", memory=pagoda.Memory(**memory), activations="recompute"
    )


@pytest.mark.parametrize(
    ("bits", "name"),
    [
        ("4bit", "qwen3"),
        pytest.param("8bit", "qwen3", marks=pytest.mark.slow),
        pytest.param("4bit", "gpt-oss", marks=pytest.mark.slow),
    ],
)
def test_experts_streamed_from_ram_and_ssd_have_the_bits_of_those_in_memory(
    bits: str, name: str, tmp_path: Path
) -> None:
    model, optimizer = wrapped(quantized(bits, name), host="64MiB")
    losses, adapters = trained(model, optimizer)
    optimizer.close()
    for memory in ({"host": "64MiB"}, {"host": "900KiB", "ssd": f"{tmp_path}:64MiB"}):
        model, optimizer = wrapped(quantized(bits, name), device="cpu:500KiB", **memory)
        plan = pagoda.plan_of(model)
        experts = {unit.index for unit in plan.units if ".experts." in unit.module}
        assert len(experts) == 2 * EXPERTS
        others, same = trained(model, optimizer)
        assert others == losses
        assert all(torch.equal(same[key], adapters[key]) for key in adapters)
        optimizer.close()

    plain = quantized(bits, name)
    params = [param for param in plain.parameters() if param.requires_grad]
    without, _ = trained(plain, torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0))
    assert without[0] == losses[0], "the forward has the bits of plain PyTorch"
    assert without == pytest.approx(losses, rel=2e-4)


@pytest.mark.parametrize("bits", PACKAGES)
def test_an_expert_takes_4_or_8_bits_and_none_of_its_weights_stays_in_a_graph(bits: str) -> None:
    memory = pagoda.Memory(host="64MiB")
    model, optimizer = pagoda.wrap(quantized(bits), pagoda.AdamW(), precision="fp32", memory=memory, activations="keep")
    few = IDS[:1, :1, :4]
    model(input_ids=few[0], labels=few[0]).loss.backward()
    optimizer.step()
    weights = 3 * 64 * 64
    sizes = {unit.numel * 4 for unit in pagoda.plan_of(model).units if ".experts." in unit.module}
    assert max(sizes) <= weights * (0.5 if bits == "4bit" else 1.2)
    least = 2 * 2 * weights * 4  # two layers of at least two experts in fp32
    assert optimizer.stats.activation_bytes.kept < least
    optimizer.close()


def test_adapters_of_quantized_experts_are_refused_by_name_and_all_linear_means_the_other_layers() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"])
    with pytest.raises(ConfigError, match=r"experts\.down_proj, but peft cannot adapt experts that --quantize"):
        targets_of(model, ("q_proj", "experts.down_proj"))
    assert targets_of(model, TARGETS) == TARGETS
    every = targets_of(model, ("all-linear",))
    assert {name.rpartition(".")[2] for name in every} == {"q_proj", "k_proj", "v_proj", "o_proj"}
