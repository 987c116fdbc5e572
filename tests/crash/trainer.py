"""A run of `transformers.Trainer` in pages, in a process of its own: a scenario for ranks/rank_server.py."""

import ctypes
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

from pagoda.integrations import Paging, checkpoints
from pagoda.integrations.staging import STATE
from pagoda.integrations.states import numbered
from pagoda.integrations.transformers import Trainer
from tests.crash.command import PATIENCE_S, RETRY_S, state_of
from tests.integrations.tiny_text import arguments, logged, memory, model, samples

STEPS = 6


def train(
    out: Path, root: str, ssd: bool, record: list[Any] | None = None, signalled: tuple[float, int] | None = None
) -> dict[str, Any]:
    """Train to the end in `root`/run, from the last checkpoint if there is one.

    `record`: the arguments of `recorder_start` in recorder.c. `signalled`: seconds until a signal, and its number.
    Returns the bits of the run at its end, and the step from which it went on.
    """
    said = os.open(out / "err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(said, number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    checkpoints.PATIENCE_S, checkpoints.RETRY_S = PATIENCE_S, RETRY_S
    if record is not None:
        folder, log, first, last, error = record
        recorder = ctypes.CDLL(os.environ["LD_PRELOAD"])
        recorder.recorder_start.argtypes = [ctypes.c_char_p] * 2 + [ctypes.c_long] * 2 + [ctypes.c_int]
        recorder.recorder_start(folder.encode(), log.encode(), first, last, error)
    run = Path(root, "run")
    settings = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 2}
    settings |= {"save_strategy": "steps", "save_steps": 1, "max_steps": STEPS, "max_grad_norm": 0.5}
    pages = memory(Path(root, "ssd")) if ssd else memory(Path(root, "ssd"), "2MiB")
    trainer = Trainer(
        model=model(attention_dropout=0.1),
        args=arguments(run, **settings),
        train_dataset=samples(),
        eval_dataset=samples(4),
        paging=Paging(memory=pages),
    )
    if signalled is not None:
        timer = threading.Timer(signalled[0], os.kill, (os.getpid(), signalled[1]))
        timer.daemon = True
        timer.start()
    trainer.train(resume_from_checkpoint=bool(numbered(run, "checkpoint-")))
    trainer.optimizer.close()
    found = {"losses": logged(trainer, "loss", "eval_loss"), "from": trainer._initial_global_step}
    return {**found, "state": state_of(run / f"checkpoint-{STEPS}" / STATE)}


def warm_up() -> None:
    """Import and compile what every run needs."""
    with tempfile.TemporaryDirectory() as path:
        for ssd in (False, True):
            Path(path, str(ssd)).mkdir()
            out, err, handler = os.dup(1), os.dup(2), signal.getsignal(signal.SIGTERM)
            train(Path(path), f"{path}/{ssd}", ssd)
            os.dup2(out, 1)
            os.dup2(err, 2)
            signal.signal(signal.SIGTERM, handler)
