"""Checkpoints of a Trainer are written while it trains, and appear complete; signals, full disks and settings."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from files import fill_disk
from transformers import LlamaForCausalLM
from transformers.trainer_utils import get_last_checkpoint

import pagoda
from integrations.test_trainer import Make, logged, paged, stock
from integrations.tiny_text import Calls, memory, model, samples
from pagoda.checkpoint import snapshot
from pagoda.cli.main import main
from pagoda.integrations import checkpoints, seals
from pagoda.integrations.staging import STATE, Staged
from pagoda.memory.ssd.orphans import orphans_in
from pagoda.optimizer import PagedOptimizer
from tests.train.test_signals import usual

__all__ = ["paged", "usual"]
Capture = pytest.CaptureFixture[str]
EACH = {"save_strategy": "steps", "save_steps": 1}


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def weights(checkpoint: Path) -> bytes:
    return (checkpoint / STATE / "weight.safetensors").read_bytes()


def test_steps_run_while_a_checkpoint_is_written_and_it_has_its_name_once_it_is_complete(
    paged: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, goes_on, told = tmp_path / "paged", threading.Event(), []
    write = snapshot.write_manifest

    def wait(*args: Any) -> None:
        assert goes_on.wait(60)
        write(*args)

    def look(state: Any) -> None:
        if state.global_step == 4:
            assert names(out) == [".checkpoint-2.partial"]
            assert get_last_checkpoint(str(out)) is None
            assert told == []
            goes_on.set()

    def saved(state: Any) -> None:
        seals.check(out / f"checkpoint-{state.global_step}")
        history = json.loads((out / f"checkpoint-{state.global_step}" / "trainer_state.json").read_text())
        assert history["global_step"] == state.global_step
        told.append(state.global_step)

    monkeypatch.setattr(snapshot, "write_manifest", wait)
    trainer = paged(
        given={"callbacks": [Calls(on_step_end=look, on_save=saved)]}, save_strategy="steps", save_steps=2, max_steps=5
    )
    trainer.train()
    assert told == [2, 4, 5]
    assert names(out) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    resumed = paged(max_steps=5, save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert logged(resumed, "loss") == logged(trainer, "loss")


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_save_that_breaks_off_deletes_nothing(
    error: BaseException, paged: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, told, settings = PagedOptimizer.save_checkpoint, [], {**EACH, "save_total_limit": 1}
    trainer = paged(given={"callbacks": [Calls(on_save=lambda state: told.append(state.global_step))]}, **settings)

    def breaks_off(*arguments: Any, **others: Any) -> None:
        if trainer.state.global_step == 2:
            raise error
        save(*arguments, **others)

    with monkeypatch.context() as patch:
        patch.setattr(PagedOptimizer, "save_checkpoint", breaks_off)
        with pytest.raises(type(error)):
            trainer.train()
    assert told == [1]
    assert names(tmp_path / "paged") == ["checkpoint-1"]
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == trainer.state.max_steps


def test_state_on_the_ssd_stays_in_its_pages_and_older_checkpoints_free_theirs(paged: Make, tmp_path: Path) -> None:
    settings = {**EACH, "save_total_limit": 1}
    whole = paged("whole", **settings)
    whole.train()
    in_pages = []

    def look(state: Any) -> None:
        manifest = tmp_path / "ended" / f"checkpoint-{state.global_step}" / STATE / "manifest.json"
        in_pages.append("paged" in json.loads(manifest.read_text()))
        if state.global_step == 5:
            raise KeyboardInterrupt

    ssd = memory(tmp_path / "own")
    ended = paged("ended", given={"callbacks": [Calls(on_save=look)]}, paging={"memory": ssd}, **settings)
    with pytest.raises(KeyboardInterrupt):
        ended.train()
    assert in_pages == [True] * 5
    ended.optimizer.close()
    resumed = paged("ended", paging={"memory": ssd}, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert names(tmp_path / "ended") == ["checkpoint-6"]
    assert not [*orphans_in(tmp_path / "own")]


def test_without_the_models_files_a_checkpoint_resumes_and_can_be_exported(paged: Make, tmp_path: Path) -> None:
    trainer = paged(save_strategy="steps", save_steps=6)
    trainer.train()
    checkpoint = tmp_path / "paged" / "checkpoint-6"
    assert not [*checkpoint.glob("*.safetensors")]
    assert (checkpoint / "config.json").is_file()
    assert main(["export", str(checkpoint / STATE), str(tmp_path / "exported")]) == 0
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    with pagoda.gathered(trainer.model):
        assert all(torch.equal(value, loaded[name]) for name, value in trainer.model.state_dict().items())


def test_the_last_checkpoint_is_tried_again_and_its_error_is_raised(
    paged: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fill_disk(2, monkeypatch)
    paged(save_strategy="steps", save_steps=3, max_steps=3).train()
    assert "The state is still in memory" in capfd.readouterr().err
    assert names(tmp_path / "paged") == ["checkpoint-3"]
    fill_disk(10**6, monkeypatch)
    monkeypatch.setattr(checkpoints, "PATIENCE_S", 0.2)
    with pytest.raises(pagoda.StorageError, match="No space left"):
        paged("other", save_strategy="steps", save_steps=3, max_steps=3).train()
    assert names(tmp_path / "other") == []


def test_what_the_trainer_writes_itself_is_tried_again_too(
    paged: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, left = torch.save, [1]

    def full(*args: Any, **kwargs: Any) -> None:
        if "scheduler" in str(args[1]) and left:
            left.pop()
            monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0, total=1 << 40))
            raise RuntimeError("PytorchStreamWriter failed writing file")
        monkeypatch.undo() if not left and shutil.disk_usage("/").free == 0 else None
        save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    paged(save_strategy="steps", save_steps=2, max_steps=2).train()
    assert names(tmp_path / "paged") == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("kind", "within"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, True)], ids=str
)
def test_a_signal_ends_the_step_saves_and_then_has_its_usual_effect(
    kind: signal.Signals, within: bool, usual: list[int], paged: Make, tmp_path: Path, capfd: Capture
) -> None:
    settings = {"gradient_accumulation_steps": 2, "save_strategy": "epoch", "eval_strategy": "epoch", "max_steps": 8}
    given = {"eval_dataset": samples(4)}
    whole = paged("whole", given=given, **settings)
    whole.train()

    def strike(state: Any) -> None:
        if state.global_step == 3 and not usual:
            os.kill(os.getpid(), kind)

    event = "on_substep_end" if within else "on_step_begin"
    ended = paged("ended", given={**given, "callbacks": [Calls(**{event: strike})]}, **settings)
    ended.train()
    assert usual == [kind]
    assert ended.state.global_step == 4
    assert names(tmp_path / "ended") == ["checkpoint-4"]
    said = capfd.readouterr().err
    assert f"{kind.name}: stops after step 4 and saves it" in said
    assert "Continue with: trainer.train(resume_from_checkpoint=True)" in said
    resumed = paged("ended", given=given, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss", "eval_loss") == logged(whole, "loss", "eval_loss")


def test_a_second_signal_ends_the_run_at_once(paged: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.signals._TOGETHER_S", -1.0)

    def strike(state: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    ended = paged(given={"callbacks": [Calls(on_substep_end=strike)]}, gradient_accumulation_steps=3, **EACH)
    with pytest.raises(KeyboardInterrupt):
        ended.train()
    assert ended.state.global_step == 0


def test_an_interrupted_run_keeps_its_last_checkpoint_beside_the_best_one(
    usual: list[int], paged: Make, tmp_path: Path
) -> None:
    settings = {**EACH, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.3, "save_total_limit": 1}
    settings |= {"load_best_model_at_end": True, "lr_scheduler_type": "constant"}

    def strike(state: Any) -> None:
        if state.global_step == 3:
            signal.raise_signal(signal.SIGTERM)

    given = {"eval_dataset": samples(4), "callbacks": [Calls(on_step_begin=strike)]}
    paged(given=given, **settings).train()
    assert names(tmp_path / "paged") == ["checkpoint-1", "checkpoint-4"]


def test_a_disk_without_room_is_named_before_the_first_step(
    paged: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    free = [1 << 10]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0], total=1 << 40))
    trainer = paged(**EACH)
    with pytest.raises(pagoda.StorageError, match=r"output_dir .* has 1.00 KiB free, and a checkpoint takes"):
        trainer.train()
    assert trainer.state.global_step == 0
    free[0] = 600 << 10
    paged(**EACH, max_steps=4).train()
    assert "The run may add 4 checkpoints of up to" in capfd.readouterr().err
    free[0] = 1 << 10
    paged("none", max_steps=1).train()


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"learning_rate": 3e-3}, r"learning_rate was 0\.01 and is 0\.003"),
    "batch": ({"per_device_train_batch_size": 1}, r"2 samples and has 1 \(gradient_accumulation_steps=2 keeps them\)"),
    "seed": ({"seed": 7, "lr_scheduler_type": "cosine"}, r"lr_scheduler_type was linear and is cosine, seed was 42"),
    "data": ({"given": {"train_dataset": samples(18)}}, "train_dataset had 20 samples and has 18"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_setting_that_would_change_the_run_is_refused(name: str, paged: Make) -> None:
    changed, said = CHANGED[name]
    paged(save_strategy="steps", save_steps=2, max_steps=2).train()
    with pytest.raises(pagoda.ConfigError, match=said):
        paged(**{"max_steps": 4, **changed}).train(resume_from_checkpoint=True)
    paged(max_steps=4, per_device_train_batch_size=1, gradient_accumulation_steps=2).train(resume_from_checkpoint=True)


class Letters:
    """A tokenizer of one byte a token."""

    padding_side = "right"

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(65 + id_ % 26) for id_ in ids)

    def save_pretrained(self, directory: str) -> None:
        pass


def test_an_evaluation_also_has_the_mean_over_tokens(paged: Make, tmp_path: Path) -> None:
    """With batches that count different numbers of tokens."""
    rows = samples(5)
    for at, row in enumerate(rows):
        row["labels"] = row["labels"].clone()
        row["labels"][: 2 * at] = -100
    given = {"eval_dataset": rows, "processing_class": Letters(), "data_collator": transformers.default_data_collator}
    found = paged(given=given, per_device_eval_batch_size=2).evaluate()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in rows:
            logits = model()(input_ids=row["input_ids"][None]).logits[0, :-1]
            labels = row["labels"][1:]
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100).item()
            tokens += int((labels != -100).sum())
    assert found["eval_token_loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert found["eval_bits_per_token"] == pytest.approx(total / tokens / 0.6931471805599453, rel=1e-6)
    assert found["eval_bits_per_byte"] == found["eval_bits_per_token"]
    args = {"per_device_eval_batch_size": 2}
    expected = stock(tmp_path / "stock", **args, max_steps=1)
    expected.model.load_state_dict(model().state_dict())
    assert found["eval_loss"] == pytest.approx(expected.evaluate(rows)["eval_loss"], rel=1e-6)
    assert found["eval_loss"] != pytest.approx(found["eval_token_loss"], rel=1e-4)


def test_the_plan_is_printed_once_and_figures_are_logged(paged: Make, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = paged(max_steps=2)
    trainer.train()
    said = capfd.readouterr().err
    assert said.count("exp_avg_sq") == 1
    assert "written a step" in said
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert last["pagoda_bytes_moved_ssd_read"] > 0
    assert last["pagoda_step_s"] > 0


def test_a_step_may_be_saved_twice(paged: Make, tmp_path: Path) -> None:
    """The second one replaces the first, and frees its pages."""
    pages = memory(tmp_path / "own")
    trainer = paged(save_strategy="steps", save_steps=3, max_steps=3, paging={"memory": pages})
    trainer.train()
    first = (tmp_path / "paged" / "checkpoint-3" / STATE / "manifest.json").read_bytes()
    trainer._save_checkpoint(trainer.model, None)
    trainer.checkpoints.end()
    assert names(tmp_path / "paged") == ["checkpoint-3"]
    assert (tmp_path / "paged" / "checkpoint-3" / STATE / "manifest.json").read_bytes() != first
    trainer.optimizer.close()
    assert not [*orphans_in(tmp_path / "own")]
    resumed = paged(max_steps=5, paging={"memory": pages})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5


def test_what_a_crash_has_left_is_completed_or_deleted_and_others_files_stay(paged: Make, tmp_path: Path) -> None:
    out = tmp_path / "paged"
    paged(save_strategy="steps", save_steps=3, max_steps=3).train()
    sealed = out / ".checkpoint-3.partial" / "checkpoint-3"
    sealed.parent.mkdir()
    (out / "checkpoint-3").rename(sealed)  # before the last step of its completion
    seals.begin(out / ".checkpoint-2.partial" / "checkpoint-2")
    seals.begin(out / "checkpoint-1")
    (out / ".checkpoint-9.partial").mkdir()
    (out / ".checkpoint-9.partial" / "thesis.txt").write_text("years of work")
    resumed = paged(max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed._initial_global_step == 3
    assert names(out) == [".checkpoint-9.partial", "checkpoint-3"]


def test_what_another_trainer_has_saved_is_not_replaced(paged: Make, tmp_path: Path) -> None:
    other = tmp_path / "paged" / "checkpoint-2" / "model.safetensors"
    other.parent.mkdir(parents=True)
    other.write_text("theirs")
    with pytest.raises(pagoda.CheckpointError, match=r"checkpoint-2 was not written by Pagoda.*move it"):
        paged(max_steps=2, **EACH).train()
    with pytest.raises(pagoda.CheckpointError, match="was not written by Pagoda"):
        Staged(other.parent, ()).create()
    assert other.read_text() == "theirs"


def test_a_checkpoint_stays_if_one_of_the_same_name_cannot_be_completed(tmp_path: Path) -> None:
    for _ in range(2):
        staged = Staged(tmp_path / "checkpoint-1", ())
        staged.create()
        staged.complete()
    staged.create()
    shutil.rmtree(staged.path)
    with pytest.raises(pagoda.StorageError):
        staged.complete()
    seals.check(tmp_path / "checkpoint-1")
