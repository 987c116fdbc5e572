"""Every tuner of peft, and every kind of layer that one adapts, trains in pages with the bits of plain PyTorch: `make
test-all`. What writes to its parameters in each forward is refused by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
import transformers
from integrations.tiny_text import VOCABULARY, model as llama
from peft import LoraConfig, get_peft_model
from torch import nn
from zoo import losses_of

import pagoda
from nightly.in_pages import assert_same_weights, in_pages

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LAYERS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"total_step": 10},
    "AdaptionPromptConfig": {"adapter_len": 4, "adapter_layers": 2, "task_type": "CAUSAL_LM"},
    "BeftConfig": {"target_modules": ["q_proj"]},
    "BOFTConfig": {"boft_block_size": 8},
    "C3AConfig": {"block_size": 8},
    "CPTConfig": {
        "cpt_token_ids": [1, 2, 3],
        "cpt_mask": [1, 1, 1],
        "cpt_tokens_type_mask": [1, 2, 3],
        "task_type": "CAUSAL_LM",
    },
    "CartridgeConfig": PROMPT,
    "FourierFTConfig": {"n_frequency": 20},
    "IA3Config": {"feedforward_modules": ["down_proj"]},
    "LNTuningConfig": {"target_modules": None},
    "OFTConfig": {"oft_block_size": 8},
    "PolyConfig": {"task_type": "CAUSAL_LM", "n_tasks": 2, "n_skills": 2, "n_splits": 2},
    "PrefixTuningConfig": PROMPT,
    "PromptEncoderConfig": {**PROMPT, "encoder_hidden_size": 16},
    "PromptTuningConfig": PROMPT,
    "PveraConfig": {"target_modules": ["q_proj", "v_proj"]},
    "RoadConfig": {"group_size": 4},
    "TrainableTokensConfig": {"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
    "VBLoRAConfig": {"num_vectors": 8, "vector_length": 8, "topk": 2},
    "VeraConfig": {"target_modules": ["q_proj", "v_proj"]},
    "WaveFTConfig": {"n_frequency": 20},
}
"""Settings that a tuner needs, in addition to `LAYERS` if it adapts layers."""
VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.1},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "dora": {"use_dora": True},
    "bias": {"bias": "all", "lora_bias": True},
    "tokens": {"trainable_token_indices": {"embed_tokens": [1, 3]}},
    "whole modules": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "replicated layers": {"layer_replication": [[0, 2], [1, 2]]},
}
OTHERS = ("LoraConfig", "PromptLearningConfig", "XLoraConfig", "ShadowConfig", "MultitaskPromptTuningConfig")
"""Tested apart, bases of others, or without a plain run of `losses`."""
TUNERS = sorted(
    kind.__name__ for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.values() if kind.__name__ not in OTHERS
)
READ_MANY = ("FrodConfig",)
"""Those whose layers all read parameters of one layer."""


class Layers(nn.Module):
    """One of each kind of layer that peft adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.linear = nn.Embedding(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.conv1, self.conv2 = nn.Conv1d(16, 16, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.conv3, self.attend = nn.Conv3d(2, 2, 3, padding=1), nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.conv1(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.conv2(x.reshape(-1, 4, 4, 8)).reshape(x.shape)
        x = self.norm(x + self.conv3(x.reshape(-1, 2, 4, 4, 4)).reshape(x.shape))
        x = x + self.linear(x).relu()
        return self.head(x + self.attend(x, x, x)[0])


def ids(step: int, size: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (2, size), generator=torch.Generator().manual_seed(step))


def loss_of_layers(model: Any, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(ids(step, 8, 16)).square().mean()
    return loss


def loss_of_llama(model: Any, step: int, **more: Any) -> torch.Tensor:
    given = ids(step, 12, VOCABULARY)
    loss: torch.Tensor = model(input_ids=given, labels=given, **more).loss
    return loss


def assert_same_bits(make: Callable[[], Any], loss: Callable[[Any, int], torch.Tensor], roomy: bool = False) -> None:
    """Train in RAM and in pages that hold a part of the model, or all of it if `roomy`. Skips what plain PyTorch does
    not train."""

    def trained(model: Any, optimizer: Any) -> list[float]:
        transformers.set_seed(2)
        return losses_of(partial(loss, model), optimizer, 3)

    try:
        plain = make()
        rule = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
        expected = trained(plain, rule)
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        pytest.skip(f"not trained by plain PyTorch: {str(error)[:120]}")
    if any(loss != loss for loss in expected):
        pytest.skip("its loss is NaN in plain PyTorch")
    same = pagoda.Optim(torch.optim.AdamW, lr=0.01)
    if roomy:
        model, optimizer = pagoda.wrap(make(), same, memory=pagoda.Memory(host="256MiB"), precision="fp32")
    else:
        model, optimizer = in_pages(make, same)
    with optimizer:
        assert trained(model, optimizer) == expected
        assert_same_weights(model, plain)


def adapted(base: Callable[[], Any], config: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    made = base()
    torch.manual_seed(1)
    return get_peft_model(made, config()).train()


def tuned(name: str) -> Any:
    kind: Any = getattr(peft, name)
    given = SETTINGS.get(name, {})
    layers = {} if issubclass(kind, peft.PromptLearningConfig) else LAYERS
    return adapted(partial(llama, num_hidden_layers=2, use_cache=False), partial(kind, **{**layers, **given}))


@pytest.mark.parametrize("name", TUNERS)
def test_each_tuner(name: str) -> None:
    tasks = {"task_ids": torch.tensor([0, 1])} if name == "PolyConfig" else {}
    assert_same_bits(partial(tuned, name), partial(loss_of_llama, **tasks), roomy=name in READ_MANY)


def test_a_tuner_that_writes_to_its_parameters_in_forward_is_refused_by_their_name() -> None:
    config = partial(peft.OFTConfig, oft_block_size=8, coft=True, init_weights=False, **LAYERS)
    with pytest.raises(pagoda.UsageError, match=r"oft_R.*was written to inside a forward"):
        assert_same_bits(lambda: adapted(partial(llama, num_hidden_layers=2), config), loss_of_llama)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_of_lora(variant: str) -> None:
    config = partial(LoraConfig, r=4, **LAYERS, **VARIANTS[variant])
    assert_same_bits(lambda: adapted(partial(llama, num_hidden_layers=2), config), loss_of_llama)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("layer", ["embed", "linear", "conv1", "conv2", "conv3", "attend"])
def test_each_kind_of_layer(layer: str, dora: bool) -> None:
    config = partial(LoraConfig, r=4, target_modules=[layer], init_lora_weights=False, use_dora=dora)
    assert_same_bits(lambda: adapted(Layers, config), loss_of_layers)


@pytest.mark.parametrize("active", ["default", "second", "both", "merged"])
def test_several_adapters(active: str) -> None:
    def make() -> Any:
        config = partial(LoraConfig, r=4, init_lora_weights=False, **LAYERS)
        model = adapted(partial(llama, num_hidden_layers=2), config)
        model.add_adapter("second", config())
        if active == "merged":
            model.merge_adapter(["default"])
        if active == "both":
            model.base_model.set_adapter(["default", "second"])
        elif active != "default":
            model.set_adapter("second")
        return model

    assert_same_bits(make, loss_of_llama)
