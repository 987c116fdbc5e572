"""What processes of their own do in `test_processes`: functions that the server of ranks calls in each."""

import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
import transformers

import pagoda
from integrations.tiny_text import Calls, arguments, logged, memory, model, samples
from pagoda.errors import UsageError
from pagoda.integrations import Paging
from pagoda.integrations.transformers import Trainer

HOST_BYTES = 24 << 20
KILL, RESUME = "kill", "resume"
"""A run ends its process in its middle, or goes on from what was saved there; else it runs from start to end."""


def kills(after: int) -> Calls:
    """Ends the process within a run."""
    return Calls(on_step_end=lambda state: os.kill(os.getpid(), signal.SIGKILL) if state.global_step == after else None)


def trainers_of_ranks(out: Path) -> dict[str, Any]:
    """The stock trainer's losses on these ranks, the paged one's, and those of a run that resumes from its middle."""
    settings = {"optim": "sgd", "learning_rate": 0.3, "eval_strategy": "steps", "eval_steps": 3}
    saving = {"save_strategy": "steps", "save_steps": 3, **settings}
    data = {"train_dataset": samples(), "eval_dataset": samples(6)}
    paging = Paging(memory=memory(out / "ssd", "2MiB"))
    stock = transformers.Trainer(model(), arguments(out / "stock", **settings), **data)
    stock.train()
    found = {"stock": logged(stock, "loss", "eval_loss"), "stock norms": logged(stock, "grad_norm")}
    paged = Trainer(model(), arguments(out / "paged", **saving), paging=paging, **data)
    paged.train()
    found |= {"paged": logged(paged, "loss", "eval_loss"), "paged norms": logged(paged, "grad_norm")}
    paged.save_model(str(out / "saved"))
    paged.optimizer.close()
    resumed = Trainer(model(), arguments(out / "paged", **saving), paging=paging, **data)
    resumed.train(resume_from_checkpoint=str(out / "paged" / "checkpoint-3"))
    return {**found, "resumed": logged(resumed, "loss", "eval_loss")}


def dpo_on_ranks(out: Path) -> dict[str, list[float]]:
    """Losses of DPO on these ranks, of TRL's own trainer and of the paged one, with its reference model in pages."""
    from integrations import test_trl

    paging = Paging(memory=memory(out / "ssd", "2MiB"), reference=memory(out / "reference", "1MiB"))
    found = {}
    for name, pages in {"stock": None, "paged": paging}.items():
        found[name] = logged(test_trl.trained("DPO", out / name, paging=pages, **test_trl.CASES["DPO"](out)), "loss")
    return found


def accelerate_on_ranks(out: Path) -> dict[str, Any]:
    """What Accelerate's own loop finds on these ranks, the paged one, and that after its state was loaded. And what
    comes of saving on one rank alone."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from integrations.test_accelerate import Run
    from pagoda.integrations.accelerate import Accelerator as PagedAccelerator

    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        """As in diffusers' scripts for LoRA, where rank 0 reads alone. Here, all ranks do, unless `alone`."""
        if not alone:
            weights[:] = [dict(each) for each in weights]
        if accelerator.is_main_process:
            torch.save(dict(weights.pop()), Path(directory, "own.pt"))

    def load(models: list[Any], directory: str) -> None:
        models.pop().load_state_dict(torch.load(Path(directory, "own.pt")))

    alone = False
    found: dict[str, Any] = {}
    AcceleratorState._reset_state(reset_partial_state=True)  # the server may have imported what makes one
    for name in ("stock", "paged", "loaded"):
        AcceleratorState._reset_state()
        paging = Paging(memory=memory(out / "ssd", "2MiB"))
        accelerator = Accelerator(cpu=True) if name == "stock" else PagedAccelerator(cpu=True, paging=paging)
        run = Run(accelerator, clip=100.0, lr=0.3)
        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        if name == "loaded":
            run.skip(2)
            accelerator.load_state(str(out / "state"))
        else:
            found[name] = run.steps(2)
        if name == "paged":
            accelerator.save_state(str(out / "state"))
            (own,) = (out / "state").rglob("own.pt")
            read, now = torch.load(own), run.model.state_dict()
            found["read by all"] = [key for key in now if torch.equal(read[key], now[key])] == [*now]
        found[name] = found.get(name, []) + run.steps(3)
        if name == "paged":
            alone = True
            try:
                accelerator.save_state(str(out / "by one"))
            except UsageError as error:
                found["read by one"] = str(error)
            alone = False
        if name == "loaded":
            try:  # as scripts do that know DDP alone
                run.accelerator.save_state(str(out / "one")) if accelerator.is_main_process else run.steps(1)
            except UsageError as error:
                found["saved by one"] = str(error)
        if name != "stock":
            run.optimizer.optimizer.close()
    return found


def lightning_on_ranks(out: Path) -> dict[str, Any]:
    """Losses of Lightning's own strategy on these ranks, of the paged one, and of a run that resumes."""
    import lightning
    from torch.utils.data import DataLoader

    from integrations.test_lightning import QUIET, Module
    from pagoda.integrations.lightning import PagodaStrategy

    def fit(strategy: Any, resume: Path | None = None) -> tuple[Any, list[float]]:
        module = Module()
        settings = {**QUIET, "devices": 2, "gradient_clip_val": 100.0, "enable_checkpointing": False}
        epochs = 1 if strategy == "ddp" or resume is None else 2
        trainer = lightning.Trainer(strategy=strategy, max_epochs=epochs, default_root_dir=out, **settings)
        trainer.fit(module, DataLoader(samples(8), batch_size=2), ckpt_path=resume)
        return trainer, module.losses

    def paged() -> Any:
        return PagodaStrategy(paging=Paging(memory=memory(out / "ssd", "2MiB")))

    found = {"stock": fit("ddp")[1]}
    trainer, found["paged"] = fit(paged())
    trainer.save_checkpoint(out / "state")
    trainer.strategy.optimizer_in_pages.close()
    trainer, found["resumed"] = fit(paged(), out / "state")
    trainer.strategy.optimizer_in_pages.close()
    return found


def _trl(out: Path, kind: str, way: str) -> list[float]:
    from integrations import test_trl

    paging = Paging(memory=memory(out / "ssd"), reference=memory(out / "reference", "84KiB", "8KiB"))
    callbacks = [kills(3)] if way == KILL else []
    more = test_trl.CASES[kind](out / "model") | {"callbacks": callbacks}
    return logged(test_trl.trained(kind, out / "run", way == RESUME, paging, **more), "loss")


def _accelerate(out: Path, _: str, way: str) -> list[float]:
    from integrations.test_accelerate import Run
    from pagoda.integrations.accelerate import Accelerator

    run = Run(Accelerator(cpu=True, paging=Paging(memory=memory(out / "ssd"))), torch.optim.AdamW, lr=1e-2)
    if way == RESUME:
        run.skip(2)
        run.accelerator.load_state(str(out / "state"))
        return run.steps(2)
    losses = run.steps(2)
    run.accelerator.save_state(str(out / "state"))
    losses += run.steps(1)
    if way == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    return losses + run.steps(1)


def _fabric(out: Path, _: str, way: str) -> list[float]:
    import lightning

    from integrations.test_lightning import fabric_run
    from pagoda.integrations.lightning import PagodaFabricStrategy

    strategy = PagodaFabricStrategy(paging=Paging(memory=memory(out / "ssd")))
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    if way == RESUME:
        return fabric_run(fabric, 2, resume=out / "state")
    if way == KILL:
        fabric_run(fabric, 2, save=out / "state")
        os.kill(os.getpid(), signal.SIGKILL)
    return fabric_run(fabric, 4)


def _lightning(out: Path, _: str, way: str) -> list[float]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from integrations.test_lightning import QUIET, Module, loader
    from pagoda.integrations.lightning import PagodaStrategy

    class Ends(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5 and way == KILL:
                os.kill(os.getpid(), signal.SIGKILL)

    paging = Paging(memory=memory(out / "ssd"))
    module = Module(torch.optim.AdamW, dropout=0.1)
    saving = ModelCheckpoint(out, save_last=True, every_n_epochs=1)
    trainer = lightning.Trainer(
        strategy=PagodaStrategy(paging=paging), max_epochs=3, callbacks=[saving, Ends()], default_root_dir=out, **QUIET
    )
    trainer.fit(module, loader(4), ckpt_path=out / "last.ckpt" if way == RESUME else None)
    return module.losses


def losses_of(out: Path, kind: str, way: str) -> list[float]:
    """The losses of a run of a framework."""
    run = {"Accelerate": _accelerate, "Lightning": _lightning, "Fabric": _fabric}.get(kind, _trl)
    return run(out, kind, way)


def beyond_memory(out: Path, way: str) -> dict[str, Any]:
    """A model whose state takes 240 MiB, in 24 MiB of RAM: by how much that lets the process grow."""
    with pagoda.deferred_init():
        made = model(hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8)
    state = 14 * sum(param.numel() for param in made.parameters())
    settings = {"bf16": True, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}
    paging = Paging(memory=pagoda.Memory(host=HOST_BYTES, ssd=str(out)), activations="recompute")
    callbacks = [kills(4)] if way == KILL else []
    (out / "first").mkdir(exist_ok=True)
    with pagoda.deferred_init():
        small = model()
    once = arguments(out / "first", **{**settings, "max_steps": 3})
    first = Trainer(small, once, train_dataset=samples(), paging=paging)
    first.train()  # imports and compiles what takes memory once
    first.optimizer.close()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer = Trainer(
        made, arguments(out / "run", **settings), train_dataset=samples(), paging=paging, callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=way == RESUME)
    trainer.save_model(str(out / "saved"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"state": state, "grown": (peak - before) << 10, "losses": logged(trainer, "loss")}
