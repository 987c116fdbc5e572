"""Param groups: which parameters are updated, with which settings, and which are reserved for later."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import nn

from pagoda.errors import CheckpointError, ConfigError
from pagoda.optim.rule import Rule

ParamGroups = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[dict[str, Any]]
"""What torch's optimizers take: parameters, named parameters, or dictionaries of `params` and their own settings."""

Reserve = nn.Module | Iterable[nn.Parameter | nn.Module]
"""Parameters, or modules, which stand for all of their parameters."""

NamedGroup = dict[str, Any]
"""A param group whose `params` are names of parameters."""


def no_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two param groups of all trainable parameters: those with `weight_decay`, and those without any.

    Parameters of fewer than two dimensions are not decayed: biases, the weights of norms, scalars. All others are,
    embeddings too. A group that would be empty is left out.
    """
    trainable = [param for param in model.parameters() if param.requires_grad]
    decayed = {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay}
    others = {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0}
    return [group for group in (decayed, others) if group["params"]]


def made_anew(model: nn.Module) -> set[str]:
    """Names of parameters that are other objects each time they are listed: what peft's LoRA of an
    `nn.MultiheadAttention` replaces in each forward. They are frozen, and no page can hold them."""
    before = dict(model.named_parameters(remove_duplicate=False))
    return {name for name, param in model.named_parameters(remove_duplicate=False) if before.get(name) is not param}


def named_groups(model: nn.Module, groups: ParamGroups | None) -> list[NamedGroup]:
    """The param groups of a model's optimizer, by name. Without `groups`, one group of all trainable parameters.

    A tied parameter has its first name. Those `made_anew` are left out. Raises ConfigError for an invalid group, for a
    parameter that is not the model's, not floating-point or in two groups, and for a trainable parameter that is in no
    group and not reserved.
    """
    if groups is None:
        return [{"params": [name for name, param in model.named_parameters() if param.requires_grad]}]
    given = _listed("param_groups", groups)
    if not given or not all(isinstance(group, Mapping) for group in given):
        given = [{"params": given}]
    anew = {model.get_parameter(name).shape for name in made_anew(model)}
    names = {id(param): name for name, param in model.named_parameters()}
    found: list[NamedGroup] = []
    seen: dict[str, int] = {}
    for index, group in enumerate(given):
        if "params" not in group:
            raise ConfigError(f"param_groups[{index}] has no 'params': it has {sorted(group)}.")
        members = []
        for param in _parameters(group["params"], index):
            if param.shape in anew and not param.requires_grad and id(param) not in names:
                continue
            name = _name_of(param, names, f"param_groups[{index}]")
            if not param.is_floating_point():
                raise ConfigError(f"param_groups[{index}] has {name!r}, which is {param.dtype}: it cannot be trained.")
            if name in seen:
                raise ConfigError(f"{name!r} is in param_groups[{seen[name]}] and again in param_groups[{index}].")
            seen[name] = index
            members.append(name)
        found.append({**group, "params": members})
    return found


def reserved_names(model: nn.Module, reserve: Reserve) -> set[str]:
    """Names of the parameters whose state is reserved. Raises ConfigError for a parameter that is not the model's."""
    names = {id(param): name for name, param in model.named_parameters()}
    found = set()
    for entry in (reserve,) if isinstance(reserve, nn.Module | nn.Parameter) else _listed("reserve", reserve):
        if not isinstance(entry, nn.Module | nn.Parameter):
            raise ConfigError(f"reserve has {entry!r}, which is neither a parameter nor a module.")
        for param in entry.parameters() if isinstance(entry, nn.Module) else (entry,):
            found.add(_name_of(param, names, "reserve"))
    return found


def _listed(name: str, given: Any) -> list[Any]:
    """The entries of an argument. Raises ConfigError if it cannot be iterated over."""
    try:
        entries = iter(given)
    except TypeError as error:
        raise ConfigError(f"{name} is {given!r}; give a list.") from error
    return list(entries)


def _name_of(param: nn.Parameter, names: Mapping[int, str], where: str) -> str:
    if (name := names.get(id(param))) is not None:
        return name
    raise ConfigError(
        f"{where} has a parameter of shape {tuple(param.shape)} that is not the model's: take parameters and modules "
        "from the model that you pass to wrap, before you call wrap."
    )


def check_placed(model: nn.Module, placed: set[str]) -> None:
    """Raises ConfigError unless every parameter that would get a gradient is in a group or reserved."""
    for name, param in model.named_parameters():
        if param.requires_grad and name not in placed:
            raise ConfigError(
                f"{name!r} requires a gradient but is in none of the param_groups: put it in one, freeze it with "
                "requires_grad_(False), or pass it to wrap(reserve=...) to add it later."
            )


def check_groups(source: str, saved: list[Any], live: list[NamedGroup]) -> None:
    """Raises CheckpointError unless the param groups of `source` have the parameters of the live ones, by name."""
    members = [{*map(str, group["params"])} for group in saved]
    wanted = [{*group["params"]} for group in live]
    if members == wanted:
        return
    differing = {*chain(*members)} ^ {*chain(*wanted)}
    same = "the same parameters are in other groups, or the groups are in another order"
    what = f"only one of the two has {min(differing)!r}" if differing else same
    raise CheckpointError(
        f"{source} has 'param_groups' of {[*map(len, members)]} parameters; this run has {[*map(len, wanted)]}, and "
        f"{what}. Give wrap(param_groups=...) and add_param_group() what the run that saved it had."
    )


def check_settings(source: str, groups: Iterable[Any], rule: Rule) -> None:
    """Raises CheckpointError unless the rule can take steps with the settings of the param groups of `source`."""
    try:
        for group in groups:
            rule.with_group(group)
            iter(group["params"])
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{source} has 'param_groups' that {rule.name} cannot use: {error!r}") from error


def _parameters(params: Any, index: int) -> Iterator[nn.Parameter]:
    """The parameters of one group, given in any way that torch accepts."""
    if isinstance(params, nn.Parameter):
        params = [params]
    if isinstance(params, set | frozenset):
        raise ConfigError(f"param_groups[{index}] has its parameters in a set, which has no order: use a list.")
    for entry in _listed(f"param_groups[{index}]['params']", params):
        param = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
        if not isinstance(param, nn.Parameter):
            raise ConfigError(f"param_groups[{index}] has {type(param).__name__} where a parameter should be.")
        yield param
