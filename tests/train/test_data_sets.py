"""Data sets of the Hugging Face Hub, several data at once, and prompts with completions."""

import io
import json
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from pagoda.cli.main import main
from pagoda.config.reading import DataSettings
from pagoda.errors import CheckpointError, ConfigError
from pagoda.train.data import IGNORED, Batches, Rows
from pagoda.train.seen import Seen
from pagoda.train.sources import check_exists, documents, find
from pagoda.train.tokenizer import Tokenizer
from pagoda.train.tokens import open_tokens
from tests.text_files import read, text_of, tokenizer, write_lines, write_pretrained
from tests.tiny import command, tiny_run, trained

NAME = "org/talks"
TEXT = "a text that is long enough for some sequences. "


class Hub:
    """A stand-in for the Hub: a directory for each revision of a data set. Everything else is datasets' own."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.kept, self.commits = root / "hub", root / "kept", 0
        for revision in ("main", "v2"):
            for file in ("train", "test", "small"):
                self.write(revision, file, [{"text": f"{revision} {file} {TEXT * 20}"}])
            splits = [{"split": name, "path": f"{name}.parquet"} for name in ("train", "test")]
            configs = [{"config_name": "default", "data_files": splits}]
            configs.append({"config_name": "small", "data_files": "small.parquet"})
            (self.root / revision / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
        self._builder = datasets.load_dataset_builder
        monkeypatch.setattr(datasets, "load_dataset_builder", self.load_dataset_builder)

    def load_dataset_builder(self, path: str, name: str | None = None, *, revision: str | None = None) -> Any:
        if path != NAME:
            return self._builder(path, name)
        folder = self.root / (revision or "main")
        commit = (folder / "commit").read_text()
        builder = self._builder(str(folder), name, cache_dir=str(self.kept / commit))
        builder.hash = commit
        return builder

    def write(self, revision: str, file: str, rows: list[dict[str, Any]]) -> None:
        (self.root / revision).mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(self.root / revision / f"{file}.parquet")
        self.commits += 1
        (self.root / revision / "commit").write_text(str(self.commits))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(tmp_path, monkeypatch)


@pytest.mark.parametrize("streaming", [False, True])
def test_subset_split_and_revision_of_the_hub_are_those_that_are_asked_for(hub: Hub, streaming: bool) -> None:
    for asked, split, expected in (
        ({}, "train", "main train "),
        ({}, "test", "main test "),
        ({"dataset_revision": "v2"}, "train", "v2 train "),
        ({"dataset_config": "small", "dataset_revision": "v2"}, "train", "v2 small "),
    ):
        settings = DataSettings(dataset_streaming=streaming, **asked)
        (document,) = documents(find(NAME, settings, split), Seen())
        assert document.text.startswith(expected)
        assert document.where == f"{NAME}, row 1"


def test_what_is_streamed_is_not_stored(hub: Hub) -> None:
    read(NAME, dataset_streaming=True)
    assert not [*hub.kept.rglob("*.arrow")]
    read(NAME)
    assert [*hub.kept.rglob("*.arrow")]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_the_hub_does_not_have_is_refused_by_name_and_a_bad_row_by_number(hub: Hub, streaming: bool) -> None:
    settings = DataSettings(dataset_streaming=streaming)
    with pytest.raises(ConfigError, match=r"the split 'dev' of org/talks cannot be read: .*dev"):
        open_tokens(NAME, settings=settings, split="dev")
    with pytest.raises(ConfigError, match="data 'org/talks' cannot be read: BuilderConfig 'none' not found"):
        read(NAME, dataset_config="none")
    asked = {"dataset_streaming": streaming, "dataset_config": "small"}
    hub.write("main", "small", [{"content": "one", "n": 1}, {"content": None, "n": 2}, {"content": "two", "n": 3}])
    seen = Seen()
    assert [document.text for document in read(NAME, seen, **asked)] == ["one", "two"]
    assert (seen.ignored, seen.left_out) == ({"n": 2}, {"it is empty": 1})
    hub.write("main", "small", [{"text": "one", "train": "yes"}, {"text": "two", "train": "1"}])
    with pytest.raises(ConfigError, match=r"^org/talks, row 1: it has the train 'yes': .*--skip-bad"):
        read(NAME, **asked)
    assert [document.text for document in read(NAME, skip_bad=True, **asked)] == ["two"]


def test_a_name_of_the_hub_is_no_file_that_is_missing(hub: Hub) -> None:
    check_exists("org/other")
    for name in ("texts/none.jsonl", "texts/none.txt", "texts/none.csv.gz", "none"):
        with pytest.raises(ConfigError, match=r"does not exist: give .*ORG/NAME of the Hugging Face Hub"):
            check_exists(name)


def test_tokens_of_the_hub_are_computed_once_for_a_revision(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_tokens(NAME, cache=tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr("pagoda.train.tokens.documents", lambda *_: pytest.fail("read again"))
        assert open_tokens(NAME, cache=tmp_path / "cache").about == first.about
    assert open_tokens(NAME, cache=tmp_path / "cache", split="test").key != first.key
    other = open_tokens(NAME, cache=tmp_path / "cache", settings=DataSettings(dataset_revision="v2"))
    assert other.about.fingerprint != first.about.fingerprint


def test_a_run_trains_on_one_split_evaluates_on_the_other_and_finds_its_data_in_another_place(
    hub: Hub, tmp_path: Path
) -> None:
    config = tiny_run(tmp_path, data=NAME, eval_data=NAME, max_steps=2, eval_steps=2, cache=tmp_path / "cache")
    _, shown = trained(config)
    counts = [len(f"main {split} {TEXT * 20}") for split in ("train", "test")]
    read = [line for line in shown.splitlines() if line.startswith("Data:")]
    assert read == [f"Data: org/talks, 1 document, {n} tokens, of which the loss counts 100%" for n in counts]
    assert (tmp_path / "run" / "evals.jsonl").exists()
    on = replace(config, max_steps=4, resume_from_checkpoint="last", dataset_revision="v2")
    with pytest.raises(CheckpointError, match="was trained on another text than data 'org/talks'"):
        trained(on)
    _, shown = trained(replace(on, data=str(hub.root / "main" / "train.parquet"), eval_data=None))
    assert "after step 2" in shown


def test_several_data_follow_one_another(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(name)
    rows = write_lines(tmp_path / "rows.jsonl", [{"text": "three"}])
    names = (str(tmp_path / "two.txt"), str(rows), str(tmp_path / "one.txt"))
    tokens = open_tokens(names, cache=tmp_path / "cache")
    assert text_of(tokens) == "two\nthree\none"
    assert (tokens.about.source, tokens.about.files) == (", ".join(names), 3)
    (tmp_path / "one.txt").write_text("four")
    assert text_of(open_tokens(names, cache=tmp_path / "cache")) == "two\nthree\nfour"


@pytest.fixture
def two_texts(tmp_path: Path) -> tuple[str, str]:
    """One of 20 sequences of 20 bytes, and one of 60."""
    for name, count in (("a", 400), ("b", 1200)):
        (tmp_path / f"{name}.txt").write_text(name * count)
    return str(tmp_path / "a.txt"), str(tmp_path / "b.txt")


def test_a_mixture_has_the_shares_that_are_asked_for_from_the_seed_and_leaves_nothing_out(
    two_texts: tuple[str, str], tmp_path: Path
) -> None:
    rows = Rows.of(open_tokens(two_texts, cache=tmp_path / "cache"), 20)
    mixed = rows.mixed((9, 1), seed=0)
    share = (mixed.starts < 400).mean()
    assert 0.85 < share < 0.95
    assert {*mixed.starts} == {*rows.starts}
    assert mixed.starts.tolist() == rows.mixed((0.9, 0.1), seed=0).starts.tolist()
    assert mixed.starts.tolist() != rows.mixed((0.9, 0.1), seed=1).starts.tolist()
    with pytest.raises(ConfigError, match="include some without a sequence"):
        replace(rows, starts=rows.starts[:20], stops=rows.stops[:20]).mixed((1, 1), seed=0)


def test_a_run_on_a_mixture_counts_its_epoch_and_keeps_its_shares(two_texts: tuple[str, str], tmp_path: Path) -> None:
    config = tiny_run(tmp_path, data=two_texts, probabilities=(0.5, 0.5), max_steps=0, max_length=20, eval_share=0.2)
    result, shown = trained(replace(config, num_train_epochs=0.1))
    (line,) = [line for line in shown.splitlines() if line.startswith("Mixture: an epoch has ")]
    rows = int(line.split()[4])
    assert rows > 80, "48 of b, and about as many of the 16 of a"
    assert result is not None
    assert result.last_step == -(-rows // 10 // config.per_device_train_batch_size)
    on = replace(config, max_steps=20, resume_from_checkpoint="last")
    with pytest.raises(ConfigError, match=r"--probabilities \(0.7, 0.3\) \(the checkpoint has \(0.5, 0.5\)\)"):
        trained(replace(on, probabilities=(0.7, 0.3)))
    with pytest.raises(ConfigError, match="give as many"):
        replace(config, probabilities=(0.2, 0.3, 0.5))
    for wrong in ((1.0, 0.0), (0.7, 0.7)):
        with pytest.raises(ConfigError, match="must be numbers above 0 that add up to 1"):
            replace(config, probabilities=wrong)


def test_several_data_are_given_on_the_command_line_and_kept_for_resuming(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run(tmp_path, max_steps=1)
    other = tmp_path / "other.txt"
    other.write_text(TEXT * 20)
    several = (str(config.data), str(other))
    usual = ["--model", config.model, "--max-steps", "1", "--precision", "fp32", "--memory.host", "64MiB"]
    assert main(["train", "--data", *several, *usual, "--output-dir", str(tmp_path / "run")]) == 0
    assert f"Data: {several[0]}, {several[1]}, 2 documents in 2 files" in capsys.readouterr().out
    assert command(f"train --resume-from-checkpoint last --output-dir {tmp_path / 'run'} --max-steps 2") == 0
    assert "2 documents in 2 files" in capsys.readouterr().out


ASKED = [
    {"prompt": "The sky is", "completion": " blue."},
    {"prompt": "return self.wei", "completion": "ght and nothing else of it"},
    {"prompt": "def forward(", "completion": "self, input):\n    return input"},
]


def test_a_prompt_with_its_completion_has_the_tokens_and_the_loss_of_trl(tmp_path: Path) -> None:
    """Whole, in a row with others, and without a chat template."""
    write_pretrained(tmp_path / "model", chat_template=None)
    model = Tokenizer(tmp_path / "model")
    tokens = open_tokens(str(write_lines(tmp_path / "a.jsonl", ASKED)), model, tmp_path / "cache")
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        SFTConfig(str(tmp_path / "sft"), max_length=None, use_cpu=True, report_to="none"),
        train_dataset=datasets.Dataset.from_list(ASKED),
        processing_class=tokenizer(),
    )
    found = np.split(tokens.ids, tokens.ends[:-1])
    for ids, theirs in zip(found, trainer.train_dataset, strict=True):
        assert np.where(ids < 0, ~ids, ids).tolist() == theirs["input_ids"]
        assert np.where(ids < 0, IGNORED, ids).tolist() == theirs["labels"]
    assert not tokens.about.chats
    rows = Rows.of(tokens, 40)
    assert {*rows.starts} < {0, *tokens.ends}
    assert {*rows.stops} < {*tokens.ends}
    assert len(Rows.of(tokens, 40, packs=False)) == 3


def test_a_prompt_of_bytes_is_not_counted(tmp_path: Path) -> None:
    tokens = open_tokens(str(write_lines(tmp_path / "a.jsonl", ASKED)), cache=tmp_path / "cache")
    whole = "\n".join(row["prompt"] + row["completion"] for row in ASKED)
    assert bytes(np.where(tokens.ids < 0, ~tokens.ids, tokens.ids).astype(np.uint8)).decode() == whole
    assert bytes(tokens.ids[tokens.ids >= 0].astype(np.uint8)).decode() == "".join(row["completion"] for row in ASKED)
    batches = Batches(rows=Rows.of(tokens, 10), batch_size=2)
    labels = [batches.of_rows(batches.row_indices(step))["labels"][:, 1:] for step in range(3)]
    assert [batches.targets_of_step(step) for step in range(3)] == [int((each != IGNORED).sum()) for each in labels]


def test_texts_that_look_like_lists_are_texts(tmp_path: Path) -> None:
    (document,) = read(write_lines(tmp_path / "a.jsonl", [{"prompt": "[1, 2]", "completion": '[{"a": 3}]'}]))
    assert (document.prompt, document.text) == ("[1, 2]", '[{"a": 3}]')


def test_a_completion_without_a_token_is_left_out(tmp_path: Path) -> None:
    seen = Seen()
    rows = [{"prompt": "hi", "completion": ""}, {"prompt": "hi", "completion": "yes"}, {"prompt": "hi"}]
    read(write_lines(tmp_path / "a.jsonl", rows), seen, skip_bad=True)
    assert seen.formats == {"prompt and completion": 1}
    assert [reason.split(" (")[0] for reason in seen.left_out] == ["it is empty", "none of its columns"]


def test_records_may_differ_in_their_keys_far_into_a_file(tmp_path: Path) -> None:
    """datasets' own reader of JSON takes the keys of the first 10 MB for those of all."""
    rows = [{"text": "x" * 1_000_000}] * 12 + [{"content": "late", "more": {"a": 1}}]
    assert read(write_lines(tmp_path / "a.jsonl", rows))[-1].text == "late"


def test_the_texts_of_a_webdataset_are_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("one", "two"):
            for kind, content in (("txt", name), ("json", "{}")):
                info = tarfile.TarInfo(f"{name}.{kind}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content.encode()))
    assert [document.text for document in read(tmp_path)] == ["one", "two"]


def test_without_datasets_it_is_named_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_run(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"data are read with datasets: pip install 'pagoda-train\[train\]'"):
        trained(config)
