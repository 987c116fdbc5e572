"""A run's directory may come from a stranger: its files lead to no other file, class or directory, and do not stop a
command."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pagoda.checkpoint.directory import read_manifest, write_manifest
from pagoda.cli.main import main
from pagoda.config.memory import Memory
from pagoda.console import lasting
from pagoda.errors import ConfigError
from pagoda.memory.forms import with_hash
from pagoda.models.build import build_from_directory
from pagoda.train import TrainConfig, assembly, defaults, run
from pagoda.train.run_dir import LOCK, RunDir
from tests.files import content_of
from tests.text_files import write_pretrained
from tests.tiny import command, tiny_run

MODULE = "class Opt(__import__('torch').optim.SGD): ...\nopen(__file__ + '.ran', 'w').close()\n"


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


def rewrite(directory: Path, **changes: object) -> None:
    """Give a run other settings, with the hash that belongs to them."""
    path = directory / "config.json"
    settings = {name: value for name, value in json.loads(path.read_text()).items() if name != "hash"}
    path.write_text(json.dumps(with_hash({**settings, **changes})))


def resumed(directory: Path, *flags: str) -> int:
    return command(" ".join([f"train --resume-from-checkpoint last --output-dir {directory} --max-steps 3", *flags]))


def test_a_class_that_only_the_run_names_is_not_imported(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "strangers_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    rewrite(directory, optim="strangers_module:Opt")
    assert resumed(directory) == 2
    assert "add --optim strangers_module:Opt" in capsys.readouterr().err
    for use in (f"generate {directory} --prompt a --max-new-tokens 1", f"report {directory}", f"inspect {directory}"):
        assert command(use) == 0
    assert "strangers_module" not in sys.modules
    assert not (tmp_path / "strangers_module.py.ran").exists()
    assert resumed(directory, "--optim", "strangers_module:Opt") == 2, "the checkpoint is of AdamW"
    assert "what it was saved with" in capsys.readouterr().err


def test_processes_that_torchrun_restarts_import_no_class_of_a_run_that_is_there(
    directory: Path, done: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although they continue a run without --resume-from-checkpoint last."""
    for module in (defaults, assembly):
        monkeypatch.setattr(module, "was_restarted", lambda: True)
    rewrite(directory, optim="strangers_module:Opt")
    with pytest.raises(ConfigError, match="add --optim strangers_module:Opt"):
        run(replace(done, output_dir=directory, max_steps=0, num_train_epochs=1.0), Console(quiet=True))


@pytest.mark.parametrize(
    ("settings", "unnamed"),
    [
        ({"optim": "a.b:C", "cache": Path("/c")}, {"optim": "a.b:C", "cache": "/c"}),
        ({"optim": "torch.optim:Adagrad", "cache": Path("run/cache")}, {}),
        ({"optim": "Adagrad", "memory": Memory(ssd="run/a,run/b:1GiB")}, {}),
        ({"memory": Memory(ssd="run/a,run/../b c")}, {"memory.ssd": "'run/a,run/../b c'"}),
        ({"optim": "torchish:C", "memory": Memory(ssd="link")}, {"optim": "torchish:C", "memory.ssd": "link"}),
    ],
)
def test_what_is_torchs_own_or_inside_the_run_needs_no_name(
    settings: dict[str, object], unnamed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("elsewhere")
    config = replace(tiny_run(tmp_path, output_dir=Path("run")), **settings)
    run_dir = RunDir(Path("run"))
    run_dir.create(config)
    flags = {name: f"--{name} {value}" for name, value in unnamed.items()}
    assert run_dir.foreign(config) == flags
    if flags:
        with pytest.raises(ConfigError, match="must be on the command line too: add --"):
            run_dir.continued_config([*flags][1:])
    assert run_dir.continued_config([*flags]) == config


def test_a_run_writes_to_no_directory_that_only_its_file_names(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").mkdir()
    settings = json.loads((directory / "config.json").read_text())
    rewrite(directory, memory={**settings["memory"], "ssd": str(tmp_path / "precious")}, cache=str(tmp_path / "new"))
    before = content_of(directory)
    assert resumed(directory) == 2
    assert f"add --memory.ssd {tmp_path / 'precious'} --cache {tmp_path / 'new'}" in capsys.readouterr().err
    assert content_of(directory) == before
    assert not (tmp_path / "new").exists()
    assert not [*(tmp_path / "precious").iterdir()]
    assert resumed(directory, "--memory.ssd", str(tmp_path / "precious"), "--cache", str(tmp_path / "new")) == 0


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


@pytest.mark.parametrize("where", ["report.html", "plan.json", "timeline.json", "metrics.jsonl", "config.json"])
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
