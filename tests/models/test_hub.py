"""Models by their name on the Hugging Face Hub. Nothing is downloaded here."""

from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest

from pagoda.cli.main import main
from pagoda.errors import ConfigError
from pagoda.models.build import build_model, model_directory, planned_name
from tests.text_files import write_pretrained
from tests.tiny import write_model

NAME = "some-org/tiny-model"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache. Returns the directory in which the model's snapshot would be."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--some-org--tiny-model"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    return repository / "snapshots" / commit


def test_a_name_on_the_hub_is_its_directory_in_the_cache(cache: Path) -> None:
    write_model(cache, num_hidden_layers=2)
    assert model_directory(NAME) == cache
    assert planned_name(NAME) == NAME
    assert build_model(NAME, seq_len=16).config.num_hidden_layers == 2


def test_a_model_that_is_not_in_the_cache_is_refused_with_the_command_that_downloads_it(cache: Path) -> None:
    with pytest.raises(ConfigError, match=f"run `hf download {NAME}`.*--download"):
        model_directory(NAME)
    with pytest.raises(ConfigError, match=rf"run `hf download {NAME} config\.json`"):
        planned_name(NAME)


def test_a_directory_comes_before_the_hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).parent.mkdir()
    write_model(tmp_path / NAME)
    assert model_directory(NAME) == Path(NAME)
    with pytest.raises(ConfigError, match="unknown model 'some-org/other'"):  # a typing error, not a repository
        model_directory("some-org/other")


def test_a_cached_configuration_without_weights_is_not_trained_from_random_ones(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(cache, num_hidden_layers=2)
    text = tmp_path / "text.txt"
    text.write_text("a text of some length. " * 100)
    flags = ["--data", str(text), "--max-steps", "1", "--max-length", "16", "--output-dir", str(tmp_path / "run")]
    assert main(["train", "--model", NAME, "--tokenizer", "bytes", *flags]) == 2
    assert "was downloaded without weights" in capsys.readouterr().err


def test_download_fetches_the_model_and_says_why_it_cannot(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def no_network(name: str, **others: object) -> str:
        asked.append(name)
        raise OSError("no route to host.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    assert main(["train", "--model", NAME, "--download"]) == 2
    assert asked == [NAME]
    assert f"{NAME} cannot be downloaded: no route to host." in capsys.readouterr().err
    assert main(["train", "--model", "llama-15m", "--download"]) == 2
    assert "--model is 'llama-15m'" in capsys.readouterr().err


def test_a_published_model_is_planned_by_its_name_on_the_hub(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--hardware", "h200", "--plan", "usual", "--json"]
    assert main(["plan", "--model", "HuggingFaceTB/SmolLM2-135M-Instruct", *flags]) == 0
    assert '"model": "smollm2-135m"' in capsys.readouterr().out
    with pytest.raises(ConfigError, match="hf download"):  # but not trained from random weights
        model_directory("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_generate_takes_a_name_on_the_hub(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pretrained(cache)
    texts = []
    for source in (str(cache), NAME):
        assert main(["generate", source, "--prompt", "a", "--max-new-tokens", "4", "--memory.host", "1GiB"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
