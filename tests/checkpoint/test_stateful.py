"""Standard loops save and load a run through `torch.distributed.checkpoint`, and go on bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pairwise import each_once
from torch.distributed.checkpoint.stateful import Stateful

import pagoda
from pagoda.optimizer import PagedOptimizer

from .hf_models import build, train, wrapped
from .test_resume import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@contextmanager
def gloo(directory: Path) -> Iterator[None]:
    """A process group for this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state_of(model: torch.nn.Module, optimizer: PagedOptimizer) -> dict[str, Any]:
    return {"model": pagoda.ModelState(model), "optim": pagoda.OptimizerState(optimizer)}


@each_once(name=["llama-tied", "gpt2"], before=["ram", "ssd"], in_group=[True, False])
def test_a_run_goes_on_bit_for_bit(name: str, before: str, in_group: bool, tmp_path: Path) -> None:
    """From a state that was saved in one place and is loaded in another."""
    after = "ssd" if before == "ram" else "ram"
    with gloo(tmp_path) if in_group else nullcontext():
        model, optimizer = wrapped(build(name), before, tmp_path)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(model, optimizer, 0, 3)
        schedule.step()
        dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / "dcp")
        rest = train(model, optimizer, 3, 5)
        final = {key: value.state_dict() for key, value in state_of(model, optimizer).items()}
        optimizer.close()

        model, optimizer = wrapped(build(name, seed=9), after, tmp_path)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(model, optimizer, 0, 1)
        dcp.load(state_of(model, optimizer), checkpoint_id=tmp_path / "dcp")
        assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)
        assert train(model, optimizer, 3, 5) == rest
        assert_same({key: value.state_dict() for key, value in state_of(model, optimizer).items()}, final)
        optimizer.close()


def test_the_state_is_by_parameter_name_and_plain_pytorch_can_load_it(tmp_path: Path) -> None:
    model, optimizer = wrapped(build("llama-tied"), "ram", tmp_path)
    train(model, optimizer, 0, 1)
    state = state_of(model, optimizer)
    assert all(isinstance(part, Stateful) for part in state.values())
    named = {name: param.shape for name, param in model.named_parameters()}
    optim = state["optim"].state_dict()
    assert optim["state"].keys() == named.keys()
    assert [name for group in optim["param_groups"] for name in group["params"]] == list(named)
    assert all(optim["state"][name]["exp_avg"].shape == shape for name, shape in named.items())
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    weights = model.state_dict()
    optimizer.close()

    plain = build("llama-tied", seed=9)
    loaded = {"model": {name: torch.empty_like(param) for name, param in plain.named_parameters()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    plain.load_state_dict(loaded["model"], strict=False)
    for name, param in plain.named_parameters():
        assert param.dtype is torch.float32
        # The compute weight rounds half away from zero, which differs from torch's rounding on exact ties alone.
        assert torch.allclose(param.bfloat16().float(), weights[name].float(), rtol=2**-7)


def test_a_state_of_another_model_is_refused_untouched(tmp_path: Path) -> None:
    model, optimizer = wrapped(build("llama-tied"), "ram", tmp_path)
    other, others = wrapped(build("gpt2"), "ram", tmp_path)
    before = {key: value.state_dict() for key, value in state_of(model, optimizer).items()}
    for mine, its in zip(state_of(model, optimizer).values(), state_of(other, others).values(), strict=True):
        with pytest.raises(pagoda.CheckpointError, match="does not belong to this model"):
            mine.load_state_dict(its.state_dict())
    wrong = {**before["model"], "model.norm.weight": torch.zeros(3)}
    with pytest.raises(pagoda.CheckpointError, match=r"'model\.norm\.weight' has shape \(3,\), but \(32,\)"):
        pagoda.ModelState(model).load_state_dict(wrong)
    groups = [{**before["optim"]["param_groups"][0], "params": []}]
    with pytest.raises(pagoda.CheckpointError, match="only one of the two has 'model"):
        pagoda.OptimizerState(optimizer).load_state_dict({**before["optim"], "param_groups": groups})
    name, entry = next(iter(before["optim"]["state"].items()))
    more = {**before["optim"]["state"], name: {**entry, "max_exp_avg_sq": entry["exp_avg_sq"]}}
    with pytest.raises(pagoda.CheckpointError, match="'max_exp_avg_sq of "):
        pagoda.OptimizerState(optimizer).load_state_dict({**before["optim"], "state": more})
    assert_same({key: value.state_dict() for key, value in state_of(model, optimizer).items()}, before)
    optimizer.close()
    others.close()


def test_a_model_that_is_not_wrapped_is_refused() -> None:
    with pytest.raises(pagoda.UsageError, match="not wrapped"):
        pagoda.ModelState(build("gpt2"))
