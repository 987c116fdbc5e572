"""`pagoda dpo`, `grpo`, `kto` and `reward`: TRL's scripts, with their flags and losses."""

import json
import math
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

import pagoda  # noqa: E402
from pagoda.cli.main import COMMANDS, main  # noqa: E402
from pagoda.integrations.transformers import PagedTrainerMixin  # noqa: E402
from pagoda.integrations.trl import divided  # noqa: E402
from tests.text_files import write_lines, write_pretrained  # noqa: E402

ASKED = [f"What is {number} plus {number}?" for number in range(24)]
RIGHT = [f" It is {2 * number}, as anyone can count." for number in range(24)]
WRONG = [f" I do not know {number}." for number in range(24)]
ANSWERS = ("chosen", "rejected")
PAIRS = [{"prompt": ask, "chosen": one, "rejected": other} for ask, one, other in zip(ASKED, RIGHT, WRONG, strict=True)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "dpo": PAIRS,
    "kto": [
        {"prompt": row["prompt"], "completion": row[of], "label": of == "chosen"} for row in PAIRS for of in ANSWERS
    ],
    "reward": PAIRS,
    "grpo": [{"prompt": ask} for ask in ASKED],
}
TRAINERS = {each.name: each.config.trainer for each in COMMANDS if each.module == "trl"}
REWARD = """
import signal
def letters(completions, **_):
    return [float(sum(map(ord, text)) % 7) for text in completions]
"""
COMMON = "--model_name_or_path model --dataset_name data --use_cpu --bf16 False --report_to none --optim adagrad"
COMMON += " --learning_rate 0.01 --max_grad_norm 0 --max_steps 4 --per_device_train_batch_size 2 --logging_steps 1"
COMMON += " --save_steps 2 --disable_tqdm True"
OWN = dict.fromkeys(("dpo", "kto", "reward"), "")
OWN["grpo"] = "--reward_funcs rewards.letters --num_generations 2 --max_completion_length 8 --beta 0.1"
SMALL = "--memory.ssd ssd --memory.page-size 4096 --memory.unit-limit 16KiB"


def args(script: str, out: str, *more: str) -> list[str]:
    return [*f"{COMMON} {OWN[script]} --output_dir {out}".split(), *more]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a model, an SSD and a reward function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # TRL adds the current directory
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    write_pretrained(tmp_path / "model")
    for name in ("ssd", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


def logged(out: Path) -> list[dict[str, Any]]:
    """What a run has logged until its last checkpoint."""
    found: list[dict[str, Any]] = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    return found


def losses(out: Path) -> list[tuple[float, ...]]:
    return [tuple(entry[name] for name in ("loss", "reward", "kl") if name in entry) for entry in logged(out)]


def stock(script: str) -> None:
    module = import_module(f"trl.scripts.{script}")
    module.main(*module.make_parser().parse_args_and_config(args(script, "stock")))


def refusal(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    assert main(given) == 2
    return capsys.readouterr().err.removeprefix("pagoda: ").strip()


@pytest.mark.parametrize("script", OWN)
def test_losses_have_the_bits_of_trls_own_script(
    script: str, here: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_lines(here / "data" / "train.jsonl", ROWS[script])
    stock(script)
    host, reference = (400, []) if script == "reward" else (400, ["--reference.host", "256KiB"])
    assert main([script, *args(script, "paged"), *SMALL.split(), "--memory.host", f"{host}KiB", *reference]) == 0
    assert losses(here / "paged") == losses(here / "stock")
    assert len(losses(here / "paged")) == 4
    figures = logged(here / "paged")
    assert any(step.get("pagoda_bytes_moved_ssd_read") for step in figures), "state is on the SSD"
    assert all(step["pagoda_peak_bytes_host"] <= host << 10 for step in figures)
    assert (here / "paged" / "model.safetensors").exists()
    assert not issubclass(getattr(trl, TRAINERS[script]), PagedTrainerMixin), "TRL is as it was"
    shown = capsys.readouterr()
    assert "Plan: " in shown.err
    assert "not deleted" not in shown.err + caplog.text


def test_a_file_has_settings_of_both_and_a_run_resumes_with_the_same_bits(here: Path) -> None:
    """The reference model gets a part of the memory. Losses are those of bf16 with a master in fp32."""
    write_lines(here / "data" / "train.jsonl", PAIRS)
    memory = {"host": "1040KiB", "ssd": "ssd", "page_size": "4KiB", "unit_limit": "16KiB"}
    settings = {"model_name_or_path": "model", "max_steps": 4, "logging_steps": 1, "save_steps": 2, "memory": memory}
    (here / "run.yaml").write_text(json.dumps({**settings, "learning_rate": 0.01, "optim": "adamw_torch"}))
    given = "dpo --config run.yaml --dataset_name data --use_cpu --report_to none --output_dir paged --activations keep"
    given += " --per_device_train_batch_size 2 --moments bf16 --export"
    assert main(given.split()) == 0
    found = losses(here / "paged")
    assert found[0] == (pytest.approx(math.log(2), abs=1e-6),), "policy and reference are the same model at first"
    assert (here / "paged" / "checkpoint-2" / "model.safetensors").exists()
    state = here / "paged" / "checkpoint-4" / "pagoda"
    sizes = [(state / f"{name}.safetensors").stat().st_size for name in ("weight", "exp_avg_bf16")]
    assert sizes[0] == sizes[1], "both are in bf16"
    shutil.rmtree(here / "paged" / "checkpoint-4")
    assert main([*given.split(), "--resume_from_checkpoint", "True"]) == 0
    assert losses(here / "paged") == found


def test_after_ctrl_c_the_step_is_saved(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(here / "data" / "train.jsonl", ROWS["grpo"])
    (here / "rewards.py").write_text(REWARD.replace("    return", "    signal.raise_signal(signal.SIGINT)\n    return"))
    assert main(["grpo", *args("grpo", "paged"), "--beta", "0"]) == 130
    assert (here / "paged" / "checkpoint-1" / "pagoda").is_dir()
    assert "nothing after the last checkpoint is kept" in capsys.readouterr().err


def test_what_cannot_be_read_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run.yaml").write_text("betta: 0.1\nmemory: {host: 1MiB}\n")
    (here / "wrong.yaml").write_text("memory: {hosts: 1MiB}\n")
    cpu = "--use_cpu"
    assert "no flag '--betta'. Did you mean '--beta'?" in refusal(capsys, "dpo", "--betta", "0.1")
    assert "Did you mean '--memory.host'?" in refusal(capsys, "dpo", "--memory.hots", "1GiB")
    assert refusal(capsys, "dpo", cpu, "--beta", "x") == "argument --beta: invalid float value: 'x'"
    assert "--memory.host: 'x' is not a size" in refusal(capsys, "reward", "--memory.host", "x")
    assert "no flag '--reference.host'" in refusal(capsys, "reward", "--reference.host", "1GiB")
    assert refusal(capsys, "kto", cpu, "--config", "run.yaml").endswith("has unknown settings: 'betta'")
    assert refusal(capsys, "kto", "--config", "wrong.yaml").endswith("has unknown settings: 'memory.hosts'")
    assert "none.yaml cannot be read" in refusal(capsys, "kto", "--config", "none.yaml")
    assert "8 bit and 4 bit precision at the same time" in refusal(
        capsys, "dpo", cpu, "--load_in_4bit", "--load_in_8bit"
    )
    assert "--dataset_name is missing" in refusal(capsys, "dpo", cpu)
    assert "--model_name_or_path is missing" in refusal(capsys, "dpo", cpu, "--dataset_name", "data")


@pytest.mark.parametrize("script", OWN)
def test_data_and_models_that_cannot_be_read_are_named(
    script: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    write_lines(here / "data" / "train.jsonl", ROWS[script])
    (here / "broken").mkdir()
    (here / "broken" / "train.jsonl").write_text('{"prompt": 3')
    stock = datasets.load_dataset

    def last(*more: str) -> str:
        return refusal(capsys, script, *args(script, "paged", *more)).splitlines()[-1].removeprefix("pagoda: ")

    unread = last("--dataset_name", "TYPO")
    assert unread.startswith("data 'TYPO', which is no folder here, cannot be read: Couldn't reach 'TYPO' on the Hub")
    assert last("--dataset_name", "broken").startswith("data 'broken' cannot be read: JSON parse error")
    only = "only train: name one, with --dataset-train-split or --dataset-test-split"
    assert last("--dataset_train_split", "trian") == f"data 'data' has no split 'trian', {only}"
    assert last("--eval_strategy", "steps") == f"data 'data' has no split 'test', {only}"
    assert last("--model_name_or_path", "./typo").startswith("model './typo' cannot be loaded: ")
    assert datasets.load_dataset is stock, "datasets is as it was"


@pytest.mark.parametrize("flags", [[], ["--help"]])
def test_without_trl_one_sentence_says_what_to_install(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.errors.find_spec", lambda _: None)
    assert refusal(capsys, "grpo", *flags) == "pagoda grpo needs TRL: pip install 'pagoda-train[trl]'"


def test_a_reference_model_has_a_quarter_of_each_size_unless_it_is_given_more(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    memory = pagoda.Memory(host="4MiB", device="cpu:2MiB", ssd=f"{tmp_path}/a:8MiB,{tmp_path}/b:8MiB", page_size=4096)
    mine, its = divided(memory, pagoda.Memory())
    assert (mine.host_bytes, its.host_bytes) == (3 << 20, 1 << 20)
    assert (mine.device, its.device) == (f"cpu:{3 << 19}", f"cpu:{1 << 19}")
    assert [*mine.ssd_directories.values()] == [6 << 20] * 2
    assert dict(its.ssd_directories) == {tmp_path / name / "reference": 2 << 20 for name in ("a", "b")}
    assert its.page_bytes == 4096
    mine, its = divided(memory, pagoda.Memory(host="1MiB", device="cpu:1MiB", ssd=tmp_path))
    assert (mine, its.host, its.ssd) == (memory, "1MiB", tmp_path)
    assert divided(pagoda.Memory(), pagoda.Memory()) == (pagoda.Memory(), pagoda.Memory())
