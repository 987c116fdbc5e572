"""Results that the ranks of a run share."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from pagoda.distributed.mesh import Mesh
from pagoda.errors import PagodaError

_T = TypeVar("_T")


def from_first(mesh: Mesh, what: str, find: Callable[[], _T]) -> _T:
    """Returns the first rank's result on every rank, or raises its error there. `what` names the result in errors."""
    if mesh.size == 1:
        return find()
    found: list[Any] = [None]
    if mesh.rank == 0:
        try:
            found[0] = find()
        except PagodaError as error:
            found[0] = error
    mesh.on_all_ranks(what, lambda: dist.broadcast_object_list(found))
    if isinstance(found[0], PagodaError):
        raise found[0]
    result: _T = found[0]
    return result


def from_all(mesh: Mesh, what: str, mine: _T) -> list[_T]:
    """Returns the results of all ranks, by rank, on every rank. `what` names them in errors."""
    found: list[Any] = [mine] * mesh.size
    if mesh.size > 1:
        mesh.on_all_ranks(what, lambda: dist.all_gather_object(found, mine))
    return found
