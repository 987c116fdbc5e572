"""Weights outside forward: read, written, saved, loaded, and every misuse answered with an error that names the fix."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import split
from runtime.conftest import Wrap
from runtime.loops import WIDTH, Layers, Wrapped, assert_same_state, layers, loss_of_layers, state_of, train_layers
from torch import nn
from zoo import ARENA_ALL_ON_SSD, PAGE, UNIT_LIMIT, assert_equal, squeeze

import pagoda
from pagoda.autograd.accesses import Accesses
from pagoda.errors import StorageError
from pagoda.memory.sizes import format_bytes, parse_bytes
from pagoda.parameters.hidden import Hidden
from pagoda.runtime.driver import Driver
from pagoda.runtime.lanes import Lane

WrapLayers = Callable[..., Wrapped]


def fresh() -> Any:
    return layers(8)


@pytest.fixture
def wrap_layers(wrap: Wrap, tmp_path: Path) -> WrapLayers:
    """Wraps a fresh model whose weights come from SSD to an arena."""
    return lambda **options: wrap(fresh(), squeeze(fresh(), ARENA_ALL_ON_SSD, tmp_path), **options)


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    return pagoda.ModelState(model).state_dict()


def is_hidden(param: nn.Parameter) -> bool:
    """Whether a parameter shows a placeholder."""
    return isinstance(param, Hidden)


# --- state dicts --------------------------------------------------------------------------------------------


def test_a_state_dict_has_copies_of_its_own_whatever_became_of_an_earlier_one(wrap_layers: WrapLayers) -> None:
    model = wrap_layers()[0]
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(10):
        tensors = [*model.state_dict().values()]  # the dictionary goes, and another may get its address
        for value in tensors:
            value.zero_()
        assert_equal(dict(model.state_dict()), start)
    given: OrderedDict[str, Any] = OrderedDict()
    assert_equal(dict(model.state_dict(destination=given)), start)
    with pytest.raises(pagoda.UsageError, match="not a plain dict"):
        model.state_dict(destination={})


def test_a_state_dict_holds_the_weights_and_loading_it_reaches_the_next_forward(wrap_layers: WrapLayers) -> None:
    model, optimizer = wrap_layers()
    start, first = model.state_dict(), loss_of_layers(model).item()
    train_layers(model, optimizer)
    assert_equal(start, {name: split(value)[0] for name, value in fresh().state_dict().items()})
    trained = model.state_dict()
    assert not torch.equal(trained["layers.0.0.weight"], start["layers.0.0.weight"])
    assert all(value.isfinite().all() for value in trained.values())
    assert loss_of_layers(model).item() != first
    model.load_state_dict(start)
    assert loss_of_layers(model).item() == first


def test_tied_names_share_one_tensor_in_a_state_dict(wrap: Wrap) -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    weights = wrap(model)[0].state_dict()
    assert [*weights] == ["0.weight", "1.weight"]
    assert weights["0.weight"].data_ptr() == weights["1.weight"].data_ptr()


def test_loading_takes_values_at_their_own_precision(wrap_layers: WrapLayers) -> None:
    """A bf16 value says nothing of the low half, so where the high half stays the low one does too."""
    torch.manual_seed(7)
    source = Layers().state_dict()
    model, optimizer = wrap_layers()
    model.load_state_dict(source)
    assert_equal(masters(model), source)
    halves = {name: value.bfloat16() for name, value in fresh().state_dict().items()}
    model.load_state_dict(halves)
    for name, master in masters(model).items():
        unchanged = split(source[name])[0] == halves[name]
        assert torch.equal(master, torch.where(unchanged, source[name], halves[name].float())), name
    train_layers(model, optimizer)


def test_mistakes_in_a_state_dict_are_reported_as_ever(wrap: Wrap) -> None:
    model, _ = wrap(fresh())
    weights = model.state_dict()
    missing = {name: value for name, value in weights.items() if name != "layers.0.0.bias"}
    for given, message in (
        (missing, r"Missing key.*layers\.0\.0\.bias"),
        ({**weights, "surplus": torch.ones(1)}, r"Unexpected key.*surplus"),
        ({**weights, "layers.0.0.bias": torch.ones(3)}, "size mismatch"),
    ):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(given)
    result = model.load_state_dict({**missing, "surplus": torch.ones(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["layers.0.0.bias"], ["surplus"])
    with pytest.raises(pagoda.UsageError, match="assign"):
        model.load_state_dict(weights, assign=True)
    for value, error, message in (
        ([0.0] * WIDTH, RuntimeError, r"layers\.7\.0\.bias.*expected torch\.Tensor"),
        (weights["layers.7.0.bias"].to("meta"), NotImplementedError, "meta"),
    ):
        with pytest.raises(error, match=message):
            model.load_state_dict({**weights, "layers.7.0.bias": value})
        assert all(is_hidden(param) for param in model.parameters())
    assert_equal(model.state_dict(), weights)


def test_a_state_dict_with_the_variables_has_the_parameters_themselves(wrap: Wrap) -> None:
    model, _ = wrap(fresh())
    model.layers[0][0].bias.requires_grad_(False)
    variables = model.state_dict(keep_vars=True)
    assert all(variables[name] is param for name, param in model.named_parameters())


def test_all_weights_have_the_names_of_a_state_dict(wrap: Wrap) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.append(model[1])
    model, _ = wrap(model, precision="fp32")
    assert_equal(pagoda.full_state_dict(model), dict(model.state_dict()))


# --- gathered -----------------------------------------------------------------------------------------------


GATHERED: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "module": (lambda m: m, {f"layers.{n}.0.{p}" for n in range(8) for p in ("weight", "bias")}),
    "submodule": (lambda m: m.layers[1], {"layers.1.0.weight", "layers.1.0.bias"}),
    "parameter": (lambda m: m.layers[1][0].weight, {"layers.1.0.weight"}),
    "list": (lambda m: [m.layers[1][0].weight, m.layers[2][0].bias], {"layers.1.0.weight", "layers.2.0.bias"}),
}


def test_gathered_parameters_are_real_inside_and_hidden_outside(wrap_layers: WrapLayers) -> None:
    model, optimizer = wrap_layers()
    train_layers(model, optimizer)
    weights = model.state_dict()
    for what, (choose, chosen) in GATHERED.items():
        with pagoda.gathered(choose(model)):
            for name, param in model.named_parameters():
                assert is_hidden(param) == (name not in chosen), (what, name)
                assert name not in chosen or torch.equal(param, weights[name]), (what, name)
        assert all(is_hidden(param) for param in model.parameters()), what


def test_changes_are_kept_where_a_block_modifies_and_ends_without_an_error(wrap_layers: WrapLayers) -> None:
    """Modified elements take the new value, and others keep their low half."""
    model, optimizer = wrap_layers()
    train_layers(model, optimizer)
    before = masters(model)

    def change(modify: bool, fails: bool = False) -> None:
        with torch.no_grad(), pagoda.gathered(model, modify=modify):
            for param in model.parameters():
                param.zero_()
            if fails:
                raise ZeroDivisionError

    with pytest.raises(pagoda.UsageError, match=r"was written to inside pagoda\.gathered.*modify=True"):
        change(modify=False)
    assert_equal(masters(model), before)
    with pytest.raises(ZeroDivisionError):
        change(modify=True, fails=True)
    assert all(is_hidden(param) for param in model.parameters())
    assert_equal(masters(model), before)
    with torch.no_grad(), pagoda.gathered(model, modify=True):
        model.layers[1][0].weight[3] = 0.7071
    expected = before["layers.1.0.weight"].clone()
    assert not torch.equal(expected, expected.bfloat16().float())
    expected[3] = torch.tensor(0.7071).bfloat16().float()
    assert_equal(masters(model), {**before, "layers.1.0.weight": expected})
    train_layers(model, optimizer, 1)


@pytest.mark.parametrize("write", ["in place", "through data", "new data"])
def test_a_write_that_gathered_drops_is_an_error(wrap_layers: WrapLayers, write: str) -> None:
    """torch counts only the first of these in the parameter's version."""
    model, _ = wrap_layers()
    weight, before = model.layers[1][0].weight, masters(model)

    def change() -> None:
        with pagoda.gathered(model), torch.no_grad():
            if write == "in place":
                weight[0, 0] += 1
            elif write == "through data":
                weight.data[0, 0] += 1
            else:
                weight.data = weight.data + 1

    with pytest.raises(pagoda.UsageError, match=r"'layers\.1\.0\.weight' was written to"):
        change()
    assert_equal(masters(model), before)


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
    train_layers(model, optimizer, 1)


def test_what_changes_weights_that_are_gathered_is_refused(wrap: Wrap, tmp_path: Path) -> None:
    """The block's copy would undo it."""
    model, optimizer = wrap(fresh())
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    train_layers(model, optimizer, 1)
    loss_of_layers(model).backward()
    before = masters(model)
    changes: tuple[Callable[[], object], ...] = (
        optimizer.step,
        lambda: optimizer.load_checkpoint(tmp_path / "checkpoint"),
        lambda: pagoda.ModelState(model).load_state_dict(before),
    )
    for change in changes:
        with pagoda.gathered(model.layers[1], modify=True), pytest.raises(pagoda.UsageError, match="copy there"):
            change()
    optimizer.step()
    assert not torch.equal(masters(model)["layers.1.0.weight"], before["layers.1.0.weight"])


def test_a_state_dict_is_loaded_into_what_is_gathered(wrap: Wrap) -> None:
    model, _ = wrap(fresh())
    other = {name: value + 1 for name, value in model.state_dict().items()}
    with pagoda.gathered(model, modify=True):
        model.load_state_dict(other)
        assert_equal(dict(model.named_parameters()), other)
    assert_equal(model.state_dict(), other)


def test_gathered_and_forward_exclude_each_other(wrap: Wrap) -> None:
    model, optimizer = wrap(fresh())
    with pagoda.gathered(model.layers[1]), pytest.raises(pagoda.UsageError, match="gathered"):
        loss_of_layers(model)
    train_layers(model, optimizer, 1)

    def gather(module: nn.Module, _args: object) -> None:
        with pagoda.gathered(module):
            raise AssertionError("gathered inside forward")

    handle = model.layers[1].register_forward_pre_hook(gather)
    with pytest.raises(pagoda.UsageError, match="forward is running"):
        loss_of_layers(model)
    handle.remove()
    train_layers(model, optimizer, 1)


# --- errors after which training goes on --------------------------------------------------------------------


def test_backward_through_a_graph_from_before_the_step_is_refused(wrap_layers: WrapLayers) -> None:
    model, optimizer = wrap_layers()
    old = loss_of_layers(model)
    train_layers(model, optimizer, 1)
    with pytest.raises(pagoda.UsageError, match=r"before optimizer\.step"):
        old.backward()
    del old
    optimizer.zero_grad()
    train_layers(model, optimizer, 1)


@pytest.mark.parametrize(("value", "clip"), [(float("nan"), None), (-float("inf"), 1.0)])
def test_a_non_finite_gradient_names_its_parameter_and_changes_nothing(
    value: float, clip: float | None, wrap: Wrap, wrap_layers: WrapLayers
) -> None:
    model, optimizer = wrap_layers(max_grad_norm=clip)
    train_layers(model, optimizer)
    before, before_masters = state_of(model, optimizer), masters(model)

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        spoiled = grad.clone()
        spoiled.view(-1)[5] = value
        return spoiled

    handle = model.layers[1][0].bias.register_hook(spoil)
    loss_of_layers(model).backward()
    handle.remove()
    with pytest.raises(pagoda.NonFiniteGradientError, match=r"'layers\.1\.0\.bias'"):
        optimizer.step()
    state_of(model, optimizer).assert_same_bits(before)
    assert_equal(masters(model), before_masters)
    twin = wrap(fresh(), max_grad_norm=clip)
    train_layers(*twin, 4)
    train_layers(model, optimizer, 2)
    assert_same_state((model, optimizer), twin)


FAILURES: dict[str, tuple[type[BaseException], Callable[[Any, Callable[..., None]], Any]]] = {
    "in-forward": (ZeroDivisionError, lambda layer, fail: layer[1].register_forward_pre_hook(fail)),
    "in-backward": (ZeroDivisionError, lambda layer, fail: layer[0].weight.register_hook(fail)),
    "interrupted": (KeyboardInterrupt, lambda layer, fail: layer[1].register_forward_pre_hook(fail)),
}


def test_training_goes_on_after_an_error(wrap: Wrap, wrap_layers: WrapLayers) -> None:
    """An interrupt is as in a notebook."""
    model, optimizer = wrap_layers()
    start = {name: value.bfloat16() for name, value in fresh().state_dict().items()}
    for where, (error, register) in FAILURES.items():

        def fail(*_: object, error: type[BaseException] = error) -> None:
            raise error

        handle = register(model.layers[1], fail)
        with pytest.raises(error):
            loss_of_layers(model).backward()
        handle.remove()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert all(is_hidden(p) for p in model.parameters()), where
        with pagoda.gathered(model):
            assert_equal(dict(model.named_parameters()), start)
        optimizer.zero_grad()
    twin = wrap(fresh())
    for wrapped in ((model, optimizer), twin):
        train_layers(*wrapped)
    assert_same_state((model, optimizer), twin)


def test_a_fault_in_the_middle_of_an_event_ends_training(
    wrap_layers: WrapLayers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("a fault")

    for name in ("end_step", "begin"):
        model, optimizer = wrap_layers()
        optimizer.save_checkpoint(tmp_path / name)
        with monkeypatch.context() as patch:
            patch.setattr(Accesses, name, fail)
            # Both are in the middle of an event: `end_step` of step(), and `begin` of a read of weights in backward.
            with pytest.raises(LookupError):
                optimizer._engine.step() if name == "end_step" else optimizer._engine.accesses.read(None)
        for use in (
            lambda model=model, optimizer=optimizer: train_layers(model, optimizer),
            lambda optimizer=optimizer: optimizer.save_checkpoint(tmp_path / "another"),
            lambda name=name, optimizer=optimizer: optimizer.load_checkpoint(tmp_path / name),
        ):
            with pytest.raises(StorageError, match="LookupError: a fault -- Start the program again"):
                use()
        optimizer.close()


def test_an_interrupt_that_ends_a_wait_drops_the_step(
    wrap: Wrap, wrap_layers: WrapLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any wait of forward, backward and a clipped `step()`. Lanes are slower than the step, so that it waits."""
    wait, do, left, waiting = Driver.wait, Lane._do, 0, threading.Event()

    def interrupt(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        waiting.set()
        try:
            wait(*arguments)
        finally:
            waiting.clear()

    def slowly(*arguments: Any) -> Any:
        waiting.wait(0.05)
        return do(*arguments)

    monkeypatch.setattr(Driver, "wait", interrupt)
    monkeypatch.setattr(Lane, "_do", slowly)
    twin = wrap(fresh(), max_grad_norm=0.01)
    train_layers(*twin, 2)
    for at in range(1, 100):
        wrapped = wrap_layers(max_grad_norm=0.01)
        train_layers(*wrapped, 1)
        left = at
        with suppress(KeyboardInterrupt):
            train_layers(*wrapped, 1)
        if left > 0:  # the step has fewer waits
            left = 0
            break
        wrapped[1].zero_grad()
        train_layers(*wrapped, 1)
        assert_same_state(wrapped, twin)
        wrapped[1].close()
    assert at > 2, "a step waits more than once"


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


def test_settings_that_mean_nothing_are_named(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"host": "12 parsecs"}, {}, r"memory\.host.*parsecs"),
        ({"host": 0}, {}, r"memory\.host.*at least 1"),
        ({"ssd": f"{tmp_path}:manyGiB"}, {}, r"memory\.ssd"),
        ({"page_size": "5000"}, {}, r"memory\.page_size.*4096"),
        ({"page_size": 12288}, {}, r"memory\.page_size.*power of two"),
        ({"unit_limit": "much"}, {}, r"memory\.unit_limit"),
        ({"device": "cpu"}, {}, r"memory\.device.*cpu:SIZE"),
        ({"device": 1 << 20}, {}, r"memory\.device is 1048576; give SIZE"),
        ({"ssd": ["a", "b"]}, {}, r"memory\.ssd is \['a', 'b'\]; it must be the path.*commas"),
        ({"split": 0.5}, {}, r"memory\.split is 0\.5; it must be a pagoda\.Split"),
        ({}, {"max_grad_norm": -1.0}, "max_grad_norm.*above 0"),
        ({}, {"max_grad_norm": float("nan")}, "max_grad_norm.*above 0"),
        ({}, {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps.*at least 1"),
        ({}, {"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps.*whole number"),
        ({}, {"tiles": "two"}, r"tiles is 'two'; give a pagoda\.Tiles"),
        ({}, {"mesh": (2, 2)}, r"mesh is \(2, 2\); give what pagoda\.open_mesh returns"),
        ({}, {"param_groups": 0.1}, r"param_groups is 0\.1; give a list"),
        ({}, {"param_groups": [{"params": 3}]}, r"param_groups\[0\]\['params'\] is 3; give a list"),
        ({}, {"reserve": 3}, "reserve is 3; give a list"),
        ({}, {"reserve": ["layers.0"]}, "reserve has 'layers.0', which is neither a parameter nor a module"),
    ]
    makers: list[tuple[Callable[..., Any], str, Any, str]] = [
        (pagoda.Split, "device_update_share", None, "from 0 to 1"),
        (pagoda.Split, "device_home_share", "half", "from 0 to 1"),
        (pagoda.MixedPrecision, "loss_scale", [2.0], "a power of two"),
        (pagoda.LossScale, "init_scale", "large", "a power of two"),
        (pagoda.Updates, "predict", "no", "True or False"),
        (pagoda.Updates, "speculate", None, "True or False"),
        (pagoda.Activations, "partition_activations", "no", "True or False"),
        (pagoda.Tiles, "per_token", "Norm", "a tuple of names"),
    ]
    for make, name, value, wanted in makers:
        with pytest.raises(pagoda.ConfigError, match=rf"{name} is {re.escape(repr(value))}; it must be {wanted}"):
            make(**{name: value})
    for memory, options, message in refused:
        with pytest.raises(pagoda.ConfigError, match=message):
            pagoda.wrap(fresh(), pagoda.AdamW(), memory=pagoda.Memory(**memory), **{"precision": "bf16", **options})


@pytest.mark.parametrize(
    ("settings", "tier"),
    [
        ({"host": "64KiB"}, "host"),
        ({"host": "64KiB", "ssd": "DIR:1GiB"}, "host"),
        ({"host": "2MiB", "ssd": "DIR:1MiB"}, "ssd"),
        ({"host": "64MiB", "device": "cpu:64KiB"}, "device"),
        ({"host": "4000"}, "host"),
        ({"host": "64MiB", "device": "cpu:65KB"}, "device"),
    ],
    ids=["host", "host-with-ssd", "ssd", "device", "below-a-page", "part-of-a-page"],
)
def test_a_budget_that_is_too_small_is_refused_before_anything_is_allocated(
    settings: dict[str, str], tier: str, tmp_path: Path
) -> None:
    """It names tier, budget, shortfall and setting, and leaves the model as it was. What it asks for is enough."""
    model = fresh()
    fixed = {"page_size": PAGE, "unit_limit": UNIT_LIMIT}
    settings = {name: value.replace("DIR", str(tmp_path)) for name, value in settings.items()}
    size = parse_bytes(settings[tier].removeprefix("cpu:").removeprefix(f"{tmp_path}:"))
    wanted = rf"{tier} needs at least .* and has {format_bytes(size)}, .* short.*memory\.{tier}"
    with pytest.raises(pagoda.BudgetError, match=wanted) as refused:
        pagoda.wrap(model, pagoda.AdamW(), memory=pagoda.Memory(**settings, **fixed), precision="bf16")
    assert refused.value.tier == tier
    assert list(tmp_path.iterdir()) == []
    assert_equal(model.state_dict(), fresh().state_dict())
    needed = refused.value.needed_bytes
    settings[tier] = {"host": f"{needed}", "ssd": f"{tmp_path}:{needed}", "device": f"cpu:{needed}"}[tier]
    memory = pagoda.Memory(**settings, **fixed)
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=memory, precision="bf16")
    train_layers(model, optimizer)
    optimizer.close()


def test_batch_norms_with_running_statistics_train_in_fp32_only(wrap: Wrap) -> None:
    """Of bf16 weights and fp32 statistics torch's kernels want no part, and bf16 statistics would go wrong."""

    def train(norm: nn.Module, **options: Any) -> nn.Module:
        dtype = next((param.dtype for param in norm.parameters()), None)
        model, optimizer = wrap(nn.Sequential(nn.Conv2d(3, 8, 3, dtype=dtype), deepcopy(norm)), **options)
        images = torch.ones(4, 3, 8, 8, dtype=next(model.parameters()).dtype)
        model(images).float().square().mean().backward()
        optimizer.step()
        return model

    with pytest.raises(pagoda.ConfigError, match=r"'1' is a BatchNorm2d .*precision='fp32'.*GroupNorm"):
        train(nn.BatchNorm2d(8))
    assert train(nn.BatchNorm2d(8), precision="fp32")[1].num_batches_tracked == 1
    train(nn.BatchNorm2d(8, track_running_stats=False))
    train(nn.BatchNorm2d(8, affine=False))
    train(nn.InstanceNorm2d(8, affine=True, track_running_stats=True))
    train(nn.GroupNorm(2, 8))
    train(nn.BatchNorm2d(8).bfloat16())


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


def test_an_update_during_backward_that_begins_after_the_last_gradient_is_noticed(wrap: Wrap) -> None:
    """Backward needs the frozen layer's weights after the other's gradient, so the update waits for backward's end."""
    outcomes = []
    for announced in (1, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[0].requires_grad_(False)
        model, optimizer = wrap(model, lr=0.1, gradient_accumulation_steps=announced)
        start = model.state_dict()
        model(torch.ones(2, WIDTH, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        if announced:
            with pytest.raises(pagoda.UsageError, match="applied during backward"):
                optimizer.zero_grad()
            states_of_two_steps: tuple[Callable[[], object], ...] = (
                pagoda.OptimizerState(optimizer).state_dict,
                optimizer.state_dict,
                model.state_dict,
                lambda model=model: pagoda.full_state_dict(model),
                pagoda.gathered(model).__enter__,
                lambda model=model, start=start: model.load_state_dict(start),
                lambda optimizer=optimizer: next(optimizer.named_states()),
            )
            for asked in states_of_two_steps:
                with pytest.raises(pagoda.UsageError, match="between backward and step"):
                    asked()
        optimizer.step()
        outcomes.append(state_of(model, optimizer))
    outcomes[0].assert_same_bits(outcomes[1])
