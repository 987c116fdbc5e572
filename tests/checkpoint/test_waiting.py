"""What is done to a model between `pagoda.load` and `wrap` gives the values that it gives to a model in RAM."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized
from transformers import LlamaForCausalLM

import pagoda
from pagoda.checkpoint.waiting import is_waiting

from .hf_models import build

Change = Callable[[Any], Any]


def copied_layer(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))


def cloned(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.clone())


def tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def fused(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.joined = nn.Parameter(torch.cat([attention.k_proj.weight, attention.v_proj.weight]).detach())
    attention.row_parts = nn.Parameter(torch.stack([*attention.q_proj.weight.data.chunk(2, dim=1)]))
    attention.q_proj.weight.data.copy_(attention.o_proj.weight.data.T)


def resized(vocabulary: int) -> Change:
    def change(model: Any) -> None:
        torch.manual_seed(1)
        model.resize_token_embeddings(vocabulary)

    return change


def cast(model: Any) -> None:
    model.to(torch.bfloat16)
    model.float()


def written(model: Any) -> None:
    torch.manual_seed(1)
    nn.init.trunc_normal_(model.lm_head.weight)
    with torch.no_grad():
        model.model.norm.weight.mul_(2).add_(1)
        model.model.embed_tokens.weight[3:5] = 0
        model.model.layers[0].mlp.up_proj.weight.add_(torch.randn(model.model.layers[0].mlp.up_proj.weight.shape))


def from_sibling(model: Any) -> None:
    first, second = model.model.layers
    first.load_state_dict(second.state_dict())
    second.load_state_dict({name: value.clone() for name, value in second.state_dict().items()}, assign=True)


def target_network(model: Any) -> nn.Module:
    return nn.ModuleDict({"online": model, "target": copy.deepcopy(model).requires_grad_(False)})


def averaged(model: Any) -> nn.Module:
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        average.update_parameters(model)
    return nn.ModuleDict({"online": model, "average": average.module})


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def trained(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def parametrized(model: Any) -> None:
    parametrizations.weight_norm(model.lm_head)
    parametrizations.orthogonal(model.model.layers[0].self_attn.q_proj)


PLAIN = (copied_layer, cloned, tied, fused, cast, written, from_sibling, target_network, averaged, pickled, trained)
CHANGES: dict[str, Change] = {change.__name__: change for change in (*PLAIN, parametrized)}
CHANGES |= {"grown": resized(80), "shrunk": resized(20)}


def values_after_wrap(model: nn.Module) -> dict[str, torch.Tensor]:
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=pagoda.Memory(host="64MiB"), precision="fp32")
    values = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    return values


@pytest.mark.parametrize("name", ["llama-untied", pytest.param("llama-tied", marks=pytest.mark.slow)])
def test_a_loaded_model_can_be_changed_like_one_in_ram(name: str, tmp_path: Path) -> None:
    build(name, seed=5).save_pretrained(tmp_path)
    for how, change in CHANGES.items():
        plain = LlamaForCausalLM.from_pretrained(tmp_path).train()
        if how == "parametrized" and name == "llama-tied":
            continue  # torch's parametrization keeps the weight that the embedding has
        expected = (change(plain) or plain).state_dict()
        loaded = pagoda.load(tmp_path)
        found = values_after_wrap(change(loaded) or loaded)
        assert found.keys() == expected.keys(), how
        for key, value in expected.items():
            assert torch.equal(found[key], value), (how, key)


@torch.no_grad()
def test_copies_of_weights_in_files_stay_in_files(tmp_path: Path) -> None:
    build("llama-untied", seed=5).save_pretrained(tmp_path)
    model = pagoda.load(tmp_path)
    twin: Any = copy.deepcopy(model).bfloat16()
    twin.lm_head.weight = nn.Parameter(twin.model.embed_tokens.weight.clone())
    assert any(is_waiting(param) for param in model.parameters())
    for name, param in twin.named_parameters():
        assert is_waiting(param) == is_waiting(model.get_parameter(name)), name
    assert is_waiting(twin.lm_head.weight)


def test_a_parameter_without_values_is_refused_by_name(tmp_path: Path) -> None:
    build("llama-untied", seed=5).save_pretrained(tmp_path)
    loaded: Any = pagoda.load(tmp_path)
    loaded.lm_head.to("meta")
    with torch.device("meta"):
        on_meta = nn.Sequential(nn.Linear(4, 4))
    for model, name in (loaded, "lm_head.weight"), (on_meta, "0.weight"):
        with pytest.raises(pagoda.ConfigError, match=rf"'{name}' is on the meta device.*no values.*deferred_init"):
            values_after_wrap(model)


def test_weights_that_transformers_keeps_in_fp32_are_named_wherever_they_come_from(tmp_path: Path) -> None:
    plain = build("llama-untied", seed=5)
    plain.save_pretrained(tmp_path)
    for model in plain, pagoda.load(tmp_path):
        model._keep_in_fp32_modules_strict = {"q_proj", "norm"}
        with pytest.warns(
            UserWarning, match=r"keeps 'model\.layers\.0\.self_attn\.q_proj\.weight'.* more in fp32.*bfloat16"
        ):
            pagoda.wrap(model, pagoda.AdamW(), memory=pagoda.Memory(host="64MiB"), precision="bf16")[1].close()


def test_weights_that_share_memory_are_refused_as_in_ram(tmp_path: Path) -> None:
    build("llama-untied", seed=5).save_pretrained(tmp_path)
    model: Any = pagoda.load(tmp_path)
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.data)
    with pytest.raises(pagoda.ConfigError, match=r"'lm_head\.weight' and .* in the same memory"):
        values_after_wrap(model)
    with pytest.raises(pagoda.UsageError, match="change the shape of a tensor in place"):
        model.lm_head.weight.data.resize_(2)


@pytest.mark.parametrize(
    "make", [parametrizations.weight_norm, parametrizations.orthogonal, parametrizations.spectral_norm]
)
def test_parametrized_layers_start_under_init_from_the_values_of_their_layer(make: Callable[..., nn.Module]) -> None:
    with pagoda.deferred_init():
        layer = nn.Linear(64, 64)
        plain = copy.deepcopy(layer)
        model = nn.Sequential(plain, make(layer))
    assert is_parametrized(layer)
    found = values_after_wrap(model)
    original = next(found[name] for name in found if name.endswith(("original", "original1")))
    if make is not parametrizations.orthogonal:
        assert torch.equal(original, found["0.weight"])


@pytest.mark.parametrize("change", ["deepcopy", "load_state_dict", "copy"])
def test_a_target_network_under_init_starts_as_its_sibling(change: str) -> None:
    with pagoda.deferred_init():
        online = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        target = copy.deepcopy(online) if change == "deepcopy" else nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        if change == "load_state_dict":
            target.load_state_dict(online.state_dict())
        elif change == "copy":
            for mine, other in zip(target.parameters(), online.parameters(), strict=True):
                mine.data.copy_(other.data)
    found = values_after_wrap(nn.ModuleDict({"target": target, "online": online}))
    for name in ("0.weight", "0.bias", "1.weight"):
        assert torch.equal(found[f"target.{name}"], found[f"online.{name}"])
    assert found["online.0.weight"].std() > 0
