"""fp16 with loss scaling, gradients in a dtype of their own, norms by group: the same bits wherever state lives."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import RESIDENT, precision_of

import pagoda

from .conftest import Wrap
from .loops import Wrapped, inputs, layers, loss_of_layers


def fp16(**scaling: Any) -> pagoda.MixedPrecision:
    return pagoda.MixedPrecision("fp16", loss_scale=pagoda.LossScale(**scaling))


def step(wrapped: Wrapped, seed: int = 1, factor: float = 1.0) -> None:
    model, optimizer = wrapped
    optimizer.scale(model(inputs(seed), [0, 1, 2]) * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_that_overflows_changes_nothing_but_the_scale(wrap: Wrap) -> None:
    model, optimizer = wrap(layers(), precision=fp16(init_scale=1024.0, growth_interval=2))
    twin, twin_optimizer = wrap(layers(), precision=fp16(init_scale=1024.0))
    scales, skipped = [], []
    for seed, factor in enumerate([1, 1, 1e6, 1, 1e6, 1e6, 1, 1, 1]):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        step((model, optimizer), seed, factor)
        scales.append(optimizer.stats.loss_scale)
        skipped.append(optimizer.stats.skipped)
        if factor > 1:
            assert optimizer.stats.grad_norm is None
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        else:
            step((twin, twin_optimizer), seed)
    assert skipped == [False, False, True, False, True, True, False, False, False]
    # Two calm steps double it, an overflow halves it and starts the count anew.
    assert scales == [1024, 1024, 2048, 1024, 1024, 512, 256, 256, 512]
    # A scale is a power of two, so that another one gives the same bits where nothing under- or overflows.
    mine, other = optimizer.state_dict()["state"], twin_optimizer.state_dict()["state"]
    for index, state in mine.items():
        assert state["step"] == other[index]["step"] == 6
        torch.testing.assert_close(state["exp_avg"], other[index]["exp_avg"], rtol=1e-2, atol=1e-7)


def test_the_scale_goes_on_after_a_checkpoint(wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = wrap(layers(), precision=fp16(growth_interval=3))
    for factor in (1e6, 1, 1):
        step((model, optimizer), factor=factor)
    optimizer.save_checkpoint(tmp_path / "step")
    state = optimizer.state_dict()
    assert state["loss_scale"] == {"scale": 32768.0, "calm_steps": 2}
    optimizer.save_state_dict(tmp_path / "optimizer.pt")
    for load in (
        lambda o: o.load_checkpoint(tmp_path / "step"),
        lambda o: o.load_state_dict(state),
        lambda o: o.load_state_dict(torch.load(tmp_path / "optimizer.pt")),
    ):
        twin = wrap(layers(), precision=fp16(growth_interval=3))
        load(twin[1])
        for scale in (32768, 65536):
            step(twin)
            assert twin[1].stats.loss_scale == scale
    _, other = wrap(layers())
    with pytest.raises(pagoda.CheckpointError, match="float16"):
        other.load_checkpoint(tmp_path / "step")


def test_a_fixed_scale_changes_no_norm_and_does_not_forgive(wrap: Wrap) -> None:
    norms = []
    for scale in (1, 256):
        precision = pagoda.MixedPrecision("fp16", loss_scale=scale)
        model, optimizer = wrap(layers(), precision=precision, max_grad_norm=0.01)
        for seed in range(3):
            step((model, optimizer), seed, 1000)  # no denormal gradients at either scale, so that each is exact
        norms.append(optimizer.stats.grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    with pytest.raises(pagoda.NonFiniteGradientError, match="not finite"):
        step((model, optimizer), factor=1e9)


def test_a_loss_that_was_not_scaled_is_refused(wrap: Wrap) -> None:
    model, optimizer = wrap(layers(), precision="fp16")
    with pytest.raises(pagoda.UsageError, match=r"optimizer\.scale\(loss\)\.backward"):
        loss_of_layers(model).backward()
    model, optimizer = wrap(layers(), precision="bf16")
    loss = loss_of_layers(model)
    assert optimizer.scale(loss) is loss


def test_a_scale_that_cannot_go_lower_names_the_gradient(wrap: Wrap) -> None:
    wrapped = wrap(layers(), precision=fp16(init_scale=2.0))
    step(wrapped, factor=math.inf)
    with pytest.raises(pagoda.NonFiniteGradientError, match=r"'layers\.2\.0\.(weight|bias)' is not finite, the first"):
        step(wrapped, factor=math.inf)


@pytest.mark.parametrize("numbers", ["bf16+fp32", "bf16+bf16", "fp32+bf16"])
def test_gradients_are_accumulated_in_the_dtype_asked_for(numbers: str, wrap: Wrap) -> None:
    """fp32: the sum of what autograd gave. bf16: rounded after every addition."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    weights, kept = (dtypes[name] for name in numbers.split("+"))
    model, optimizer = wrap(layers(), precision=precision_of(numbers), lr=0.0)
    plain = layers().to(weights)
    total: dict[str, torch.Tensor] = {}
    for seed in range(8):
        for module in (model, plain):
            module(inputs(seed), [0, 1, 2]).backward()
        for name, param in plain.named_parameters():
            grad = param.grad.to(kept)
            total[name] = total[name] + grad if name in total else grad
            param.grad = None
    optimizer.step()
    squares = [grad.double().square().sum().item() for grad in total.values()]
    assert optimizer.stats.grad_norm == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_trains_in_its_own_dtype_unless_a_precision_is_given(dtype: torch.dtype) -> None:
    """With the losses of the loop before: those of plain PyTorch, where its arithmetic is the same."""
    model, optimizer = pagoda.wrap(layers().to(dtype), pagoda.AdamW(lr=1e-2), memory=RESIDENT)
    assert {param.dtype for param in model.parameters()} == {dtype}
    assert optimizer.scales_loss == (dtype is torch.float16)
    plain = layers().to(dtype)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses = []
    for seed in range(4 if dtype is torch.float32 else 1):
        for module, stepped in ((model, optimizer), (plain, theirs)):
            loss = module(inputs(seed), [0, 1, 2])
            optimizer.scale(loss).backward() if stepped is optimizer else loss.backward()
            stepped.step()
            stepped.zero_grad()
            losses.append(loss.item())
    assert losses[::2] == pytest.approx(losses[1::2], rel=1e-5)
    optimizer.close()


def test_norms_of_groups_add_up_to_the_norm(wrap: Wrap) -> None:
    model, plain = layers(), layers()
    groups = [{"params": layer.parameters()} for layer in model.get_submodule("layers")]
    model, optimizer = wrap(model, param_groups=groups, precision="fp32", max_grad_norm=1e-3)
    for module in (model, plain):
        module(inputs(1), [0, 2]).backward()
    optimizer.step()
    first, second, third = optimizer.stats.group_norms
    assert second is None
    for norm, layer in ((first, 0), (third, 2)):
        grads = [p.grad for p in plain.get_submodule(f"layers.{layer}").parameters()]
        assert norm == pytest.approx(torch.nn.utils.get_total_norm(grads).item(), rel=1e-5)
    assert optimizer.stats.grad_norm == pytest.approx(math.hypot(first, third), rel=1e-12)


BAD_SETTINGS: tuple[tuple[Any, dict[str, Any], str], ...] = (
    ("bf16", {"loss_scale": 2.0}, "precision='fp16'"),
    ("fp16", {"loss_scale": 1000}, "power of two"),
    ("fp16", {"loss_scale": "automatic"}, "'dynamic'"),
    ("fp8", {}, "bf16, fp16, fp32"),
    ("bf16", {"gradients": "fp16"}, "bf16, fp32"),
)


def test_settings_that_make_no_sense_are_refused(wrap: Wrap) -> None:
    model = layers()
    for precision, settings, message in BAD_SETTINGS:
        with pytest.raises(pagoda.ConfigError, match=message):
            wrap(model, precision=pagoda.MixedPrecision(precision, **settings))
    for name, value in (("init_scale", 3.0), ("backoff_factor", 1.0), ("growth_interval", 0), ("growth_factor", 0.5)):
        with pytest.raises(pagoda.ConfigError, match=name):
            pagoda.LossScale(**{name: value})
    with torch.no_grad():
        model.get_parameter("layers.1.0.bias")[3] = 7e4
    with pytest.raises(pagoda.ConfigError, match=r"'layers\.1\.0\.bias' has a value of 70000.*bf16"):
        pagoda.wrap(model, pagoda.AdamW(), memory=RESIDENT, precision="fp16")
