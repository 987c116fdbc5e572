"""Converts tensors between a model and its files with transformers' own code, without reading them."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from pagoda.checkpoint.lazy import LazyTensor
from pagoda.errors import CheckpointError


def stored_names(model: Any) -> dict[str, str]:
    """The tensors that `save_pretrained` saves: name in `state_dict()` -> name of the parameter or buffer in the model.

    A tied parameter appears once, under the name that transformers keeps. Its name in the model is its first one.
    """
    first = {id(param): name for name, param in model.named_parameters()}
    ignored, tied = set(model._keys_to_ignore_on_save or ()), set(model.all_tied_weights_keys)
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in ignored:
            names.setdefault(id(tensor), []).append(name)
    kept = {next((name for name in same if name not in tied), same[0]): key for key, same in names.items()}
    return {name: first.get(key, name) for name, key in kept.items()}


def from_files(model: Any, tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], list[str], list[str]]:
    """Convert tensors of files to tensors named as in `state_dict()`, like `from_pretrained`.

    Also returns the names in the model that the files lack, and the names in the files that the model lacks, without
    those that transformers ignores.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    from transformers.utils.loading_report import LoadStateDictInfo

    expected = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, Any] = {}
    unexpected = set()
    for name in sorted(tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if renamed not in expected and name in expected:
            renamed, pattern = name, None
        if renamed not in expected:
            unexpected.add(name)
        elif pattern is not None:
            group = groups.setdefault(renamed, deepcopy(of_pattern[pattern]))
            group.add_tensor(renamed, name, pattern, tensors[name])
        else:
            groups.setdefault(renamed, WeightRenaming(name, renamed)).add_tensor(renamed, name, name, tensors[name])
    found: dict[str, LazyTensor] = {}
    for name, group in groups.items():
        try:
            converted = group.convert(name, model=model, config=model.config)
        except (RuntimeError, ValueError, LookupError) as error:
            raise CheckpointError(f"the files' tensors for {name!r} cannot be converted: {error}") from error
        for target, value in converted.items():
            found[target] = value[0] if isinstance(value, list) else value
    report = LoadStateDictInfo(
        missing_keys=expected.keys() - found.keys(),
        unexpected_keys=unexpected | (found.keys() - expected.keys()),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(report)
    found = {name: tensor for name, tensor in found.items() if name in expected}
    return found, sorted(report.missing_keys), sorted(report.unexpected_keys)
