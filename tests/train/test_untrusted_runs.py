"""A run's directory may come from a stranger: its files lead to no other file or directory, and stop no command."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pagoda.checkpoint.directory import read_manifest, write_manifest
from pagoda.cli.main import main
from pagoda.console import lasting
from pagoda.errors import ConfigError
from pagoda.models.build import build_from_directory
from pagoda.train import TrainConfig, run
from pagoda.train.run_dir import LOCK, RunDir
from tests.files import content_of
from tests.text_files import write_pretrained
from tests.tiny import command, tiny_run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of two steps, with a tokenizer and evaluations: to be copied, not changed."""
    folder = tmp_path_factory.mktemp("done")
    config = tiny_run(folder, model=str(write_pretrained(folder / "model")), max_steps=2, save_steps=1)
    config = replace(config, eval_share=0.2, max_eval_samples=2)
    run(config, Console(quiet=True))
    return config


@pytest.fixture
def directory(done: TrainConfig, tmp_path: Path) -> Path:
    """That run, elsewhere."""
    return Path(shutil.copytree(done.output_dir, tmp_path / "run"))


def resumed(directory: Path, *flags: str) -> int:
    return command(" ".join([f"train --resume-from-checkpoint last --output-dir {directory} --max-steps 3", *flags]))


def test_links_in_a_run_change_no_file_elsewhere(directory: Path, tmp_path: Path) -> None:
    precious, new = tmp_path / "precious", tmp_path / "new"
    precious.write_text("precious")
    written = [*directory.iterdir(), *(directory / "tokenizer").iterdir(), directory / "output.txt"]
    for path in written:
        if not path.is_dir():
            os.link(precious, path.with_name(path.name + ".tmp"))
    shutil.copy(directory / "evals.jsonl", tmp_path / "evals")
    for name, target in (("metrics.jsonl", new), ("evals.jsonl", tmp_path / "evals")):
        (directory / name).unlink()
        (directory / name).symlink_to(target)
    before = (tmp_path / "evals").read_bytes()
    assert resumed(directory) == 0
    assert precious.read_text() == "precious"
    assert not new.exists()
    assert (tmp_path / "evals").read_bytes() == before
    assert [json.loads(line)["step"] for line in (directory / "metrics.jsonl").open()] == [3]


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_file_that_is_written_in_place_must_not_be_a_link(
    link: Callable[[Path, Path], None], directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    link(precious, directory / LOCK)
    assert resumed(directory) == 2
    assert f"--output-dir {directory} cannot be used" in capsys.readouterr().err
    link(precious, directory / "output.txt")
    with open(os.devnull) as unwritable, lasting(Console(file=unwritable)) as output:
        output.instead = directory / "output.txt"
        output.write("more")
        output.write("more")
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("name", ["checkpoint-2", "tokenizer"])
def test_a_linked_directory_is_not_written_to(
    name: str, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / name).rename(tmp_path / "elsewhere")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    before = content_of(tmp_path)
    assert resumed(directory) == 2
    assert f"{name} in it is a symbolic link" in capsys.readouterr().err
    assert content_of(tmp_path) == before
    assert main(["export", str(directory), str(tmp_path / "exported")]) == (2 if name == "tokenizer" else 0)


def test_an_export_has_no_file_to_which_a_link_of_the_run_leads(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (directory / "tokenizer" / "added_tokens.json").symlink_to(tmp_path / "secret")
    assert main(["export", str(directory), str(tmp_path / "exported")]) == 2
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("where", ["report.html", "plan.json", "timeline.json", "metrics.jsonl", "run.yaml"])
def test_a_report_waits_for_no_pipe_and_reads_no_endless_file(
    where: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.write_text("[" * 99_999)):
        (directory / where).unlink(missing_ok=True)
        make(directory / where)
        assert main(["report", str(directory)]) == 2
        assert capsys.readouterr().err.startswith("pagoda: ")


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_experts", "vision_config.depth", "encoder_layers"])
@pytest.mark.parametrize("count", [10**7, 10**15])
def test_a_model_with_more_layers_than_any_is_refused_at_once(
    name: str, count: int, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = RunDir(directory).latest().state
    manifest = read_manifest(checkpoint)
    outer, _, inner = name.rpartition(".")
    changed = {outer: {inner: count}} if outer else {inner: count}
    manifest["model"]["config"] |= changed
    write_manifest(checkpoint, manifest)
    for use in (f"generate {directory} --prompt a", f"export {directory} {tmp_path / 'out'}"):
        assert command(use) == 2
        assert f"{inner} is 1e+" in capsys.readouterr().err
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(manifest["model"]["config"]))
    with pytest.raises(ConfigError, match=rf"{inner} is 1e\+"):
        build_from_directory(tmp_path / "model")


def test_an_enormous_manifest_is_refused_before_it_is_read(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(RunDir(directory).latest().state / "manifest.json", 1 << 40)
    for use in (f"generate {directory} --prompt a", f"export {directory} {tmp_path / 'out'}"):
        assert command(use) == 2
        assert "1099511627776 bytes, more than any file that Pagoda writes" in capsys.readouterr().err


def test_the_lock_of_cached_tokens_empties_no_other_file(done: TrainConfig, tmp_path: Path) -> None:
    precious, cache = tmp_path / "precious", tmp_path / "cache"
    precious.write_text("precious")
    run(replace(done, output_dir=tmp_path / "one", cache=cache, max_steps=1), Console(quiet=True))
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    shutil.rmtree(entry)
    entry.with_suffix(".lock").unlink(missing_ok=True)
    os.link(precious, entry.with_suffix(".lock"))
    with pytest.raises(Exception, match="a second name"):
        run(replace(done, output_dir=tmp_path / "two", cache=cache, max_steps=1), Console(quiet=True))
    assert precious.read_text() == "precious"
