"""Transformers of diffusers train in pages with the bits of plain PyTorch: `make test-all`, where it is installed.

Full, and adapters as diffusers adds them; with accumulation, clipping, and diffusers' own average of the weights.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import reference
import torch

diffusers = pytest.importorskip("diffusers")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from diffusers.optimization import get_scheduler  # noqa: E402
from diffusers.training_utils import EMAModel  # noqa: E402
from peft.utils import get_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from zoo import assert_equal  # noqa: E402

import pagoda  # noqa: E402
from nightly.in_pages import assert_same_weights, in_pages  # noqa: E402
from pagoda.config.training import ActivationMode  # noqa: E402
from pagoda.integrations import Paging  # noqa: E402
from pagoda.integrations.accelerate import Accelerator  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
RULE = pagoda.AdamW(lr=1e-2, weight_decay=0.1)
CLIP, ACCUMULATION, BATCH = 0.01, 2, 2
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        **HEADS, in_channels=8, num_single_layers=2, joint_attention_dim=24, pooled_projection_dim=24,
        axes_dims_rope=(4, 6, 6), guidance_embeds=True,
    )  # fmt: skip


def of_flux(seed: int, t: torch.Tensor) -> dict[str, Any]:
    return {
        "hidden_states": noise(seed, BATCH, 16, 8),
        "encoder_hidden_states": noise(seed + 1, BATCH, 6, 24),
        "pooled_projections": noise(seed + 2, BATCH, 24),
        "timestep": t,
        "guidance": torch.ones(BATCH),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(6, 3),
    }


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        **HEADS, sample_size=8, in_channels=4, out_channels=4, joint_attention_dim=24, caption_projection_dim=32,
        pooled_projection_dim=24, pos_embed_max_size=8, qk_norm="rms_norm", dual_attention_layers=(0,),
    )  # fmt: skip


def of_sd3(seed: int, t: torch.Tensor) -> dict[str, Any]:
    return {
        "hidden_states": noise(seed, BATCH, 4, 8, 8),
        "encoder_hidden_states": noise(seed + 1, BATCH, 6, 24),
        "pooled_projections": noise(seed + 2, BATCH, 24),
        "timestep": t * 1000,
    }


def qwen_image() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        **HEADS, in_channels=16, out_channels=4, joint_attention_dim=24, axes_dims_rope=(4, 6, 6)
    )


def of_qwen_image(seed: int, t: torch.Tensor) -> dict[str, Any]:
    return {
        "hidden_states": noise(seed, BATCH, 16, 16),
        "encoder_hidden_states": noise(seed + 1, BATCH, 6, 24),
        "encoder_hidden_states_mask": torch.ones(BATCH, 6, dtype=torch.long),
        "timestep": t,
        "img_shapes": [[(1, 4, 4)]] * BATCH,
    }


def wan() -> Any:
    return diffusers.WanTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, text_dim=24, freq_dim=32, ffn_dim=48, rope_max_seq_len=32
    )


def of_wan(seed: int, t: torch.Tensor) -> dict[str, Any]:
    return {
        "hidden_states": noise(seed, BATCH, 4, 2, 8, 8),
        "encoder_hidden_states": noise(seed + 1, BATCH, 6, 24),
        "timestep": (t * 1000).long(),
    }


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int, torch.Tensor], dict[str, Any]]]] = {
    "Flux": (flux, of_flux),
    "SD3": (sd3, of_sd3),
    "Qwen-Image": (qwen_image, of_qwen_image),
    "Wan": (wan, of_wan),
}


class InMemory(reference.InMemory):
    """AdamW by its definition, with exact clipping."""

    def clip_grad_norm_(self, limit: float) -> float:
        squares = [param.grad.double().square().sum().item() for param in self.states if param.grad is not None]
        norm = math.sqrt(math.fsum(squares))
        self.factor = min(1.0, limit / (norm + 1e-6))
        return norm

    def step(self, grad_scale: float = 1.0) -> None:
        super().step(self.factor)


def made(name: str, adapters: bool) -> Any:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    return with_adapters(model) if adapters else model


def with_adapters(model: Any) -> Any:
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=targets, init_lora_weights="gaussian"))
    return model


def trained(name: str, model: Any, optimizer: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps of flow matching, and the average of the trained weights."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    average, found = EMAModel(trainable, decay=0.5), []
    for step in range(3):
        for part in range(ACCUMULATION):
            seed = 10 * (ACCUMULATION * step + part)
            given = MODELS[name][1](seed, torch.tensor([0.25, 0.75]))
            output = model(**given, return_dict=False)[0]
            loss = (output - noise(seed + 3, *output.shape)).square().mean() / ACCUMULATION
            loss.backward()
            found.append(loss.item())
        assert optimizer.clip_grad_norm_(CLIP) > CLIP
        optimizer.step()
        optimizer.zero_grad()
        average.step(trainable)
    return found, average.shadow_params


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_in_pages_with_the_bits_of_plain_pytorch(
    name: str, adapters: bool, activations: ActivationMode, tmp_path: Path
) -> None:
    plain = made(name, adapters)
    expected = trained(name, plain, InMemory((p for p in plain.parameters() if p.requires_grad), RULE))
    model, optimizer = in_pages(lambda: made(name, adapters), RULE, activations)
    with optimizer:
        found = trained(name, model, optimizer)
        assert found[0] == expected[0]
        assert all(map(torch.equal, found[1], expected[1]))
        assert_same_weights(model, plain)
        if adapters:
            model.save_lora_adapter(tmp_path)
            saved = load_file(tmp_path / "pytorch_lora_weights.safetensors")
            assert_equal(saved, get_peft_model_state_dict(plain))
        else:
            model.save_pretrained(tmp_path)
            assert_same_weights(type(plain).from_pretrained(tmp_path), plain)


def in_4_bits(linear: torch.nn.Linear) -> torch.nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes.nn")
    made = bitsandbytes.Linear4bit(linear.in_features, linear.out_features, compute_dtype=torch.float32, device="meta")
    made.weight = bitsandbytes.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4").to("cpu")
    made.weight.module, made.quant_state, made.bias = made, made.weight.quant_state, linear.bias
    return made


def in_fp8(linear: torch.nn.Linear) -> torch.nn.Module:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(linear, torchao.Float8WeightOnlyConfig())
    return linear


@pytest.mark.parametrize("packed", [in_4_bits, in_fp8])
@pytest.mark.parametrize("name", ["Flux", "SD3"])
def test_adapters_over_a_base_in_4_or_8_bits_train_with_the_bits_of_plain_pytorch(
    name: str, packed: Callable[[torch.nn.Linear], torch.nn.Module]
) -> None:
    def model() -> Any:
        base = made(name, adapters=False)
        for layer, linear in [*base.named_modules()]:
            if type(linear) is torch.nn.Linear and "transformer_blocks" in layer and "norm" not in layer:
                base.set_submodule(layer, packed(linear))
        return with_adapters(base)

    plain = model()
    expected = trained(name, plain, InMemory((p for p in plain.parameters() if p.requires_grad), RULE))
    paged, optimizer = in_pages(model, RULE, "recompute")
    with optimizer:
        found = trained(name, paged, optimizer)
        assert found[0] == expected[0]
        assert all(map(torch.equal, found[1], expected[1]))


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_a_script_of_diffusers_trains_and_resumes_with_the_bits_of_its_own_accelerator(
    adapters: bool, tmp_path: Path
) -> None:
    expected = script(accelerator_of(accelerate.Accelerator), adapters, tmp_path / "stock")
    pages = Paging(memory=pagoda.Memory(host="1MiB", ssd=f"{tmp_path}:64MiB", page_size=4096))
    accelerator = accelerator_of(Accelerator, paging=pages)
    assert script(accelerator, adapters, tmp_path / "paged") == expected
    for _, optimizer in accelerator._paged:
        optimizer.optimizer.close()


def accelerator_of(kind: Any, **settings: Any) -> Any:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return kind(cpu=True, gradient_accumulation_steps=ACCUMULATION, **settings)


def script(accelerator: Any, adapters: bool, out: Path) -> list[float]:
    """What diffusers' scripts for Flux do with an accelerator. Returns the losses, and twice those after a save."""
    transformer = made("Flux", adapters)
    trainable = [param for param in transformer.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD([{"params": trainable, "lr": 0.1}])
    scheduler = get_scheduler("constant_with_warmup", optimizer=optimizer, num_warmup_steps=2)
    transformer, optimizer, scheduler = accelerator.prepare(transformer, optimizer, scheduler)
    found = []
    for step in (0, 1, 2, 3, "save", 4, 5, "load", 4, 5):
        if step == "save":
            accelerator.save_state(str(out))
        elif step == "load":
            accelerator.load_state(str(out))
        else:
            with accelerator.accumulate(transformer):
                output = transformer(**of_flux(10 * int(step), torch.tensor([0.25, 0.75])), return_dict=False)[0]
                loss = (output - noise(10 * int(step) + 3, *output.shape)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(transformer.parameters(), 1e9)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append(loss.item())
    return found
