"""Help is tyro's, in groups, and messages have the names of flags."""

import warnings

import pytest

from pagoda.cli.flags import with_flags
from pagoda.cli.main import COMMANDS, main
from pagoda.config.commands import GenerateConfig
from pagoda.train.config import TrainConfig


def help_of(command: str, capsys: pytest.CaptureFixture[str], flag: str = "--help") -> str:
    with pytest.raises(SystemExit) as exited:
        main([command, flag])
    assert exited.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "plan"])
def test_many_flags_are_listed_by_their_groups_and_described_on_demand(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listed, described = (help_of(command, capsys, flag) for flag in ("--help", "--help-verbose"))
    for shown in (listed, described):
        groups = [shown.index(f" {group}options ") for group in ("", "memory ")]
        assert groups == sorted(groups)
        batch, ssd = shown.index("--per-device-train-batch-size INT"), shown.index("--memory.ssd DIR")
        assert groups[0] < batch < groups[1] < ssd
    assert "Sequences per forward pass" in described
    assert len(listed.splitlines()) < 120


@pytest.mark.parametrize("command", [each.name for each in COMMANDS if each.name not in ("train", "plan")])
def test_few_flags_are_described_at_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(command, capsys)
    assert shown.startswith(f"usage: pagoda {command} ")
    assert "(default: " in shown
    assert "--help-verbose" not in shown


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Raise memory.host, or add memory.ssd='DIR'.", "Raise --memory.host, or add --memory.ssd DIR."),
        ("with pagoda.Tiles(tile_limit=...), layers", "with --tile-limit, layers"),
        ("use wrap(activations='keep') or 'offload'.", "use --activations keep or 'offload'."),
        ("precision is 'x'; use bf16", "--precision is 'x'; use bf16"),
        *[(same, same) for same in ("/data/max_length/x and --memory.ssd", "memory.split=None chooses it")],
    ],
)
def test_messages_of_the_command_name_its_flags(message: str, said: str) -> None:
    assert with_flags(message, TrainConfig) == said
    assert with_flags("memory.host or max_length", GenerateConfig) == "--memory.host or max_length"


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
