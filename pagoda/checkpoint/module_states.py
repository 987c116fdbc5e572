"""What a model's `state_dict()` has in addition to weights in pages: buffers, and states that modules keep otherwise.

They are loaded by the model's own `load_state_dict()`, with torch's rules. So a module whose buffers change their shape
can take the saved one in its `_load_from_state_dict`, as in plain PyTorch.
"""

import inspect
import io
import logging
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from pagoda.checkpoint.state import is_paged, named_tensors, unpaged
from pagoda.errors import CheckpointError
from pagoda.parameters.hidden import Hidden

_log = logging.getLogger("pagoda")


def module_states(model: nn.Module) -> dict[str, Any]:
    """The entries of `model.state_dict()` that are neither parameters nor buffers, such as results of
    `get_extra_state()`. What a parameter's class stores below the parameter's name belongs to the parameter.

    Raises CheckpointError for a module that returns an extra state and cannot be given it back.
    """
    for prefix, module in model.named_modules():
        kind: Any = type(module)
        writes = kind.get_extra_state is not nn.Module.get_extra_state
        if writes and kind.set_extra_state is nn.Module.set_extra_state:
            raise CheckpointError(
                f"Module {prefix!r} ({kind.__name__}) has get_extra_state() but no set_extra_state(), so no checkpoint "
                "of it could be resumed: add that method, or keep the state in a buffer."
            )
    held: dict[str, Any] = dict(named_tensors(model, every_name=True))
    tensors, shown = {id(tensor) for tensor in held.values()}, model.state_dict(keep_vars=True)
    params = {name for name, value in (held | shown).items() if isinstance(value, nn.Parameter | Hidden)}
    return {
        name: value
        for name, value in shown.items()
        if name not in held and id(value) not in tensors and not isinstance(value, Hidden) and not _below(name, params)
    }


def _below(name: str, params: set[str]) -> bool:
    """Whether a name is below that of a parameter, as bitsandbytes' `weight.absmax` is."""
    return any(name[:end] in params for end, letter in enumerate(name) if letter == ".")


def as_bytes(name: str, state: Any) -> torch.Tensor:
    """A module's state as torch saves it. Raises CheckpointError for objects that `torch.load` refuses to read."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        stored = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        from_bytes(stored)
    except (pickle.PickleError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"The state {name!r} of a module has objects that a checkpoint cannot hold: {str(error).splitlines()[0]} "
            "Keep it in buffers, or return tensors, numbers, strings, lists and dictionaries from get_extra_state()."
        ) from error
    return stored


def from_bytes(stored: torch.Tensor) -> Any:
    """The result of `as_bytes`. No code from the checkpoint runs."""
    return torch.load(io.BytesIO(stored.numpy().tobytes()), map_location="cpu", weights_only=True)


def load_into(model: nn.Module, given: Mapping[str, Any], device: torch.device) -> None:
    """Load buffers, parameters that are not in pages, and module states through `model.load_state_dict()`. The model's
    code gets tensors on `device`.

    Missing and unexpected names are errors, as for torch. Raises CheckpointError, and leaves all buffers as they were,
    if the model does not accept what is given.
    """
    names = {id(tensor): name for name, tensor in named_tensors(model)}
    held = model.state_dict(keep_vars=True)
    entries: Any = OrderedDict(tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), dict(given)))
    for name, value in held.items():
        if isinstance(value, Hidden) or is_paged(value):
            entries[name] = value
        elif name not in given and (source := names.get(id(value))) in given:  # another name of the same tensor
            entries[name] = entries[source]
    entries._metadata = held._metadata  # type: ignore[attr-defined]  # the versions of modules
    takes = inspect.signature(model.load_state_dict).parameters.values()
    strict = {"strict": False} if any(each.name == "strict" or each.kind is each.VAR_KEYWORD for each in takes) else {}
    with _unchanged_on_error(model):
        try:
            told = model.load_state_dict(entries, **strict)
        except Exception as error:  # of the model's own code too
            raise CheckpointError(f"the model's load_state_dict() raises {type(error).__name__}: {error}") from error
        missing, unexpected = told or ((), ())
        params = {name for name, _ in model.named_parameters(remove_duplicate=False)} - given.keys()
        for what, wrong in (("missing", {*missing} - params), ("not in the model", {*unexpected})):
            if wrong:
                raise CheckpointError(
                    f"{', '.join(map(repr, sorted(wrong)[:3]))} {'is' if len(wrong) == 1 else 'are'} {what}"
                )
    for name, tensor in named_tensors(model):
        saved = given.get(name)
        if isinstance(saved, torch.Tensor) and saved.dtype is not tensor.dtype:
            _log.warning("%r was saved as %s, and load_state_dict() cast it to %s.", name, saved.dtype, tensor.dtype)


def grown(model: nn.Module, before: Mapping[str, torch.Size]) -> list[str]:
    """Buffers that were not there `before` or had another shape, and that neither their module nor the model loads by
    a method of its own. torch's `load_state_dict()` would refuse them in a model that is built anew."""
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return []
    changed = [name for name, tensor in unpaged(model) if before.get(name) != tensor.shape]
    kinds = {name: type(model.get_submodule(name.rpartition(".")[0])) for name in changed}
    return [name for name in changed if kinds[name]._load_from_state_dict is nn.Module._load_from_state_dict]


@contextmanager
def _unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """If the block fails, give every module the buffers that it has now, with their values."""
    before = [(module._buffers, {**module._buffers}) for module in model.modules()]
    values = [(buffer, buffer.clone()) for _, held in before for buffer in held.values() if buffer is not None]
    try:
        yield
    except BaseException:
        for buffers, held in before:
            buffers.clear()
            buffers.update(held)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        raise
