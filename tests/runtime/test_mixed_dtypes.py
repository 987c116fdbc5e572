"""A model that mixes dtypes trains as in plain PyTorch: each parameter in its own, wherever its state lives."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_once
from reference import InMemory
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from zoo import (
    ALL_ON_SSD,
    ARENA,
    ARENA_ALL_ON_SSD,
    HOST_WEIGHTS,
    PAGE,
    RESIDENT,
    VOCABULARY,
    MixedDtypes,
    Outcome,
    llama,
    loss_of,
    run,
    squeeze,
    t5,
    take_step,
)

import pagoda
from pagoda.checkpoint.export import export
from pagoda.optim import Rule

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
ATTENTION = {**SIZES, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}


def in_fp32(model: nn.Module, *names: str) -> nn.Module:
    """The model in bf16, except the parameters whose names end with one of these."""
    model = model.bfloat16()
    for name, param in model.named_parameters():
        if name.endswith(names):
            param.data = param.data.float()
    return model


def gpt_oss() -> nn.Module:
    sizes = {**ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager"}
    return in_fp32(GptOssForCausalLM(GptOssConfig(**sizes)), "norm.weight")


def qwen3_next() -> nn.Module:
    sizes = {
        **ATTENTION, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    return in_fp32(Qwen3NextForCausalLM(Qwen3NextConfig(**sizes)), "A_log", "dt_bias")


def mamba2() -> nn.Module:
    sizes = {**SIZES, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    return in_fp32(Mamba2ForCausalLM(Mamba2Config(**sizes)), "A_log", ".D", "dt_bias")


def t5_with_wo() -> nn.Module:
    return in_fp32(t5(2), "wo.weight")


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixed": MixedDtypes, "gpt-oss": gpt_oss, "qwen3-next": qwen3_next, "mamba2": mamba2, "t5": t5_with_wo,
}  # fmt: skip


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


def steps(model: nn.Module, optimizer: Any, outcome: Outcome, passes: int = 1, count: int = 3) -> None:
    """Training steps with a loss."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for _ in range(passes):
            ids = torch.randint(1, VOCABULARY, (2, 16), generator=generator)
            loss = loss_of(model(input_ids=ids, labels=ids))
            loss.backward()
            outcome.losses.append(loss.item())
        take_step(optimizer, outcome)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_weights_have_the_bits_of_plain_pytorch_in_the_same_dtypes(name: str) -> None:
    """With an optimizer in memory that does the same arithmetic on the fp32 master of each parameter."""
    rule = pagoda.AdamW(lr=1e-2, weight_decay=0.1)
    plain = build(name)
    dtypes = {name: param.dtype for name, param in plain.named_parameters()}
    assert len({*dtypes.values()}) == 2
    expected = Outcome()
    steps(plain, InMemory(plain.parameters(), rule), expected)
    found = run(build(name), RESIDENT, steps, rule=rule, precision=None)
    assert {name: tensor.dtype for name, tensor in found.weights.items() if name in dtypes} == dtypes
    assert found.losses == expected.losses
    theirs = plain.state_dict()
    assert not [key for key, tensor in found.weights.items() if not torch.equal(tensor, theirs[key])]


RULES: dict[str, Rule] = {
    "adamw": pagoda.AdamW(lr=1e-2, weight_decay=0.1),
    "adamw-8bit": pagoda.AdamW(lr=1e-2, moments="8bit"),
    "sgd": pagoda.SGD(lr=1e-1),
    "adafactor": pagoda.Adafactor(lr=1e-2, beta1=0.9),
    "muon": pagoda.Muon(lr=1e-2),
    "adagrad": pagoda.Optim(torch.optim.Adagrad, lr=1e-2),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.5},
    "during backward": {"gradient_accumulation_steps": 2},
    "announced, clipped": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "fp32 gradients": {"precision": pagoda.MixedPrecision(gradients="fp32")},
    "asynchronous": {"update": "async"},
    "predicted": {"update": pagoda.Updates("async", predict=True)},
    "recomputed": {"activations": "recompute"},
}


def memory_of(name: str, placement: str, folder: Path, rule: Rule, **settings: Any) -> pagoda.Memory:
    """The smallest budgets in which the model trains in a placement, or all in RAM."""
    if placement == "resident":
        return RESIDENT
    clips = settings.get("max_grad_norm") is not None
    announced = settings.get("gradient_accumulation_steps")
    if getattr(settings.get("update"), "predict", False):
        rule = rule.predicting(1.0)
    options = {"announced": announced, "clipping": clips, "asynchronous": "update" in settings}
    memory = squeeze(build(name), placement, folder, precision=None, rule=rule, **options)
    return replace(memory, host=memory.host + (128 << 10)) if "precision" in settings else memory


@each_once(
    placement=[HOST_WEIGHTS, ALL_ON_SSD, ARENA, ARENA_ALL_ON_SSD], rule=[*RULES], setting=[*SETTINGS],
)  # fmt: skip
def test_placement_does_not_change_a_bit(placement: str, rule: str, setting: str, tmp_path: Path) -> None:
    settings = {"precision": None, **SETTINGS[setting]}
    if setting in ("asynchronous", "predicted"):
        rule = "adamw"

    def loop(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        steps(model, optimizer, outcome, passes=2)

    memory = memory_of("mixed", placement, tmp_path, RULES[rule], **SETTINGS[setting])
    found = run(build("mixed"), memory, loop, rule=RULES[rule], **settings)
    found.assert_same_bits(run(build("mixed"), RESIDENT, loop, rule=RULES[rule], **settings))
    assert len(found.plan.layout.dtypes) == 2


@pytest.mark.parametrize(
    ("saved", "resumed"), [("resident", ALL_ON_SSD), (ALL_ON_SSD, ALL_ON_SSD), (ALL_ON_SSD, "resident")]
)
def test_a_checkpoint_resumes_bit_for_bit_in_any_placement_and_an_export_has_each_dtype(
    saved: str, resumed: str, tmp_path: Path
) -> None:
    """On SSD, it keeps its pages."""
    rule = RULES["adamw"]

    def wrapped(placement: str, seed: int) -> tuple[nn.Module, Any]:
        folder = tmp_path / placement
        folder.mkdir(exist_ok=True)
        memory = replace(memory_of("mixed", placement, folder, rule, max_grad_norm=0.5), ssd_checkpoints=2)
        model = build("mixed")
        with torch.no_grad():
            for param in model.parameters():
                param.add_(seed)
        return pagoda.wrap(model, rule, memory=memory, max_grad_norm=0.5)

    model, optimizer = wrapped(saved, 0)
    steps(model, optimizer, Outcome())
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    export(model, tmp_path / "out", own_names=True)
    expected = Outcome()
    steps(model, optimizer, expected)
    optimizer.close()
    again, other = wrapped(resumed, 1)
    other.load_checkpoint(tmp_path / "checkpoint")
    written = load_file(tmp_path / "out" / "model.safetensors")
    held = again.state_dict()
    assert {name: tensor.dtype for name, tensor in written.items()} == {
        name: param.dtype for name, param in build("mixed").named_parameters()
    }
    assert all(torch.equal(tensor, held[name]) for name, tensor in written.items())
    found = Outcome()
    steps(again, other, found)
    assert found.losses == expected.losses
    assert found.norms == expected.norms


def test_a_model_of_transformers_keeps_in_fp32_what_it_does_from_pretrained(tmp_path: Path) -> None:
    """From a directory, from a checkpoint and in an export."""
    sizes = {
        **SIZES, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "moe_num_experts": 4,
        "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**sizes)).bfloat16().save_pretrained(tmp_path / "hf")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").train()
    dtypes = {name: param.dtype for name, param in plain.named_parameters()}
    gate = "model.layers.1.mlp.gate"
    kept = [f"{gate}.weight", f"{gate}.moe_statics.e_score_correction_bias"]
    assert [name for name, dtype in dtypes.items() if dtype is torch.float32] == kept
    expected, found = Outcome(), Outcome()
    steps(plain, InMemory(plain.parameters(), RULES["adamw"]), expected)
    model, optimizer = pagoda.wrap(pagoda.load(tmp_path / "hf"), RULES["adamw"], memory=RESIDENT)
    assert all(param.dtype is dtypes.get(name, torch.bfloat16) for name, param in model.named_parameters())
    steps(model, optimizer, found)
    assert found.losses == expected.losses
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    export(model, tmp_path / "out")
    for again in (pagoda.load(tmp_path / "checkpoint"), AutoModelForCausalLM.from_pretrained(tmp_path / "out")):
        assert {name: param.dtype for name, param in again.named_parameters()} == dtypes
    again, other = pagoda.wrap(pagoda.load(tmp_path / "checkpoint"), RULES["adamw"], memory=RESIDENT)
    other.load_checkpoint(tmp_path / "checkpoint")
    ours, theirs = Outcome(), Outcome()
    steps(model, optimizer, ours)
    steps(again, other, theirs)
    assert ours.losses == theirs.losses


def test_adapters_in_fp32_over_a_base_in_bf16_train_as_in_plain_peft(tmp_path: Path) -> None:
    """And an export merges them into the base's dtype."""
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model: nn.Module = peft.get_peft_model(llama(2).bfloat16(), lora)
        return model.train()

    plain, expected, found = adapted(), Outcome(), Outcome()
    trained = [param for param in plain.parameters() if param.requires_grad]
    assert {param.dtype for param in trained} == {torch.float32}
    steps(plain, InMemory(trained, RULES["adamw"]), expected, passes=2)
    model, optimizer = pagoda.wrap(
        adapted(), RULES["adamw"], memory=pagoda.Memory(host="1MiB", ssd=tmp_path, page_size=PAGE, unit_limit="64KiB")
    )
    plan = pagoda.plan_of(model)
    assert all(unit.trainable_numel in (0, unit.numel) for unit in plan.units)
    assert plan.layout.bytes_per_parameter["weight"] == 4
    steps(model, optimizer, found, passes=2)
    assert found.losses == expected.losses
    export(model, tmp_path / "merged", merge=True)
    assert {tensor.dtype for tensor in load_file(tmp_path / "merged" / "model.safetensors").values()} == {
        torch.bfloat16
    }


class HalfFrozen(nn.Module):
    """A frozen layer in fp16 and adapters in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(16, 16, dtype=torch.float16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2), nn.Linear(2, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.frozen(x.half()).float() + self.up(self.down(x))).square().mean()


def test_a_frozen_base_in_fp16_needs_no_loss_scale_and_adapters_in_fp16_do() -> None:
    plain, rule = HalfFrozen(), pagoda.Optim(torch.optim.SGD, lr=0.1)
    theirs = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = pagoda.wrap(HalfFrozen(), rule, memory=RESIDENT)
    with optimizer:
        assert not optimizer.scales_loss
        for number in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
            losses = [each(x) for each in (model, plain)]
            assert losses[0].item() == losses[1].item()
            for loss, each in zip(losses, (optimizer, theirs), strict=True):
                loss.backward()
                each.step()
                each.zero_grad()
        assert all(torch.equal(model.get_parameter(name), param) for name, param in plain.named_parameters())
    half = HalfFrozen()
    half.up.half()
    _, optimizer = pagoda.wrap(half, rule, memory=RESIDENT)
    with optimizer:
        assert optimizer.scales_loss
