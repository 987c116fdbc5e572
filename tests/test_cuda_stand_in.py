"""What needs a GPU, on a stand-in for one: the same bits in every placement, no race between streams, no leak."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_placements_on_a_gpu_give_the_same_bits_without_a_race_and_a_step_waits_for_no_copy() -> None:
    placements = "users and llama and checkpoint and test_placement or test_nor_do_updates"
    chosen = f"{placements} or refused or first_did_not and both or peak_memory or waits_for_no_copy"
    assert "passed" in gpu_tests("tests/cuda_stand_in/steps.py", "-k", chosen)


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


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_that_send_from_gpu_to_gpu_give_the_bits_of_one_without_a_race(stage: int) -> None:
    """And experts on the GPUs of two ranks get their tokens."""
    models = ("llama", "alone", "llama", str(stage), "moe", "0")
    lines = run("-m", "torch.distributed.run", "--nproc-per-node", "2", TRAIN_ON_RANKS, *models).splitlines()
    said = [json.loads(line) for line in lines if line.startswith("{")]
    assert [of_rank["races"] for of_rank in said] == [[]] * 6
    assert len({of_rank["weights"] for of_rank in said if of_rank["model"] == "llama"}) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_that_needs_a_gpu_passes_on_the_stand_in() -> None:
    assert "passed" in gpu_tests("-k", "not profile", timeout=1700)  # it has no profiler
