"""Help is in groups, mistakes in flags are one line, and messages have the names of flags."""

import warnings

import pytest

from pagoda.cli.flags import with_flags
from pagoda.cli.main import COMMANDS, main
from pagoda.config.commands import GenerateConfig
from pagoda.train.config import TrainConfig


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return capsys.readouterr().out


def test_help_of_train_begins_with_what_is_needed_and_has_groups(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of("train", capsys)
    assert "--data" in "\n".join(shown.splitlines()[:10])
    essential, memory, advanced = (shown.index(f"\n{group}:\n") for group in ("essential", "memory", "advanced"))
    assert essential < shown.index("\n  --data STR") < shown.index("\n  --optim.lr FLOAT, --lr FLOAT") < memory
    assert memory < shown.index("\n  --memory.ssd DIR") < advanced < shown.index("\n  --trace-step INT")


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help_in_lines_of_a_terminal(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(command, capsys)
    assert shown.startswith(f"usage: pagoda {command} ")
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Raise memory.host, or add memory.ssd='DIR'.", "Raise --memory.host, or add --memory.ssd DIR."),
        ("with pagoda.Tiles(tile_limit=...), layers", "with --tile-limit, layers"),
        ("use wrap(activations='keep') or 'offload'.", "use --activations keep or 'offload'."),
        ("precision is 'x'; use bf16", "--precision is 'x'; use bf16"),
        ("/data/seq_len/x and --memory.ssd are as they were", "/data/seq_len/x and --memory.ssd are as they were"),
        ("memory.split=None chooses it", "memory.split=None chooses it"),
    ],
)
def test_messages_of_the_command_name_flags(message: str, said: str) -> None:
    assert with_flags(message, TrainConfig) == said


def test_messages_name_only_flags_that_the_command_has() -> None:
    assert with_flags("Raise memory.host, or lower seq_len", GenerateConfig) == "Raise --memory.host, or lower seq_len"


def test_warnings_are_one_line_and_those_for_developers_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> int:
        warnings.warn("`x` will be removed", FutureWarning, stacklevel=1)
        warnings.warn("memory.host is small", stacklevel=1)
        return 0

    monkeypatch.setattr("pagoda.cli.generate.run", run)
    assert main(["generate", "run", "--prompt", "text"]) == 0
    assert capsys.readouterr().err == "pagoda: warning: --memory.host is small\n"
