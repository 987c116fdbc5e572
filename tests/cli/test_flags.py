"""Every flag is a field of the settings' classes, its help is the field's docstring, and its default exists once."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import pytest
import tyro

from pagoda.cli.main import parse
from pagoda.config.run import Run
from pagoda.config.settings import flag
from pagoda.forecast.config import PlanConfig
from pagoda.train.config import TrainConfig

OF_A_RUN = {
    # What it trains on, and where it writes.
    "download", "data", "dataset_text_field", "skip_bad", "dataset_config", "dataset_train_split",
    "dataset_test_split", "dataset_revision", "dataset_streaming", "tokenizer", "cache", "probabilities",
    "eval_data", "eval_share", "eval_steps", "max_eval_samples", "early_stopping_patience", "keep_best",
    "packing", "num_train_epochs", "config", "report_to", "seed",
    "output_dir", "resume_from_checkpoint", "save_at_end", "verbose",
    # Which values states take, not how many.
    "learning_rate", "betas", "eps", "weight_decay", "weight_decay_on", "warmup_steps",
    "lr_scheduler_type", "min_lr_ratio",
}  # fmt: skip
OF_A_MACHINE = {
    "hardware", "ram", "nodes", "gpus_per_node", "search_degrees", "max_model", "json",
}  # fmt: skip
COMMANDS = {"train": TrainConfig, "plan": PlanConfig}


def settings(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, type, class) of every setting that has a flag."""
    hints, annotated = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            yield from settings(hints[field.name], f"{prefix}{field.name}.")
        elif tyro.conf.Suppress not in get_args(annotated[field.name]):
            yield prefix + field.name, hints[field.name], kind


def docstring(kind: Any, name: str) -> str:
    """What stands below the field, in the class that says it."""
    for cls in kind.__mro__[:-1]:
        (definition,) = ast.parse(inspect.getsource(cls)).body
        body = definition.body
        for field, below in pairwise(body):
            if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == name and isinstance(below, ast.Expr):
                return str(ast.literal_eval(below.value))
    raise AssertionError(f"{kind.__name__}.{name} has no docstring")


def words(text: str) -> str:
    return re.sub(r"\W+", "", text)


def test_a_run_and_its_plan_are_asked_for_alike() -> None:
    train, plan = ({name: hint for name, hint, _ in settings(kind)} for kind in COMMANDS.values())
    assert train.keys() - OF_A_RUN == plan.keys() - OF_A_MACHINE
    assert train.keys() >= OF_A_RUN
    for name in train.keys() & plan.keys() - {"model"}:
        assert train[name] in (plan[name], plan[name] | None), name


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_the_fields_with_their_docstrings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([command, "--help-verbose"])
    shown = capsys.readouterr().out
    known = {flag(name): docstring(kind, name.rpartition(".")[2]) for name, _, kind in settings(COMMANDS[command])}
    assert known.keys() <= {*re.findall(r"--[a-z][a-z0-9.-]+", shown)}
    for name, help_text in known.items():
        assert words(help_text) in words(shown), name


@pytest.mark.parametrize("kind", COMMANDS.values())
def test_a_default_exists_once(kind: type) -> None:
    """A command gives a default only to what the shared class leaves open."""
    again = {field.name for field in fields(Run)} & kind.__annotations__.keys()
    assert not [name for name in again if hasattr(Run, name)]
