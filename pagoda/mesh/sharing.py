"""Results that ranks share."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from pagoda.errors import PagodaError
from pagoda.mesh.mesh import Mesh

_T = TypeVar("_T")


def from_first(mesh: Mesh, what: str, find: Callable[[], _T]) -> _T:
    """Returns the first rank's result on every rank, or raises its error there. `what` names the result in errors."""
    found: Any = None
    if mesh.everyone.rank == 0:
        try:
            found = find()
        except PagodaError as error:
            found = error
    found = from_all(mesh, what, found)[0]
    if isinstance(found, PagodaError):
        raise found
    result: _T = found
    return result


def from_all(mesh: Mesh, what: str, mine: _T) -> list[_T]:
    """Returns the results of all ranks, by rank, on every rank. `what` names them in errors. Those of the last stage of
    a pipeline come last."""
    found: list[Any] = [mine] * mesh.everyone.size
    if len(found) > 1:
        mesh.on_all_ranks(what, lambda: dist.all_gather_object(found, mine))
    return found
