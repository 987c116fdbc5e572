"""Hooks that are registered before `wrap` run as they do without it, also where `wrap` makes parameters anew."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zoo import RESIDENT

import pagoda
from pagoda.optimizer import PagedOptimizer

from .test_experts import built


def linears() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def under_init() -> Any:
    with pagoda.deferred_init():
        return linears()


def with_a_state_dict() -> Any:
    """Hooks are registered before the values arrive."""
    with pagoda.deferred_init():
        model = linears()
        model[0].weight.register_hook(lambda grad: grad * 0)
        model.load_state_dict(linears().state_dict())
    return model


def hooked_at_birth() -> Any:
    """Hooks are registered before the parameter is a module's."""

    class Born(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            weight = nn.Parameter(torch.ones(8, 8))
            weight.register_hook(lambda grad: grad * 0)
            del self.weight
            self.weight = weight

    with pagoda.deferred_init():
        return nn.Sequential(Born(), nn.Linear(8, 8))


def wrapped(model: Any, **options: Any) -> tuple[Any, PagedOptimizer]:
    return pagoda.wrap(model, pagoda.SGD(lr=0.1), memory=RESIDENT, **{"precision": "fp32", **options})


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 8, dtype=model[0].weight.dtype)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("build", [linears, under_init])
@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook", "several"])
def test_a_parameter_keeps_its_hooks_and_their_handles(name: str, build: Callable[[], Any]) -> None:
    model, seen = build(), []
    weight = model[0].weight
    if name == "several":
        handle = torch.autograd.graph.register_multi_grad_hook([weight], seen.append, mode="any")
    else:
        handle = getattr(weight, name)(seen.append)
    model, optimizer = wrapped(model)
    step(model, optimizer)
    assert len(seen) == 1
    handle.remove()
    step(model, optimizer)
    assert len(seen) == 1
    optimizer.close()


@pytest.mark.parametrize("build", [with_a_state_dict, hooked_at_birth])
def test_a_hook_that_masks_a_gradient_masks_it_wherever_the_values_come_from(build: Callable[[], Any]) -> None:
    model, optimizer = wrapped(build())
    before = model.state_dict()
    step(model, optimizer)
    after = model.state_dict()
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["1.weight"], after["1.weight"])
    optimizer.close()


def hooked_node(weight: nn.Parameter) -> Any:
    """A handle of a hook on a node that only graphs hold."""
    return torch.autograd.graph.get_gradient_edge(weight).node.register_hook(print)


def test_graphs_from_before_wrap_may_live_on_and_refuse_their_backward_by_name() -> None:
    """Such as copies of the first weights, which the program compares with the last ones."""
    for make, precision in ((linears, "bf16"), (under_init, "fp32")):
        model = make()
        before = {name: param.clone() for name, param in model.named_parameters()}
        first = {name: copy.detach().clone() for name, copy in before.items()}
        model, optimizer = wrapped(model, precision=precision)
        step(model, optimizer)
        assert all(torch.equal(copy, first[name]) for name, copy in before.items())
        with pytest.raises(pagoda.UsageError, match=r"'1\.weight'.*before wrap"):
            before["1.weight"].sum().backward()
        step(model, optimizer)
        optimizer.close()


def test_hooks_on_autograds_node_of_a_parameter_that_is_made_anew_are_refused_by_name() -> None:
    for register in (
        lambda weight: torch.autograd.graph.register_multi_grad_hook([weight], print),
        lambda weight: [torch.autograd.graph.get_gradient_edge(weight).node],
        lambda weight: (weight.clone(), hooked_node(weight)),
    ):
        model = under_init()
        held = register(model[1].weight)
        with pytest.raises(pagoda.ConfigError, match=r"'1\.weight'.*register_multi_grad_hook"):
            wrapped(model)
        del held


def test_hooks_on_the_node_of_a_parameter_that_stays_run_and_those_after_wrap_too() -> None:
    model, seen = linears(), []
    torch.autograd.graph.register_multi_grad_hook([model[0].weight, model[1].weight], seen.append)
    model, optimizer = wrapped(model)
    step(model, optimizer)
    assert len(seen) == 1
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), seen.append)
    step(model, optimizer)
    assert len(seen) == 3
    optimizer.close()


def test_hooks_on_the_node_of_a_parameter_whose_dtype_changes_are_refused_by_name() -> None:
    model = linears()
    handle = torch.autograd.graph.register_multi_grad_hook([model[1].weight], print)
    with pytest.raises(pagoda.ConfigError, match=r"'1\.weight'.*register_multi_grad_hook"):
        wrapped(model, precision="bf16")
    handle.remove()
    wrapped(model, precision="bf16")[1].close()


def test_a_hook_that_drops_a_gradient_drops_those_before_it_too() -> None:
    results = []
    for wraps in (False, True):
        model = linears()
        keeps = [True]
        model[0].weight.register_post_accumulate_grad_hook(
            lambda p, k=keeps: None if k[0] else setattr(p, "grad", None)
        )
        model, optimizer = wrapped(model) if wraps else (model, torch.optim.SGD(model.parameters(), lr=0.1))
        for keeps[0] in (True, False):
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        results.append(model.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value)


def test_hooks_of_state_dicts_see_weights_and_their_changes_stay() -> None:
    def renamed(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}half"] = state.pop(f"{prefix}weight").half()
        state[f"{prefix}bias"] += 1

    def restored(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}half") * 2
        state[f"{prefix}bias"] -= 1

    results = []
    for build in (lambda model: (model, None), wrapped):
        model = linears()
        model[0].register_state_dict_post_hook(renamed)
        model[0].register_load_state_dict_pre_hook(restored)
        model, optimizer = build(model)
        saved = model.state_dict()
        model.load_state_dict({name: value.clone() for name, value in saved.items()})
        results.append((saved, model.state_dict()))
        if optimizer is not None:
            optimizer.close()
    for plain, ours in zip(*results, strict=True):
        assert plain.keys() == ours.keys()
        assert all(torch.equal(plain[name], ours[name]) for name in plain)


def test_hooks_of_the_optimizer_run() -> None:
    model, optimizer = wrapped(linears())
    seen: list[str] = []
    for name in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre"):
        getattr(optimizer, f"register_{name}_hook")(lambda *_, name=name: seen.append(name))
    step(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre"]
    optimizer.close()


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("where", ["parameter", "module"])
def test_a_stack_of_experts_with_hooks_stays_whole_and_runs_them(where: str) -> None:
    model, seen = built("mixtral"), []
    experts = model.get_submodule(EXPERTS)
    if where == "parameter":
        experts.down_proj.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    else:
        experts.register_full_backward_hook(lambda *_: seen.append((4, 64, 96)))
    with pytest.warns(UserWarning, match=f"experts of '{EXPERTS}' stay together"):
        model, optimizer = wrapped(model)
    ids = torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert seen == [(4, 64, 96)]
    optimizer.close()


def test_the_router_of_a_switch_transformer_keeps_its_hooks() -> None:
    model = built("switch")
    routers = [module for name, module in model.named_modules() if name.endswith("router.classifier")]
    seen: list[str] = []
    routers[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    routers[0].register_forward_hook(lambda *_: seen.append("after"))
    routers[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    model, optimizer = wrapped(model)
    ids = torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    assert seen == ["before", "after", "backward"]
    optimizer.close()
