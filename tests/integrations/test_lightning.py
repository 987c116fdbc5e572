"""Lightning's Trainer and Fabric with state in pages: the losses of their own strategies, and runs that resume."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning")

import pagoda  # noqa: E402
from integrations.tiny_text import memory, model, samples, warmed  # noqa: E402
from pagoda.checkpoint.waiting import is_waiting  # noqa: E402
from pagoda.integrations import Paging  # noqa: E402
from pagoda.integrations.lightning import PagodaFabricStrategy, PagodaStrategy  # noqa: E402
from pagoda.integrations.paging import optimizer_of  # noqa: E402

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
QUIET |= {"accelerator": "cpu", "devices": 1}


class Module(lightning.LightningModule):
    """A language model as Lightning's documentation has it: a network inside, and a loss of its own."""

    def __init__(self, kind: type = torch.optim.SGD, dropout: float = 0.0) -> None:
        super().__init__()
        self._kind = kind
        self.network = model(attention_dropout=dropout)
        self.losses: list[float] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(input_ids=ids).logits
        return logits

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        logits = self(batch["input_ids"])[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", self.training_step(batch, index))

    def configure_optimizers(self) -> Any:
        optimizer = self._kind(self.parameters(), lr=0.1 if self._kind is torch.optim.SGD else 1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 6)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loader(count: int = 24) -> Any:
    """Batches of two samples. Those of training are shuffled, except where a run resumes: Lightning does not save the
    order."""
    return DataLoader(samples(count), 2, shuffle=count == 24, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes strategies whose state is in 300 KiB of RAM and on an SSD."""
    made: list[Any] = []

    def make(kind: type = PagodaStrategy) -> Any:
        made.append(kind(paging=Paging(memory=memory(tmp_path / f"ssd-{len(made)}"))))
        return made[-1]

    yield make
    for strategy in made:
        if strategy._paged is not None:
            strategy._paged.close()


def fitted(out: Path, module: Module, strategy: Any = "auto", resume: Any = None, **settings: Any) -> list[float]:
    """The losses of a run, of twelve steps an epoch, or of two where checkpoints are made."""
    given = {"max_steps": 6, "default_root_dir": out, "num_sanity_val_steps": 0, **QUIET, **settings}
    trainer = lightning.Trainer(strategy=strategy, **{"enable_checkpointing": False, **given})
    train = loader(4 if "callbacks" in settings else 24)
    trainer.fit(module, train, loader(4) if "val_check_interval" in settings else None, ckpt_path=resume)
    return module.losses


def test_losses_have_the_bits_of_lightnings_own_strategy(pages: Any, tmp_path: Path) -> None:
    """With accumulation and validation."""
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_steps": 3, "val_check_interval": 2}
    strategy = pages()
    found = fitted(tmp_path, Module(), strategy, **settings)
    assert found == fitted(tmp_path, Module(), **settings)
    assert sum(strategy.optimizer_in_pages.stats.bytes_moved.values()), "state was on the SSD"


def test_autocast_has_the_bits_of_lightnings_own_in_bf16(pages: Any, tmp_path: Path) -> None:
    strategy = pages()
    strategy.paging = replace(strategy.paging, autocast=True)
    found = fitted(tmp_path, Module(), strategy, precision="bf16-mixed")
    assert strategy.optimizer_in_pages.param_groups[0]["params"][0].dtype is torch.float32
    assert found == fitted(tmp_path, Module(), precision="bf16-mixed")


def test_callbacks_that_copy_weights_are_refused_before_training(pages: Any, tmp_path: Path) -> None:
    averaging = lightning.pytorch.callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=1)
    with pytest.raises(pagoda.ConfigError, match=r"StochasticWeightAveraging.*examples/ema\.py"):
        fitted(tmp_path, Module(), pages(), callbacks=[averaging])


def test_clipped_by_value_it_has_the_bits_of_lightnings_own_strategy(pages: Any, tmp_path: Path) -> None:
    """And a callback that logs norms finds the same."""
    found: list[Any] = []

    class Log(lightning.pytorch.callbacks.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            norms = lightning.pytorch.utilities.grad_norm(module, norm_type=1)
            found.append({name: float(norm) for name, norm in norms.items()})

    settings = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value", "max_steps": 3}
    losses = [fitted(tmp_path, Module(), how, callbacks=[Log()], **settings) for how in (pages(), "auto")]
    assert losses[0] == losses[1]
    assert found[:3] == found[3:]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_clipped_and_in_16_bits_it_is_near_lightnings_own(precision: str, pages: Any, tmp_path: Path) -> None:
    settings = {"gradient_clip_val": 0.1, "precision": precision}
    strategy = pages()
    found = fitted(tmp_path, Module(torch.optim.AdamW), strategy, **settings)
    expected = fitted(tmp_path, Module(torch.optim.AdamW), gradient_clip_val=0.1)
    assert found == pytest.approx(expected, rel=1e-5 if precision == "32-true" else 2e-2)
    assert strategy.optimizer_in_pages.stats.grad_norm > 0.1, "there was something to clip"


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(pages: Any, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    def settings(name: str, **more: Any) -> dict[str, Any]:
        saving = ModelCheckpoint(tmp_path / name, save_last=True, every_n_epochs=1)
        return {"precision": "bf16-true", "enable_checkpointing": True, "callbacks": [saving], "max_steps": -1, **more}

    def make() -> Module:
        return Module(torch.optim.AdamW, dropout=0.1)

    whole = fitted(tmp_path, make(), pages(), **settings("whole", max_epochs=3))
    fitted(tmp_path, make(), pages(), **settings("ended", max_epochs=2))
    resumed = fitted(tmp_path, make(), pages(), tmp_path / "ended" / "last.ckpt", **settings("ended", max_epochs=3))
    assert resumed == whole[4:]
    assert len(resumed) == 2
    last = tmp_path / "ended" / "last.ckpt"
    assert [path.name for path in last.iterdir()] == ["pagoda"], "what was overwritten is deleted"
    (last / "pagoda" / "rest.ckpt").write_bytes(b"")  # a power loss, had it not been synced
    with (
        pytest.warns(UserWarning, match=r"rest\.ckpt has changed"),
        pytest.raises(pagoda.CheckpointError, match="no complete save"),
    ):
        fitted(tmp_path, make(), pages(), last, **settings("ended", max_epochs=4))


def test_a_model_is_made_in_pages_validated_before_and_after_it_fits_and_saved(pages: Any, tmp_path: Path) -> None:
    trainer = lightning.Trainer(strategy=pages(), max_steps=6, enable_checkpointing=False, **QUIET)
    with trainer.init_module():
        module = Module()
    assert any(is_waiting(param) for param in module.parameters())
    before = trainer.validate(module, loader(4), verbose=False)[0]["validation"]
    trainer.fit(module, loader())
    after = trainer.validate(module, loader(4), verbose=False)[0]["validation"]
    assert after < before
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    loaded = Module.load_from_checkpoint(tmp_path / "weights.ckpt", weights_only=False)
    expected = module.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_the_strategy_has_a_name(tmp_path: Path) -> None:
    trainer = lightning.Trainer(strategy="pagoda", **QUIET)
    assert isinstance(trainer.strategy, PagodaStrategy)
    assert isinstance(one_device("pagoda").strategy, PagodaFabricStrategy)


# --- one device --------------------------------------------------------------------------------------------------


class Regression(lightning.LightningModule):
    """Two layers, an optimizer with momentum, and the losses and rates of its steps."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size, self.rate, self.momentum = batch_size, 0.02, 0.5
        self.schedule: Any = None
        torch.manual_seed(1)
        self.network = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
        self.steps: list[tuple[float, float]] = []

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        loss = (self.network(batch[0]) - batch[0][:, :1].sin()).square().mean()
        self.steps.append((loss.item(), self.trainer.optimizers[0].param_groups[0]["lr"]))
        return loss

    def test_step(self, batch: Any, index: int) -> None:
        self.log("found", self.network(batch[0]).mean())

    def train_dataloader(self, shuffle: bool = False) -> Any:
        inputs = torch.randn(24, 16, generator=torch.Generator().manual_seed(5))
        return DataLoader(torch.utils.data.TensorDataset(inputs), self.batch_size, shuffle=shuffle)

    test_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=self.momentum)
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(optimizer)])


def trainer_of(strategy: Any, out: Path, **settings: Any) -> Any:
    given = {"max_epochs": 1, "default_root_dir": out, "enable_checkpointing": False, **QUIET, **settings}
    return lightning.Trainer(strategy=strategy, **given)


Alike = Callable[[Callable[[Callable[..., Any]], Any]], None]


@pytest.fixture
def alike(pages: Any, tmp_path: Path) -> Alike:
    """Asserts that a program gives the same with Lightning's own strategy. The program gets a function that makes
    trainers, with one strategy each, and with the same settings of paging."""

    def check(program: Callable[[Callable[..., Any]], Any]) -> None:
        paging = pages().paging

        def own(**settings: Any) -> Any:
            return trainer_of("auto", tmp_path, **settings)

        def paged(**settings: Any) -> Any:
            strategies.append(PagodaStrategy(paging=paging))
            return trainer_of(strategies[-1], tmp_path, **settings)

        strategies: list[Any] = []
        found = [program(make) for make in (own, paged)]
        strategies[0].optimizer_in_pages.close()
        assert found[1] == found[0]

    return check


def test_one_device_draws_the_random_numbers_of_lightnings_own_strategy(alike: Alike) -> None:
    """A loader without a generator of its own shuffles from the seed of the program."""

    def program(make: Any) -> Any:
        lightning.seed_everything(3, verbose=False)
        module, trainer = Regression(), make()
        trainer.fit(module, module.train_dataloader(shuffle=True))
        assert isinstance(trainer.strategy, lightning.pytorch.strategies.SingleDeviceStrategy)
        return module.steps

    alike(program)


@pytest.mark.parametrize("again", ["the same trainer", "another trainer"])
def test_each_fit_begins_with_what_configure_optimizers_gives(again: str, alike: Alike) -> None:
    """Its rate, momentum and schedulers, and no state of the last fit."""

    def program(make: Any) -> Any:
        module, trainer = Regression(), make()
        trainer.fit(module)
        module.rate, module.momentum, module.schedule = 0.1, 0.25, warmed
        if again == "another trainer":
            trainer = make()
            trainer.test(module, verbose=False)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module)
        return module.steps

    alike(program)


def test_an_optimizer_that_a_module_keeps_goes_on_with_its_state(alike: Alike) -> None:
    def program(make: Any) -> Any:
        module, trainer = Regression(), make()
        kept = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        module.configure_optimizers = lambda: kept
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module)
        return module.steps

    alike(program)


def test_a_trainer_may_get_another_module(alike: Alike) -> None:
    def program(make: Any) -> Any:
        first, second, trainer = Regression(), Regression(), make()
        trainer.fit(first)
        if (paged := optimizer_of(first)) is not None:
            paged.close()
        found = trainer.test(second, verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(second)
        return found, second.steps

    alike(program)


def test_a_fit_with_another_optimizer_is_refused_in_words(pages: Any, tmp_path: Path) -> None:
    module, trainer = Regression(), trainer_of(pages(), tmp_path)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 2
    module.configure_optimizers = lambda: torch.optim.Adagrad(module.parameters())
    with pytest.raises(pagoda.UsageError, match="differs from the first time: optimizer class"):
        trainer.fit(module)
    module.configure_optimizers = lambda: torch.optim.SGD(module.network[0].parameters(), momentum=0.5)
    with pytest.raises(pagoda.UsageError, match="first time: parameters of the param groups"):
        trainer.fit(module)
    with pytest.raises(pagoda.UsageError, match="first time: paging"):
        trainer_of(PagodaStrategy(paging=Paging()), tmp_path).fit(module)


def test_the_tuner_finds_what_it_finds_with_lightnings_own_strategy(alike: Alike) -> None:
    from lightning.pytorch.tuner import Tuner

    def program(make: Any) -> Any:
        module, trainer = Regression(2), make()
        size = Tuner(trainer).scale_batch_size(module, max_trials=3)
        rates = Tuner(make()).lr_find(module, num_training=5, max_lr=0.5, update_attr=False).results
        trainer.fit(module)
        return size, rates, module.steps

    alike(program)


def test_a_checkpoint_of_lightnings_own_strategy_resumes_with_its_optimizer(alike: Alike, tmp_path: Path) -> None:
    first = trainer_of("auto", tmp_path)
    first.fit(Regression())
    first.save_checkpoint(tmp_path / "first.ckpt")

    def program(make: Any) -> Any:
        module = Regression()
        make(max_epochs=2).fit(module, ckpt_path=tmp_path / "first.ckpt")
        return module.steps

    alike(program)


def test_hooks_on_saving_see_the_state_dict_and_may_choose_from_it(alike: Alike, tmp_path: Path) -> None:
    def program(make: Any) -> Any:
        class Biases(Regression):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                kept = {name: value for name, value in checkpoint["state_dict"].items() if "bias" in name}
                checkpoint["state_dict"] = kept

        module, trainer = Biases(), make()
        trainer.fit(module)
        trainer.save_checkpoint(tmp_path / "biases.ckpt", weights_only=True)
        saved = torch.load(tmp_path / "biases.ckpt", weights_only=False)["state_dict"]
        return {name: value.tolist() for name, value in saved.items()}

    alike(program)


def test_a_module_without_an_optimizer_can_only_be_evaluated(alike: Alike, pages: Any, tmp_path: Path) -> None:
    class Evaluated(Regression):
        def configure_optimizers(self) -> Any:
            if self.trainer.state.fn != "fit" and self.rate:
                raise LookupError("no steps to schedule")

    def program(make: Any) -> Any:
        module = Evaluated()
        module.rate = 0
        return make().test(module, verbose=False)

    alike(program)
    with pytest.raises(pagoda.ConfigError, match=r"before test\(\), too.*LookupError.*may return None"):
        trainer_of(pages(), tmp_path).test(Evaluated(), verbose=False)
    with pytest.raises(pagoda.ConfigError, match="gave 0 optimizers"):
        trainer_of(pages(), tmp_path).fit(Evaluated())


def test_processes_that_lightning_does_not_count_are_refused(
    pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pagoda.ConfigError, match=r"1 processes, and torchrun's environment 2.*as many devices"):
        trainer_of(pages(), tmp_path).fit(Regression())


# --- Fabric ------------------------------------------------------------------------------------------------------


def one_device(strategy: Any = "auto", **settings: Any) -> Any:
    return lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy, **settings)


def fabric_run(
    fabric: Any, steps: int, resume: Any = None, save: Any = None, clip: float = 0.0, kind: type = torch.optim.AdamW
) -> list[float]:
    """A loop as Fabric's documentation has it."""
    fabric.launch()
    made = model(attention_dropout=0.1)
    optimizer = kind(made.parameters(), lr=1e-2)
    made, optimizer = fabric.setup(made, optimizer)
    state = {"model": made, "optimizer": optimizer, "step": 0}
    batches = [*fabric.setup_dataloaders(loader())]
    if resume is not None:
        fabric.load(resume, state)
    losses = []
    for batch in batches[state["step"] : state["step"] + steps]:
        loss = made(**batch).loss
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(made, optimizer, max_norm=clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        state["step"] += 1
    if save is not None:
        fabric.save(save, state)
    return losses


def test_fabric_has_the_bits_of_its_own_strategy(pages: Any) -> None:
    own, found = (one_device(strategy) for strategy in ("auto", pages(PagodaFabricStrategy)))
    assert fabric_run(found, 4, kind=torch.optim.SGD) == fabric_run(own, 4, kind=torch.optim.SGD)


def test_a_scheduler_that_fabric_does_not_know_changes_the_rate(pages: Any) -> None:
    fabric = one_device(pages(PagodaFabricStrategy))
    fabric.launch()
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    made, optimizer = fabric.setup(made, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    for batch in loader(4):
        fabric.backward(made(**batch).loss)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_fabric_needs_no_launch_on_one_device(pages: Any) -> None:
    fabric = one_device(pages(PagodaFabricStrategy))
    made = torch.nn.Linear(4, 1)
    made, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1))
    with fabric.no_backward_sync(made):
        fabric.backward(made(torch.ones(2, 4)).sum())
    optimizer.step()


def test_fabric_trains_and_resumes(pages: Any, tmp_path: Path) -> None:
    """Clipped and in 16 bits, with a scale of the loss."""

    def fabric() -> Any:
        return one_device(pages(PagodaFabricStrategy), precision="16-mixed")

    whole = fabric_run(fabric(), 4, clip=0.1)
    plain = fabric_run(one_device(), 4, clip=0.1)
    assert whole == pytest.approx(plain, rel=2e-2)
    begun = fabric_run(fabric(), 2, save=tmp_path / "state", clip=0.1)
    rest = fabric_run(fabric(), 2, resume=tmp_path / "state", clip=0.1)
    assert begun + rest == whole


def test_fabric_makes_a_model_in_pages_and_refuses_one_without_its_optimizer(pages: Any) -> None:
    fabric = one_device(pages(PagodaFabricStrategy))
    fabric.launch()
    with pytest.raises(pagoda.ConfigError, match="with its optimizer"):
        fabric.setup(model())
    with fabric.init_module():
        made = model()
    assert any(is_waiting(param) for param in made.parameters())
    made, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1))
    losses = []
    for batch in loader(8):
        fabric.backward(loss := made(**batch).loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
