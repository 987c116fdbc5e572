"""Models built under `pagoda.deferred_init()`: what stays real, who initialises what, and how little RAM it takes."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import zoo
from runtime.conftest import Wrap
from torch import nn
from transformers import CLIPConfig, CLIPModel, MixtralConfig, MixtralForCausalLM

import pagoda
from pagoda.checkpoint.waiting import is_waiting
from pagoda.config.training import Precision


@pytest.fixture
def wrap(wrap: Wrap) -> Wrap:
    """In fp32, where weights can be compared with those of eager construction."""
    return partial(wrap, precision="fp32")


def encoder() -> nn.Module:
    """MultiheadAttention has `_reset_parameters`; the layers are copies of one another, as torch builds them."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def norms() -> nn.Module:
    return nn.Sequential(nn.Conv1d(8, 16, 3), nn.BatchNorm1d(16), nn.PReLU(), nn.Bilinear(4, 4, 16), nn.GRU(16, 24, 2))


def embeddings() -> nn.Module:
    return nn.Sequential(nn.Embedding(96, 64, padding_idx=0), nn.LSTM(64, 32), nn.Linear(32, 96, bias=False))


BUILD: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: zoo.llama(2),
    "encoder": encoder,
    "norms": norms,
    "embeddings": embeddings,
}


def built_later(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with pagoda.deferred_init():
        return build()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter once, under its first name."""
    weights = model.state_dict()
    return {name: weights[name].float() for name, _ in model.named_parameters()}


def real_share(model: nn.Module) -> float:
    """Share of a model's elements that are in RAM."""
    params = list(model.parameters())
    return sum(p.numel() for p in params if not is_waiting(p)) / sum(p.numel() for p in params)


def mixtral() -> nn.Module:
    """Its experts are large parameters of a module without `reset_parameters`."""
    config = {"vocab_size": 96, "hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**config, **heads, num_local_experts=8))


def test_large_parameters_of_transformers_wait_for_the_models_initialiser(wrap: Wrap) -> None:
    eager, later = mixtral(), built_later(mixtral)
    assert real_share(later) < 0.01
    found = {name: value.float() for name, value in wrap(later, pagoda.Memory(host="256MiB"))[0].state_dict().items()}
    for name, param in eager.named_parameters():
        assert found[name].mean().item() == pytest.approx(param.mean().item(), abs=1e-3), name
        assert found[name].std().item() == pytest.approx(param.std().item(), rel=0.1), name


def test_small_parameters_of_transformers_keep_what_their_constructor_gave_them() -> None:
    """Not every `_init_weights` fills them all."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(text_config=sizes, vision_config=sizes)
    later = built_later(lambda: CLIPModel(config))
    assert later.logit_scale.item() == pytest.approx(config.logit_scale_init_value)


def test_modules_built_after_the_block_are_real_again() -> None:
    class FailingError(Exception):
        pass

    def fail() -> None:
        with pagoda.deferred_init():
            raise FailingError

    with pytest.raises(FailingError):
        fail()
    assert not is_waiting(nn.Linear(2, 2).weight)
    with pagoda.deferred_init():
        with pagoda.deferred_init():
            pass
        assert is_waiting(nn.Linear(2, 2).weight)
    assert not is_waiting(nn.Linear(2, 2).weight)


@pytest.mark.parametrize("name", BUILD)
def test_parameters_wait_and_are_initialised_with_the_statistics_of_eager_construction(name: str, wrap: Wrap) -> None:
    """Buffers are real. Two parameters share numbers if they do in eager construction, which copies a layer, and only
    then."""
    torch.manual_seed(1)
    built, later = BUILD[name](), built_later(BUILD[name])
    assert [(n, p.shape, p.requires_grad) for n, p in later.named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in built.named_parameters()
    ]
    for module in later.modules():
        can_start_over = hasattr(module, "reset_parameters") or hasattr(module, "_reset_parameters")
        for param in module.parameters(recurse=False):
            assert is_waiting(param) or not can_start_over, type(module)
    assert real_share(later) < 0.05, "or building it would take the RAM that `init` is there to save"
    for (mine, buffer), (other, expected) in zip(later.named_buffers(), built.named_buffers(), strict=True):
        assert mine == other
        assert not is_waiting(buffer)
        assert torch.equal(buffer, expected), mine
    eager = {n: p.detach().double() for n, p in built.named_parameters()}
    found = values(wrap(later)[0])
    assert found.keys() == eager.keys()
    for param, expected in eager.items():
        value = found[param].double()
        if expected.numel() == 1 or expected.std() == 0:
            assert torch.equal(value, expected), param
            continue
        assert (value == 0).sum() == (expected == 0).sum(), param
        # Four standard errors of a difference of two samples, where those exceed the 10% that a mistake would.
        error = 4 / math.sqrt(expected.numel())
        assert value.std().item() == pytest.approx(expected.std().item(), rel=max(0.1, error)), param
        assert value.mean().item() == pytest.approx(expected.mean().item(), abs=1.5 * error * expected.std().item())
        assert value.abs().max().item() == pytest.approx(expected.abs().max().item(), rel=0.5), param
    drawn = {n: v.flatten() for n, v in found.items() if v.numel() >= 32 and v.std() > 0}
    assert len(drawn) > 1
    for (first, a), (second, b) in itertools.combinations(drawn.items(), 2):
        if eager[first].shape == eager[second].shape and torch.equal(eager[first], eager[second]):
            assert torch.equal(a, b), (first, second)
            continue
        count = min(len(a), len(b))
        correlation = torch.corrcoef(torch.stack([a[:count], b[:count]]).double())[0, 1].abs().item()
        assert correlation < 6 / math.sqrt(count), (first, second)


@pytest.mark.parametrize(("name", "precision"), [("norms", "fp32"), ("llama", "bf16")])
def test_values_depend_on_the_seed_alone(name: str, precision: Precision, wrap: Wrap, tmp_path: Path) -> None:
    """Not on unit size, page size or tier."""
    reference = values(wrap(built_later(BUILD[name]), precision=precision)[0])
    memories = [
        pagoda.Memory(host="64MiB", unit_limit="4KiB", page_size=zoo.PAGE),
        pagoda.Memory(host="64MiB", unit_limit="16MiB"),
        zoo.squeeze(
            BUILD[name](), zoo.ARENA_ALL_ON_SSD, tmp_path, precision=precision, clipping=False, unit_limit="32KiB"
        ),
    ]
    for memory in memories:
        model, _ = wrap(built_later(BUILD[name]), memory, precision=precision)
        zoo.assert_equal(values(model), reference)
    other = values(wrap(built_later(BUILD[name], seed=1), precision=precision)[0])
    drawn = [n for n, value in reference.items() if value.numel() > 1 and value.std() > 0]
    assert drawn
    assert all(not torch.equal(other[n], reference[n]) for n in drawn if n != "scale")


def test_what_wrap_draws_does_not_depend_on_the_memory(wrap: Wrap, tmp_path: Path) -> None:
    """For a model that is real it draws nothing, so that data and dropout are the same whether a model is wrapped."""
    on_ssd = zoo.squeeze(zoo.ConvNet(), zoo.ALL_ON_SSD, tmp_path, precision="fp32", clipping=False)
    after = []
    for memory in (zoo.RESIDENT, on_ssd):
        wrap(built_later(zoo.ConvNet), memory)
        after.append(torch.rand(3))
    assert torch.equal(*after)
    model = zoo.ConvNet()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    wrap(model)
    assert torch.equal(torch.rand(3), expected)


class Table(nn.Module):
    """A constructor that computes its parameter, and has no way to do so again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(0, 1, 32).view(4, 8))
        self.scale = nn.Parameter(torch.tensor([2.5]))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x @ self.table.T @ self.table * self.scale)


def test_values_that_only_a_constructor_knows_are_kept(wrap: Wrap) -> None:
    later = built_later(Table)
    assert not is_waiting(later.table)
    assert not is_waiting(later.scale)
    assert is_waiting(later.inner.weight)
    model, optimizer = wrap(nn.Sequential(later, nn.Linear(8, 8)))
    found = values(model)
    assert torch.equal(found["0.table"], torch.linspace(0, 1, 32).view(4, 8))
    assert found["0.scale"] == 2.5
    assert found["0.inner.weight"].std() > 0
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


class OddShapes(nn.Module):
    """Parameters of no dimension, as CLIP's logit scale, of one element, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.shift = nn.Parameter(torch.full((1, 1), 0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale + self.shift).square().mean() + self.empty.sum()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_parameters_of_any_shape_train_and_are_resumed(precision: str, wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = wrap(OddShapes(), precision=precision)
    assert [tuple(p.shape) for p in model.parameters()] == [(), (1, 1), (0, 3)]
    first = model(torch.ones(2)).item()
    assert first == 9.0
    for _ in range(30):
        model(torch.ones(2)).backward()
        optimizer.step()
    assert model(torch.ones(2)).item() <= first
    found = values(model)
    assert found["scale"] < 2.5
    assert found["empty"].shape == (0, 3)
    optimizer.save_checkpoint(tmp_path / "step")
    optimizer.load_checkpoint(tmp_path / "step")
    assert [entry["step"].item() for entry in optimizer.state_dict()["state"].values()] == [30, 30, 30]


class Adapted(nn.Module):
    """A model with its own initialiser, around a part that may be pretrained."""

    def __init__(self, pretrained: nn.Module) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.head = nn.Linear(16, 16)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module is not self.pretrained:
            nn.init.constant_(module.weight, 0.25)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Adapted):
            # As some models do: an initialiser of the whole reaches into its parts.
            for name, param in module.named_parameters():
                if name.endswith("weight"):
                    nn.init.constant_(param, 0.5)


@pytest.mark.parametrize("unit_limit", ["4KiB", "1MiB"])
def test_an_initialiser_of_the_whole_model_leaves_pretrained_parts_alone(unit_limit: str, wrap: Wrap) -> None:
    torch.manual_seed(0)
    with pagoda.deferred_init():
        later = Adapted(nn.Identity())
    later.pretrained = nn.Linear(16, 16)
    kept = {f"pretrained.{name}": value.detach().clone() for name, value in later.pretrained.named_parameters()}
    model, _ = wrap(later, pagoda.Memory(host="64MiB", unit_limit=unit_limit, page_size=zoo.PAGE))
    found = values(model)
    zoo.assert_equal({name: found[name] for name in kept}, kept)
    assert (found["head.weight"] == 0.5).all()
    assert (found["head.bias"] == 0).all()


class Forgetful(nn.Module):
    """An initialiser that leaves one of its parameters out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.forgotten = nn.Parameter(torch.empty(8))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def test_a_parameter_that_nobody_initialises_is_named(tmp_path: Path) -> None:
    with pagoda.deferred_init():
        model = nn.Sequential(nn.Linear(8, 8), Forgetful())
    memory = pagoda.Memory(host="64KiB", ssd=f"{tmp_path}:1GiB", unit_limit="4KiB", page_size=zoo.PAGE)
    with pytest.raises(pagoda.ConfigError, match=r"'1\.forgotten'.*uninitialised.*reset_parameters"):
        pagoda.wrap(model, pagoda.AdamW(), memory=memory, precision="bf16")
    assert list(tmp_path.iterdir()) == []


class Tied(nn.Module):
    """A head with the weight of an embedding, or the other way round."""

    def __init__(self, of_embedding: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(256, 64), nn.Linear(64, 256, bias=False)
        if of_embedding:
            self.head.weight = self.table.weight
        else:
            self.table.weight = self.head.weight


@pytest.mark.parametrize("of_embedding", [True, False])
def test_a_tied_parameter_is_initialised_by_the_module_that_made_it(of_embedding: bool, wrap: Wrap) -> None:
    """An embedding draws from N(0, 1), a linear layer of 64 inputs from [-1/8, 1/8]."""
    with pagoda.deferred_init():
        model = Tied(of_embedding)
    model, _ = wrap(model, zoo.RESIDENT)
    weight = model.state_dict()["table.weight"]
    assert weight.abs().max() > 3 if of_embedding else weight.abs().max() <= 0.125
    assert weight.std().item() == pytest.approx(Tied(of_embedding).table.weight.std().item(), rel=0.05)
