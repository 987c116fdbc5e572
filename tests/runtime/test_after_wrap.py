"""What is done to a wrapped model too late, or by the wrong hands, is refused in words that name the cause and the fix.

Each of these would train nothing in silence, or fail somewhere inside torch.
"""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_once
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import pagoda

from .conftest import Wrap


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(16, 16)) for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(1)))
    return loss


def adapted(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["body"], init_lora_weights="gaussian"))


# --- parameters that wrap never saw ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda model: setattr(model, "head", nn.Linear(16, 16)), "'head.weight', 'head.bias' were added"),
        (lambda model: setattr(model.head, "bias", nn.Parameter(torch.zeros(16))), "'head.bias' were added"),
        (adapted, "'body.lora_A.default.weight', 'body.lora_B.default.weight' were added"),
    ],
    ids=["module", "parameter", "adapters"],
)
def test_a_step_refuses_trainable_parameters_that_came_after_wrap(
    change: Callable[[Any], object], names: str, wrap: Wrap
) -> None:
    model, optimizer = wrap(fresh(), precision="fp32")
    change(model)
    loss_of(model).backward()
    with pytest.raises(pagoda.UsageError, match=rf"{names} to the model after wrap\(\).*get_peft_model"):
        optimizer.step()


def swap(model: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (swap, r"'blocks\.0\.1\.weight', 'blocks\.0\.1\.bias', 'blocks\.1\.1\.weight' and 1 more is not"),
        (lambda model: model.blocks.__delitem__(0), "is not the parameter that had this name"),
        (lambda model: setattr(model, "head", model.body), r"'head\.weight', 'head\.bias' is not"),
        (lambda model: setattr(model.head, "weight", model.body.weight), r"'head\.weight' is not"),
        (lambda model: setattr(model, "blocks", nn.ModuleList([nn.Sequential(*model.blocks)])), "and 5 more is not"),
        (lambda model: setattr(model, "head", nn.Identity()), r"'head\.weight', 'head\.bias' is not"),
    ],
    ids=["swapped", "deleted", "shared", "tied", "nested", "replaced"],
)
def test_a_step_and_a_checkpoint_refuse_parameters_that_have_other_names_since_wrap(
    change: Callable[[Any], object], names: str, wrap: Wrap, tmp_path: Path
) -> None:
    model, optimizer = wrap(fresh())
    optimizer.save_checkpoint(tmp_path / "before")
    change(model)
    refused = (
        optimizer.step,
        lambda: optimizer.save_checkpoint(tmp_path / "after"),
        lambda: optimizer.load_checkpoint(tmp_path / "before"),
        lambda: optimizer.save_state_dict(tmp_path / "after.pt"),
    )
    for method in refused:
        with pytest.raises(pagoda.UsageError, match=names):
            method()


def test_modules_without_parameters_may_come_and_go_after_wrap(wrap: Wrap) -> None:
    model, optimizer = wrap(fresh(), precision="fp32")
    model.blocks[0][0] = nn.Dropout(0.0)
    loss_of(model).backward()
    optimizer.step()
    model.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    loss_of(model).backward()
    optimizer.step()
    model.frozen.requires_grad_(True)
    with pytest.raises(pagoda.UsageError, match="'frozen' were added"):
        optimizer.step()


def test_the_full_state_dict_of_a_part_or_of_a_changed_model_has_the_names_of_that(wrap: Wrap) -> None:
    model, _ = wrap(fresh(), precision="fp32")
    swap(model)
    for of in (model, model.blocks):
        found = pagoda.full_state_dict(of)
        assert found.keys() == of.state_dict().keys()
        assert all(torch.equal(value, found[name]) for name, value in of.state_dict().items())


@pytest.mark.parametrize("announced", [None, 1], ids=["at-step", "during-backward"])
def test_a_model_frozen_after_backward_takes_its_step_and_no_other(announced: int | None, wrap: Wrap) -> None:
    """peft's get_peft_model for prompts freezes the model and holds what trains outside of it."""
    model, optimizer = wrap(fresh(), precision="fp32", gradient_accumulation_steps=announced)
    before = model.state_dict()["body.weight"]
    loss_of(model).backward()
    model.requires_grad_(False)
    optimizer.step()
    assert not torch.equal(model.state_dict()["body.weight"], before)
    optimizer.zero_grad()
    with pytest.raises(pagoda.UsageError, match=r"frozen .*get_peft_model"):
        optimizer.step()


def test_parameters_edited_in_and_out_of_groups_are_refused(wrap: Wrap) -> None:
    model, optimizer = wrap(fresh(), precision="fp32")
    loss_of(model).backward()
    taken = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(pagoda.UsageError, match=r"param_groups.*requires_grad_\(False\)"):
        optimizer.step()
    optimizer.param_groups[0]["params"].append(taken)
    optimizer.step()
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    with pytest.raises(pagoda.UsageError, match=r"param_groups.*add_param_group"):
        optimizer.step()


# --- other optimizers, compilers, mergers ----------------------------------------------------------------------


@each_once(kind=[torch.optim.SGD, torch.optim.AdamW], announced=[None, 1])
def test_another_optimizer_over_paged_parameters_is_refused(announced: int | None, kind: type[Any], wrap: Wrap) -> None:
    """And one over other parameters is not."""
    model, _ = wrap(fresh(), precision="fp32", gradient_accumulation_steps=announced)
    plain = fresh()
    loss_of(model).backward()
    loss_of(plain).backward()
    with pytest.raises(pagoda.UsageError, match=rf"{kind.__name__}\.step\(\).*'body\.weight'.*wrap\(\) returned"):
        kind(model.parameters(), lr=0.1).step()
    kind(plain.parameters(), lr=0.1).step()
    assert not torch.equal(plain.get_parameter("head.bias"), fresh().get_parameter("head.bias"))


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(model, backend="eager", **options)


def compiled_part(model: nn.Module) -> nn.Module:
    model.get_submodule("body").compile(backend="eager")
    return model


def compiled_block(model: nn.Module) -> nn.Module:
    """One whose own forward reads no parameter, so that no hook is on it."""
    model.get_submodule("blocks.0").compile(backend="eager")
    return model


def compiled_call(model: nn.Module) -> Any:
    return torch.compile(lambda x: model(x), backend="eager")


@each_once(compile_late=[compiled, compiled_part, compiled_block, compiled_call], activations=["recompute", "keep"])
def test_compiling_after_wrap_is_refused(
    compile_late: Callable[[nn.Module], nn.Module], activations: str, wrap: Wrap
) -> None:
    model, _ = wrap(fresh(), precision="fp32", activations=activations)
    torch.compiler.reset()
    with pytest.raises(pagoda.UsageError, match=r"torch\.compile .*before wrap\(\)"):
        loss_of(compile_late(model))


def test_tracing_after_wrap_is_refused(wrap: Wrap) -> None:
    layer, _ = wrap(nn.Linear(8, 8), precision="fp32")
    with pytest.raises(pagoda.UsageError, match=r"torch\.jit\.trace .*state_dict\(\)"):
        torch.jit.trace(layer, torch.ones(1, 8))


def _in(mode: Any) -> Callable[[Any], object]:
    def run(model: Any) -> object:
        with mode():
            return model(torch.ones(2, 16))

    return run


TRACES: dict[str, Callable[[Any], object]] = {
    "export": lambda model: torch.export.export(model, (torch.ones(2, 16),)),
    "script": torch.jit.script,
    "script of a part": lambda model: torch.jit.script(model.body),
    "script of what contains it": lambda model: torch.jit.script(nn.Sequential(model)),
    "make_fx": lambda model: make_fx(model)(torch.ones(2, 16)),
    "linearize": lambda model: torch.func.linearize(model, torch.ones(2, 16)),
    "fake tensors": _in(partial(FakeTensorMode, allow_non_fake_inputs=True)),
    "no hooks": _in(partial(torch.autograd.graph.disable_saved_tensors_hooks, "none, please")),
}


@pytest.mark.parametrize("trace", TRACES)
def test_what_records_a_forward_is_refused_with_the_way_out(trace: str, wrap: Wrap) -> None:
    model, optimizer = wrap(fresh(), precision="fp32")
    with pytest.raises(pagoda.UsageError, match=r"state_dict\(\) of this one|Hooks for saved tensors are disabled"):
        TRACES[trace](model)
    loss_of(model).backward()
    optimizer.step()


def test_a_parameter_of_a_parameter_shows_its_values(wrap: Wrap) -> None:
    model, _ = wrap(fresh(), precision="fp32")
    weight = model.body.weight
    other = nn.Parameter(weight)
    (other * other).sum().backward()
    assert torch.equal(other.detach().clone(), weight.detach().clone())
    assert torch.equal(other.grad, 2 * weight.detach().clone())
    assert weight.grad is None


def test_a_whole_graph_of_a_wrapped_model_is_refused(wrap: Wrap) -> None:
    """torch words this error, and Pagoda the reason in it."""
    model, _ = wrap(fresh(), precision="fp32")
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=r"compile before wrap\(\)"):
        loss_of(compiled(model, fullgraph=True))


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_adapters_merge_where_weights_are_gathered_and_nowhere_else(merge: str, wrap: Wrap) -> None:
    model, optimizer = wrap(adapted(fresh()), precision="fp32")
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
    with pytest.raises(pagoda.UsageError, match=r"body\.merge\(\) needs weights.*gathered\(model, modify=True\)"):
        getattr(model, merge)()
    with torch.no_grad():
        before = loss_of(model).item()
    with pagoda.gathered(model, modify=True):
        merged = getattr(model, merge)() or model
    with torch.no_grad():
        assert loss_of(merged).item() == pytest.approx(before, rel=1e-5)
    weights = {
        name: value
        for name, value in merged.state_dict().items()
        if name.endswith(("body.weight", "base_layer.weight"))
    }
    assert not torch.equal(*weights.values(), fresh().state_dict()["body.weight"])


def test_a_step_without_a_gradient_is_said_once(wrap: Wrap) -> None:
    """Torch's optimizers take such steps, as of a batch that was skipped, and so does this one: but not in silence."""
    model, optimizer = wrap(fresh())
    before = model.state_dict()
    with pytest.warns(UserWarning, match="without a gradient and changed nothing"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
