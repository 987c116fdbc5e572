"""A run resumed from a checkpoint goes on bit for bit, whatever tiers, pages and units it had and gets."""

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from zoo import PAGE, RESIDENT, UNIT_LIMIT, VOCABULARY, Batch, Recipe, assert_equal, batch, loss_of, losses_of

import pagoda
from pagoda.checkpoint.directory import MANIFEST, write_manifest
from pagoda.optimizer import PagedOptimizer

HALF = 2
"""Steps before and after the checkpoint."""


class BatchNormNet(nn.Module):
    """Buffers that training changes: running statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8 * 36, VOCABULARY)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.features(images.to(self.head.weight.dtype))
        return nn.functional.cross_entropy(self.head(hidden.flatten(1)).float(), labels)


def build(recipe: Recipe, seed: int) -> nn.Module:
    """The recipe's model; another seed gives other weights, which a checkpoint must replace."""
    if recipe.model != "batch_norm":
        model = recipe.build()
        torch.manual_seed(seed)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(seed * torch.randn_like(param))
        return model
    torch.manual_seed(seed)
    return BatchNormNet().train()


def data(recipe: Recipe, step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    return batch("conv" if recipe.model == "batch_norm" else recipe.model, generator)


@dataclass
class Run:
    """A model in training with an LR schedule, and what it has shown."""

    recipe: Recipe
    memory: pagoda.Memory
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model: nn.Module
        self.optimizer: PagedOptimizer
        self.model, self.optimizer = pagoda.wrap(
            build(self.recipe, self.seed),
            pagoda.AdamW(lr=1e-2, weight_decay=0.1, moments=self.recipe.moments),
            memory=self.memory,
            precision=self.recipe.precision,
            max_grad_norm=self.recipe.clip,
            **self.options,
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=10)

    def train(self, first: int, last: int) -> "Run":
        for step in range(first, last):
            loss = loss_of(self.model(**data(self.recipe, step)))
            loss.backward()
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.losses.append(loss.item())
        return self

    def save(self, directory: Path, **how: Any) -> None:
        self.optimizer.save_checkpoint(directory, {"schedule": self.schedule.state_dict()}, **how)

    def load(self, directory: Path) -> "Run":
        """Its losses begin anew."""
        self.schedule.load_state_dict(self.optimizer.load_checkpoint(directory)["schedule"])
        self.losses, self.rates = [], []
        return self

    def goes_on(self) -> None:
        """The steps after the checkpoint are those of a run that was never interrupted."""
        self.train(HALF, 2 * HALF).finish().assert_continues_as(uninterrupted(self.recipe))

    def finish(self) -> "Result":
        result = Result(self.losses, self.rates, self.model.state_dict(), self.optimizer.state_dict())
        self.optimizer.close()
        return result


@dataclass(frozen=True)
class Result:
    """What two runs that are the same have in common."""

    losses: list[float]
    rates: list[float]
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, object]

    def assert_continues_as(self, whole: "Result") -> None:
        assert self.losses == whole.losses[-len(self.losses) :]
        assert self.rates == whole.rates[-len(self.rates) :]
        assert_same(self.weights, whole.weights)
        assert_same(self.optimizer, whole.optimizer)


def assert_same(mine: object, other: object, at: str = "") -> None:
    """Equal, and tensors bit for bit."""
    assert type(mine) is type(other), at
    if isinstance(mine, torch.Tensor):
        assert mine.dtype is other.dtype, at
        assert torch.equal(mine, other), at
    elif isinstance(mine, dict):
        assert mine.keys() == other.keys(), at
        for key, value in mine.items():
            assert_same(value, other[key], f"{at}/{key}")
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other), at
        for index, (one, two) in enumerate(zip(mine, other, strict=True)):
            assert_same(one, two, f"{at}/{index}")
    else:
        assert mine == other, at


Place = Callable[[Recipe, Path], pagoda.Memory]


def resident(_recipe: Recipe, _ssd: Path) -> pagoda.Memory:
    return RESIDENT


def on_ssd(recipe: Recipe, ssd: Path) -> pagoda.Memory:
    """As little RAM as there can be: everything is on SSD."""
    settings = {"ssd": str(ssd), "unit_limit": UNIT_LIMIT, "page_size": PAGE}
    with pytest.raises(pagoda.BudgetError) as refused:
        Run(recipe, pagoda.Memory(host=PAGE, **settings))
    return pagoda.Memory(host=refused.value.needed_bytes, **settings)


def arena(recipe: Recipe, ssd: Path) -> pagoda.Memory:
    return pagoda.Memory(device="cpu:300KiB", host="1MiB", ssd=str(ssd), unit_limit=UNIT_LIMIT, page_size=PAGE)


def other_pages(_recipe: Recipe, ssd: Path) -> pagoda.Memory:
    return pagoda.Memory(host="2MiB", ssd=str(ssd), unit_limit="40KiB", page_size=16384)


def one_unit(_recipe: Recipe, _ssd: Path) -> pagoda.Memory:
    return pagoda.Memory(host="64MiB", unit_limit="64MiB")


PLACES: dict[str, Place] = {place.__name__: place for place in (resident, on_ssd, arena, other_pages, one_unit)}
LLAMA = Recipe("llama", layers=3)
CASES = [
    (LLAMA, "on_ssd", "arena"),
    (LLAMA, "arena", "other_pages"),
    (Recipe("t5", frozen=True), "one_unit", "other_pages"),
    (Recipe("conv", clip=None, precision="fp32"), "other_pages", "one_unit"),
    (Recipe("batch_norm", clip=None, precision="fp32"), "resident", "on_ssd"),  # with dropout
]
SLOW = [
    (Recipe("llama", moments="bf16", precision="fp32"), "other_pages", "on_ssd"),
    (Recipe("t5", moments="8bit", frozen=True), "on_ssd", "other_pages"),
]


@cache
def uninterrupted(recipe: Recipe) -> Result:
    return Run(recipe, RESIDENT).train(0, 2 * HALF).finish()


def assert_resumes(directory: Path, memory: pagoda.Memory = RESIDENT, recipe: Recipe = LLAMA) -> None:
    """A run that had other weights goes on from a checkpoint."""
    Run(recipe, memory, seed=1).load(directory).goes_on()


@pytest.mark.parametrize(
    ("recipe", "before", "after"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=[f"{recipe.model}-{recipe.moments}-{one}-{two}" for recipe, one, two in (*CASES, *SLOW)],
)
def test_a_resumed_run_continues_bit_for_bit(recipe: Recipe, before: str, after: str, tmp_path: Path) -> None:
    saved = Run(recipe, PLACES[before](recipe, tmp_path)).train(0, HALF)
    saved.save(tmp_path / "step")
    saved.optimizer.close()
    torch.manual_seed(77)
    assert_resumes(tmp_path / "step", PLACES[after](recipe, tmp_path), recipe)


def test_a_run_that_went_on_can_go_back_and_drops_the_gradients_that_had_arrived(tmp_path: Path) -> None:
    run = Run(LLAMA, arena(LLAMA, tmp_path)).train(0, HALF)
    run.save(tmp_path / "step")
    run.train(HALF, HALF + 1)
    loss_of(run.model(**data(LLAMA, 50))).backward()
    run.load(tmp_path / "step").goes_on()


def test_extra_comes_back_as_it_was_and_must_be_json(tmp_path: Path) -> None:
    run = Run(Recipe("conv"), RESIDENT)
    extra = {"position": 12, "schedule": {"last_epoch": 3}, "names": ["é", None, 1.5]}
    run.optimizer.save_checkpoint(tmp_path / "step", extra=extra)
    run.optimizer.save_checkpoint(tmp_path / "plain")
    circle: list[Any] = []
    circle.append(circle)
    for bad in (torch.ones(2), {"deep": [object()]}, {(1, 2): 3}, circle):
        with pytest.raises(pagoda.ConfigError, match=r"extra\['bad'\] cannot be saved: .* Give text, numbers"):
            run.optimizer.save_checkpoint(tmp_path / "other", {"good": 1, "bad": bad}, replaces=[tmp_path / "step"])
    for bad in ("best", []):
        with pytest.raises(pagoda.ConfigError, match=r"extra is .*; it must be a dictionary"):
            run.optimizer.save_checkpoint(tmp_path / "other", extra=bad)
    run.optimizer.param_groups[0]["note"] = torch.ones(2)
    with pytest.raises(pagoda.ConfigError, match=r"param_groups\[0\]\['note'\] cannot be saved: "):
        run.optimizer.save_checkpoint(tmp_path / "other", wait=False)
    del run.optimizer.param_groups[0]["note"]
    assert {path.name for path in tmp_path.iterdir()} == {"step", "plain"}
    assert run.optimizer.load_checkpoint(tmp_path / "step") == extra
    assert run.optimizer.load_checkpoint(str(tmp_path / "plain")) == {}
    run.optimizer.close()


# --- refusals: the live model stays as it was ----------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the Llama after one step."""
    directory = tmp_path_factory.mktemp("saved") / "step"
    run = Run(LLAMA, RESIDENT).train(0, 1)
    run.save(directory)
    run.optimizer.close()
    return directory


def assert_refused_untouched(run: Run, directory: Path, message: str) -> None:
    """Loading fails with `message`, and training goes on as if it had not been tried."""
    run.train(0, HALF)
    generator = torch.get_rng_state()
    with pytest.raises(pagoda.CheckpointError, match=message):
        run.load(directory)
    assert torch.equal(torch.get_rng_state(), generator)
    run.goes_on()


def test_a_checkpoint_of_another_model_or_of_moments_kept_otherwise_is_refused(saved: Path) -> None:
    other, moments = (Run(recipe, RESIDENT) for recipe in (Recipe("conv"), Recipe("llama", moments="8bit")))
    assert_refused_untouched(other, saved, "does not belong to this model: only one of the two trains")
    assert_refused_untouched(moments, saved, "this run keeps .*exp_avg_sq_fp8.*precision, optimizer and moments of the")


def test_a_checkpoint_with_a_missing_or_cut_file_is_refused(saved: Path, tmp_path: Path) -> None:
    run = Run(LLAMA, RESIDENT)
    for number, name in enumerate((MANIFEST, "weight_low.safetensors", "buffers.safetensors")):
        missing, cut = tmp_path / f"missing-{number}", tmp_path / f"cut-{number}"
        for copy in (missing, cut):
            shutil.copytree(saved, copy)
        (missing / name).unlink()
        os.truncate(cut / name, (cut / name).stat().st_size // 2)
        for copy in (missing, cut):
            with pytest.raises(pagoda.CheckpointError, match=name):
                run.load(copy)
    assert_refused_untouched(run, missing, name)


def damaged(saved: Path, copy: Path, **changes: object) -> Path:
    """A copy of a checkpoint with something else in its manifest."""
    shutil.copytree(saved, copy)
    content = json.loads((copy / MANIFEST).read_text())
    for key, value in changes.items():
        del content[key]
        if value is not None:
            content[key] = value
    write_manifest(copy, {key: value for key, value in content.items() if key not in ("format", "version", "hash")})
    return copy


def test_a_manifest_with_values_that_cannot_be_used_is_refused(saved: Path, tmp_path: Path) -> None:
    content = json.loads((saved / MANIFEST).read_text())
    steps, rng, (group,) = content["steps"], content["rng"], content["param_groups"]
    cases: list[tuple[str, object]] = [
        *((key, None) for key in ("states", "steps", "param_groups", "rng", "extra")),
        ("steps", [1]),
        ("steps", {**steps, "model.norm.weight": -1}),
        ("steps", {**steps, "model.norm.weight": "1"}),
        ("steps", {name: count for name, count in steps.items() if name != "model.norm.weight"}),
        ("steps", {**steps, "model.other": 1}),
        ("param_groups", []),
        ("param_groups", ["group"]),
        ("param_groups", [group, group]),
        ("param_groups", [{**group, "params": [0]}]),
        ("param_groups", [{**group, "lr": "fast"}]),
        ("param_groups", [{**group, "betas": [0.9]}]),
        ("param_groups", [{key: value for key, value in group.items() if key != "eps"}]),
        ("rng", {**rng, "torch": "AAAA"}),
        ("rng", {**rng, "python": [3, [1, 2], None]}),
        ("rng", {**rng, "numpy": ["MT19937", [2**40], 0, 0, 0.0]}),
        ("rng", {"torch": rng["torch"]}),
    ]
    run = Run(LLAMA, RESIDENT)
    for number, (key, value) in enumerate(cases):
        copy = damaged(saved, tmp_path / f"step-{number}", **{key: value})
        with pytest.raises(pagoda.CheckpointError, match=rf"step-{number}.*({key}|random number|model)"):
            run.load(copy)
    assert_refused_untouched(run, copy, "random number generators cannot be restored")


def test_weights_of_another_dtype_and_moments_of_several_are_refused_and_no_file_stays_open(
    saved: Path, tmp_path: Path
) -> None:
    run = Run(LLAMA, RESIDENT)
    shutil.copytree(saved, tmp_path / "other")
    shutil.copytree(saved, tmp_path / "several")
    weights, moments = (safetensors.torch.load_file(saved / f"{of}.safetensors") for of in ("weight", "exp_avg"))
    name = "model.norm.weight"
    others = {**weights, name: weights[name].float()}
    safetensors.torch.save_file(others, tmp_path / "other" / "weight.safetensors")
    several = {**moments, name: moments[name].bfloat16()}
    safetensors.torch.save_file(several, tmp_path / "several" / "exp_avg.safetensors")
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(pagoda.CheckpointError, match=r"its exp_avg is \['torch\.bfloat16', 'torch\.float32'\]"):
        run.load(tmp_path / "several")
    assert len(os.listdir("/proc/self/fd")) == opened
    message = r"among its weight is torch\.float32 of shape .*, but torch\.bfloat16 of shape .* in the model"
    assert_refused_untouched(run, tmp_path / "other", message)


def test_gradients_that_had_arrived_outlive_a_refused_load(saved: Path, tmp_path: Path) -> None:
    expected = Run(LLAMA, RESIDENT).train(0, HALF).finish()
    run = Run(LLAMA, RESIDENT).train(0, HALF - 1)
    loss = loss_of(run.model(**data(LLAMA, HALF - 1)))
    loss.backward()
    with pytest.raises(pagoda.CheckpointError):
        run.load(damaged(saved, tmp_path / "step", rng=None))
    run.optimizer.step()
    result = run.finish()
    assert_same(result.weights, expected.weights)


class WithTable(nn.Module):
    """A linear layer beside a persistent buffer."""

    def __init__(self, buffer: torch.Tensor | None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", buffer)
        self.register_buffer("last", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.bfloat16()).float().sum()


Table = Callable[[torch.Tensor | None], tuple[nn.Module, PagedOptimizer]]


@pytest.fixture
def wrapped_table() -> Iterator[Table]:
    """Wraps a `WithTable` of a buffer."""
    with ExitStack() as stack:

        def make(buffer: torch.Tensor | None) -> tuple[nn.Module, PagedOptimizer]:
            torch.manual_seed(0)
            model, optimizer = pagoda.wrap(WithTable(buffer), pagoda.AdamW(), memory=RESIDENT, precision="bf16")
            stack.callback(optimizer.close)
            return model, optimizer

        yield make


@pytest.mark.parametrize(
    ("other", "told"),
    [(torch.zeros(2, 2), "size mismatch for table"), (None, "'table' is not in the model")],
    ids=["shape", "absent"],
)
def test_a_checkpoint_of_another_buffer_is_refused(
    other: torch.Tensor | None, told: str, wrapped_table: Table, tmp_path: Path
) -> None:
    wrapped_table(torch.ones(4))[1].save_checkpoint(tmp_path / "step")
    model, optimizer = wrapped_table(other)
    model.last.fill_(3)
    with pytest.raises(pagoda.CheckpointError, match=told):
        optimizer.load_checkpoint(tmp_path / "step")
    assert other is None or model.table.eq(0).all()
    assert model.last.eq(3).all(), "it was loaded, and the checkpoint refused"
    losses_of(lambda _: model(torch.ones(2, 8)), optimizer, 1)


def test_a_buffer_of_another_dtype_is_cast_with_a_warning_as_torch_does(
    wrapped_table: Table, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped_table(torch.full((4,), 2.5))[1].save_checkpoint(tmp_path / "step")
    model, optimizer = wrapped_table(torch.zeros(4, dtype=torch.int32))
    optimizer.load_checkpoint(tmp_path / "step")
    assert model.table.dtype is torch.int32
    assert model.table.eq(2).all()
    assert "'table' was saved as torch.float32, and load_state_dict() cast it to torch.int32" in caplog.text


class Changing(nn.Linear):
    """Its buffers change while it trains, and it has state that is in no buffer. `kind` is how."""

    def __init__(self, kind: str) -> None:
        super().__init__(8, 8)
        self.kind, self.calls = kind, 0
        self.register_buffer("seen", None if kind == "none" else torch.zeros(0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.register_buffer("gone", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        dtype = torch.float64 if self.kind == "dtype" else torch.float32
        before = torch.zeros(0) if self.seen is None else self.seen
        self.seen = torch.cat([before.to(dtype), x.detach().flatten()[:2].to(dtype) + self.calls])
        if self.kind == "lazy" and not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(()))
        if self.kind == "removed":
            self.gone = None
        out = super().forward(x) * (1 + self.seen.mean().float() / 8 + self.calls / 16)
        if hasattr(self, "late"):
            self.late += out.detach().mean()
            out = out + self.late
        return out.square()

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "mean": torch.tensor(float(self.calls))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        assert state["mean"].item() == self.calls

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        self.seen = torch.zeros_like(state_dict[prefix + "seen"])
        if prefix + "late" in state_dict:
            self.register_buffer("late", torch.zeros(()))
        if prefix + "gone" not in state_dict:
            self.gone = None
        super()._load_from_state_dict(state_dict, prefix, *others)


@pytest.mark.parametrize("kind", ["shape", "dtype", "none", "lazy", "removed"])
def test_a_module_loads_buffers_that_changed_and_its_extra_state_by_its_own_methods(kind: str, tmp_path: Path) -> None:
    """A run goes on bit for bit, and the state dicts of plain PyTorch and of pages load each other."""

    def build() -> tuple[nn.Module, PagedOptimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(Changing(kind), nn.Linear(8, 4))
        return pagoda.wrap(model, pagoda.AdamW(lr=0.01), memory=RESIDENT, precision="fp32")

    def go(model: nn.Module, optimizer: PagedOptimizer, first: int) -> list[float]:
        return losses_of(lambda n: model(torch.full((2, 8), 0.1 * (first + n))).mean(), optimizer, 3)

    model, optimizer = build()
    go(model, optimizer, 0)
    optimizer.save_checkpoint(tmp_path / "step")
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in model.state_dict().items()
    }
    assert pagoda.full_state_dict(model).keys() == state.keys()
    expected, after = go(model, optimizer, 3), model.state_dict()
    optimizer.close()
    model, optimizer = build()
    optimizer.load_checkpoint(tmp_path / "step")
    assert model[0].scratch.eq(0).all()
    assert go(model, optimizer, 3) == expected
    assert model.state_dict().keys() == after.keys()
    assert torch.equal(model[0].seen, after["0.seen"])
    model.load_state_dict(state)
    assert model[0].calls == 3
    optimizer.close()


def test_a_buffer_that_no_new_model_would_take_is_warned_of_when_it_is_saved(
    wrapped_table: Table, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = wrapped_table(torch.ones(4))
    optimizer.save_checkpoint(tmp_path / "1")
    assert caplog.text == ""
    model.table = torch.ones(5)
    for name in "23":
        optimizer.save_checkpoint(tmp_path / name)
    assert caplog.text.count("'table' got another shape since wrap()") == 1


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    "buffer",
    [
        torch.empty(2, 0, 3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(4, dtype=torch.float8_e4m3fn),
        torch.arange(6.0).view(2, 3).T,
    ],
    ids=["empty", "conjugated", "float8", "transposed"],
)
def test_buffers_of_any_kind_are_saved_and_restored(buffer: torch.Tensor, wrapped_table: Table, tmp_path: Path) -> None:
    wrapped_table(buffer)[1].save_checkpoint(tmp_path / "step")
    model, optimizer = wrapped_table(torch.zeros_like(buffer))
    optimizer.load_checkpoint(tmp_path / "step")
    assert torch.equal(bits(model.table), bits(buffer))


@pytest.mark.parametrize(
    "buffer", [torch.ones(2, dtype=torch.complex128), torch.eye(3).to_sparse()], ids=["complex128", "sparse"]
)
def test_buffers_that_no_file_can_hold_are_refused_before_anything_is_written(
    buffer: torch.Tensor, wrapped_table: Table, tmp_path: Path
) -> None:
    kind = buffer.dtype if buffer.layout is torch.strided else buffer.layout
    _, optimizer = wrapped_table(buffer)
    with pytest.raises(pagoda.CheckpointError, match=rf"'table' is {kind}.*persistent=False"):
        optimizer.save_checkpoint(tmp_path / "deep" / "step")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("can_set", [False, True])
def test_state_of_a_module_that_could_not_be_resumed_is_refused(can_set: bool, tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return Path("of-a-class-that-torch-does-not-load") if can_set else 7

        if can_set:

            def set_extra_state(self, state: Any) -> None:
                pass

    _, optimizer = pagoda.wrap(nn.Sequential(Counting(8, 8)), pagoda.AdamW(), memory=RESIDENT)
    told = "'0._extra_state' of a module has objects" if can_set else r"'0' \(Counting\).*no set_extra_state\(\)"
    with pytest.raises(pagoda.CheckpointError, match=told):
        optimizer.save_checkpoint(tmp_path / "step")
    assert list(tmp_path.iterdir()) == []
    optimizer.close()


def test_states_that_a_library_adds_to_state_dicts_are_resumed(tmp_path: Path) -> None:
    """torchmetrics keeps persistent states in attributes, which are neither parameters nor buffers."""
    torchmetrics = pytest.importorskip("torchmetrics")

    def build() -> tuple[Any, PagedOptimizer]:
        model = nn.Sequential(nn.Linear(8, 8))
        model.metric = torchmetrics.MeanMetric()
        model.metric.persistent(True)
        return pagoda.wrap(model, pagoda.AdamW(), memory=RESIDENT)

    model, optimizer = build()
    model.metric.update(torch.tensor([2.0, 5.0]))
    optimizer.save_checkpoint(tmp_path / "step")
    optimizer.close()
    model, optimizer = build()
    optimizer.load_checkpoint(tmp_path / "step")
    assert model.metric.compute() == 3.5
    optimizer.close()


def test_half_updated_states_are_not_saved_and_a_checkpoint_replaces_them(saved: Path, tmp_path: Path) -> None:
    """With updates during backward, some units are ahead of the others until `step()`."""
    torch.manual_seed(0)
    model, optimizer = pagoda.wrap(
        LLAMA.build(), pagoda.AdamW(), memory=RESIDENT, gradient_accumulation_steps=1, precision="bf16"
    )
    loss_of(model(**data(LLAMA, 0))).backward()
    with pytest.raises(pagoda.UsageError, match=r"between backward.*Call optimizer\.step\(\) first"):
        optimizer.save_checkpoint(tmp_path / "step")
    assert list(tmp_path.iterdir()) == []
    optimizer.load_checkpoint(saved)
    assert all(param.grad is None for param in model.parameters())
    before = model.state_dict()
    optimizer.step()  # of the dropped backward, nothing is left
    assert_equal(model.state_dict(), before)
    loss_of(model(**data(LLAMA, 0))).backward()
    optimizer.step()
    optimizer.save_checkpoint(tmp_path / "step")
    optimizer.close()


def test_parameters_that_are_not_floating_point_are_saved_and_restored(tmp_path: Path) -> None:
    """Such as the codes of quantised weights; the module's class may have an initialiser for its others."""
    codes = torch.tensor([3, -7, 100], dtype=torch.int8)

    def build(codes: torch.Tensor) -> tuple[nn.Module, PagedOptimizer]:
        with pagoda.deferred_init():
            linear = nn.Linear(8, 8)
            linear.codes = nn.Parameter(codes, requires_grad=False)
        return pagoda.wrap(linear, pagoda.AdamW(), memory=RESIDENT, precision="bf16")

    _, optimizer = build(codes)
    optimizer.save_checkpoint(tmp_path / "step")
    optimizer.close()
    model, optimizer = build(torch.zeros_like(codes))
    optimizer.load_checkpoint(tmp_path / "step")
    with pagoda.gathered(model):
        assert torch.equal(model.codes, codes)
    optimizer.close()


def test_a_frozen_parameter_that_came_after_wrap_and_a_learning_rate_in_a_tensor_are_saved_and_restored(
    wrapped_table: Table, tmp_path: Path
) -> None:
    model, optimizer = wrapped_table(torch.zeros(3))
    model.late = nn.Parameter(torch.tensor([1.5, -2.0]), requires_grad=False)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    optimizer.save_checkpoint(tmp_path / "step")
    model.late.zero_()
    optimizer.load_checkpoint(tmp_path / "step")
    assert model.late.tolist() == [1.5, -2.0]
    assert optimizer.param_groups[0]["lr"] == 0.25


class Tiled:
    """A linear layer of four tiles in training, each tile a parameter of its own."""

    def __init__(self, tile_limit: str = "4KiB") -> None:
        torch.manual_seed(0)
        model, tiles = nn.Sequential(nn.Linear(64, 64, bias=False)), pagoda.Tiles(tile_limit=tile_limit)
        self.model, self.optimizer = pagoda.wrap(
            model, pagoda.AdamW(lr=0.1), memory=RESIDENT, precision="fp32", tiles=tiles
        )

    def step(self, seed: int, frozen: bool) -> list[float]:
        [*self.model.parameters()][1].requires_grad_(not frozen)
        values = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
        loss = self.model(values).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item()]


def test_tiles_that_were_frozen_alone_keep_their_own_number_of_updates(tmp_path: Path) -> None:
    whole, before, after = Tiled(), Tiled(), Tiled()
    losses = [whole.step(seed, frozen=seed < 3) for seed in range(5)]
    for seed in range(3):
        before.step(seed, frozen=True)
    before.optimizer.save_checkpoint(tmp_path / "saved")
    after.optimizer.load_checkpoint(tmp_path / "saved")
    assert [after.step(seed, frozen=False) for seed in (3, 4)] == losses[3:]
    assert_same(after.optimizer.state_dict()["state"], whole.optimizer.state_dict()["state"])

    other = Tiled("8KiB")
    with pytest.raises(pagoda.CheckpointError, match=r"from 0 to 3 updates.*tile_limit"):
        other.optimizer.load_checkpoint(tmp_path / "saved")
    with pytest.raises(pagoda.UsageError, match=r"from 0 to 3 updates.*use save_checkpoint"):
        pagoda.OptimizerState(before.optimizer).state_dict()
    for each in (whole, before, after, other):
        each.optimizer.close()


def test_a_state_dict_has_weights_of_one_step() -> None:
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    model, optimizer = pagoda.wrap(
        layers, pagoda.SGD(lr=0.1), memory=pagoda.Memory(host="1MiB", unit_limit="4KiB"), precision="fp32"
    )

    def train(*_: object) -> None:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()

    found: OrderedDict[str, torch.Tensor] = OrderedDict()
    for _ in range(2):
        train()
        model.state_dict(destination=found)
    assert torch.equal(found["0.weight"], model.state_dict()["0.weight"])
    layers[0].register_state_dict_post_hook(train)  # type: ignore[no-untyped-call]
    with pytest.raises(pagoda.UsageError, match="weights of different steps"):
        model.state_dict()
    optimizer.close()
