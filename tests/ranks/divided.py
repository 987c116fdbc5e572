"""Models that torch's tensor parallelism divides, trained in Pagoda's pages and without them: scenarios of a rank."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import reference
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from zoo import BATCH, LENGTH, VOCABULARY, Outcome, Recipe, batch, loss_of, take_step

import pagoda
from pagoda.checkpoint.export import export
from pagoda.config.training import ActivationMode
from pagoda.models import build_model
from pagoda.optim.rule import TensorRule

from .scenarios import RULES, in_pages, left_behind, place, refusal, save_or_resume, settings_of, state_of


class Mixer(nn.Module):
    """Blocks of two layers each; with tensor parallelism, what is between blocks is divided along the sequence."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(width), "up": nn.Linear(width, 128), "down": nn.Linear(128, width, bias=False)}
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block["down"](nn.functional.gelu(block["up"](block["norm"](hidden))))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())


def _llama_plan() -> dict[str, Any]:
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    columns = [f"{attention}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    columns += [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    rows = [f"{attention}.o_proj", f"{mlp}.down_proj"]
    return {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}


def _mixture_plan() -> dict[str, Any]:
    return {name: style for name, style in _llama_plan().items() if "self_attn" in name}


def _mixer_plan() -> dict[str, Any]:
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(use_local_output=True),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def build(name: str) -> nn.Module:
    if name == "mixer":
        torch.manual_seed(0)
        return Mixer()
    if "/" in name:  # a mixture of experts, by its directory
        torch.manual_seed(0)
        return build_model(name, seq_len=LENGTH)
    return Recipe(name).build()


def divide(model: nn.Module, name: str, mesh: pagoda.Mesh) -> nn.Module:
    """Divide a model over the tensor-parallel ranks of a mesh; of one, leave it."""
    if mesh.ranks.tensor_parallel == 1:
        return model
    plan = _mixer_plan() if name == "mixer" else _mixture_plan() if "/" in name else _llama_plan()
    return parallelize_module(model, mesh.tensor, plan)


class PlainOptimizer:
    """A rule on tensors that torch alone holds, with the methods of Pagoda's optimizer. An element-wise rule updates
    this rank's part of each parameter. One that takes whole parameters, in fp32, updates all of each on every rank,
    which keeps its part."""

    def __init__(self, model: nn.Module, rule: Any) -> None:
        self.rule, self.takes_whole = rule, isinstance(rule, TensorRule)
        self.params = dict(model.named_parameters())
        self.steps = 0
        self.stats = SimpleNamespace(grad_norm=None, faults=0, bytes_moved={})
        self.gradients: dict[str, torch.Tensor] = {}
        self.states = {name: self._states_of(name, param) for name, param in self.params.items()}

    def _states_of(self, name: str, param: torch.Tensor) -> dict[str, torch.Tensor]:
        weight = whole_of(param).clone() if self.takes_whole else part_of(param).view(-1)
        found = {"weight": weight}
        for spec in self.rule.own_states():
            shape: Any = weight.shape if self.takes_whole else spec.elements(weight.numel())
            if self.takes_whole and spec.shape_of is not None:
                shape = spec.shape_of(name, tuple(weight.shape))
            if shape is not None:
                found[spec.name] = torch.zeros(shape, dtype=spec.dtype)
        return found

    @torch.no_grad()
    def take(self) -> None:
        """Add the gradients of a micro-batch to those before; torch would add up partial sums of ranks first."""
        for name, param in self.params.items():
            grad, param.grad = param.grad, None
            if self.takes_whole:
                grad = whole_of(grad)
            elif isinstance(grad, DTensor):
                grad = grad.redistribute(placements=param.placements).to_local()
            self.gradients[name] = self.gradients[name] + grad if name in self.gradients else grad

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for name, states in self.states.items():
            param, gradient = self.params[name], self.gradients[name]
            if not self.takes_whole:
                noise = self.rule.noise(name, self.steps)
                reference.update(self.rule, states, gradient.reshape(-1), self.rule.scalars(self.steps), noise)
                continue
            own = {**states}
            whole = own.pop("weight")
            self.rule.update(self.steps, whole, gradient, own)
            if isinstance(param, DTensor):
                whole = DTensor.from_local(whole, param.device_mesh, [Replicate()])
                whole = whole.redistribute(placements=param.placements).to_local()
            part_of(param).copy_(whole)

    def zero_grad(self) -> None:
        self.gradients = {}


@torch.no_grad()
def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or all of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def plain(name: str, mesh: pagoda.Mesh, precision: str, rule: str) -> tuple[nn.Module, PlainOptimizer]:
    """A divided model in torch's own memory."""
    model = build(name)
    masters = {
        key: part_of(param).flatten().clone() for key, param in divide(build(name), name, mesh).named_parameters()
    }
    if precision == "bf16":
        for param in model.parameters():
            param.data = param.data.bfloat16()
    model = divide(model, name, mesh)
    optimizer = PlainOptimizer(model, RULES[rule]())
    if precision == "bf16":
        for key, states in optimizer.states.items():
            high, states["weight_low"] = reference.split(masters[key])
            states["weight"].copy_(high)
    return model, optimizer


def take_steps(
    name: str, model: nn.Module, optimizer: Any, mesh: pagoda.Mesh, parts: int, steps: range, larger: int = 1
) -> Outcome:
    """Each group of tensor-parallel ranks takes its share of the `parts` micro-batches of a step, which have `larger`
    times as many sequences."""
    outcome = Outcome()
    groups = mesh.ranks.data_parallel
    group = mesh.rank // mesh.ranks.tensor_parallel
    generator = torch.Generator().manual_seed(1)
    for step in range(steps.stop):
        for part in range(parts):
            data = {key: values.repeat(larger, 1) for key, values in batch(name, generator).items()}
            if step < steps.start or part * groups // parts != group:
                continue
            loss = loss_of(model(**data))
            (loss / (parts // groups)).backward()
            outcome.losses.append(loss.item())
            if isinstance(optimizer, PlainOptimizer):
                optimizer.take()
        if step >= steps.start:
            take_step(optimizer, outcome)
    return outcome


def wrapped(
    out: Path, name: str, tensor: int, kind: str = "ram", on_meta: bool = False, by_torch: bool = False, **settings: Any
) -> tuple[nn.Module, Any, pagoda.Mesh]:
    """A divided model in pages; with `by_torch`, torch's mesh says what is divided."""
    chosen = {key: settings.pop(key) for key in ("stage", "replicas", "expert_parallel") if key in settings}
    mesh = pagoda.open_mesh(tensor_parallel=tensor, **chosen)
    if on_meta:
        torch.manual_seed(mesh.rank)
        with pagoda.deferred_init():
            model = Mixer()
    else:
        model = build(name)
    given: Any = mesh
    if by_torch:
        given = init_device_mesh("cpu", (mesh.ranks.data_parallel, tensor), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(model, given["tp"], _llama_plan())
    else:
        model = divide(model, name, mesh)
    settings = settings_of(**{"precision": "bf16", **settings})
    model, optimizer = in_pages(model, settings.pop("optimizer"), kind, out, given, **settings)
    return model, optimizer, mesh


def parts_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's parts of the weights."""
    return {key: part_of(value).clone() for key, value in model.state_dict().items()}


def train_divided(
    out: Path,
    name: str,
    tensor: int,
    parts: int,
    steps: int = 3,
    precision: str = "bf16",
    larger: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Train in pages."""
    model, optimizer, mesh = wrapped(out, name, tensor, precision=precision, **settings)
    outcome = take_steps(name, model, optimizer, mesh, parts, range(steps), larger)
    plan = pagoda.plan_of(model)
    found = {
        "hidden": BATCH * LENGTH * 64 * larger * (2 if precision == "bf16" else 4),
        "on_device": sorted(plan.placement.on_device),
        "modules": [unit.module for unit in plan.units],
        "moved": outcome.moved,
        "full": pagoda.full_state_dict(model, all_ranks=True),
        "parts": parts_of(model),
    }
    return {**found, **left_behind(model, optimizer, outcome)}


def train_case(out: Path, name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Train with the settings of a row of the matrix."""
    update = case["update"]
    return train_divided(
        out,
        name,
        case["tensor"],
        parts=place()[1] // case["tensor"],
        precision=case["numbers"],
        rule=case["rule"],
        kind=case["place"],
        stage=case["stage"],
        replicas=case["replicas"],
        expert_parallel=case["experts"],
        activations=case["activations"],
        partition=case["partition"],
        max_grad_norm=case["clip"],
        gradient_accumulation_steps=1 if update in ("announced", "speculate") else None,
        guess=update == "speculate",
        late=update.startswith("async"),
        predict=update.endswith("predicted"),
        tiles={"batch": {"batch_tiles": 2}, "layers": {"tile_limit": "16KiB"}}.get(case["tiles"]),
    )


def train_plain(
    out: Path, name: str, tensor: int, parts: int, steps: int = 3, precision: str = "bf16", rule: str = "adamw"
) -> dict[str, Any]:
    """Train by torch alone."""
    mesh = pagoda.open_mesh(tensor_parallel=tensor)
    model, optimizer = plain(name, mesh, precision, rule)
    outcome = take_steps(name, model, optimizer, mesh, parts, range(steps))
    return {"losses": outcome.losses, "parts": parts_of(model)}


def save_divided(
    out: Path,
    name: str,
    tensor: int,
    directory: str,
    parts: int = 1,
    way: str = "checkpoint",
    resumes: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """As `save_or_resume`."""
    model, optimizer, mesh = wrapped(out, name, tensor, **settings)
    take = partial(take_steps, name, model, optimizer, mesh, parts)
    return save_or_resume(model, optimizer, take, directory, way, resumes)


resume_divided = partial(save_divided, resumes=True)


def choose_together(
    out: Path, name: str, activations: ActivationMode, room: Sequence[str | None], expert_parallel: int, tensor: int
) -> dict[str, Any]:
    """Train a mixture whose ranks have batches of other lengths, and other room for activations."""
    rank, steps = place()[0], 4
    torch.manual_seed(0)
    mesh = pagoda.open_mesh(expert_parallel=expert_parallel, tensor_parallel=tensor)
    model = divide(build_model(name, seq_len=64), name, mesh)
    memory = pagoda.Memory(host="1GiB", unit_limit="64KiB", activations=room[rank])
    model, optimizer = pagoda.wrap(
        model,
        pagoda.AdamW(lr=1e-2),
        memory=memory,
        mesh=mesh,
        activations=activations,
        max_grad_norm=0.5,
        precision="bf16",
    )
    outcome = Outcome()
    group = rank // tensor
    generator = torch.Generator().manual_seed(group)
    for step in range(steps):
        ids = torch.randint(256, (2, 48 if (group + step // 2) % 2 else 64), generator=generator)
        loss = loss_of(model(input_ids=ids, labels=ids))
        loss.backward()
        outcome.losses.append(loss.item())
        take_step(optimizer, outcome)
    chosen = pagoda.plan_of(model).activations
    found = {"policies": [str(policy) for policy in chosen.policies], "most_kept": chosen.peak.kept}
    return {**found, "parts": parts_of(model), **left_behind(model, optimizer, outcome)}


def change_divided(out: Path, name: str, rule: str) -> dict[str, Any]:
    """Read and change a divided parameter and its states, and load a state dict of plain tensors."""
    model, optimizer, mesh = wrapped(out, name, 2, rule=rule)
    before = state_of(model, optimizer)["weights"]
    full = pagoda.full_state_dict(model)
    export(model, out / "exported")
    with pagoda.gathered(model.head, modify=True), torch.no_grad():
        shown = model.head.weight.full_tensor()
        model.head.weight.mul_(2)
    doubled = state_of(model, optimizer)["weights"]
    model.load_state_dict(before)
    after = state_of(model, optimizer)["weights"]
    take_steps(name, model, optimizer, mesh, 1, range(1))
    entry = optimizer.state[model.head.weight]
    moment = [*entry][-1]
    moments = [entry[moment].full_tensor()]
    entry[moment].mul_(2)
    moments.append(entry[moment].full_tensor())
    entry[moment] = torch.ones(model.head.weight.shape)
    optimizer.load_state_dict(optimizer.state_dict())
    entry = optimizer.state[model.head.weight]
    moments.append(entry[moment].full_tensor())
    model.state_dict()["head.weight"].zero_()
    refused = refusal(lambda: take_steps(name, model, optimizer, mesh, 1, range(1)))
    optimizer.close()
    changed = {"shown": shown, "doubled": doubled, "moments": moments, "refused": refused}
    return {"before": before, "full": full, "after": after, **changed}


READS: dict[str, Callable[[Any], torch.Tensor]] = {
    "full_tensor": lambda p: p.full_tensor(),
    "to_local": lambda p: p.to_local(),
    "redistribute": lambda p: p.redistribute(placements=[Replicate()]).to_local(),
    "norm": lambda p: p.norm().full_tensor(),
    "own part": lambda p: p._local_tensor * 1,
}


def read_divided(_out: Path, lr: float = 0.125) -> list[str]:
    """Divided parameters as their class's own methods give them, and penalties in the loss of what these give; the
    names of those that differ from the same without pages."""
    mesh = init_device_mesh("cpu", (2,))

    def net() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        return parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    plain, model = net(), net()
    memory = pagoda.Memory(device="cpu:64KiB", host="64MiB")
    model, optimizer = pagoda.wrap(model, pagoda.SGD(lr=lr), memory=memory, precision="fp32")
    names = [name for name, param in plain.named_parameters() if isinstance(param, DTensor)]

    def differing(read: Callable[[Any], torch.Tensor]) -> bool:
        mine, theirs = (([read(module.get_parameter(name)) for name in names]) for module in (model, plain))
        return not all(map(torch.equal, mine, theirs))

    wrong = [f"{kind} before a step" for kind, read in READS.items() if differing(read)]
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    for kind, read in READS.items():
        if kind == "own part":
            continue  # autograd does not see it, with pages or without
        for module in (model, plain):
            penalty = sum(read(module.get_parameter(name)).square().sum() for name in names)
            (module(x).square().mean() + 0.01 * penalty).backward()
            for name in names:  # gradients are divided like their parameters
                grad = module.get_parameter(name).grad
                grad.clamp_(-1e-2, 1e-2).to_local()[0] *= 0.7
                module.get_parameter(name).grad = grad * 0.9
        wrong += [f"a gradient by {read}" for read in READS if differing(lambda p, read=read: READS[read](p.grad))]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param in plain.parameters():
                param.copy_(param - lr * param.grad)
                param.grad = None
        wrong += [f"{read} after a step with {kind}" for read in READS if differing(READS[read])]
    with torch.no_grad():
        for module in (model, plain):
            module.get_parameter(names[-1]).to_local().mul_(0.5)
    wrong += ["a write to a part"] if differing(READS["full_tensor"]) else []
    optimizer.close()
    return wrong


def drawn(out: Path, tensor: int) -> dict[str, Any]:
    """The weights of a model that was built on meta and divided there, with another seed on every rank."""
    model, optimizer, _ = wrapped(out, "mixer", tensor, on_meta=True)
    found = state_of(model, optimizer)["weights"]
    optimizer.close()
    return found


REFUSED: dict[str, Callable[[pagoda.Mesh], Any]] = {
    "not divided": lambda mesh: pagoda.wrap(build("mixer"), pagoda.AdamW(), mesh=mesh, precision="bf16"),
    "other mesh": lambda mesh: pagoda.wrap(
        divide(build("mixer"), "mixer", mesh), pagoda.AdamW(), mesh=pagoda.open_mesh(), precision="bf16"
    ),
    "uneven": lambda mesh: pagoda.wrap(
        parallelize_module(nn.Sequential(nn.Linear(4, 5)), mesh.tensor, {"0": ColwiseParallel()}),
        pagoda.AdamW(),
        mesh=mesh,
        precision="bf16",
    ),
}


def refuse(out: Path) -> dict[str, str]:
    """What wrap says of what it does not support."""
    mesh = pagoda.open_mesh(tensor_parallel=2)
    return {name: refusal(partial(wrap, mesh)) for name, wrap in REFUSED.items()}
