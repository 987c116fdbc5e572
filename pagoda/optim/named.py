"""Rules by name, as on the command line."""

import ast
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch

from pagoda.config.run import StatesConfig
from pagoda.config.settings import require
from pagoda.errors import ConfigError
from pagoda.optim.adafactor import Adafactor
from pagoda.optim.adam import Adam
from pagoda.optim.adamw import AdamW
from pagoda.optim.lion import Lion
from pagoda.optim.muon import Muon
from pagoda.optim.rule import Rule
from pagoda.optim.sgd import SGD
from pagoda.optim.sign_sgd import SignSGD
from pagoda.optim.torch_optimizer import Optim

RULES: Mapping[str, type[Rule]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "signsgd": SignSGD,
    "lion": Lion,
    "adafactor": Adafactor,
    "muon": Muon,
}
_WORDS = {"true": True, "false": False, "none": None}


def rule_from(name: str, asked: StatesConfig, settings: Mapping[str, Any]) -> Rule:
    """The rule of that name with `settings`, and with the moments and options of `asked`. Raises like `rule_named`."""
    if name == "adamw":
        settings = {**settings, "moments": asked.moments}
    else:
        require(asked.moments == "fp32", "moments", asked.moments, "fp32 for optimizers other than adamw")
    return rule_named(name, {**settings, **parsed_options(asked.optim_args)})


def rule_named(name: str, settings: Mapping[str, Any]) -> Rule:
    """The rule of that name: one of `RULES`, a class of ``torch.optim`` such as Adagrad, or MODULE:CLASS.

    Raises ConfigError for an unknown name, and for a setting that the rule does not have or that is out of range.
    """
    if name in RULES:
        kind = RULES[name]
        known = kind.setting_names()
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise ConfigError(f"--optim {name} has no {', '.join(unknown)}: it has {', '.join(known)}")
        return kind(**settings)
    return Optim(_class_named(name), **settings)


def parsed_options(options: Iterable[str]) -> dict[str, Any]:
    """Settings from "NAME=VALUE". Values are numbers, tuples, true, false, none, or any other text."""
    settings: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"the optimizer's option {option!r} is not NAME=VALUE")
        try:
            settings[name] = _WORDS[text.lower()] if text.lower() in _WORDS else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            settings[name] = text
    return settings


def _class_named(name: str) -> type[torch.optim.Optimizer]:
    module, colon, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute) if colon else getattr(torch.optim, name, None)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--optim {name} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(
            f"--optim {name} is unknown: use one of {', '.join(RULES)}, a class of torch.optim such as Adagrad, or "
            "MODULE:CLASS of another optimizer"
        )
    return found
