"""Models that torch's tensor parallelism divides, trained in Pagoda's pages and without them: scenarios of a rank."""

import os
from collections.abc import Callable, Sequence
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

from .scenarios import RULES, in_pages, load, place, save, state_of


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


class PlainAdamW:
    """AdamW with Pagoda's arithmetic on tensors that torch alone holds, with the methods of Pagoda's optimizer."""

    def __init__(self, model: nn.Module, rule: pagoda.AdamW) -> None:
        self.rule = rule
        self.params = list(model.parameters())
        self.steps = 0
        self.stats = SimpleNamespace(grad_norm=None, faults=0, bytes_moved={})
        self.states = []
        self.gradients: list[torch.Tensor | None] = [None] * len(self.params)
        for param in self.params:
            part = part_of(param).view(-1)
            own = {spec.name: torch.zeros(spec.elements(part.numel()), dtype=spec.dtype) for spec in rule.own_states()}
            self.states.append({"weight": part, **own})

    @torch.no_grad()
    def take(self) -> None:
        """Add the gradients of a micro-batch to those before; torch would add up partial sums of ranks first."""
        for index, param in enumerate(self.params):
            grad = param.grad
            if isinstance(grad, DTensor):
                grad = grad.redistribute(placements=param.placements).to_local()
            before = self.gradients[index]
            self.gradients[index] = grad if before is None else before + grad
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for gradient, states in zip(self.gradients, self.states, strict=True):
            assert gradient is not None
            reference.update(self.rule, states, gradient.reshape(-1), self.rule.scalars(self.steps))

    def zero_grad(self) -> None:
        self.gradients = [None] * len(self.params)


class PlainTensorRule(PlainAdamW):
    """A rule that takes whole parameters, in fp32, on tensors that torch alone holds: every rank updates all of each
    parameter, and keeps its part."""

    def __init__(self, model: nn.Module, rule: Any) -> None:
        self.rule = rule
        self.params = list(model.parameters())
        self.steps = 0
        self.stats = SimpleNamespace(grad_norm=None, faults=0, bytes_moved={})
        self.states = []
        self.gradients: list[torch.Tensor | None] = [None] * len(self.params)
        for name, param in model.named_parameters():
            own = {}
            for spec in rule.own_states():
                shape = param.shape if spec.shape_of is None else spec.shape_of(name, tuple(param.shape))
                if shape is not None:
                    own[spec.name] = torch.zeros(shape, dtype=spec.dtype)
            self.states.append({"weight": whole_of(param).clone(), **own})

    @torch.no_grad()
    def take(self) -> None:
        for index, param in enumerate(self.params):
            assert param.grad is not None
            grad, before = whole_of(param.grad), self.gradients[index]
            self.gradients[index] = grad if before is None else before + grad
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for param, gradient, states in zip(self.params, self.gradients, self.states, strict=True):
            assert gradient is not None
            whole = states["weight"]
            self.rule.update(self.steps, whole, gradient, {key: s for key, s in states.items() if key != "weight"})
            if isinstance(param, DTensor):
                whole = DTensor.from_local(whole, param.device_mesh, [Replicate()])
                whole = whole.redistribute(placements=param.placements).to_local()
            part_of(param).copy_(whole)


@torch.no_grad()
def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or all of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def plain(name: str, mesh: pagoda.Mesh, precision: str, rule: str) -> tuple[nn.Module, PlainAdamW]:
    """A divided model in torch's own memory."""
    model = build(name)
    masters = {
        key: part_of(param).flatten().clone() for key, param in divide(build(name), name, mesh).named_parameters()
    }
    if precision == "bf16":
        for param in model.parameters():
            param.data = param.data.bfloat16()
    model = divide(model, name, mesh)
    made = RULES[rule]()
    optimizer = PlainTensorRule(model, made) if isinstance(made, TensorRule) else PlainAdamW(model, made)
    if precision == "bf16":
        for (key, _), states in zip(model.named_parameters(), optimizer.states, strict=True):
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
            if isinstance(optimizer, PlainAdamW):
                optimizer.take()
        if step >= steps.start:
            take_step(optimizer, outcome)
    return outcome


def wrapped(
    out: Path,
    name: str,
    tensor: int,
    precision: str = "bf16",
    kind: str = "ram",
    on_meta: bool = False,
    rule: str | None = None,
    **settings: Any,
) -> tuple[nn.Module, Any, pagoda.Mesh]:
    """A divided model in pages; `rule` is the name of one, AdamW where it is left out."""
    rule = RULES[rule or "adamw"]()
    chosen = {key: settings.pop(key) for key in ("stage", "replicas", "expert_parallel") if key in settings}
    by_torch = settings.pop("by_torch", False)
    if "tile_limit" in settings:
        settings["tiles"] = pagoda.Tiles(tile_limit=settings.pop("tile_limit"))
    if settings.pop("partition", False):
        settings["activations"] = pagoda.Activations(settings["activations"], partition_activations=True)
    mesh = pagoda.open_mesh(tensor_parallel=tensor, **chosen)
    if on_meta:
        torch.manual_seed(mesh.rank)
        with pagoda.init():
            model = Mixer()
    else:
        model = build(name)
    if by_torch:
        of_torch = init_device_mesh("cpu", (mesh.ranks.data_parallel, tensor), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(model, of_torch["tp"], _llama_plan())
    else:
        model = divide(model, name, mesh)
    given = of_torch if by_torch else mesh
    model, optimizer = in_pages(model, rule, kind, out, given, precision=precision, **settings)
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
    precision: Any = "bf16",
    larger: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Train in pages."""
    model, optimizer, mesh = wrapped(out, name, tensor, precision, **settings)
    outcome = take_steps(name, model, optimizer, mesh, parts, range(steps), larger)
    plan = pagoda.plan_of(model)
    result = {
        "losses": outcome.losses,
        "norms": outcome.norms,
        "kept": optimizer.stats.activation_bytes.kept,
        "hidden": BATCH * LENGTH * 64 * larger * (2 if precision == "bf16" else 4),
        "peak": optimizer.stats.peak_bytes,
        "plan_peak": dict(plan.peak_bytes),
        "on_device": sorted(plan.placement.on_device),
        "modules": [unit.module for unit in plan.units],
        "lines": {tier: dict(lines) for tier, lines in plan.bytes.items()},
        "moved": outcome.moved,
        "full": pagoda.full_state_dict(model, all_ranks=True),
        "parts": parts_of(model),
        **state_of(model, optimizer),
    }
    optimizer.close()
    return result


def train_case(out: Path, name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Train with the settings of a row of the matrix."""
    precision, _, gradients = case["numbers"].partition("+")
    announced = case["update"] in ("announced", "speculate")
    return train_divided(
        out,
        name,
        case["tensor"],
        parts=int(os.environ["WORLD_SIZE"]) // case["tensor"],
        precision=pagoda.MixedPrecision(precision, gradients or None),  # type: ignore[arg-type]
        rule=case["rule"],
        kind=case["place"],
        stage=case["stage"],
        replicas=case["replicas"],
        expert_parallel=case["experts"],
        activations=case["activations"],
        partition=case["partition"],
        clip_grad_norm=case["clip"],
        accumulation_steps=1 if announced else None,
        update=pagoda.Updates(
            "async" if case["update"] == "async" else "sync",
            max_staleness=2,
            speculate=True if case["update"] == "speculate" else None,
        ),
        tiles={"batch": pagoda.Tiles(batch_tiles=2), "layers": pagoda.Tiles(tile_limit="16KiB")}.get(case["tiles"]),
    )


def train_plain(
    out: Path, name: str, tensor: int, parts: int, steps: int = 3, precision: str = "bf16", rule: str = "adamw"
) -> dict[str, Any]:
    """Train by torch alone."""
    mesh = pagoda.open_mesh(tensor_parallel=tensor)
    model, optimizer = plain(name, mesh, precision, rule)
    outcome = take_steps(name, model, optimizer, mesh, parts, range(steps))
    return {
        "losses": outcome.losses,
        "parts": parts_of(model),
    }


def save_divided(
    out: Path, name: str, tensor: int, directory: str, parts: int = 1, way: str = "checkpoint", **settings: Any
) -> dict[str, Any]:
    """Train two steps, save, and go on for one; what was saved, and the losses after it."""
    model, optimizer, mesh = wrapped(out, name, tensor, **settings)
    take_steps(name, model, optimizer, mesh, parts, range(2))
    saved = state_of(model, optimizer)
    save(model, optimizer, directory, way)
    after = take_steps(name, model, optimizer, mesh, parts, range(2, 3))
    optimizer.wait_for_checkpoint()
    optimizer.close()
    return {"losses": after.losses, **saved}


def resume_divided(
    out: Path, name: str, tensor: int, directory: str, parts: int = 1, way: str = "checkpoint", **settings: Any
) -> dict[str, Any]:
    """Load what `save_divided` has saved, and take the step after it."""
    model, optimizer, mesh = wrapped(out, name, tensor, **settings)
    assert load(model, optimizer, directory, way) == {"step": 2}
    loaded = state_of(model, optimizer)
    after = take_steps(name, model, optimizer, mesh, parts, range(2, 3))
    optimizer.close()
    return {"losses": after.losses, **loaded}


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
        model, pagoda.AdamW(lr=1e-2), memory=memory, mesh=mesh, activations=activations, clip_grad_norm=0.5
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
    assert chosen is not None
    result = {
        "losses": outcome.losses,
        "norms": outcome.norms,
        "weights": parts_of(model),
        "policies": [str(policy) for policy in chosen.policies],
        "peak": chosen.peak.kept,
        "kept": optimizer.stats.activation_bytes.kept,
    }
    optimizer.close()
    return result


def change_divided(out: Path, name: str, rule: str) -> dict[str, Any]:
    """Read and change a divided parameter, and load a state dict of plain tensors."""
    model, optimizer, _ = wrapped(out, name, 2, rule=rule)
    before = state_of(model, optimizer)["weights"]
    full = pagoda.full_state_dict(model)
    export(model, out / "exported")
    with pagoda.gathered(model.head, modify=True), torch.no_grad():
        shown = model.head.weight.full_tensor()
        model.head.weight.mul_(2)
    doubled = state_of(model, optimizer)["weights"]
    model.load_state_dict(before)
    after = state_of(model, optimizer)["weights"]
    optimizer.close()
    return {"before": before, "full": full, "shown": shown, "doubled": doubled, "after": after}


def drawn(out: Path, tensor: int) -> dict[str, Any]:
    """The weights of a model that was built on meta and divided there, with another seed on every rank."""
    model, optimizer, _ = wrapped(out, "mixer", tensor, on_meta=True)
    found = state_of(model, optimizer)["weights"]
    optimizer.close()
    return found


REFUSED: dict[str, Callable[[pagoda.Mesh], Any]] = {
    "not divided": lambda mesh: pagoda.wrap(build("mixer"), pagoda.AdamW(), mesh=mesh),
    "other mesh": lambda mesh: pagoda.wrap(
        divide(build("mixer"), "mixer", mesh), pagoda.AdamW(), mesh=pagoda.open_mesh()
    ),
    "uneven": lambda mesh: pagoda.wrap(
        parallelize_module(nn.Sequential(nn.Linear(4, 5)), mesh.tensor, {"0": ColwiseParallel()}),
        pagoda.AdamW(),
        mesh=mesh,
    ),
}


def refuse(out: Path) -> dict[str, str]:
    """What wrap says of what it does not support."""
    mesh = pagoda.open_mesh(tensor_parallel=2)
    said = {}
    for name, wrap in REFUSED.items():
        try:
            wrap(mesh)
            said[name] = "wrapped"
        except pagoda.ConfigError as error:
            said[name] = str(error)
    return said
