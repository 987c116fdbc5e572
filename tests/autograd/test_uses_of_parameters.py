"""Parameters used in methods and forwards other than that of the module that holds them: the bits of plain PyTorch."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_once
from runtime import loops
from runtime.conftest import Wrap
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import PAGE, assert_equal

import pagoda

SMALL = pagoda.Memory(host="64MiB", unit_limit="4KiB", page_size=PAGE)
WIDTH = 32


RESIDENT, ARENA = "resident", "arena"
"""Weights that are leased in place, and weights that are fetched to where compute is."""


def memory_in(place: str, ssd: Path) -> pagoda.Memory:
    if place == RESIDENT:
        return SMALL
    return pagoda.Memory(device="cpu:256KiB", host="1MiB", ssd=f"{ssd}:64MiB", unit_limit="4KiB", page_size=PAGE)


class Codebook(nn.Module):
    """Half of what it does is not its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.table = nn.Embedding(8, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self._scaled(self.mix(x)) @ self.table.weight.t()

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.softmax(-1) @ self.table.weight * self.scale

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.exp()


class Parent(nn.Module):
    """Calls methods of its part that are not forward, and has one that calls its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook = Codebook()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.codebook.decode(self.codebook.encode(x)))

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean() * self.temperature.exp()


def fresh(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


METHODS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor]]] = {
    "called-by-the-user": (Codebook, lambda m: m.decode(m.encode(batch())).square().mean()),
    "called-by-a-parent": (Parent, lambda m: m(batch()).square().mean()),
    "calls-the-forward": (Parent, lambda m: m.training_step(batch())),
}


def assert_same_norm(optimizer: Any, plain: nn.Module) -> None:
    """Pagoda's step had the gradients that a model in plain PyTorch has."""
    grads = [param.grad for param in plain.parameters() if param.grad is not None]
    assert optimizer.stats.grad_norm == pytest.approx(torch.nn.utils.get_total_norm(grads).item(), rel=1e-6)


def assert_same_step(
    kind: Callable[[], nn.Module],
    loss_of: Callable[[Any], torch.Tensor],
    wrap: Wrap,
    memory: pagoda.Memory,
    **wrapped: Any,
) -> None:
    """Two steps have the losses and gradient norms of plain PyTorch; the second one sees what the first has changed."""
    plain = fresh(kind)
    model, optimizer = wrap(fresh(kind), memory, precision="fp32", **wrapped)
    for _ in range(2):
        expected = loss_of(plain)
        expected.backward()
        loss = loss_of(model)
        assert torch.equal(loss.detach(), expected.detach())
        loss.backward()
        optimizer.step()
        assert_same_norm(optimizer, plain)
        plain.zero_grad()
        plain.load_state_dict(model.state_dict())


@each_once(case=[*METHODS], place=[RESIDENT, ARENA])
def test_methods_other_than_forward_use_their_parameters(case: str, place: str, wrap: Wrap, tmp_path: Path) -> None:
    assert_same_step(*METHODS[case], wrap, memory_in(place, tmp_path))
    for activations in ("recompute", "auto") if case == "calls-the-forward" else ():
        assert_same_step(*METHODS[case], wrap, SMALL, activations=activations)


# --- parameters of other modules ----------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    """Operations of its own: torch asks no parameter before it runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t() * 2, x.t() @ grad * 2


class Meddler(nn.Module):
    """Uses parameters of a layer inside its own forward, by paths that its source does not show."""

    def __init__(self, use: Callable[[torch.Tensor, nn.Linear], torch.Tensor], called: bool, frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.layers[2].requires_grad_(not frozen)
        self._use = use
        self._called = called

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = getattr(self, "".join(("lay", "ers")))[2][0]
        x = self._use(self.layers[0](x), used)
        return self.layers[2 if self._called else 1](x).square().mean()


USES: dict[str, Callable[[torch.Tensor, nn.Linear], torch.Tensor]] = {
    "matmul": lambda x, other: x @ other.weight,
    "linear": lambda x, other: nn.functional.linear(x, other.weight, other.bias),
    "product": lambda x, other: x * other.bias,
    "sum": lambda x, other: x + other.bias,
    "mean": lambda x, other: x * other.weight.mean(),
    "detached": lambda x, other: x + other.bias.detach(),
    "data": lambda x, other: x @ other.weight.data,
    "transposed": lambda x, other: x @ other.weight.T,
    "cast": lambda x, other: x @ other.weight.to(torch.float64).float(),
    "index": lambda x, other: x + other.weight[1],
    "several": lambda x, other: x + torch.cat([other.weight, other.bias[None]]).mean(0),
    "custom-function": lambda x, other: Twice.apply(x, other.weight),
}


@each_once(use=[*USES], called=[False, True], case=[(False, RESIDENT), (False, ARENA), (True, ARENA)])
def test_a_forward_may_use_the_parameters_of_any_module(
    use: str, called: bool, case: tuple[bool, str], wrap: Wrap, tmp_path: Path
) -> None:
    frozen, place = case
    kind = partial(Meddler, USES[use], called, frozen)
    assert_same_step(kind, lambda m: m(batch()), wrap, memory_in(place, tmp_path))


@each_once(use=["matmul", "product", "custom-function"], frozen=[False, True])
def test_a_block_that_is_recomputed_may_use_the_parameters_of_another(use: str, frozen: bool, wrap: Wrap) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Meddler(USES[use], True, frozen) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(block(x) for block in self.blocks)

    assert_same_step(Blocks, lambda m: m(batch()), wrap, SMALL, activations="recompute")


class Around(nn.Module):
    """Its forward uses a parameter of a part, and it holds none itself."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) @ next(self.part.parameters())


def test_a_part_of_a_model_may_be_called_that_uses_parameters_of_its_parts(wrap: Wrap) -> None:
    assert_same_step(lambda: nn.Sequential(Around(), nn.Tanh()), lambda m: m[0](batch()).square().mean(), wrap, SMALL)


class OwnCheckpoint(nn.Module):
    """Checkpoints a function that uses its own parameters."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.shift = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer(x) * self.scale + self.shift) * self.scale

        return checkpoint(scaled, x, use_reentrant=self._reentrant)


@each_once(reentrant=[False, True], place=[RESIDENT, ARENA])
def test_a_module_may_checkpoint_a_function_that_uses_its_parameters(
    reentrant: bool, place: str, wrap: Wrap, tmp_path: Path
) -> None:
    def kind() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), OwnCheckpoint(reentrant), OwnCheckpoint(reentrant))

    assert_same_step(kind, lambda m: m(batch()).square().mean(), wrap, memory_in(place, tmp_path))


NAMED_GRADIENTS = "dict" in str(torch.autograd.grad.__annotations__["inputs"]).lower()
"""Whether torch differentiates by parameters that are given by name."""


def test_gradients_by_chosen_parameters_are_those_of_torch(wrap: Wrap) -> None:
    """Code that backward runs, such as a checkpoint, finds parameters as it would in any backward."""

    def kind() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), OwnCheckpoint(False), nn.Linear(WIDTH, WIDTH))

    plain = fresh(kind)
    model, optimizer = wrap(fresh(kind), SMALL, precision="fp32")
    found: list[dict[str, torch.Tensor]] = []
    for each in (model, plain):
        chosen = {name: param for name, param in each.named_parameters() if param.requires_grad}
        loss = each[:2](batch()).square().mean()
        if NAMED_GRADIENTS:
            found.append(torch.autograd.grad(loss, chosen, materialize_grads=True))
        else:
            grads = torch.autograd.grad(loss, [*chosen.values()], materialize_grads=True)
            found.append(dict(zip(chosen, grads, strict=True)))
        each(batch()).square().mean().backward(inputs=[each[0].weight, each[1].scale])
        assert each[2].weight.grad is None
    assert_equal(*found)
    optimizer.step()
    assert_same_norm(optimizer, plain)


def test_a_parameter_that_a_function_keeps_without_autograd_is_read_in_backward(wrap: Wrap, tmp_path: Path) -> None:
    class Keeps(Twice):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.kept = weight
            return Twice.forward(ctx, x, weight)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return grad @ ctx.kept.t() * 2, ctx.saved_tensors[0].t() @ grad * 2

    kind = partial(Meddler, lambda x, other: Keeps.apply(x, other.weight), True, False)
    assert_same_step(kind, lambda m: m(batch()), wrap, memory_in(ARENA, tmp_path))


# --- hooks for saved tensors --------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Graphs keep its parameter itself; of linear layers, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Deep(nn.Module):
    """Some of its layers run inside hooks that its forward enters."""

    def __init__(self, hooks: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(), nn.Tanh()) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self._hooks = hooks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if self._hooks is not None and index in (1, 2):
                with self._hooks():
                    x = layer(x)
            else:
                x = layer(x)
        return x.square().mean()


def identity_hooks() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed)


HOOKS: dict[str, Callable[[], Any]] = {
    "identity": identity_hooks,
    "save-on-cpu": torch.autograd.graph.save_on_cpu,
    "pickled": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.detach().numpy().tolist(), torch.tensor
    ),
}


@each_once(hooks=[*HOOKS], inside=[False, True], case=[("keep", ARENA), ("recompute", RESIDENT), ("recompute", ARENA)])
def test_hooks_for_saved_tensors_do_not_change_gradients(
    hooks: str, inside: bool, case: tuple[Any, str], wrap: Wrap, tmp_path: Path
) -> None:
    activations, memory = case[0], memory_in(case[1], tmp_path)

    def loss_of(model: nn.Module) -> torch.Tensor:
        if inside:
            return model(batch())
        with HOOKS[hooks]():
            return model(batch())

    assert_same_step(lambda: Deep(HOOKS[hooks] if inside else None), loss_of, wrap, memory, activations=activations)


def test_hooks_for_saved_tensors_and_offloaded_activations_exclude_each_other(wrap: Wrap, tmp_path: Path) -> None:
    memory = pagoda.Memory(host="64MiB", ssd=f"{tmp_path}:64MiB", unit_limit="4KiB", page_size=PAGE)
    model, optimizer = wrap(fresh(Deep), memory, precision="fp32", activations="offload")
    with (
        identity_hooks(),
        pytest.raises(pagoda.UsageError, match=r"saved_tensors_hooks.*activations.*leave one of them out"),
    ):
        model(batch())
    model(batch()).backward()
    optimizer.step()


def test_two_models_pack_inside_each_other(wrap: Wrap, tmp_path: Path) -> None:
    """The hooks of a wrapped model are, to another one that its forward calls, those of a user."""

    class Outer(Deep):
        other: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.other[0](x)
            return super().forward(x) + inner

    inner, inner_optimizer = wrap(fresh(Deep), precision="fp32")
    outer, optimizer = wrap(fresh(Outer), memory_in(ARENA, tmp_path), precision="fp32")
    outer.other = (inner,)
    plain, plain_inner = fresh(Outer), fresh(Deep)
    plain.other = (plain_inner,)
    outer(batch()).backward()
    plain(batch()).backward()
    for stepped, reference in ((optimizer, plain), (inner_optimizer, plain_inner)):
        stepped.step()
        assert_same_norm(stepped, reference)


# --- leases ---------------------------------------------------------------------------------------------------


def test_a_view_that_outlives_its_forward_keeps_its_frames(wrap: Wrap) -> None:
    """Four of eight layers fit the device at once: the frames of the first are not given to others while it is held."""
    model = loops.Layers()
    weight = model.layers[0][0].weight.detach().bfloat16()
    memory = pagoda.Memory(device="cpu:256KiB", host="64MiB", unit_limit="64KiB", page_size=PAGE)
    wrapped, _ = wrap(model, memory)
    kept: list[torch.Tensor] = []
    layer = wrapped.get_submodule("layers.0.0")
    handle = layer.register_forward_hook(lambda module, _args, _out: kept.append(module.weight.detach()))
    with torch.no_grad():
        for _ in range(2):
            wrapped(torch.ones(2, loops.WIDTH), [*range(8)])
    handle.remove()
    torch.testing.assert_close(kept[0], weight, rtol=2**-7, atol=0)
