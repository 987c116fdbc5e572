"""`pagoda train --lora-r`: adapters over weights that do not fit RAM, from the first step to what peft loads."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagoda.checkpoint.reader import SavedCheckpoint
from pagoda.cli.main import main
from pagoda.memory.sizes import parse_bytes
from pagoda.train.metrics import read_metrics
from tests.cli.workspace import Workspace
from tests.tiny import command, write_weights

HOST = "768KiB"
TARGETS = ("q_proj", "v_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory, with weights that take more than `HOST`."""
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 5}
    directory = write_weights(tmp_path_factory.mktemp("base"), **sizes)
    assert (directory / "model.safetensors").stat().st_size > 2 * parse_bytes(HOST, "host")
    return directory


ADAPTED = ("--lora-r", "4", "--lora-dropout", "0.1", "--lora-target-modules", *TARGETS)


def workspace(root: Path, model: Path) -> Workspace:
    usual = {"max_steps": 4, "max_length": 16, "precision": "fp32", "learning_rate": 1e-2, "save_steps": 2}
    return Workspace(root, model, **usual, lr_scheduler_type="constant", memory__host=HOST, eval_share=0.0)


@pytest.fixture
def work(model: Path, tmp_path: Path) -> Workspace:
    return workspace(tmp_path, model)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, in `run`."""
    root = tmp_path_factory.mktemp("trained")
    workspace(root, model).train("run", *ADAPTED)
    return root


def last_checkpoint(root: Path) -> Path:
    return max((root / "run").glob("checkpoint-*")) / "pagoda"


def adapters(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What has had updates: name -> fp32 weights."""
    with SavedCheckpoint(checkpoint) as opened:
        return {name: opened.tensors["weight"][name].whole() for name in opened.manifest["steps"]}


def test_adapters_train_over_weights_that_exceed_ram_and_keep_their_rank(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = read_metrics(trained / "run" / "metrics.jsonl")
    assert metrics[-1]["peak_bytes"]["host"] <= parse_bytes(HOST, "host")
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    found = adapters(last_checkpoint(trained))
    assert len(found) == 2 * 5 * len(TARGETS)
    assert all(value.any() for value in found.values()), "lora_B starts as zeros"
    again = f"train --resume-from-checkpoint last --output-dir {trained / 'run'} --memory.ssd {trained / 'ssd'}"
    assert command(f"{again} --max-steps 6 --lora-r 8") == 2
    assert "--lora-r 8 (the checkpoint has 4)" in capsys.readouterr().err


def test_the_adapter_is_exported_and_merged(
    model: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel  # takes a second

    run = str(trained / "run")
    capsys.readouterr()
    assert main(["export", run, str(tmp_path / "adapter")]) == 0
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    own = files - {path.name for path in (trained / "run" / "tokenizer").glob("*")}
    assert f"in {len(own)} files" in capsys.readouterr().out.replace("\n", " ")
    assert main(["export", run, str(tmp_path / "merged"), "--merge"]) == 0
    plain = AutoModelForCausalLM.from_pretrained(model)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    assert adapted.peft_config["default"].base_model_name_or_path == str(model)
    for name, value in adapters(last_checkpoint(trained)).items():
        assert torch.equal(adapted.get_parameter(name), value), name
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(24).view(1, 24)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if any(target in name for target in TARGETS)}


@pytest.mark.slow
def test_experts_are_adapted_by_the_names_of_their_parameters(work: Workspace) -> None:
    targets = ("--lora-target-modules", "q_proj", "experts.down_proj")
    work.train("run", "--model", "mixtral-15m", "--lora-r", "2", *targets, max_steps=1, memory__host="1GiB")
    named = adapters(last_checkpoint(work.root))
    assert {name.split(".layers.0.")[-1].split(".lora_")[0] for name in named if ".layers.0." in name} == {
        "self_attn.q_proj",
        "mlp.experts",
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--lora-r", "None"), "--lora-r is missing"),
        (("--tile-limit", "64KiB"), "leave out --tile-limit"),
        (("--lora-target-modules", "no_such_layer"), "--lora-target-modules is no_such_layer"),
        (
            ("--model", "mixtral-15m", "--lora-target-modules", "all-linear", "--lora-dropout", "0.1"),
            "ParamWrapper does not work with --lora-dropout",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused(
    flags: tuple[str, ...], words: str, work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(work.args("run", *ADAPTED, *flags))
    except SystemExit as stopped:  # a flag that cannot be read
        code = stopped.code
    assert code == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (work.root / "run").exists()


def test_without_peft_the_message_says_how_to_get_it_and_a_whole_model_has_nothing_to_merge(
    work: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work.train("whole", max_steps=1, memory__host="64MiB")
    assert main(["export", str(work.root / "whole"), str(work.root / "out"), "--merge"]) == 2
    assert "no adapter to merge" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "peft", None)
    assert main(work.args("run", *ADAPTED)) == 2
    assert "pip install 'pagoda-train[peft]'" in capsys.readouterr().err
