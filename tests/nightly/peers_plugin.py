"""A pytest plugin that puts Pagoda's classes at the names that another project's tests import them from.

`--peer NAME` names the suite, `--ours` exchanges its classes, and `--outcomes FILE` gets a line of JSON for each test.
Without `--ours`, the suite runs as it is, which is what `peers.py` compares with. Pages do not hold all weights.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pagoda
from pagoda.integrations import paging

TRAINERS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer")
_open: list[Any] = []
"""Optimizers of the running test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("peers")
    group.addoption("--peer", help="the suite")
    group.addoption("--ours", action="store_true", help="put Pagoda's classes in place of the suite's own")
    group.addoption("--outcomes", type=Path, help="file for outcomes")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.peer == "trl" and not torch.cuda.is_available():
        _on_cpus()
    if config.option.ours:
        paging.wrap = _small(paging.wrap)  # type: ignore[assignment]
        {"transformers": _transformers, "trl": _trl, "accelerate": _accelerate, "peft": _peft}[config.option.peer]()
    if config.option.outcomes is not None:
        config.pluginmanager.register(_Outcomes(config.option.outcomes))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    try:
        return (yield)
    finally:
        while _open:
            _open.pop().close()


class _Outcomes:
    """Appends each test's outcome as soon as it is known, so that a run that is cut off has those before."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = "" if crash is None else crash.message.partition("\n")[0][:300]
            with self.path.open("a") as out:
                print(json.dumps({"test": report.nodeid, "outcome": report.outcome, "why": why}), file=out)


def _small(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """`wrap` with pages for compute that hold about half of the weights."""

    def run(model: Any, rule: Any, *, memory: Any = None, **settings: Any) -> Any:
        share = max(sum(param.nbytes for param in model.parameters()) // 2, 4096)
        for _ in range(6):
            memory = pagoda.Memory(device=f"cpu:{share >> 10}KiB", host="256MiB", page_size=4096, unit_limit="16KiB")
            try:
                wrapped = wrap(model, rule, memory=memory, **settings)
            except pagoda.BudgetError as refused:
                share = max(refused.needed_bytes or 0, share) + (64 << 10)
                continue
            _open.append(wrapped[1])
            return wrapped
        raise AssertionError("no arena was large enough")

    return run


def _on_cpus() -> None:
    """TRL's arguments have bf16 by default, which transformers refuses without a GPU unless it is told to use none."""
    from transformers import TrainingArguments

    check = TrainingArguments.__post_init__

    def told(arguments: Any) -> None:
        arguments.use_cpu = True
        check(arguments)

    TrainingArguments.__post_init__ = told


def _transformers() -> None:
    import transformers
    from transformers import trainer, trainer_seq2seq

    from pagoda.integrations.transformers import Seq2SeqTrainer, Trainer

    transformers.Trainer = trainer.Trainer = Trainer
    transformers.Seq2SeqTrainer = trainer_seq2seq.Seq2SeqTrainer = Seq2SeqTrainer


def _trl() -> None:
    """The suite's bf16 is autocast, so ours is, too."""
    import trl

    from pagoda.integrations.transformers import PagedTrainerMixin

    for name in TRAINERS:

        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            PagedTrainerMixin.__init__(trainer, *args, paging=paging.Paging(autocast=True), **kwargs)

        setattr(trl, name, type(name, (PagedTrainerMixin, getattr(trl, name)), {"__init__": init}))


def _accelerate() -> None:
    import accelerate

    from pagoda.integrations.accelerate import Accelerator

    accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator


def _peft() -> None:
    """An optimizer of torch that is made for all parameters of a model wraps the model."""
    wrap = _small(pagoda.wrap)
    for name in ("SGD", "Adam", "AdamW"):
        stock = getattr(torch.optim, name)

        def made(params: Any, *, stock: Any = stock, **settings: Any) -> Any:
            frame = getattr(params, "gi_frame", None)  # of `model.parameters()`
            model = frame.f_locals.get("self") if frame is not None else None
            if not isinstance(model, torch.nn.Module):
                return stock(params, **settings)
            return wrap(model, pagoda.Optim(stock, **settings))[1]

        setattr(torch.optim, name, made)
