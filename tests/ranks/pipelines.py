"""Models whose layers are the stages of a pipeline, run by torch's schedules: scenarios of a rank."""

import io
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from zoo import BATCH, LENGTH, VOCABULARY, Outcome, assert_equal, take_step

import pagoda
from pagoda.models import build_model

from .scenarios import in_pages, left_behind, refusal, save_or_resume, settings_of, state_of as whole_state_of

PAGE, WIDTH, BLOCKS, MICRO_BATCHES = 4096, 64, 8, 4
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class Block(nn.Module):
    """A layer with parts, and a buffer in which the model counts its forwards."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.mixture: nn.Module | None = None
        if experts:
            config = MixtralConfig(num_local_experts=experts, intermediate_size=48, hidden_size=WIDTH)
            config._experts_implementation = "eager"
            self.mixture = MixtralSparseMoeBlock(config)
            for param in self.mixture.parameters():
                nn.init.normal_(param, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x if self.mixture is None else x + self.mixture(x)


class Part(nn.Module):
    """Some adjoining layers of a model, under the names that they have in the whole."""

    def __init__(self, numbers: range, experts: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block(experts) for number in range(BLOCKS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for number in set(range(BLOCKS)) - set(numbers):
            del self.blocks[str(number)]
        if 0 not in numbers:
            self.embed = None
        if BLOCKS - 1 not in numbers:
            self.head = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            block.calls += 1
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(mesh: pagoda.Mesh, schedule: str, experts: int = 0) -> tuple[nn.Module, list[Part]]:
    """What this rank wraps, and its parts, of which there are two where stages are interleaved."""
    chunks = 2 if schedule == "interleaved" else 1
    size = BLOCKS // (mesh.ranks.pipeline_parallel * chunks)
    first = [(chunk * mesh.ranks.pipeline_parallel + mesh.pipeline_stage) * size for chunk in range(chunks)]
    parts = [Part(range(start, start + size), experts) for start in first]
    if mesh.ranks.tensor_parallel > 1:
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parts = [parallelize_module(part, mesh.tensor, plan) for part in parts]
    return (parts[0] if chunks == 1 else nn.ModuleList(parts)), parts


def wrapped(
    out: Path,
    schedule: str = "1f1b",
    kind: str = "ram",
    divided: dict[str, Any] | None = None,
    by_torch: bool = False,
    experts: int = 0,
    **settings: Any,
) -> tuple[nn.Module, list[Part], Any, pagoda.Mesh]:
    """A stage in pages; with `by_torch`, torch's mesh says what is divided."""
    mesh = pagoda.open_mesh(**(divided or {}))
    given = init_device_mesh("cpu", (2, mesh.size), mesh_dim_names=("pp", "dp")) if by_torch else mesh
    model, parts = build(mesh, schedule, experts)
    settings = settings_of(**settings)
    _, optimizer = in_pages(model, settings.pop("optimizer"), kind, out, given, **settings)
    return model, parts, optimizer, mesh


def schedule_of(
    name: str, parts: list[Part], mesh: pagoda.Mesh, loss: Callable[..., torch.Tensor], scale_grads: bool
) -> Any:
    """torch's schedule over this rank's parts."""
    count = mesh.ranks.pipeline_parallel
    stages = [
        PipelineStage(
            part, chunk * count + mesh.pipeline_stage, count * len(parts), torch.device("cpu"), group=mesh.pipeline
        )
        for chunk, part in enumerate(parts)
    ]
    of = stages if name == "interleaved" else stages[0]
    return SCHEDULES[name](of, MICRO_BATCHES, loss_fn=loss, scale_grads=scale_grads)


def data_of(generator: torch.Generator, mesh: pagoda.Mesh) -> torch.Tensor:
    """The micro-batches of a step that this rank's pipeline takes, one after another."""
    groups = mesh.ranks.data_parallel
    ids = torch.randint(VOCABULARY, (groups, MICRO_BATCHES * BATCH, LENGTH), generator=generator)
    return ids[mesh.rank // mesh.ranks.tensor_parallel]


def take_steps(
    name: str, parts: list[Part], optimizer: Any, mesh: pagoda.Mesh, steps: range, scale_grads: bool = False
) -> Outcome:
    """Steps of a pipeline. Without `scale_grads`, the loss is divided instead."""
    outcome, generator = Outcome(), torch.Generator().manual_seed(1)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return optimizer.scale(loss_of(logits, labels) / (1 if scale_grads else MICRO_BATCHES))

    last = mesh.pipeline_stage == mesh.ranks.pipeline_parallel - 1
    schedule = schedule_of(name, parts, mesh, loss, scale_grads)
    for step in range(steps.stop):
        ids = data_of(generator, mesh)
        if step not in steps:
            continue
        losses: list[torch.Tensor] = []
        scale = optimizer._engine.stepper.scaler.scale
        given = (ids,) if mesh.pipeline_stage == 0 else ()
        schedule.step(*given, **({"target": ids, "losses": losses} if last else {}))
        outcome.losses += [each.item() / scale for each in losses]
        take_step(optimizer, outcome)
    return outcome


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Weights and moments of this stage, by the names of the whole model."""
    names = [name.lstrip("01.") for name, _ in model.named_parameters()]
    state = whole_state_of(model, optimizer)
    return {
        "weights": {name.lstrip("01."): value for name, value in state["weights"].items()},
        "states": {names[index]: entry for index, entry in state["states"].items()},
    }


def joined(results: list[dict[str, Any]], what: str) -> dict[str, Any]:
    """Of all stages, without the counts of their calls."""
    return {name: v for result in results for name, v in result[what].items() if not name.endswith("calls")}


def change_gradients(optimizer: Any, *_: Any) -> None:
    """Read and write each gradient as a tensor."""
    for param in optimizer.param_groups[0]["params"]:
        largest = param.grad.abs().max()
        param.grad.clamp_(-0.5 * largest, 0.5 * largest)[0] *= 0.5
        param.grad = param.grad - param.grad.mean()


def train_pipeline(
    out: Path,
    schedule: str = "1f1b",
    steps: int = 3,
    scale_grads: bool = False,
    changes: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train a stage in pages. `changes`: the values of gradients are changed before each step."""
    model, parts, optimizer, mesh = wrapped(out, schedule, **settings)
    if changes:
        optimizer.register_step_pre_hook(change_gradients)
    outcome = take_steps(schedule, parts, optimizer, mesh, range(steps), scale_grads)
    return left_behind(model, optimizer, outcome, state_of)


def train_alone(
    out: Path,
    groups: int = 1,
    steps: int = 3,
    divided: dict[str, Any] | None = None,
    experts: int = 0,
    changes: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train the whole model without stages, in RAM, on the micro-batches of so many pipelines, of which each rank takes
    its share."""
    mesh = pagoda.open_mesh(**(divided or {}))
    model = Part(range(BLOCKS), experts)
    memory = pagoda.Memory(host="64MiB", page_size=PAGE, unit_limit="64KiB")
    model, optimizer = pagoda.wrap(model, memory=memory, mesh=mesh, **{"precision": "bf16", **settings_of(**settings)})
    if changes:
        optimizer.register_step_pre_hook(change_gradients)
    generator, outcome = torch.Generator().manual_seed(1), Outcome()
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (groups, MICRO_BATCHES * BATCH, LENGTH), generator=generator)
        for part in ids[mesh.rank :: mesh.size].flatten(0, 1).split(BATCH):
            loss = loss_of(model(part), part) / MICRO_BATCHES
            optimizer.scale(loss / (groups // mesh.size)).backward()
            outcome.losses.append(loss.item())
        take_step(optimizer, outcome)
    return left_behind(model, optimizer, outcome, state_of)


def save_pipeline(
    out: Path, directory: str, schedule: str = "1f1b", way: str = "checkpoint", resumes: bool = False, **settings: Any
) -> dict[str, Any]:
    """As `save_or_resume`, but one rank without a pipeline takes no steps."""
    model, parts, optimizer, mesh = wrapped(out, schedule, **settings)
    take = partial(take_steps, schedule, parts, optimizer, mesh) if mesh.everyone.size > 1 else lambda _: Outcome()
    return save_or_resume(model, optimizer, take, directory, way, resumes, state_of)


resume_pipeline = partial(save_pipeline, resumes=True)


def stage_not_finite(out: Path) -> str:
    """The error of a step in which a gradient of the second stage is NaN: no stage changes a weight."""
    model, parts, optimizer, mesh = wrapped(out, divided={"pipeline_parallel": 2})
    before = state_of(model, optimizer)
    last = parts[0].blocks["7"].up.weight if mesh.pipeline_stage == 1 else torch.ones(1, requires_grad=True)
    spoiling = last.register_hook(lambda grad: grad * torch.nan)
    error = refusal(partial(take_steps, "1f1b", parts, optimizer, mesh, range(1)))
    for of in "weights", "states":
        assert_equal(joined([state_of(model, optimizer)], of), joined([before], of))
    spoiling.remove()
    optimizer.zero_grad()
    take_steps("1f1b", parts, optimizer, mesh, range(1))
    optimizer.close()
    return error


def refuse_pipelines(out: Path) -> dict[str, str]:
    """Errors of what two stages cannot do."""
    mesh = pagoda.open_mesh(pipeline_parallel=2)

    def wrap(model: nn.Module | None = None, lr: float = 1e-2, host: Any = "64MiB", **settings: Any) -> Any:
        memory = pagoda.Memory(host=host, page_size=PAGE, unit_limit="64KiB")
        model = build(mesh, "1f1b")[0] if model is None else model
        return pagoda.wrap(model, pagoda.AdamW(lr=lr), memory=memory, mesh=mesh, **{"precision": "bf16", **settings})

    said = {
        "names": refusal(lambda: wrap(nn.Linear(4, 4))),
        "settings": refusal(lambda: wrap(lr=1e-2 * (1 + mesh.pipeline_stage))),
        "memory": refusal(lambda: wrap(host=PAGE if mesh.pipeline_stage == 1 else "64MiB")),
    }
    model, parts, optimizer, mesh = wrapped(out, divided={"pipeline_parallel": 2})

    def torchs_clipping() -> None:
        schedule = schedule_of("1f1b", parts, mesh, loss_of, scale_grads=True)
        ids = data_of(torch.Generator().manual_seed(1), mesh)
        schedule.step(
            *((ids,) if mesh.pipeline_stage == 0 else ()), **({"target": ids} if mesh.pipeline_stage == 1 else {})
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    said["clipping"] = refusal(torchs_clipping)
    optimizer.zero_grad()
    said["points"] = refusal(
        optimizer.step if mesh.pipeline_stage == 0 else partial(optimizer.save_checkpoint, out / "never")
    )
    optimizer.close()
    return said


def share_experts(out: Path, name: str) -> list[str]:
    """The errors of two ranks of a stage that would need weights, or experts, of each other."""

    def wrap(**divided: int) -> None:
        mesh = pagoda.open_mesh(pipeline_parallel=2, **divided)
        model = nn.ModuleDict({f"of-stage-{mesh.pipeline_stage}": build_model(name, seq_len=LENGTH)})
        pagoda.wrap(model, pagoda.AdamW(), memory=pagoda.Memory(host="1GiB"), mesh=mesh, precision="bf16")

    return [refusal(partial(wrap, stage=2)), refusal(partial(wrap, expert_parallel=2))]


def run_example(out: Path, name: str, words: list[str]) -> str:
    """Run a script of `examples/` in a directory; what it prints."""
    shown = io.StringIO()
    os.chdir(out)
    sys.argv = [name, *words]
    with redirect_stdout(shown):
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / f"{name}.py"), run_name="__main__")
    return shown.getvalue()
