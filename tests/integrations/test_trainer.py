"""transformers.Trainer in pages: the stock trainer's losses, and runs that go on where they ended."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, TrainerCallback

import pagoda
from integrations.tiny_text import Calls, arguments, logged, memory, model, samples, warmed
from pagoda.integrations import Paging, seals
from pagoda.integrations.staging import STATE
from pagoda.integrations.transformers import PagedTrainerMixin, Seq2SeqTrainer, Trainer

Make = Callable[..., Any]
TORCHS_ADAMW = pagoda.Optim(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
"""With the very operations of the stock trainer's."""


@pytest.fixture
def paged(tmp_path: Path) -> Iterator[Make]:
    """Makes trainers whose state is in 300 KiB of RAM and on an SSD."""
    made: list[Any] = []

    def make(out: str = "paged", kind: type = Trainer, paging: dict[str, Any] | None = None, **settings: Any) -> Any:
        given = {"model": model(), "train_dataset": samples(), **settings.pop("given", {})}
        pages = Paging(**{"memory": memory(tmp_path / f"ssd-{len(made)}"), **(paging or {})})
        trainer = kind(args=settings.pop("args", None) or arguments(tmp_path / out, **settings), paging=pages, **given)
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        if trainer._paged is not None:
            trainer._paged.close()


def stock(out: Path, **settings: Any) -> Any:
    trainer = transformers.Trainer(
        model(), arguments(out, **settings), train_dataset=samples(), eval_dataset=samples(4)
    )
    trainer.train()
    return trainer


AUTOCAST: dict[str, Any] = {"optimizer": TORCHS_ADAMW, "autocast": True}


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_autocast_has_the_bits_of_the_stock_trainer_in_bf16(activations: str, paged: Make, tmp_path: Path) -> None:
    """Weights, gradients and checkpoints are in fp32. By default they are in bf16."""
    settings = {"optim": "adamw_torch", "bf16": True, "weight_decay": 0.1, "eval_strategy": "steps", "eval_steps": 2}
    trainer = paged(given={"eval_dataset": samples(4)}, paging={**AUTOCAST, "activations": activations}, **settings)
    before = {name: param.clone() for name, param in trainer.model.named_parameters()}
    trainer.train()
    assert {param.dtype for param in trainer.model.parameters()} == {torch.float32}
    assert all(copy.requires_grad for copy in before.values())
    expected = stock(tmp_path / "stock", **settings)
    assert logged(trainer, "loss", "eval_loss") == logged(expected, "loss", "eval_loss")
    in_bf16 = paged("own", paging={"optimizer": TORCHS_ADAMW}, **{**settings, "eval_strategy": "no"})
    in_bf16.train()
    assert {param.dtype for param in in_bf16.model.parameters()} == {torch.bfloat16}
    assert logged(in_bf16, "loss") == pytest.approx(logged(expected, "loss"), rel=2e-2)


ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 5}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SAME: dict[str, dict[str, Any]] = {
    "adafactor, checkpointing": {"optim": "adafactor", "activation_checkpointing": True},
    "adamw, groups, schedule": {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2, **EVALUATED},
    "sgd, accumulation, the last step of an epoch is shorter": {"optim": "sgd", **ACCUMULATED},
}


@pytest.mark.parametrize("case", SAME)
def test_losses_have_the_bits_of_the_stock_trainer(case: str, paged: Make, tmp_path: Path) -> None:
    settings = {"optim": "adamw_torch", **SAME[case]}
    given = {"eval_dataset": samples(4)}
    rule = TORCHS_ADAMW if settings["optim"] == "adamw_torch" else None
    trainer = paged(given=given, paging={"optimizer": rule}, **settings)
    trainer.train()
    expected = stock(tmp_path / "stock", **settings)
    names = ("loss", "eval_loss", "learning_rate")
    assert logged(trainer, *names) == logged(expected, *names)
    assert logged(trainer, "grad_norm") == pytest.approx(logged(expected, "grad_norm"), rel=1e-6)
    assert any(value for value in trainer._paged.stats.bytes_moved.values()), "state was on the SSD"


class Stock(transformers.Trainer):
    """Runs the first half of a batch forward and backward in its loss, as cached contrastive losses do."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        halves = zip(*(value.chunk(2) for value in inputs.values()), strict=True)
        first, second = (dict(zip(inputs, half, strict=True)) for half in halves)
        (model(**first).loss / 2).backward()
        return model(**second).loss / 2


class Halves(PagedTrainerMixin, Stock):
    """The same in pages."""


def test_a_loss_may_run_any_number_of_backward_passes(paged: Make, tmp_path: Path) -> None:
    settings = {"optim": "sgd", "gradient_accumulation_steps": 2, "max_steps": 3}
    trainer = paged(kind=Halves, **settings)
    trainer.train()
    expected = Stock(model(), arguments(tmp_path / "stock", **settings), train_dataset=samples())
    expected.train()
    assert logged(trainer, "loss") == logged(expected, "loss")
    announced = paged(kind=Halves, paging={"backward_passes": 2}, **settings)
    announced.train()
    assert logged(announced, "loss") == logged(expected, "loss")
    with pytest.raises(pagoda.UsageError, match=r"announced 2\..*Paging\(backward_passes="):
        paged(kind=Halves, paging={"backward_passes": 1}, max_grad_norm=0.5, **settings).train()


def test_losses_in_fp16_and_clipped_are_near_the_stock_trainers(paged: Make, tmp_path: Path) -> None:
    settings = {"fp16": True, "max_grad_norm": 0.5}
    trainer = paged(**settings)
    trainer.train()
    expected = stock(tmp_path / "stock", **settings)
    for name in ("loss", "grad_norm"):
        assert logged(trainer, name) == pytest.approx(logged(expected, name), rel=3e-2)
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0]


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(paged: Make, tmp_path: Path) -> None:
    settings = {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings |= {"fp16": True}
    dropout = {"attention_dropout": 0.1}
    whole = paged("whole", given={"model": model(**dropout)}, **settings)
    whole.train()

    def stop(state: Any) -> None:
        if state.global_step == 5:
            raise KeyboardInterrupt  # as if it had been killed

    ended = paged("ended", given={"model": model(**dropout), "callbacks": [Calls(on_step_end=stop)]}, **settings)
    with pytest.raises(KeyboardInterrupt):
        ended.train()
    (tmp_path / "ended" / "checkpoint-5").mkdir()  # a crash while it was written
    resumed = paged("ended", given={"model": model(**dropout)}, **settings)
    with pytest.warns(UserWarning, match="checkpoint-5 cannot be resumed"):
        resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss", "grad_norm", "learning_rate") == logged(whole, "loss", "grad_norm", "learning_rate")
    last = [out / "checkpoint-6" / STATE / "weight.safetensors" for out in (tmp_path / "whole", tmp_path / "ended")]
    assert last[0].read_bytes() == last[1].read_bytes()


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("scheduler.pt", "rng_state.pth")]


@pytest.mark.parametrize("name", ["trainer_state.json", f"{STATE}/weight.safetensors", seals.SEAL, *SLOW])
def test_a_run_resumes_from_the_last_checkpoint_that_is_not_damaged(name: str, paged: Make, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}
    whole = paged(**settings)
    whole.train()
    args = torch.load(tmp_path / "paged" / "checkpoint-6" / "training_args.bin", weights_only=False)
    assert args.save_total_limit == 3
    damaged = tmp_path / "paged" / "checkpoint-6" / name
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content if "safetensors" in name else b"")
    with pytest.raises(pagoda.CheckpointError, match=r"checkpoint-6 cannot be resumed"):
        paged(**settings).train(resume_from_checkpoint=str(tmp_path / "paged" / "checkpoint-6"))
    resumed = paged(**settings)
    with pytest.warns(UserWarning, match=r"checkpoint-6 cannot be resumed.*from the checkpoint before it"):
        resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(whole, "loss")


def test_older_checkpoints_are_deleted_once_the_new_one_is_on_the_disk(
    paged: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def begin(directory: Path) -> None:
        if not directory.parent.name.endswith(".partial"):  # it is going to be deleted
            newest = max(directory.parent.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
            assert newest != directory
            files = {path.name for path in newest.iterdir()} - {seals.SEAL}
            assert files <= {path.name for path in synced if newest.name in path.parts}
            replaced.append(directory.name)
        real(directory)

    real, replaced = seals.begin, []
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(seals, "begin", begin)
    paged(save_strategy="steps", save_steps=2, save_total_limit=1).train()
    assert replaced == ["checkpoint-2", "checkpoint-4"]
    assert [path.name for path in (tmp_path / "paged").iterdir()] == ["checkpoint-6"]


def test_the_best_model_comes_back(paged: Make, tmp_path: Path) -> None:
    """With a learning rate that ruins the model after the first evaluation."""
    settings = {"max_steps": 5, "learning_rate": 0.3, "lr_scheduler_type": "constant"}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_strategy": "steps"}
    given = {"eval_dataset": samples(4)}
    trainer = paged(**settings, save_total_limit=1, load_best_model_at_end=True, given=given)
    trainer.train()
    losses = logged(trainer, "eval_loss")
    assert min(losses) < losses[-1]
    assert trainer.evaluate()["eval_loss"] == min(losses)
    assert len([*(tmp_path / "paged").glob("checkpoint-*")]) <= 2


def test_a_checkpoint_with_a_file_of_the_users_is_not_deleted_at_the_end(paged: Make, tmp_path: Path) -> None:
    settings = {"max_steps": 3, "learning_rate": 0.3, "lr_scheduler_type": "constant"}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_strategy": "steps"}
    trainer = paged(**settings, save_total_limit=1, load_best_model_at_end=True, given={"eval_dataset": samples(4)})
    notes = tmp_path / "paged" / "checkpoint-3" / STATE / "notes.txt"

    class Notes(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if notes.parent.exists():
                notes.write_text("mine")

    trainer.add_callback(Notes())
    trainer.train()
    assert "checkpoint-3" not in trainer.state.best_model_checkpoint
    assert notes.read_text() == "mine"


@pytest.mark.parametrize("only_model", [False, True])
def test_what_is_saved_is_what_from_pretrained_loads(only_model: bool, paged: Make, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "save_only_model": only_model}
    trainer = paged(paging={} if only_model else {"export": True}, **settings)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    with pagoda.gathered(trainer.model):
        expected = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for out, has_state in ((tmp_path / "saved", False), (tmp_path / "paged" / "checkpoint-2", not only_model)):
        loaded = LlamaForCausalLM.from_pretrained(out).state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
        names = {path.name for path in out.iterdir()}
        assert "training_args.bin" in names
        assert (STATE in names) == has_state
        assert not [name for name in names if name.startswith(".pagoda")], "nothing temporary is left"


def test_layers_are_compiled(paged: Make, tmp_path: Path) -> None:
    torch.compiler.reset()
    settings = {"torch_compile": True, "torch_compile_backend": "aot_eager", "optim": "sgd", "max_steps": 3}
    trainer = paged(**settings)
    trainer.train()
    assert all(layer._compiled_call_impl is not None for layer in trainer.model.model.layers)
    expected = stock(tmp_path / "stock", optim="sgd", max_steps=3)
    assert logged(trainer, "loss") == pytest.approx(logged(expected, "loss"), rel=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    LlamaForCausalLM.from_pretrained(tmp_path / "saved")


def test_each_model_of_model_init_is_wrapped_anew_and_made_in_pages(paged: Make) -> None:
    def make() -> Any:
        with pagoda.deferred_init():
            return model()

    trainer = paged(given={"model": None, "model_init": make}, max_steps=3)
    trainer.train()
    first, losses = trainer._paged, logged(trainer, "loss")
    assert losses[-1] < losses[0]
    trainer.train()
    assert trainer._paged is not first
    assert logged(trainer, "loss") == losses
    assert trainer._paged.stats.peak_bytes["host"] <= 300 << 10


def test_a_model_that_a_user_has_wrapped_is_clipped_as_the_arguments_say(paged: Make, tmp_path: Path) -> None:
    made, optimizer = pagoda.wrap(
        model(), pagoda.AdamW(lr=1e-2, weight_decay=0.0), memory=pagoda.Memory(host="1MiB"), precision="fp32"
    )
    trainer = paged(given={"model": made, "optimizers": (optimizer, None)}, max_grad_norm=0.1)
    trainer.train()
    expected = stock(tmp_path / "stock", max_grad_norm=0.1)
    assert logged(trainer, "loss") == pytest.approx(logged(expected, "loss"), rel=1e-5)


class Remembering(torch.nn.Module):
    """It keeps what it has seen in a buffer, and takes the saved size when it is loaded if it `takes` that."""

    def __init__(self, takes: bool = True) -> None:
        super().__init__()
        self.layer, self.takes = torch.nn.Linear(4, 1), takes
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen = torch.cat([self.seen, x.detach()[:, 0]])
        return {"loss": (self.layer(x).squeeze(-1) * self.seen.mean() - labels).square().mean()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if self.takes:
            self.seen = torch.zeros_like(state_dict["seen"])
        return super().load_state_dict(state_dict, *args, **kwargs)


def test_a_run_whose_buffer_grows_resumes_as_the_stock_trainers(paged: Make, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 2}

    def given(**own: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(8)]
        return {"given": {"model": Remembering(**own), "train_dataset": data}, **settings}

    whole, resumed, fixed = paged(paging={"export": True}, **given()), paged(**given()), paged(**given(takes=False))
    whole.train()
    assert (tmp_path / "paged" / "checkpoint-2" / "model.safetensors").is_file(), "a module of one's own is exported"
    resumed.train(resume_from_checkpoint=str(tmp_path / "paged" / "checkpoint-2"))
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert torch.equal(resumed.model.seen, whole.model.seen)
    with pytest.raises(pagoda.CheckpointError, match=r"size mismatch for seen") as refused:
        fixed.train(resume_from_checkpoint=str(tmp_path / "paged" / "checkpoint-2"))
    assert "nother trainer" not in str(refused.value)


def test_seq2seq_trains_resumes_and_generates_as_the_stock_trainer(paged: Make, tmp_path: Path) -> None:
    shape = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}

    def t5() -> Any:
        torch.manual_seed(0)
        config = transformers.T5Config(**shape, decoder_start_token_id=0)
        return transformers.T5ForConditionalGeneration(config)

    def run(kind: type, **more: Any) -> Any:
        settings = {"predict_with_generate": True, "generation_max_length": 6, "optim": "sgd"}
        settings |= {"save_strategy": "steps", "save_steps": 3}
        args = arguments(tmp_path / kind.__module__, transformers.Seq2SeqTrainingArguments, **settings)
        given = {"model": t5(), "train_dataset": samples(), "eval_dataset": samples(4)}
        trainer = paged(kind=kind, given=given, args=args) if kind is Seq2SeqTrainer else kind(args=args, **given)
        trainer.train(**more)
        return trainer.predict(samples(4)), logged(trainer, "loss")

    expected, losses = run(transformers.Seq2SeqTrainer)
    first = str(tmp_path / Seq2SeqTrainer.__module__ / "checkpoint-3")
    for settings in ({}, {"resume_from_checkpoint": first}):
        found, its = run(Seq2SeqTrainer, **settings)
        assert its == losses
        assert (found.predictions == expected.predictions).all()
        assert found.metrics["test_loss"] == expected.metrics["test_loss"]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"auto_find_batch_size": True}, {}, "auto_find_batch_size.*choose the batch size"),
    ({"bf16_full_eval": True}, {}, "bf16_full_eval.*set bf16"),
    ({"fp16": True}, AUTOCAST, r"autocast=True\) is for bf16.*fp16"),
    ({"activation_checkpointing": True}, {"activations": "recompute"}, "set gradient_checkpointing=False in its argu"),
]


def test_what_has_no_meaning_in_pages_is_refused_in_words(paged: Make, tmp_path: Path) -> None:
    for settings, paging, said in REFUSED:
        with pytest.raises((pagoda.ConfigError, pagoda.UsageError), match=said):
            paged(paging=paging, **settings).train()
    stock(tmp_path / "stock", save_strategy="steps", save_steps=1, max_steps=1)
    with pytest.raises(pagoda.CheckpointError, match="load the model from it"):
        paged().train(resume_from_checkpoint=str(tmp_path / "stock" / "checkpoint-1"))


def own_optimizer(trainer: Any) -> Any:
    """For `create_optimizer` of a user's class: another learning rate for the output layer."""
    if trainer.optimizer is None:
        head, others = [*trainer.model.lm_head.parameters()], [*trainer.model.model.parameters()]
        trainer.optimizer = torch.optim.SGD([{"params": head, "lr": 1.0}, {"params": others}], lr=0.1, momentum=0.9)
    return trainer.optimizer


Own = type("Own", (transformers.Trainer,), {"create_optimizer": own_optimizer})


@pytest.mark.parametrize(
    "kind",
    [type("Over", (Trainer,), {"create_optimizer": own_optimizer}), type("Under", (PagedTrainerMixin, Own), {})],
    ids=["over", "under"],
)
def test_the_optimizer_of_a_users_class_is_paged(kind: type, paged: Make, tmp_path: Path) -> None:
    trainer = paged(kind=kind, save_strategy="steps", save_steps=3)
    trainer.train()
    expected = Own(model(), arguments(tmp_path / "stock"), train_dataset=samples())
    expected.train()
    assert logged(trainer, "loss", "learning_rate") == logged(expected, "loss", "learning_rate")
    assert (tmp_path / "paged" / "checkpoint-6" / STATE).is_dir()


def test_an_optimizer_and_a_scheduler_that_are_passed_are_taken_over(paged: Make, tmp_path: Path) -> None:
    def given() -> dict[str, Any]:
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        return {"model": made, "optimizers": (optimizer, warmed(optimizer)), "train_dataset": samples()}

    trainer = paged(given=given())
    trainer.train()
    expected = transformers.Trainer(args=arguments(tmp_path / "stock"), **given())
    expected.train()
    assert logged(trainer, "loss", "learning_rate") == logged(expected, "loss", "learning_rate")


def test_precision_comes_from_accelerate_launch(paged: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = paged(max_steps=1)
    trainer.train()
    assert trainer.model.lm_head.weight.dtype is torch.bfloat16


def test_the_best_model_does_not_bring_its_random_numbers_back(paged: Make) -> None:
    settings = {"max_steps": 2, "learning_rate": 3.0, "lr_scheduler_type": "constant", "optim": "sgd"}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_strategy": "steps"}
    drawn = []
    for load in (False, True):
        given = {"model": model(attention_dropout=0.1), "eval_dataset": samples(4)}
        paged("drawn", **settings, load_best_model_at_end=load, given=given).train()
        drawn.append(torch.rand(1))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("kind", ["modules to save", "prompts", "add_adapter"])
def test_adapters_are_saved_as_by_the_stock_trainer(kind: str, paged: Make, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = {"r": 4, "target_modules": ["q_proj", "embed_tokens"], "init_lora_weights": "gaussian"}

    def adapted() -> Any:
        made = model()
        if kind == "add_adapter":
            made.add_adapter(peft.LoraConfig(**lora))
            return made
        if kind == "prompts":
            return peft.get_peft_model(made, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
        config = peft.LoraConfig(task_type="CAUSAL_LM", modules_to_save=["lm_head"], bias="lora_only", **lora)
        return peft.get_peft_model(made, config)

    settings = {"optim": "sgd", "learning_rate": 0.1, "save_strategy": "steps", "save_steps": 6}
    paged(given={"model": adapted()}, **settings).train()
    transformers.Trainer(adapted(), arguments(tmp_path / "stock", **settings), train_dataset=samples()).train()
    files = [tmp_path / out / "checkpoint-6" / "adapter_model.safetensors" for out in ("paged", "stock")]
    mine, theirs = map(load_file, files)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


# --- a second trainer, and runs that end early -------------------------------------------------------------------


def test_a_second_trainer_of_a_model_trains_as_the_stock_one(paged: Make, tmp_path: Path) -> None:
    """With its own rate and schedule, and new states. To evaluate, it needs no optimizer, and leaves the first's."""
    settings: dict[str, Any] = {"optim": "adagrad", "max_steps": 3}
    found = []
    for make in (paged, None):
        made, losses = model(), []
        for changed in ({}, {"learning_rate": 3e-2, "lr_scheduler_type": "cosine"}):
            given = {"model": made, "train_dataset": samples(), "eval_dataset": samples(4)}
            if make is None:
                trainer = transformers.Trainer(args=arguments(tmp_path / "stock", **settings, **changed), **given)
            else:
                trainer = make(given=given, paging={"memory": pagoda.Memory(host="2MiB")}, **settings, **changed)
            losses.append(trainer.evaluate()["eval_loss"])
            trainer.train()
            losses += logged(trainer, "loss", "learning_rate")
        found.append(losses)
    assert found[0] == found[1]


def test_a_second_trainer_evaluates_without_an_optimizer_and_saves(paged: Make, tmp_path: Path) -> None:
    first = paged(optim="adagrad")
    first.train()
    before = first.optimizer.state_dict()
    second = paged(given={"model": first.model, "eval_dataset": samples(4)})
    assert second.evaluate()["eval_loss"] == first.evaluate(samples(4))["eval_loss"]
    assert second.optimizer is None
    second.save_model(str(tmp_path / "saved"))
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path / "saved").lm_head.weight, first.model.lm_head.weight)
    after = first.optimizer.state_dict()
    assert all(torch.equal(state["sum"], before["state"][at]["sum"]) for at, state in after["state"].items())


def test_a_second_trainer_with_other_settings_of_wrap_names_the_remedy(paged: Make) -> None:
    memory_of_both = {"memory": pagoda.Memory(host="2MiB")}
    first = paged(paging=memory_of_both)
    first.train()
    second = paged(given={"model": first.model}, paging=memory_of_both, max_grad_norm=0.1)
    with pytest.raises(pagoda.UsageError, match=r"gradient clipping.*optimizers=\(trainer\.optimizer, None\)"):
        second.train()
    third = paged(given={"model": first.model, "optimizers": (first.optimizer, None)}, paging=memory_of_both)
    third.train()
    assert len(logged(third, "loss")) == 6


@pytest.mark.parametrize(
    ("where", "said"), [(True, "No valid checkpoint found"), ("/nowhere/checkpoint-5", "no such directory")]
)
def test_a_run_without_a_checkpoint_raises_the_stock_trainers_error(where: Any, said: str, paged: Make) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        paged().train(resume_from_checkpoint=where)
    assert "nother trainer" not in str(raised.value)


class Preempted:
    """Asks for a checkpoint as SIGTERM does with `enable_jit_checkpoint`, before the fourth step or within it."""

    manager: Any

    def __init__(self, within: bool) -> None:
        self.callback = Calls(**{"on_substep_end" if within else "on_step_begin": self._ask})

    def _ask(self, state: Any) -> None:
        self.manager.is_checkpoint_requested |= state.global_step == 3


@pytest.mark.parametrize("within", [False, True])
def test_what_is_saved_on_sigterm_resumes(within: bool, paged: Make) -> None:
    """Also if it is asked for after the backward that has updated units."""
    settings = {"gradient_accumulation_steps": 2, "enable_jit_checkpoint": True}
    whole = paged("whole", **settings)
    whole.train()
    asks = Preempted(within)
    ended = paged("ended", given={"callbacks": [asks.callback]}, **settings)
    managers = [getattr(each, "jit_manager", None) for each in ended.callback_handler.callbacks]
    (asks.manager,) = filter(None, managers)
    ended.train()
    assert ended.state.global_step == 4
    resumed = paged("ended", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(whole, "loss")


def test_a_checkpoint_is_pushed_once_it_is_sealed(paged: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = []

    def push(_: Any, directory: str) -> None:
        seals.check(Path(directory))
        pushed.append(Path(directory).name)

    for name in ("init_hf_repo", "push_to_hub", "_finish_current_push"):
        monkeypatch.setattr(transformers.Trainer, name, lambda *_, **__: None)
    monkeypatch.setattr(transformers.Trainer, "_push_from_checkpoint", push)
    settings = {"push_to_hub": True, "hub_strategy": "checkpoint", "hub_model_id": "a/b", "hub_token": "none"}
    paged(save_strategy="steps", save_steps=3, **settings).train()
    assert pushed == ["checkpoint-3", "checkpoint-6"]


def test_adafactors_own_rates_are_logged(paged: Make, tmp_path: Path) -> None:
    def run(make: Callable[..., Any]) -> list[float]:
        made = model()
        optimizer = transformers.Adafactor(made.parameters(), warmup_init=True)
        schedule = transformers.optimization.AdafactorSchedule(optimizer)
        trainer = make(given={"model": made, "optimizers": (optimizer, schedule)})
        trainer.train()
        return logged(trainer, "loss", "learning_rate")

    def own(given: dict[str, Any]) -> Any:
        return transformers.Trainer(args=arguments(tmp_path / "stock"), train_dataset=samples(), **given)

    rates = run(paged)
    assert rates == run(own)
    assert rates[-1] > 0


@pytest.mark.parametrize("settings", [{"max_grad_norm": 1.0}, {"max_grad_norm": 0.0}])
def test_steps_that_are_not_finite_are_skipped_if_a_setting_says_so(settings: dict[str, Any], paged: Make) -> None:
    class Broken(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * (float("nan") if self.state.global_step == 2 else 1.0)

    skipping = paged(kind=Broken, paging={"skip_non_finite": True}, **settings)
    with pytest.warns(UserWarning, match=r"A step is skipped\. The gradient of .* is not finite"):
        skipping.train()
    losses = logged(skipping, "loss")
    assert len(losses) == 6
    assert all(0 < loss < 10 for at, loss in enumerate(losses) if at != 2)
    with pytest.raises(pagoda.NonFiniteGradientError):
        paged(kind=Broken, **settings).train()
