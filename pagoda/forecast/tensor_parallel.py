"""The part of a model that one tensor-parallel rank has: its part of each divided matrix, and the rest whole.

Layers are divided as in Megatron-LM (arXiv 1909.08053): the first matrices of attention and MLP by columns of their
output, the last ones by rows of their input. So ranks add up the outputs of the last ones and, in backward, the input
gradients of the first ones. Every rank has the embedding, the head and the norms whole.
"""

from collections.abc import Callable
from dataclasses import replace

from pagoda.errors import ConfigError
from pagoda.forecast.model_description import ModelDescription
from pagoda.models.divisions import COLUMN, ROW, Division, divided
from pagoda.plan.units import ModuleSpec, ParamSpec, TensorShard


def tensor_part_of(
    described: ModelDescription, ranks: int, stored_whole: Callable[[str, tuple[int, ...]], bool] | None = None
) -> ModelDescription:
    """The part of the model on each of `ranks` tensor-parallel ranks. `stored_whole` means the same as in
    `distributed.tensors.shard_of`.

    Raises ConfigError if the model does not say how it is divided, or if it does not divide into equal parts.
    """
    if ranks == 1:
        return described
    asked = f"--tensor-parallel is {ranks}"
    if described.top_k:
        raise ConfigError(f"{asked}, but {described.name!r} is a mixture of experts: use --expert-parallel")
    specs = {module.name: module for module in described.root.modules()}
    layers = [name for name, module in specs.items() if module.params]
    divisions = divided(described.name, layers, described.divisions, described.heads, ranks)
    for name, division in divisions.items():
        dim = 0 if division == COLUMN else 1
        size = specs[name].params[0].shape[dim]
        if size % ranks:
            raise ConfigError(f"{asked}, which does not divide the {size} {division}s of {name!r}")

    wholes: dict[str, int] = {}

    def part(param: ParamSpec, module: str) -> ParamSpec:
        mine = _part(param, divisions[module], ranks)
        if mine.shard is None or stored_whole is None or not stored_whole(param.name, param.shape):
            return mine
        wholes[module] = wholes.get(module, 0) + param.numel
        return param

    def visit(module: ModuleSpec) -> ModuleSpec:
        params = module.params
        if module.name in divisions:
            params = tuple(part(param, module.name) for param in params)
        return replace(module, params=params, children=tuple(map(visit, module.children)))

    flops = {name: n / (ranks if name in divisions else 1) for name, n in described.forward_flops.items()}
    return replace(
        described,
        root=visit(described.root),
        forward_flops=flops,
        tensor_parallel=ranks,
        summed=tuple(name for name, division in divisions.items() if division == ROW),
        stored_whole=wholes,
        measurable=False,
    )


def _part(param: ParamSpec, division: Division, ranks: int) -> ParamSpec:
    """A rank's part of a matrix or a bias. A bias that is added to a sum stays whole on every rank."""
    if division == ROW and len(param.shape) == 1:
        return param
    shard = TensorShard(param.shape, 0 if division == COLUMN else 1, ranks)
    return replace(param, shape=shard.part_shape, shard=shard)
