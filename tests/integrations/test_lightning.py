"""Lightning's Trainer and Fabric with state in pages: the losses of their own strategies, and runs that resume."""

from collections.abc import Callable, Iterator
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

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 1,
}


class Module(lightning.LightningModule):
    """A language model as Lightning's documentation has it: a network inside, and a loss of its own."""

    def __init__(self, kind: type = torch.optim.SGD, dropout: float = 0.0, schedule: Any = None) -> None:
        super().__init__()
        self._schedule = schedule or (lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 6))
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
        return [optimizer], [{"scheduler": self._schedule(optimizer), "interval": "step"}]


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


def test_schedulers_inside_a_scheduler_change_the_rate(pages: Any, tmp_path: Path) -> None:
    found = fitted(tmp_path, Module(schedule=warmed), pages())
    assert found == fitted(tmp_path, Module(schedule=warmed))


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
    assert [path.name for path in last.iterdir()] == ["pagoda-3"], "what was overwritten is deleted"
    (last / "pagoda-3" / "rest.ckpt").write_bytes(b"")  # a power loss, had it not been synced
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
    assert isinstance(lightning.Fabric(accelerator="cpu", devices=1, strategy="pagoda").strategy, PagodaFabricStrategy)


# --- Fabric ------------------------------------------------------------------------------------------------------


def fabric_run(
    fabric: Any,
    steps: int,
    resume: Any = None,
    save: Any = None,
    clip: float | None = None,
    kind: type = torch.optim.AdamW,
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
        if clip is not None:
            fabric.clip_gradients(made, optimizer, max_norm=clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        state["step"] += 1
    if save is not None:
        fabric.save(save, state)
    return losses


def test_fabric_has_the_bits_of_its_own_strategy(pages: Any) -> None:
    found = []
    for strategy in ("auto", pages(PagodaFabricStrategy)):
        fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
        found.append(fabric_run(fabric, 4, kind=torch.optim.SGD))
    assert found[0] == found[1]


def test_a_scheduler_that_fabric_does_not_know_changes_the_rate(pages: Any) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=pages(PagodaFabricStrategy))
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


def test_fabric_trains_and_resumes(pages: Any, tmp_path: Path) -> None:
    """Clipped and in 16 bits, with a scale of the loss."""

    def fabric() -> Any:
        strategy = pages(PagodaFabricStrategy)
        return lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy, precision="16-mixed")

    whole = fabric_run(fabric(), 4, clip=0.1)
    plain = fabric_run(lightning.Fabric(accelerator="cpu", devices=1), 4, clip=0.1)
    assert whole == pytest.approx(plain, rel=2e-2)
    begun = fabric_run(fabric(), 2, save=tmp_path / "state", clip=0.1)
    rest = fabric_run(fabric(), 2, resume=tmp_path / "state", clip=0.1)
    assert begun + rest == whole


def test_fabric_makes_a_model_in_pages_and_refuses_one_without_its_optimizer(pages: Any) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=pages(PagodaFabricStrategy))
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
