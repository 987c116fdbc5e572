"""What needs a GPU, on a stand-in for one: the same bits in every placement, no race between streams, no leak."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cuda_stand_in.build import build, missing

TESTS = Path(__file__).parent
TRAIN_ON_RANKS = str(TESTS / "cuda_stand_in" / "train_on_ranks.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}:{TESTS.parent / 'benchmarks'}"}

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build()


def run(*arguments: str, timeout: float = 300) -> str:
    """What a process with the stand-in prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT, cwd=TESTS.parent
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def gpu_tests(*chosen: str, timeout: float = 300) -> str:
    options = ("-p", "no:cacheprovider", "-p", "cuda_stand_in.plugin", "-m", "gpu")
    return run("-m", "pytest", *options, "tests/runtime/test_cuda.py", *chosen, timeout=timeout)


SEES = """
from cuda_stand_in.cuda import install
native = install()
import pytest, torch

x = torch.arange(6.0, device="cuda").view(2, 3)
x.t().mul_(2)
assert (x @ x.t()).tolist() == [[20.0, 56.0], [56.0, 200.0]]
layer = torch.nn.Linear(3, 2).cuda()
layer(x).sum().backward()
assert layer.weight.grad.is_cuda
assert torch.equal(layer.weight.grad.cpu(), x.cpu().sum(0).expand(2, 3))
with pytest.raises(RuntimeError, match="same device"):
    x + torch.ones(2, 3)
with pytest.raises(torch.OutOfMemoryError):
    torch.empty(2 * native.DEVICE_BYTES, dtype=torch.uint8, device="cuda")
assert native.take_races() == []

side, event = torch.cuda.Stream(), torch.cuda.Event()
def on_side(tensor):
    with torch.cuda.stream(side):
        tensor.add_(1)

x.mul_(2)
on_side(x)
assert any("write by aten::add on stream 1 is not ordered after" in race for race in native.take_races())
event.record(side)
torch.cuda.current_stream().wait_event(event)
x.mul_(2)  # ordered by the event
assert native.take_races() == []
event.record()
event.synchronize()
on_side(x)  # ordered by the host, which has waited
assert native.take_races() == []
side.synchronize()

y = torch.ones(1000, device="cuda")
on_side(y.sum())  # a result that is freed while the side stream may still be at work on it ...
z = y.sum()       # ... is given to the stream that had it
assert native.take_races()
torch.cuda.synchronize()
native.take_races(), native.take_counts()

ram = torch.zeros(4)
ram.to("cuda")
ram.to("cuda", non_blocking=True)
ram.pin_memory().to("cuda", non_blocking=True).cpu()
assert native.take_counts() == {
    "h2d that waits": 1, "h2d of RAM that is not pinned": 1, "h2d": 1, "d2h that waits": 1
}
with pytest.raises(RuntimeError, match="record_stream"):
    x.record_stream(torch.Stream(stream_id=1, device_index=0, device_type=1))
import ctypes
print("seen", flush=True)
ctypes.string_at(x.data_ptr(), 1)
"""


def test_the_stand_in_sees_what_it_is_there_for() -> None:
    """The last thing that the script does is to read memory of the GPU as if it were RAM."""
    done = subprocess.run(
        [sys.executable, "-c", SEES], capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=TESTS.parent
    )
    assert "seen" in done.stdout, done.stderr[-3000:]
    assert done.returncode == -11


def test_placements_on_a_gpu_give_the_same_bits_without_a_race() -> None:
    placements = "users and llama and checkpoint and test_placement or test_nor_do_updates"
    assert "passed" in gpu_tests("-k", f"{placements} or refused or first_did_not and both or peak_memory")


STEPS = """
from cuda_stand_in.cuda import install
native = install()
import sys
from pathlib import Path
import pytest, torch, pagoda
from runtime.test_cuda import memory, on_gpu
from zoo import Recipe, batch, loss_of

for placement in ("few", "ssd", "both", "home"):
    recipe = Recipe("llama")
    tiers = memory(placement, Path(sys.argv[1]), recipe)
    with pagoda.init():
        model = recipe.build()
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=tiers, clip_grad_norm=1.0)
    inputs = on_gpu(batch("llama", torch.Generator().manual_seed(1)))
    for step in range(6):
        if step == 3:
            native.take_counts()
        loss_of(model(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    print(native.take_counts())
    with pytest.raises(pagoda.UsageError, match="outside the forward.*gathered"):
        torch.nn.init.zeros_(next(model.parameters()))
    optimizer.close()
"""


def test_a_step_copies_pinned_memory_alone_and_waits_for_no_copy(tmp_path: Path) -> None:
    lines = run("-c", STEPS, str(tmp_path)).splitlines()
    assert len(lines) == 4
    for counts in map(ast.literal_eval, lines):
        assert counts.pop("aten::_local_scalar_dense", 0) <= 3  # transformers looks into each forward's positions
        assert counts["d2h"] > 0
        assert set(counts) <= {"h2d", "d2h"}


BENCHMARK = """
from cuda_stand_in.cuda import install
native = install()
import sys
from pathlib import Path
import gpu
import gpu_suite.common as common
import pagoda.calibrate.gpu as calibrate

gpu.REAL = common.SMOKE
common._ACTIVATIONS = native.DEVICE_BYTES - (40 << 20)
calibrate._TOKENS, calibrate._WIDTH = 32, 64
sections = [name for name in gpu.SECTIONS if name not in ("copies", "baselines")]  # which need a profiler, and NCCL
gpu.main(tuple(sections), host="256MiB", ssd=Path(sys.argv[1]), out=Path(sys.argv[1]) / "gpu.json")
print(native.take_races())
"""


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_runs_on_it(tmp_path: Path) -> None:
    assert run("-c", BENCHMARK, str(tmp_path)).splitlines()[-1] == "[]"
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["largest"]["falling"]
    assert found["largest_8bit"]["within_plan"]
    assert found["bits"]["AdamW, bf16"] == 0


TRAIN = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from cuda_stand_in.cuda import install
native = install()
import sys
from pagoda.cli import main
code = main(sys.argv[1:])
print(native.take_races())
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--speculate", "True"),
        ("--update", "async", "--max-staleness", "2", "--clip-grad-norm", "None"),
        ("--activations", "offload", "--precision", "fp16"),
        ("--optimizer", "adafactor", "--chunked-loss", "True", "--batch-tiles", "2"),
        ("--accumulation-steps", "2", "--gradients", "fp32", "--tile-limit", "100KB"),
    ],
    ids=lambda options: options[0],
)
def test_the_program_trains_on_it_in_every_mode(options: tuple[str, ...], tmp_path: Path) -> None:
    sizes = ("--memory.device", "24MiB", "--memory.host", "256MiB", "--memory.ssd", f"{tmp_path}:512MiB")
    shape = ("--model", "gpt-2x64", "--batch-size", "2", "--seq-len", "32", "--steps", "4")
    said = run("-c", TRAIN, "train", *shape, *sizes, "--out", str(tmp_path / "run"), *options)
    assert said.splitlines()[-1] == "[]"


def train_on(ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """What each rank says at the end of each model."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    said = [line for line in run(*launcher, TRAIN_ON_RANKS, *arguments).splitlines() if line.startswith("{")]
    assert len(said) == ranks * len(arguments) // 2
    return [json.loads(line) for line in said]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_that_send_from_gpu_to_gpu_give_the_bits_of_one_without_a_race(stage: int) -> None:
    """And experts on the GPUs of two ranks get their tokens."""
    (alone,) = train_on(1, "llama", "0")
    said = train_on(2, "llama", str(stage), "moe", "0")
    assert [rank["races"] for rank in said] == [[]] * 4
    assert [rank["weights"] for rank in said if rank["model"] == "llama"] == [alone["weights"]] * 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_that_needs_a_gpu_passes_on_the_stand_in() -> None:
    assert "passed" in gpu_tests("-k", "not profile", timeout=1700)  # it has no profiler
