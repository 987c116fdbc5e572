"""TRL's training scripts, with the state of their trainers in pages."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import datasets
import torch
import trl

from pagoda.budgets import as_setting, own_directories
from pagoda.config.commands import ReferringConfig, ScriptConfig
from pagoda.config.memory import FIRST_SHARE, Memory
from pagoda.config.reading import check_split
from pagoda.config.run import StatesConfig
from pagoda.errors import ConfigError, PagodaError, reading, unknown_name
from pagoda.integrations.paging import Paging
from pagoda.integrations.transformers import PagedTrainerMixin
from pagoda.optim.named import rule_from
from pagoda.optim.rule import Rule
from pagoda.process import temporarily

_PART = 4
"""The reference model has a quarter of the memory: its weights, next to weights and two moments, all in fp32."""


def run_script(config: ScriptConfig, flags: Collection[str], own: Collection[str]) -> None:
    """Run a script of TRL as `trl` does, in this process. `flags` are Pagoda's, and `own` its settings in files.

    Raises ConfigError for flags that cannot be read, and the errors of `PagedTrainerMixin`.
    """
    script, training, model, data = _parsed(config, flags, own)
    if not (script.dataset_name or data.datasets):
        raise ConfigError("--dataset_name is missing: name a dataset of the Hub, or a folder with its files")
    if not model.model_name_or_path:
        raise ConfigError("--model_name_or_path is missing: name a model of the Hub, or its directory")
    if str(training.resume_from_checkpoint).lower() == "true":
        training.resume_from_checkpoint = True
    training.model_init_kwargs = {"device_map": None, **(training.model_init_kwargs or {})}  # else all is put on a GPU
    alone = model.use_peft or getattr(training, "precompute_ref_log_probs", False)
    refers = not alone and getattr(training, "beta", 0.0) != 0.0
    main = import_module(f"trl.scripts.{config.script}").main
    paging = _paging(config, training, refers)
    with _paged(config.trainer, paging), temporarily(datasets, load_dataset=_refusing(script, training)):
        main(script, training, model, data)


def parser_of(script: str) -> Any:
    """TRL's parser of a script's flags. It raises ConfigError for a value that it cannot read."""
    parser = import_module(f"trl.scripts.{script}").make_parser(prog=f"pagoda {script}")
    parser.error = _refuse
    return parser


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)


def _parsed(config: ScriptConfig, flags: Collection[str], own: Collection[str]) -> Any:
    """The configurations of a script. Raises ConfigError for flags, and settings in a file, that it does not have."""
    parser = parser_of(config.script)
    instead = [] if config.activations is None else ["--gradient_checkpointing", "False"]
    args = [*instead, *config.others]
    given = [arg for arg in parser.parse_known_args(args)[1] if arg != "--config"]
    if unknown := next((arg.partition("=")[0] for arg in given if arg.startswith("--")), None):
        known = [*flags, *(option for action in parser._actions for option in action.option_strings)]
        prog = f"pagoda {config.script}"
        raise unknown_name(unknown, known, f"{prog} has no flag {unknown!r}.", f"`{prog} --help` lists all.")
    try:
        *found, of_file, others = parser.parse_args_and_config(
            args, return_remaining_strings=True, separate_remaining_strings=True
        )
    except (ValueError, TypeError) as error:  # what the configurations refuse
        raise ConfigError(str(error)) from error
    strange = [f"'{name[2:]}'" for name in of_file[::2] if name[2:] not in own]
    if strange:
        raise ConfigError(f"the file with --config has unknown settings: {', '.join(strange)}")
    if others:
        raise ConfigError(f"{others[0]!r} belongs to no flag")
    return found


def _refusing(script: Any, training: Any) -> Callable[..., Any]:
    """`datasets.load_dataset`, which raises ConfigError for data that cannot be read, or that lack a split."""
    load = datasets.load_dataset
    wanted = [script.dataset_train_split, *([script.dataset_test_split] * (training.eval_strategy != "no"))]

    def loaded(path: str, *args: Any, **settings: Any) -> Any:
        with reading(f"data {path!r}" + ", which is no folder here," * (not Path(path).exists())):
            found = load(path, *args, **settings)
        if isinstance(found, dict):
            for split in wanted:
                check_split(path, split, found)
        return found

    return loaded


@contextmanager
def _paged(name: str, paging: Paging) -> Iterator[None]:
    """Inside, `trl` has a trainer with its state in pages under the name of its own one. A script of TRL imports its
    trainer from there when it runs, and takes no other. Pages are closed at the end of the script, as long as the ranks
    still have their process group, or when the script fails."""
    stock, trainers = getattr(trl, name), []

    class Paged(PagedTrainerMixin, stock):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _loading(kwargs["model"]):
                super().__init__(*args, paging=paging, **kwargs)
            trainers.append(self)

        def end(self) -> None:
            close()
            super().end()

    def close() -> None:
        for trainer in trainers:
            for optimizer in (trainer._paged, trainer._reference):
                if optimizer is not None:
                    optimizer.close()
        trainers.clear()

    Paged.__name__ = name
    try:
        with temporarily(trl, **{name: Paged}):
            yield
    finally:
        close()


@contextmanager
def _loading(model: str) -> Iterator[None]:
    """Raises ConfigError if transformers finds no model or tokenizer, for which it raises OSErrors without a file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or isinstance(error, PagodaError):
            raise
        raise ConfigError(f"model {model!r} cannot be loaded: {str(error).splitlines()[0]}") from error


def _paging(config: ScriptConfig, training: Any, refers: bool) -> Paging:
    memory, reference = config.memory, None
    if memory.device is None and training.device.type == "cuda":
        memory = replace(memory, device=str(int(torch.cuda.mem_get_info()[0] * FIRST_SHARE)))
    if refers and isinstance(config, ReferringConfig):
        memory, reference = divided(memory, config.reference)
    return Paging(
        memory=memory,
        reference=reference,
        optimizer=_rule(config, training),
        activations=config.activations or "keep",
        update=config.update,
        autocast=config.autocast and bool(training.bf16),
        skip_non_finite=config.skip_non_finite,
        export=config.export or None,
        save_minutes=config.save_minutes,
    )


def _rule(config: ScriptConfig, training: Any) -> Rule | None:
    """The optimizer that Pagoda's own flags name, with TRL's settings. None if they name none."""
    if config.optimizer is None and config.moments == "fp32":
        return None
    name, settings = config.optimizer or "adamw", {"lr": training.learning_rate}
    if name == "adamw":
        betas = training.adam_beta1, training.adam_beta2
        settings |= {"betas": betas, "eps": training.adam_epsilon, "weight_decay": training.weight_decay}
    return rule_from(name, StatesConfig(moments=config.moments), settings)


def divided(memory: Memory, reference: Memory) -> tuple[Memory, Memory]:
    """The memory of the model, and that of its reference model. A size that the reference model is not given is a
    quarter of the model's, which then lacks it. It has directories `reference` in those of the model."""
    mine: dict[str, Any] = {}
    its: dict[str, Any] = {name: getattr(memory, name) for name in ("page_size", "unit_limit", "embedding_limit")}
    if memory.host_bytes is not None and reference.host is None:
        its["host"] = memory.host_bytes // _PART
        mine["host"] = memory.host_bytes - its["host"]
    if memory.device_bytes is not None and reference.device is None:
        nbytes, kind = memory.device_bytes, "cpu:" if memory.arena_for_device else ""
        its["device"] = f"{kind}{nbytes // _PART}"
        mine["device"] = f"{kind}{nbytes - nbytes // _PART}"
    if memory.ssd is not None and reference.ssd is None:
        sizes = memory.ssd_directories
        its["ssd"] = own_directories({path: size and size // _PART for path, size in sizes.items()}, "reference")
        mine["ssd"] = as_setting({path: size and size - size // _PART for path, size in sizes.items()})
    given = {name: value for name in its if (value := getattr(reference, name)) is not None}
    return replace(memory, **mine), replace(reference, **{**its, **given})
