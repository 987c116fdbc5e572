"""Lookups: embeddings of which the CPU looks up rows in RAM, while a separate device computes everything else.

Rows are far fewer bytes than the weights, which need no lease then. PatrickStar always does this (arXiv 2108.05818).
"""

from pagoda.errors import ConfigError
from pagoda.plan.options import Options
from pagoda.plan.ranks import Ranks
from pagoda.plan.tiers import Budgets
from pagoda.plan.units import ModuleSpec


def lookups_asked(root: ModuleSpec, itemsize: int, options: Options, budgets: Budgets, ranks: Ranks) -> frozenset[str]:
    """The embeddings that `options` ask for. Raises ConfigError if one of them cannot be looked up on the CPU."""
    limit = options.embedding_limit
    if limit is None:
        return frozenset()
    if budgets.device is None:
        raise ConfigError("memory.embedding_limit is given, but the CPU computes everything: leave it out.")
    if ranks.count > 1:
        raise ConfigError("memory.embedding_limit is given, but works on one rank only: leave it out.")
    larger = [module for module in root.modules() if module.lookup is not None and module.nbytes(itemsize) > limit]
    for module in larger:
        check_lookup(module.name, module.lookup)
    names = frozenset(module.name for module in larger)
    if names and not any(module.params for module in root.modules() if module.name not in names):
        raise ConfigError("With memory.embedding_limit, the device has no parameters to compute with: leave it out.")
    return names


def check_lookup(name: str, reason: str | None) -> None:
    """Raises ConfigError if there is a reason why the CPU cannot look up an embedding above the limit."""
    if reason:
        raise ConfigError(
            f"The embedding {name!r} is larger than memory.embedding_limit, but the CPU cannot look up its rows: "
            f"{reason}. Raise the limit, or leave it out."
        )


def largest_lookups(root: ModuleSpec, ranks: Ranks) -> frozenset[str]:
    """The embeddings that the CPU can look up and that are larger than any other parameter. So if the device has no
    room for the largest unit, it may have if these are looked up on the CPU."""
    found = {module.name: module.numel for module in root.modules() if module.lookup == ""}
    if ranks.count > 1:
        return frozenset()
    others = [param.numel for module in root.modules() if module.name not in found for param in module.params]
    if not others:
        return frozenset()
    most = max(others)
    return frozenset(name for name, numel in found.items() if numel > most)
