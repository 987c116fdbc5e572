"""Frozen experts in 4 and 8 bits, each fetched alone: the bits of the same experts in memory. What is in files is
packed straight into pages."""

import re
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import zoo
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

import pagoda
from pagoda.plan.units import UnitSpec
from pagoda.prepare import construct, quantize
from pagoda.prepare.quantize import PACKAGES, quantize_experts, quantize_layers, targets_of

SIZES: dict[str, Any] = {**zoo.SIZES, "num_hidden_layers": 2, "head_dim": 16, "num_experts_per_tok": 2}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 64, "use_cache": True}
EXPERTS = 8
CONFIGS = {
    "qwen3": Qwen3MoeConfig(moe_intermediate_size=64, num_experts=EXPERTS, **SIZES),
    "gpt-oss": GptOssConfig(num_local_experts=EXPERTS, **SIZES),
}
TARGETS = ("q_proj", "v_proj")
OF_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
IDS = torch.randint(96, (3, 2, 24), generator=torch.Generator().manual_seed(2))


def quantized(bits: str, name: str = "qwen3", *, experts: bool = True, model: Any = None) -> Any:
    """A model of quantized layers, and of quantized `experts`, with adapters of both whose initial values change
    outputs."""
    pytest.importorskip(PACKAGES[bits])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32) if model is None else model
    quantize_layers(model, bits, torch.float32, torch.device("cpu"))
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=[*TARGETS], target_parameters=[*OF_EXPERTS])
    adapted = peft.get_peft_model(model, lora).train()
    with torch.no_grad():
        for key, param in adapted.named_parameters():
            if "lora_B" in key:
                param.normal_(std=0.02)
    if experts:
        quantize_experts(adapted, bits, torch.float32, torch.device("cpu"))
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


def units_of_experts(model: nn.Module) -> list[UnitSpec]:
    """Those of experts, without adapters."""
    return [unit for unit in pagoda.plan_of(model).units if re.search(r"\.experts(\.base_layer)*\.\d+$", unit.module)]


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
        assert len(units_of_experts(model)) == 2 * EXPERTS
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
    assert max(unit.numel * 4 for unit in units_of_experts(model)) <= weights * (0.5 if bits == "4bit" else 1.2)
    least = 2 * 2 * weights * 4  # two layers of at least two experts in fp32
    assert optimizer.stats.activation_bytes.kept < least
    optimizer.close()


def test_adapters_add_to_quantized_experts_what_peft_adds_to_the_same_experts_dequantized() -> None:
    packed, plain = quantized("4bit"), quantized("4bit", experts=False)
    dequantize = pytest.importorskip("bitsandbytes.functional").dequantize_4bit
    for ours, theirs in zip(packed.get_base_model().model.layers, plain.get_base_model().model.layers, strict=True):
        stack = theirs.mlp.experts.get_base_layer()
        for number, (expert, _) in enumerate(ours.mlp.experts.get_base_layer().pieces()):
            for name, param in expert.named_parameters():
                stack.get_parameter(name).data[number] = dequantize(param.data, expert.states[name])[0]
    results = []
    for model in (packed, plain):
        loss = model(input_ids=IDS[0], labels=IDS[0]).loss
        loss.backward()
        grads = {name: param.grad for name, param in model.named_parameters() if ".experts." in name and "lora" in name}
        with model.disable_adapter(), torch.no_grad():
            results.append((loss, model(input_ids=IDS[0], labels=IDS[0]).loss, grads))
    (loss, without, grads), (expected, expected_without, expected_grads) = results
    assert torch.equal(loss, expected)
    assert torch.equal(without, expected_without)
    assert not torch.equal(loss, without)
    assert len(grads) == 8
    torch.testing.assert_close(grads, expected_grads)


def test_all_linear_means_the_layers_outside_experts() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"])
    assert targets_of(model, (*TARGETS, *OF_EXPERTS)) == (*TARGETS, *OF_EXPERTS)
    every = targets_of(model, ("all-linear",))
    assert {name.rpartition(".")[2] for name in every} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("bits", PACKAGES)
def test_weights_in_files_are_packed_one_at_a_time_straight_into_their_tier(
    bits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a base that exceeds RAM is quantized onto an SSD. It trains with the bits of one that was packed in RAM."""
    pytest.importorskip(PACKAGES[bits])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["qwen3"], dtype=torch.float32).save_pretrained(tmp_path / "base")
    model, optimizer = wrapped(quantized(bits), host="64MiB")
    expected = trained(model, optimizer)
    optimizer.close()

    live, peak, packings = 0, 0, 0
    pack = {"4bit": quantize._in_4_bits, "8bit": quantize._in_8_bits}[bits]

    def counting(values: torch.Tensor) -> Any:
        nonlocal live, peak, packings

        def freed() -> None:
            nonlocal live
            live -= 1

        weight = pack(values)
        if not values.is_meta:
            live, packings = live + 1, packings + 1
            peak = max(peak, live)
            weakref.finalize(weight, freed)
        return weight

    monkeypatch.setattr(quantize, pack.__name__, counting)
    monkeypatch.setattr(construct, "_LARGE_ELEMENTS", 0)  # these experts are small
    model = quantized(bits, model=pagoda.load(tmp_path / "base").train())
    assert packings == 0, "nothing is packed before wrap"
    model, optimizer = wrapped(model, host="400KiB", device="cpu:300KiB", ssd=f"{tmp_path}:64MiB", page_size=4096)
    assert (packings, peak) == (SIZES["num_hidden_layers"] * (4 + 2 * EXPERTS), 1)
    assert trained(model, optimizer)[0] == expected[0]
    assert optimizer.stats.bytes_moved["ssd_read"] > 0
    optimizer.close()
