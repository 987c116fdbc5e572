"""DTensors: parameters that torch's tensor parallelism has divided, and a rank's parts of them.

Pages hold a rank's own part, or the whole parameter if the optimizer takes it whole. When compute uses a parameter, it
is a DTensor again, around this rank's part of the lease. This needs no communication.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pagoda.errors import ConfigError
from pagoda.mesh.mesh import Mesh
from pagoda.plan.units import TensorShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    """The tensor if it is a DTensor, otherwise None. Does not import torch's module of DTensors."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return None
    known = sys.modules.get("torch.distributed.tensor")
    return tensor if known is not None and isinstance(tensor, known.DTensor) else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: all of it, unless it is a DTensor. Waits for it if it has not arrived yet."""
    distributed = as_dtensor(tensor)
    if distributed is None:
        return tensor
    mine = distributed._local_tensor
    return mine.wait() if hasattr(mine, "wait") else mine  # an AsyncCollectiveTensor


@dataclass(frozen=True)
class DTensorForm:
    """The division of a DTensor over ranks, and what pages store of it on this rank."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    """The shape of the whole tensor."""
    stride: tuple[int, ...]
    stored_whole: bool = False
    """Whether pages store the whole tensor on every rank, and not only this rank's part."""

    @classmethod
    def of(cls, tensor: torch.Tensor, stored_whole: bool = False) -> DTensorForm | None:
        """The form of a DTensor. None for any other tensor."""
        distributed = as_dtensor(tensor)
        if distributed is None:
            return None
        mesh, placements = distributed.device_mesh, distributed.placements
        return cls(mesh, placements, distributed.shape, distributed.stride(), stored_whole)

    @property
    def replicated(self) -> bool:
        """Whether every rank has the whole tensor."""
        return all(placement.is_replicate() for placement in self.placements)

    def held(self, param: Any) -> torch.Tensor:
        """This rank's part of a parameter, as the parameter shows it now."""
        mine: torch.Tensor = param._local_tensor
        return mine

    def show(self, param: Any, mine: torch.Tensor) -> None:
        """Make a parameter show `mine` as this rank's part."""
        param._local_tensor = mine

    def around(self, mine: torch.Tensor) -> DTensor:
        """A DTensor that shares the storage of this rank's part."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(mine, self.mesh, self.placements, shape=self.shape, stride=self.stride)

    @torch.no_grad()
    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that pages store on this rank. The tensor has the whole shape. It is a DTensor, divided
        in any way, or a tensor that every rank has."""
        distributed = as_dtensor(tensor)
        if distributed is None:
            return (tensor if self.stored_whole else self._part(tensor)).contiguous()
        placements: Sequence[Placement] = self.placements
        if self.stored_whole:
            from torch.distributed.tensor import Replicate

            placements = [Replicate()] * len(placements)
        if distributed.placements != tuple(placements):
            distributed = distributed.redistribute(placements=placements)
        return local(distributed)

    def shown(self, stored: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor that pages store, as a view."""
        return self._part(stored) if self.stored_whole else stored

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        for placement in self.placements:
            if placement.is_shard():
                dim: int = placement.dim  # type: ignore[attr-defined]
                whole = whole.chunk(self.mesh.size(), dim)[self.mesh.get_local_rank()]
        return whole


def shard_of(
    name: str, param: torch.Tensor, stored_whole: Callable[[str, tuple[int, ...]], bool] | None = None
) -> tuple[tuple[int, ...], TensorShard | None]:
    """The shape of what this rank stores of a parameter, and how it is divided (None if this rank has all of it).

    `stored_whole` is a function of a parameter's name and shape. It returns whether every rank stores all of it, which
    optimizers need that take it whole (`StateSpec.whole`). None: no parameter is.

    Raises ConfigError for a DTensor that is not divided into equal parts along one dimension.
    """
    distributed = as_dtensor(param)
    if distributed is None:
        return tuple(param.shape), None
    shape, ranks = tuple(distributed.shape), distributed.device_mesh.size()
    if distributed.device_mesh.ndim != 1:
        raise ConfigError(
            f"{name!r} is a DTensor over a mesh of {distributed.device_mesh.ndim} dimensions: give parallelize_module "
            "only the mesh of tensor-parallel ranks, such as pagoda.open_mesh(tensor_parallel=N).tensor. "
            "wrap itself divides the state over data-parallel ranks."
        )
    (placement,) = distributed.placements
    if placement.is_replicate():
        return shape, None
    if not placement.is_shard():
        raise ConfigError(f"{name!r} is a DTensor with the placement {placement}: use Shard or Replicate.")
    dim: int = placement.dim % len(shape)  # type: ignore[attr-defined]
    if shape[dim] % ranks:
        raise ConfigError(
            f"{name!r} of shape {shape} cannot be divided in {ranks} equal parts along dimension {dim}: change that "
            "size, or leave the parameter out of the parallelize plan."
        )
    shard = TensorShard(shape, dim, ranks)
    if stored_whole is not None and stored_whole(name, shape):
        return shape, None
    return shard.part_shape, shard


def check_tensor_parallel(model: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Raises ConfigError if a model is not divided as the mesh says."""
    wanted, found = mesh.ranks.tensor_parallel, dict(_dtensors(model))
    if wanted == 1 and not found:
        return
    if not found:
        raise ConfigError(
            f"tensor_parallel is {wanted}, but no parameter is a DTensor: call parallelize_module(model, mesh.tensor, "
            "...) before wrap."
        )
    for name, param in found.items():
        ranks = tuple(param.device_mesh.mesh.flatten().tolist())
        if ranks != mesh.tensor_ranks:
            raise ConfigError(
                f"{name!r} is a DTensor over ranks {ranks}, but tensor_parallel of the mesh is {wanted}, so it "
                f"should be over {mesh.tensor_ranks}: give parallelize_module the mesh's `tensor`, and wrap the mesh."
            )
        if param.device_mesh.device_type != device.type:
            raise ConfigError(
                f"{name!r} is a DTensor on {param.device_mesh.device_type}, but compute runs on {device.type}: create "
                f"its mesh for {device.type!r}."
            )
    for name, buffer in model.named_buffers():
        if as_dtensor(buffer) is not None:
            raise ConfigError(f"Buffer {name!r} is a DTensor, which is not supported: keep it out of the plan.")


def divided_in(model: nn.Module) -> int:
    """The number of tensor-parallel ranks that divide a model's parameters. 1 if none is a DTensor."""
    return max((param.device_mesh.size() for _, param in _dtensors(model)), default=1)


def _dtensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, param in model.named_parameters():
        if as_dtensor(param) is not None:
            yield name, param
