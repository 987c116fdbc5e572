"""What needs a GPU, on a stand-in for one: the same bits in every placement, no race between streams, no leak."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_stand_in.build import build, missing

TESTS = Path(__file__).parent
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


def gpu_tests(chosen: str, timeout: float = 300) -> str:
    """Run some tests in one process with the stand-in, its own first."""
    options = ("-p", "no:cacheprovider", "-p", "cuda_stand_in.plugin", "-m", "gpu", "-k", chosen)
    return run("-m", "pytest", *options, "tests/cuda_stand_in/checks.py", "tests/runtime/test_cuda.py", timeout=timeout)


def test_placements_on_a_gpu_give_the_same_bits_without_a_race_and_a_step_waits_for_no_copy() -> None:
    placements = (
        "users and llama and checkpoint and test_placement and ssd or during and home or users and resident and home"
    )
    others = (
        "second_placement and poison and drive or sees or one_without_a_race and 3 or refused or "
        "whatever_stream or first_did_not and both or peak_memory or waits_for_no_copy and (ssd or both) or "
        "by_torch_alone and (sign or row) or read_on_a_stream"
    )
    rules = "share_buffers or asynchronous and home and 2 or adafactor and both"
    assert "passed" in gpu_tests(f"{placements} or {others} or {rules}")


BENCHMARK = """
from cuda_stand_in.cuda import install
native = install()
import sys
from pathlib import Path
import gpu
import gpu_suite.common as common
import pagoda.calibrate.machine as calibrate

gpu.REAL = common.SMOKE
common._ACTIVATIONS = native.DEVICE_BYTES - (40 << 20)
calibrate._TOKENS, calibrate._WIDTH = 32, 64
sections = [name for name in gpu.SECTIONS if name not in ("copies", "baselines")]  # which need a profiler, and NCCL
gpu.main(tuple(sections), host="256MiB", ssd=Path(sys.argv[1]), out=Path(sys.argv[1]) / "gpu.json", here=True)
print(native.take_races())
"""


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_runs_on_it(tmp_path: Path) -> None:
    assert run("-c", BENCHMARK, str(tmp_path)).splitlines()[-1] == "[]"
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["largest"]["falling"]
    assert found["largest_8bit"]["within_plan"]
    assert found["bits"]["AdamW, bf16"] == 0
    assert found["same"]["same"]


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
        ("--update", "async", "--max-grad-norm", "0"),
        ("--activations", "offload", "--precision", "fp16"),
        ("--optim", "adafactor", "--chunked-loss", "True", "--batch-tiles", "2"),
        ("--gradient-accumulation-steps", "2", "--gradients", "fp32", "--tile-limit", "100KB"),
    ],
    ids=lambda options: options[0],
)
def test_the_program_trains_on_it_in_every_mode(options: tuple[str, ...], tmp_path: Path) -> None:
    sizes = ("--memory.device", "24MiB", "--memory.host", "256MiB", "--memory.ssd", f"{tmp_path}:512MiB")
    shape = ("--model", "gpt-2x64", "--per-device-train-batch-size", "2", "--max-length", "32", "--max-steps", "4")
    said = run("-c", TRAIN, "train", *shape, *sizes, "--output-dir", str(tmp_path / "run"), *options)
    assert said.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_the_program_gives_the_gpu_by_default_what_its_first_steps_leave_free(tmp_path: Path) -> None:
    shape = (
        "--model",
        "gpt-2x64",
        "--per-device-train-batch-size",
        "2",
        "--max-length",
        "32",
        "--max-steps",
        "3",
        "--memory.host",
        "256MiB",
    )
    said = run("-c", TRAIN, "train", *shape, "--output-dir", str(tmp_path / "run"))
    assert "--memory.adapt-after 2: until then, pages take 50% of it" in " ".join(said.split())
    assert "After 2 steps, activations and all else but pages had taken" in " ".join(said.split())
    assert said.splitlines()[-1] == "[]"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_that_needs_a_gpu_passes_on_the_stand_in() -> None:
    assert "passed" in gpu_tests("not profile", timeout=1700)  # it has no profiler
