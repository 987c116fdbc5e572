"""Quantized base weights under adapters: integers in pages, on any tier, with the bits of the run without Pagoda.

bitsandbytes has 4 bits, torchao 8; each is tested where it is installed. A layer of the test's own needs neither.
"""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.tiny_text import model as llama
from pairwise import each_once
from torch import nn
from torch.nn import functional
from zoo import losses_of

import pagoda
from pagoda.checkpoint.export import export
from pagoda.config.training import ActivationMode

SHAPE = 64, 96
RULE = pagoda.Optim(torch.optim.SGD, lr=0.5)


class Packed(nn.Module):
    """A linear layer of 4-bit integers, two to a byte, with an adapter of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        rows, columns = SHAPE
        self.packed = nn.Parameter(torch.randint(256, (rows, columns // 2), dtype=torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(torch.randn(rows, 1).abs(), requires_grad=False)
        self.down, self.up = nn.Linear(columns, 2), nn.Linear(2, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        integers = torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(1)
        weight = (integers.to(x.dtype) - 8) * self.scales / 16
        return functional.linear(x, weight) + self.up(self.down(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed, self.back = Packed(), nn.Linear(SHAPE[0], SHAPE[1])
        self.back.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x + self.back(self.packed(x).tanh()), (SHAPE[1],))


def own() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(6)))


def four_bits(model: nn.Module) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for name, module in [*model.named_modules()]:
        if type(module) is nn.Linear and name != "lm_head":
            dtype = module.weight.dtype
            made = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
            )
            made.support_avx512bf16_for_cpu = False  # else other bits in eval than in training
            made.weight = bitsandbytes.nn.Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4", module=made
            )
            holder, _, short = name.rpartition(".")
            setattr(model.get_submodule(holder), short, made.to("cpu"))
    return model


def eight_bits(model: nn.Module) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(
        model,
        quantization.Int8WeightOnlyConfig(),
        filter_fn=lambda module, name: type(module) is nn.Linear and name != "lm_head",
    )
    return model


def adapted(quantize: Callable[[nn.Module], nn.Module], dora: bool = False) -> Any:
    peft = pytest.importorskip("peft")
    base = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3).requires_grad_(False)
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian", use_dora=dora)
    return peft.get_peft_model(quantize(base), settings, autocast_adapter_dtype=False)


MODELS: dict[str, Callable[[], Any]] = {
    "bytes": own,
    "4 bits": lambda: adapted(four_bits),
    "8 bits": lambda: adapted(eight_bits),
}
IDS = torch.arange(24).view(2, 12)
HOST: dict[str, str] = {"bytes": "148KiB", "4 bits": "160KiB", "8 bits": "160KiB"}
"""Less than the frozen weights take."""


def outcome(model: Any) -> torch.Tensor:
    if isinstance(model, nn.Sequential):
        torch.manual_seed(2)
        return model(torch.randn(2, SHAPE[1])).square().mean()
    loss: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
    return loss


def wrapped(case: str, directory: Path, activations: ActivationMode = "recompute") -> Any:
    directory.mkdir(exist_ok=True)
    memory = pagoda.Memory(host=HOST[case], ssd=str(directory), page_size=4096, unit_limit="32KiB")
    return pagoda.wrap(MODELS[case](), RULE, memory=memory, precision="fp32", activations=activations)


@each_once(case=[*MODELS], activations=["recompute", "keep"])
def test_quantized_weights_on_ssd_train_adapters_with_the_bits_of_torch_resume_and_are_read_as_they_are(
    case: str, activations: ActivationMode, tmp_path: Path
) -> None:
    plain = MODELS[case]()
    trained = [param for param in plain.parameters() if param.requires_grad]
    sgd = torch.optim.SGD(trained, lr=0.5)
    expected = losses_of(lambda _: outcome(plain), sgd, 2)
    model, optimizer = wrapped(case, tmp_path / "ssd", activations)
    assert losses_of(lambda _: outcome(model), optimizer, 2) == expected
    assert pagoda.plan_of(model).bytes["ssd"]["weight"] > pagoda.plan_of(model).bytes["host"].get("weight", 0)
    assert_same_weights(model.state_dict(), plain.state_dict())
    with pagoda.gathered(model):
        assert_same_weights(dict(model.named_parameters()), dict(plain.named_parameters()))
    with torch.no_grad():
        assert outcome(model.eval()).item() == outcome(plain.eval()).item()
    optimizer.save_checkpoint(tmp_path / "saved")
    optimizer.close()
    model, optimizer = wrapped(case, tmp_path / "another", activations)
    optimizer.load_checkpoint(tmp_path / "saved")
    plain.train()
    assert losses_of(lambda _: outcome(model), optimizer, 2) == losses_of(lambda _: outcome(plain), sgd, 2)
    if case == "bytes":
        with pagoda.gathered(model, modify=True):
            model[0].packed.packed.data.fill_(136)
            plain[0].packed.packed.data.fill_(136)
    else:
        with (
            pagoda.gathered(model, modify=True),
            pytest.raises(pagoda.UsageError, match=r"quantized.*PeftModel.from_pretrained"),
        ):
            model.merge_and_unload()
        out = export(tmp_path / "saved", tmp_path / "adapter")
        assert "adapter_model.safetensors" in out.files
        with pytest.raises(pagoda.CheckpointError, match="cannot be exported"):
            export(tmp_path / "saved", tmp_path / "merged", merge=True)
    if case != "4 bits":  # bitsandbytes' layers do not load what they give
        model.load_state_dict(model.state_dict())
    assert outcome(model).item() == outcome(plain).item()
    optimizer.close()


def assert_same_weights(mine: dict[str, torch.Tensor], its: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == its.keys()
    for name, value in its.items():
        assert type(mine[name]) is type(value) or isinstance(value, nn.Parameter)
        assert all(map(torch.equal, inner(mine[name]), inner(value))), name


def inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of one, which may be of a class around them."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.detach()]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0] if getattr(tensor, name) is not None]


def test_quantized_weights_are_neither_trained_nor_cast() -> None:
    model = adapted(eight_bits)
    with pytest.raises(pagoda.ConfigError, match=r"is quantized.*leave it out of param_groups"):
        pagoda.wrap(model, pagoda.AdamW(), param_groups=model.parameters(), precision="fp32")
    with pytest.raises(pagoda.ConfigError, match=r"Int8Tensor.*precision"):
        pagoda.wrap(model, pagoda.AdamW(), precision="bf16")


def test_eight_bits_of_bitsandbytes_are_refused() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    layer.weight = bitsandbytes.nn.Int8Params(torch.randn(64, 64), requires_grad=False, has_fp16_weights=False)
    with pytest.raises(pagoda.ConfigError, match="Linear4bit"):
        pagoda.wrap(nn.Sequential(layer.to("cpu"), nn.Linear(64, 1)), pagoda.AdamW(), precision="fp32")


def test_an_evaluated_model_of_bitsandbytes_says_how_to_unpack() -> None:
    plain = adapted(four_bits)
    layer = next(module for module in plain.modules() if hasattr(module, "quant_state"))
    layer.quant_state.packing_format_for_cpu = True
    with pytest.raises(pagoda.ConfigError, match="state_dict"):
        pagoda.wrap(plain, pagoda.AdamW(), precision="fp32")


def test_a_model_in_4_bits_that_is_dropped_without_close_is_freed() -> None:
    """bitsandbytes' weights refer to their layers."""

    def trained() -> weakref.ref[nn.Module]:
        model, optimizer = pagoda.wrap(adapted(four_bits), RULE, memory=pagoda.Memory(host="4MiB"), precision="fp32")
        losses_of(lambda _: outcome(model), optimizer)
        return weakref.ref(model)

    dropped = trained()
    gc.collect()
    assert dropped() is None


def test_dora_over_quantized_weights_has_the_bits_of_torch(tmp_path: Path) -> None:
    plain = adapted(eight_bits, dora=True)
    trained = [param for param in plain.parameters() if param.requires_grad]
    expected = losses_of(lambda _: outcome(plain), torch.optim.SGD(trained, lr=0.5))
    memory = pagoda.Memory(host="1MiB", ssd=str(tmp_path), page_size=4096, unit_limit="32KiB")
    model, optimizer = pagoda.wrap(adapted(eight_bits, dora=True), RULE, memory=memory, precision="fp32")
    assert losses_of(lambda _: outcome(model), optimizer) == expected
    optimizer.close()
