"""Weights outside forward: read, written, saved, loaded, and every misuse answered with an error that names the fix."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import join, split
from torch import nn
from zoo import ALL_ON_SSD, ARENA_ALL_ON_SSD, PAGE, RESIDENT, UNIT_LIMIT, Outcome, Recipe, assert_equal, squeeze

import pagoda
from pagoda.optimizer import PagedOptimizer

from .conftest import Wrap
from .loops import WIDTH, Layers

Place = Callable[[nn.Module], pagoda.Memory]


@pytest.fixture(params=["resident", pytest.param(ALL_ON_SSD, marks=pytest.mark.slow), ARENA_ALL_ON_SSD])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Budgets for a model, in three placements."""

    def choose(model: nn.Module) -> pagoda.Memory:
        return RESIDENT if request.param == "resident" else squeeze(model, request.param, tmp_path)

    return choose


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


def forward(model: nn.Module, picked: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
    return model(torch.ones(2, WIDTH), list(picked))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: PagedOptimizer, steps: int = 2) -> None:
    for _ in range(steps):
        forward(model).backward()
        optimizer.step()


def master_of(optimizer: PagedOptimizer, param: nn.Parameter) -> torch.Tensor:
    """The fp32 master, from the two states it is kept in."""
    optimizer.drain()
    state = optimizer._states[id(param)]
    return join(state.read("weight"), state.read("weight_low"))


def masters(model: nn.Module, optimizer: PagedOptimizer) -> dict[str, torch.Tensor]:
    return {name: master_of(optimizer, param) for name, param in model.named_parameters()}


def is_hidden(param: nn.Parameter) -> bool:
    """Whether using the value of a parameter raises."""
    try:
        param.sum()
    except pagoda.UsageError:
        return True
    return False


# --- state dicts --------------------------------------------------------------------------------------------


def test_a_state_dict_holds_the_weights(wrap: Wrap, place: Place) -> None:
    plain = fresh().state_dict()
    model = fresh()
    model, optimizer = wrap(model, place(model))
    found = model.state_dict()
    train(model, optimizer)
    assert_equal(found, {name: split(value)[0] for name, value in plain.items()})  # a copy that training leaves
    trained = model.state_dict()
    assert not torch.equal(trained["layers.0.0.weight"], found["layers.0.0.weight"])
    assert all(value.isfinite().all() for value in trained.values())


def test_tied_names_share_one_tensor_in_a_state_dict(wrap: Wrap) -> None:
    model, _ = wrap(Recipe("llama").build())
    weights = model.state_dict()
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    assert len({value.data_ptr() for value in weights.values()}) == len(weights) - 1


def test_loading_takes_values_at_their_own_precision(wrap: Wrap, place: Place) -> None:
    """A bf16 value says nothing of the low half, so where the high half stays the low one does too."""
    torch.manual_seed(7)
    source = Layers().state_dict()
    model = fresh()
    model, optimizer = wrap(model, place(model))
    model.load_state_dict(source)
    assert_equal(masters(model, optimizer), source)
    halves = {name: value.bfloat16() for name, value in fresh().state_dict().items()}
    model.load_state_dict(halves)
    for name, master in masters(model, optimizer).items():
        unchanged = split(source[name])[0] == halves[name]
        assert torch.equal(master, torch.where(unchanged, source[name], halves[name].float())), name
    train(model, optimizer)


def test_loading_reaches_the_next_forward(wrap: Wrap, place: Place) -> None:
    model = fresh()
    model, optimizer = wrap(model, place(model))
    start = model.state_dict()
    first = forward(model).item()
    train(model, optimizer)
    assert forward(model).item() != first
    model.load_state_dict(start)
    assert forward(model).item() == first


def test_mistakes_in_a_state_dict_are_reported_as_ever(wrap: Wrap) -> None:
    model, _ = wrap(fresh())
    weights = model.state_dict()
    missing = {name: value for name, value in weights.items() if name != "layers.0.0.bias"}
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.0\.0\.bias"):
        model.load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*surplus"):
        model.load_state_dict({**weights, "surplus": torch.ones(1)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**weights, "layers.0.0.bias": torch.ones(3)})
    result = model.load_state_dict({**missing, "surplus": torch.ones(1)}, strict=False)
    assert result.missing_keys == ["layers.0.0.bias"]
    assert result.unexpected_keys == ["surplus"]
    with pytest.raises(pagoda.UsageError, match="assign"):
        model.load_state_dict(weights, assign=True)
    assert_equal(model.state_dict(), weights)


# --- gathered -----------------------------------------------------------------------------------------------


GATHERED: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "module": (lambda m: m, {f"layers.{n}.0.{p}" for n in range(8) for p in ("weight", "bias")}),
    "submodule": (lambda m: m.layers[1], {"layers.1.0.weight", "layers.1.0.bias"}),
    "parameter": (lambda m: m.layers[1][0].weight, {"layers.1.0.weight"}),
    "list": (lambda m: [m.layers[1][0].weight, m.layers[2][0].bias], {"layers.1.0.weight", "layers.2.0.bias"}),
}


@pytest.mark.parametrize("what", GATHERED)
def test_gathered_parameters_are_real_inside_and_hidden_outside(what: str, wrap: Wrap, place: Place) -> None:
    choose, chosen = GATHERED[what]
    model = fresh()
    model, optimizer = wrap(model, place(model))
    train(model, optimizer)
    weights = model.state_dict()
    with pagoda.gathered(choose(model)):
        for name, param in model.named_parameters():
            assert is_hidden(param) == (name not in chosen), name
            assert name not in chosen or torch.equal(param, weights[name]), name
    for name, param in model.named_parameters():
        assert is_hidden(param), name


def test_reading_and_dropping_changes_leave_no_trace(wrap: Wrap, place: Place) -> None:
    model = fresh()
    model, optimizer = wrap(model, place(model))
    train(model, optimizer)
    before = masters(model, optimizer)
    with torch.no_grad(), pagoda.gathered(model):
        for param in model.parameters():
            param.zero_()
    assert_equal(masters(model, optimizer), before)


def test_modified_elements_take_the_new_value_and_others_keep_their_low_half(wrap: Wrap, place: Place) -> None:
    model = fresh()
    model, optimizer = wrap(model, place(model))
    train(model, optimizer)
    before = masters(model, optimizer)
    with torch.no_grad(), pagoda.gathered(model, modify=True):
        model.layers[1][0].weight[3] = 0.7071
    after = masters(model, optimizer)
    expected = before["layers.1.0.weight"].clone()
    assert not torch.equal(expected, expected.bfloat16().float())
    expected[3] = torch.tensor(0.7071).bfloat16().float()
    assert_equal(after, {**before, "layers.1.0.weight": expected})


def test_gathered_blocks_nest(wrap: Wrap) -> None:
    model, optimizer = wrap(fresh())
    weight = model.layers[1][0].weight
    with torch.no_grad(), pagoda.gathered(model.layers[1], modify=True):
        with pagoda.gathered(model):
            weight.fill_(0.5)
            assert model.layers[2][0].weight.isfinite().all()
        assert (weight == 0.5).all()  # the outer block still holds it
        assert is_hidden(model.layers[2][0].weight)
    assert (model.state_dict()["layers.1.0.weight"] == 0.5).all()
    with torch.no_grad(), pagoda.gathered(model), pagoda.gathered(weight, modify=True):
        weight.fill_(0.25)  # an inner block that modifies is not lost in an outer one that reads
    assert (model.state_dict()["layers.1.0.weight"] == 0.25).all()
    train(model, optimizer, 1)


def test_an_error_inside_gathered_hides_the_weights_and_changes_nothing(wrap: Wrap) -> None:
    model, optimizer = wrap(fresh())
    before = masters(model, optimizer)

    def fail_after_a_change() -> None:
        with torch.no_grad(), pagoda.gathered(model, modify=True):
            model.layers[0][0].weight.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_a_change()
    assert is_hidden(model.layers[0][0].weight)
    assert_equal(masters(model, optimizer), before)
    train(model, optimizer, 1)


def test_gathered_and_forward_exclude_each_other(wrap: Wrap) -> None:
    model, optimizer = wrap(fresh())
    with pagoda.gathered(model.layers[1]), pytest.raises(pagoda.UsageError, match="gathered"):
        forward(model)
    train(model, optimizer, 1)

    def gather(module: nn.Module, _args: object) -> None:
        with pagoda.gathered(module):
            raise AssertionError("gathered inside forward")

    handle = model.layers[1].register_forward_pre_hook(gather)
    with pytest.raises(pagoda.UsageError, match="forward is running"):
        forward(model)
    handle.remove()
    train(model, optimizer, 1)


# --- parameters between forwards ----------------------------------------------------------------------------


def test_backward_through_a_graph_from_before_the_step_is_refused(wrap: Wrap, place: Place) -> None:
    model = fresh()
    model, optimizer = wrap(model, place(model))
    old = forward(model)
    train(model, optimizer, 1)
    with pytest.raises(pagoda.UsageError, match=r"before optimizer\.step"):
        old.backward()
    del old
    optimizer.zero_grad()
    train(model, optimizer, 1)


# --- gradients that are not finite --------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "clip"), [(float("nan"), None), (-float("inf"), 1.0)])
def test_a_non_finite_gradient_names_its_parameter_and_changes_nothing(
    value: float, clip: float | None, wrap: Wrap, place: Place
) -> None:
    model = fresh()
    model, optimizer = wrap(model, place(model), clip_grad_norm=clip)
    train(model, optimizer)
    before = Outcome(weights=masters(model, optimizer), optimizer=optimizer.state_dict())

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        spoiled = grad.clone()
        spoiled.view(-1)[5] = value
        return spoiled

    handle = model.layers[1][0].bias.register_hook(spoil)
    forward(model).backward()
    handle.remove()
    with pytest.raises(pagoda.NonFiniteGradientError, match=r"'layers\.1\.0\.bias'"):
        optimizer.step()
    Outcome(weights=masters(model, optimizer), optimizer=optimizer.state_dict()).assert_same_bits(before)
    twin, twin_optimizer = wrap(fresh(), clip_grad_norm=clip)
    train(twin, twin_optimizer, 4)
    train(model, optimizer, 2)
    assert_equal(masters(model, optimizer), masters(twin, twin_optimizer))


FAILURES: dict[str, tuple[type[BaseException], Callable[[Any, Callable[..., None]], Any]]] = {
    "in-forward": (ZeroDivisionError, lambda layer, fail: layer[1].register_forward_pre_hook(fail)),
    "in-backward": (ZeroDivisionError, lambda layer, fail: layer[0].weight.register_hook(fail)),
    "interrupted": (KeyboardInterrupt, lambda layer, fail: layer[1].register_forward_pre_hook(fail)),
}


@pytest.mark.parametrize("where", FAILURES)
def test_training_goes_on_after_an_error(where: str, wrap: Wrap, place: Place) -> None:
    """An interrupt is as in a notebook."""
    error, register = FAILURES[where]
    model = fresh()
    start = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    model, optimizer = wrap(model, place(model))
    twin, twin_optimizer = wrap(fresh())

    def fail(*_: object) -> None:
        raise error

    handle = register(model.layers[1], fail)
    with pytest.raises(error):
        forward(model).backward()
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert all(is_hidden(p) for p in model.parameters())
    with pagoda.gathered(model):
        assert_equal(dict(model.named_parameters()), start)
    optimizer.zero_grad()
    train(model, optimizer)
    train(twin, twin_optimizer)
    assert_equal(masters(model, optimizer), masters(twin, twin_optimizer))


def test_a_model_may_call_itself(wrap: Wrap) -> None:
    class CallsItself(nn.Linear):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return super().forward(self(x, depth - 1) if depth else x)

    model = CallsItself(8, 8)
    x = torch.linspace(-1, 1, 16).view(2, 8)
    expected = model(x)
    model, _ = wrap(model, precision="fp32")
    assert torch.equal(model(x), expected)


# --- what is refused at once --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "options", "message"),
    [
        ({"host": "12 parsecs"}, {}, r"memory\.host.*parsecs"),
        ({"host": 0}, {}, r"memory\.host.*at least 1"),
        ({"ssd": "DIR:manyGiB"}, {}, r"memory\.ssd"),
        ({"page_size": "5000"}, {}, r"memory\.page_size.*4096"),
        ({"page_size": 12288}, {}, r"memory\.page_size.*power of two"),
        ({"unit_limit": "much"}, {}, r"memory\.unit_limit"),
        ({"device": "cpu"}, {}, r"memory\.device.*cpu:SIZE"),
        ({}, {"clip_grad_norm": 0.0}, "clip_grad_norm.*above 0"),
        ({}, {"clip_grad_norm": float("nan")}, "clip_grad_norm.*above 0"),
        ({}, {"accumulation_steps": 0}, "accumulation_steps.*at least 1"),
        ({}, {"accumulation_steps": 1.5}, "accumulation_steps.*whole number"),
        ({}, {"tiles": "two"}, r"tiles is 'two'; give a pagoda\.Tiles"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_named(
    memory: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if "ssd" in memory:
        memory = {"ssd": memory["ssd"].replace("DIR", str(tmp_path))}
    with pytest.raises(pagoda.ConfigError, match=message):
        pagoda.wrap(fresh(), pagoda.AdamW(), memory=pagoda.Memory(**memory), **options)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("gradients", r"precision=pagoda\.MixedPrecision\(gradients=\.\.\.\)"),
        ("speculate", r"update=pagoda\.Updates\(speculate"),
        ("partition_activations", r"activations=pagoda\.Activations\(partition_activations"),
        ("batch_tiles", r"tiles=pagoda\.Tiles\(batch_tiles"),
        ("keep_checkpoints", r"memory=pagoda\.Memory\(ssd_checkpoints"),
    ],
)
def test_an_argument_that_has_moved_is_refused_with_its_new_place(name: str, place: str) -> None:
    with pytest.raises(pagoda.UsageError, match=rf"{name} is no argument of wrap: give wrap\({place}"):
        pagoda.wrap(fresh(), pagoda.AdamW(), **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'presicion'"):
        pagoda.wrap(fresh(), pagoda.AdamW(), presicion="fp32")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "tier"),
    [
        ({"host": "64KiB"}, "host"),
        ({"host": "64KiB", "ssd": "DIR:1GiB"}, "host"),
        ({"host": "2MiB", "ssd": "DIR:1MiB"}, "ssd"),
        ({"host": "64MiB", "device": "cpu:64KiB"}, "device"),
    ],
    ids=["host", "host-with-ssd", "ssd", "device"],
)
def test_a_budget_that_is_too_small_is_refused_before_anything_is_allocated(
    settings: dict[str, str], tier: str, tmp_path: Path
) -> None:
    """The refusal names tier, shortfall and setting, leaves the model as it was, and what it asks for is enough."""
    model = fresh()
    fixed = {"page_size": PAGE, "unit_limit": UNIT_LIMIT}
    settings = {name: value.replace("DIR", str(tmp_path)) for name, value in settings.items()}
    with pytest.raises(pagoda.BudgetError, match=rf"{tier} needs at least .* short.*memory\.{tier}") as refused:
        pagoda.wrap(model, pagoda.AdamW(), memory=pagoda.Memory(**settings, **fixed))  # type: ignore[arg-type]
    assert refused.value.tier == tier
    assert list(tmp_path.iterdir()) == []
    assert_equal(model.state_dict(), fresh().state_dict())
    needed = refused.value.needed_bytes
    settings[tier] = {"host": f"{needed}", "ssd": f"{tmp_path}:{needed}", "device": f"cpu:{needed}"}[tier]
    memory = pagoda.Memory(**settings, **fixed)  # type: ignore[arg-type]
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=memory)
    train(model, optimizer)
    optimizer.close()


@pytest.mark.parametrize("size", ["", ":1GiB"])
def test_an_ssd_directory_that_is_missing_is_refused(size: str, tmp_path: Path) -> None:
    model = fresh()
    settings = {"host": "2MiB", "page_size": PAGE, "unit_limit": UNIT_LIMIT}
    with pytest.raises(pagoda.StorageError, match="nowhere"):
        pagoda.wrap(model, pagoda.AdamW(), memory=pagoda.Memory(ssd=f"{tmp_path}/nowhere{size}", **settings))  # type: ignore[arg-type]
    assert_equal(model.state_dict(), fresh().state_dict())
    assert list(tmp_path.iterdir()) == []


def images_in(model: nn.Module) -> torch.Tensor:
    return torch.ones(4, 3, 8, 8, dtype=next(model.parameters()).dtype)


def test_batch_norms_with_running_statistics_train_in_fp32_only(wrap: Wrap) -> None:
    """bf16 weights beside fp32 statistics are more than torch's kernels take, and bf16 statistics would go wrong."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    with pytest.raises(pagoda.ConfigError, match=r"'1' is a BatchNorm2d .*precision='fp32'.*GroupNorm"):
        wrap(model)
    model, optimizer = wrap(model, precision="fp32")
    model(images_in(model)).square().mean().backward()
    optimizer.step()
    assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.BatchNorm2d(8, affine=False),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.GroupNorm(2, 8),
        nn.BatchNorm2d(8).bfloat16(),
    ],
    ids=["untracked", "not-affine", "instance", "group", "bf16-statistics"],
)
def test_norms_that_torch_runs_in_bf16_train_in_it(norm: nn.Module, wrap: Wrap) -> None:
    dtype = next((param.dtype for param in norm.parameters()), None)
    model, optimizer = wrap(nn.Sequential(nn.Conv2d(3, 8, 3, dtype=dtype), deepcopy(norm)))
    model(images_in(model)).float().square().mean().backward()
    optimizer.step()
    model(images_in(model))


def test_a_model_is_wrapped_once(wrap: Wrap) -> None:
    model, optimizer = wrap(fresh())
    for closed in (False, True):
        for module in (model, model.layers):
            with pytest.raises(pagoda.UsageError, match="wrapped already"):
                wrap(module)
        if not closed:
            optimizer.close()
    with pytest.raises(pagoda.UsageError, match="not wrapped"):
        pagoda.plan_of(fresh())


def test_an_update_during_backward_that_begins_after_the_last_gradient_is_noticed() -> None:
    """Backward needs the frozen layer's weights after the other's gradient, so the update waits for backward's end."""

    def trained(accumulation_steps: int | None) -> tuple[dict[str, Any], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[0].requires_grad_(False)
        model, optimizer = pagoda.wrap(
            model, pagoda.AdamW(lr=0.1), memory=RESIDENT, accumulation_steps=accumulation_steps
        )
        model(torch.ones(2, WIDTH, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        if accumulation_steps is not None:
            with pytest.raises(pagoda.UsageError, match="applied during backward"):
                optimizer.zero_grad()
            states_of_two_steps = (
                pagoda.OptimizerState(optimizer).state_dict,
                optimizer.state_dict,
                model.state_dict,
                lambda: pagoda.full_state_dict(model),
                lambda: next(optimizer.named_states()),
            )
            for asked in states_of_two_steps:
                with pytest.raises(pagoda.UsageError, match="between backward and step"):
                    asked()
        optimizer.step()
        states = model.state_dict(), optimizer.state_dict()["state"]
        optimizer.close()
        return states

    for found, expected in zip(trained(1), trained(None), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
