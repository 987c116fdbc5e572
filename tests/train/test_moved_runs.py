"""Runs whose state is on SSD are renamed, and their page tables exchanged: nothing is lost, nothing silently wrong."""

from pathlib import Path

import pytest

from pagoda.cli.main import main
from pagoda.train.metrics import read_metrics
from tests.tiny import write_model

STEPS = 4


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tiny model, a text, and an SSD directory."""
    write_model(tmp_path / "model")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    (tmp_path / "ssd").mkdir()
    (tmp_path / "other").mkdir()
    return tmp_path


def args(root: Path, out: str, *flags: str, **changes: object) -> list[str]:
    settings: dict[str, object] = {"model": root / "model", "data": root / "text", "steps": STEPS, "batch-size": 1}
    settings |= {
        "seq-len": 16,
        "checkpoint-every": 1,
        "optim.schedule": "constant",
        "memory.host": "1MiB",
        "memory.ssd": root / "ssd",
        **changes,
    }
    return ["train", *(f"--{k}={v}" for k, v in settings.items()), "--out", str(root / out), *flags]


def losses(root: Path, out: str) -> list[object]:
    return [metrics["loss"] for metrics in read_metrics(root / out / "metrics.jsonl")]


def test_a_renamed_run_and_a_new_one_of_its_name_share_an_ssd_directory(root: Path) -> None:
    assert main(args(root, "whole", **{"steps": STEPS + 1, "memory.ssd": root / "other"})) == 0
    assert main(args(root, "run")) == 0
    (root / "run").rename(root / "old")
    assert len(list((root / "ssd").glob("*/commits/*"))) == 2
    assert main(args(root, "run", steps=STEPS - 1)) == 0, "a new one"
    for out, done in (("old", STEPS), ("run", STEPS - 1)):
        last = root / out / "checkpoints" / f"step-{done:06d}"
        assert main(["inspect", str(last), "--verify"]) == 0
        assert main(["train", "--resume", "--out", str(root / out), f"--steps={STEPS + 1}"]) == 0
        assert losses(root, out) == losses(root, "whole")


def test_page_tables_that_were_exchanged_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args(root, "run")) == 0
    first, second = sorted((root / "ssd").glob("*/commits/*"))
    aside = root / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    assert main(["inspect", str(root / "run"), "--verify"]) == 1
    assert "is the page table of commit" in capsys.readouterr().out
    assert main(["train", "--resume", "--out", str(root / "run"), f"--steps={STEPS + 1}"]) == 2
    assert "is the page table of commit" in capsys.readouterr().err
