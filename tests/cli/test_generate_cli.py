"""`pagoda generate` and what `pagoda export` writes beside weights, of a run with a tokenizer."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GPT2Config, T5Config

from pagoda.cli.main import main
from pagoda.config.commands import GenerateConfig
from pagoda.errors import ConfigError
from pagoda.train.chat import ChatTemplate
from pagoda.train.generate import continued
from pagoda.train.tokenizer import ByteTokenizer
from tests.cli.workspace import Workspace
from tests.files import content_of
from tests.text_files import MARKED, chats, write_lines, write_pretrained
from tests.tiny import at_the_first_batch


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """With a run that has two checkpoints and evaluations."""
    folder = tmp_path_factory.mktemp("generate")
    write_pretrained(folder / "model")
    data = write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats()])
    usual = {"data": data, "max_length": 128, "precision": "fp32", "memory__host": "1GiB", "memory__ssd": None}
    work = Workspace(folder, folder / "model", **usual)
    work.train("run", max_steps=4, eval_share=0.2, max_eval_samples=4, eval_steps=2, learning_rate=1e-2, save_steps=2)
    return work


@pytest.fixture
def folder(work: Workspace) -> Path:
    return work.root


def test_an_export_has_what_converters_read(folder: Path, tmp_path: Path) -> None:
    """vLLM and llama.cpp's convert_hf_to_gguf.py: an architecture by name, special tokens, and how to write."""
    out = tmp_path / "exported"
    assert main(["export", str(folder / "run"), str(out), "--dtype", "bf16"]) == 0
    config, tokens, writes, vocabulary = (
        json.loads((out / name).read_text())
        for name in ("config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json")
    )
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["model_type"], config["dtype"]) == ("llama", "bfloat16")
    mine, own = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(folder / "model")
    assert mine.chat_template == own.chat_template
    assert mine("What is 1 plus 2?")["input_ids"] == own("What is 1 plus 2?")["input_ids"]
    assert vocabulary["model"]["type"] == "BPE"
    assert vocabulary["model"]["merges"]
    assert tokens["eos_token"] in {token["content"] for token in vocabulary["added_tokens"]}
    assert (out / "chat_template.jinja").read_text() == MARKED
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert writes["eos_token_id"] == model.generation_config.eos_token_id


def write_rich_model(directory: Path, **changes: Any) -> Path:
    """A model whose directory has every kind of file that an export copies, and settings that are not the defaults."""
    write_pretrained(directory)
    said = {"eos_token_id": [0, 2], "temperature": 0.6, "top_p": 0.9, "do_sample": True, "their_own": [1]}
    (directory / "generation_config.json").write_text(json.dumps({"transformers_version": "5.0.0", **said}))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "their_own": {"a": 1e-7}, **changes}))
    for name in ("preprocessor_config.json", "special_tokens_map.json", "additional_chat_templates/tools.jinja"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("use_cache", "flags", "exported"),
    [
        (True, (), ()),
        (False, ("--lora-r", "2"), ("--merge",)),
        pytest.param(True, ("--lora-r", "2"), (), marks=pytest.mark.slow),
    ],
)
def test_an_export_of_a_resumed_run_is_that_of_an_uninterrupted_one_and_has_all_that_the_model_came_with(
    use_cache: bool, flags: tuple[str, ...], exported: tuple[str, ...], work: Workspace, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = write_rich_model(tmp_path / "model", use_cache=use_cache)
    before = {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}
    settings = {
        "model": model,
        "output_dir": tmp_path / "whole",
        "max_steps": 2,
        "eval_share": 0.0,
        "learning_rate": None,
    }
    assert main(work.args("-", *flags, **settings)) == 0
    at_the_first_batch(lambda: signal.raise_signal(signal.SIGTERM), monkeypatch)
    assert main(work.args("-", *flags, **{**settings, "output_dir": tmp_path / "cut"})) == 128 + signal.SIGTERM
    (model / "generation_config.json").unlink()
    (model / "special_tokens_map.json").write_text("{} ")
    assert main(["train", "--resume-from-checkpoint", "last", "--output-dir", str(tmp_path / "cut")]) == 0
    found = []
    for name in ("whole", "cut"):
        assert main(["export", str(tmp_path / name), str(tmp_path / f"of {name}"), *exported]) == 0
        found.append(content_of(tmp_path / f"of {name}"))
    assert found[0] == found[1]
    of_weights = {"model.safetensors", "config.json", "generation_config.json"}
    assert {name: found[0].get(name) for name in before.keys() - of_weights} == {
        name: before[name] for name in before.keys() - of_weights
    }
    if exported or not flags:
        for name in ("config.json", "generation_config.json"):
            others = {"dtype": None, "transformers_version": None}
            assert {**json.loads(found[0][name]), **others} == {**json.loads(before[name]), **others}


def generated(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert main(["generate", *args, "--memory.host", "1GiB", "--max-new-tokens", "12"]) == 0
    return capsys.readouterr().out.strip()


def test_a_run_writes_what_transformers_would(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(folder / "run"), str(folder / "again"), "--checkpoint", "checkpoint-2"]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder / "again")
    tokenizer = AutoTokenizer.from_pretrained(folder / "again")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 5?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    torch.manual_seed(0)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=[0, 2], pad_token_id=0)
    said = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True).strip()
    args = (str(folder / "run"), "--prompt", "What is 5?", "--checkpoint", "checkpoint-2")
    before = (folder / "run").stat().st_mtime_ns
    assert generated(capsys, *args) == said
    assert (folder / "run").stat().st_mtime_ns == before, "weights go from the checkpoint to pages, by no other file"
    assert generated(capsys, str(folder / "again"), *args[1:3]) == said
    assert generated(capsys, *args, "--tile-limit", "8KiB") == said
    assert generated(capsys, *args, "--do-sample") == generated(capsys, *args, "--do-sample") != said
    for least in (("--temperature", "1e-6"), ("--top-p", "1e-6")):
        assert generated(capsys, *args, "--do-sample", *least) == said, "only the most likely token is left"


def test_the_checkpoint_and_the_precision_are_said_and_are_true(
    work: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(model: nn.Module, *_: Any, **__: Any) -> str:
        return f"in {next(model.parameters()).dtype}"

    monkeypatch.setattr("pagoda.train.generate.continued", written)
    dtypes = {"fp32": "in torch.float32", "bf16": "in torch.bfloat16"}
    run, half = work.root / "run", tmp_path / "half"
    assert main(["export", str(run), str(half), "--dtype", "bf16"]) == 0
    places = {run: (run / "checkpoint-4", "fp32"), work.root / "model": (work.root / "model", "fp32")}
    for source, (place, precision) in {**places, half: (half, "bf16")}.items():
        assert main(["generate", str(source), "--prompt", "a", "--max-new-tokens", "1", "--memory.host", "64MiB"]) == 0
        said = capsys.readouterr()
        assert said.err.splitlines()[-1] == f"pagoda: reading {place}, computing in {precision}"
        assert dtypes[precision] in said.out


def test_a_run_with_adapters_writes_too_and_its_adapter_has_the_tokenizer(
    work: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work.train("chosen", max_steps=1, lora_r=2, eval_share=0.0, learning_rate=None)
    assert "--learning-rate 0.0002: usual for adapters" in capsys.readouterr().out
    work.train("adapted", max_steps=4, lora_r=4, eval_share=0.0, learning_rate=0.05)
    text = generated(capsys, str(work.root / "adapted"), "--prompt", "What is 5?")
    assert main(["export", str(work.root / "adapted"), str(tmp_path / "merged"), "--merge"]) == 0
    assert generated(capsys, str(tmp_path / "merged"), "--prompt", "What is 5?") == text
    assert main(["export", str(work.root / "adapted"), str(tmp_path / "adapter")]) == 0
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names >= {"adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"}


def test_a_chat_has_a_system_prompt_and_several_turns(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(ChatTemplate, "prompt", lambda _, messages: seen.append(messages) or [5])
    args = [str(folder / "run"), "--prompt", "Hi", "Hello", "Who?", "--system", "Be brief."]
    generated(capsys, *args)
    (messages,) = seen
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Who?")
    ]  # fmt: skip
    assert "several turns are for a chat" in refused(capsys, *args, "--chat", "False")
    with pytest.raises(ConfigError, match="ending with the user"):
        GenerateConfig(source=folder / "run", prompt=("Hi", "Hello"))


def test_a_checkpoint_that_is_missing_is_named_with_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder / "run"), "--prompt", "a", "--checkpoint", "checkpoint-3"]) == 2
    assert "it has checkpoint-2, checkpoint-4" in capsys.readouterr().err
    assert main(["generate", str(folder / "model" / "none"), "--prompt", "a"]) == 2
    assert "neither a run nor a Hugging Face directory" in capsys.readouterr().err


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    capsys.readouterr()
    assert main(["generate", *map(str, args)]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_continued_is_refused_in_words(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = folder / "run", folder / "model"
    for flags in (("--max-new-tokens", "0"), ("--seed", "-1"), ("--temperature", "0"), ("--top-p", "1.5")):
        assert main(["generate", str(run), "--prompt", "a", *flags]) == 2
    assert "--prompt is empty" in refused(capsys, run, "--prompt", "", "--chat", False)
    for chat in (("--prompt", "a \udcff"), ("--prompt", "a", "--system", "b \udcff")):
        assert "--prompt is not UTF-8" in refused(capsys, run, *chat)
    assert "the model has 256 positions" in refused(capsys, run, "--prompt", "a b " * 300)
    assert "names a checkpoint of a run" in refused(capsys, model, "--prompt", "a", "--checkpoint", "best")
    AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=256, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path / "bytes")
    assert "--prompt is not UTF-8" in refused(capsys, tmp_path / "bytes", "--prompt", "a \udcff")
    assert "no chat template" in refused(capsys, tmp_path / "bytes", "--prompt", "a", "--chat", True)
    generated(capsys, str(tmp_path / "bytes"), "--prompt", "as many as fit")


def test_a_decoder_of_its_own_does_not_repeat_the_prompt() -> None:
    config = T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    ids = torch.tensor([list(b"some text")])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 1:]
    text = ByteTokenizer().decode(expected.tolist())
    assert continued(model, ByteTokenizer(), "some text", chat=False, tokens=12) == text
