"""Tiled linear layers and embeddings: blocks of their rows are separate modules, used one after another.

ZeRO-Infinity calls this memory-centric tiling (arXiv 2104.07857, section 5.1.3).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd, prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pagoda.errors import UsageError
from pagoda.parameters.hidden import Hidden, hide, name_of
from pagoda.plan.units import ALIGN_ELEMENTS

Visit = Callable[[torch.Tensor, torch.Tensor | None, int], Any]
"""Called with some rows of a layer's weight, their bias and the index of the first row, while they are in memory."""


def row_blocks(
    rows: int, widths: Sequence[int], most_elements: int, align: int = ALIGN_ELEMENTS
) -> list[tuple[int, int]]:
    """(start, stop) of tiles of equal size, except the last, with at most `most_elements` each if alignment permits.

    `widths`: elements of a row in each of the parameters that are cut. `align`: a tile's part of each begins at a
    multiple of as many elements, in which blocks moments may be stored.
    """
    step = align // gcd(align, *widths)
    width = sum(widths)
    count = max(1, -(-rows * width // most_elements))
    each = max(step, -(-rows // count) // step * step)
    if each * width > most_elements:
        each = max(step, most_elements // width // step * step)
    return [(start, min(start + each, rows)) for start in range(0, rows, each)]


class LinearTile(nn.Module):
    """Some rows of a linear layer: `hidden` [..., in] -> [..., rows]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, first: int) -> None:
        super().__init__()
        self.weight, self.bias, self.first = weight, bias, first

    def forward(self, hidden: torch.Tensor, visit: Visit | None = None) -> Any:
        if visit is not None:
            return visit(self.weight, self.bias, self.first)
        return functional.linear(hidden, self.weight, self.bias)


class EmbeddingTile(nn.Module):
    """Some rows of an embedding: writes the vectors of the `ids` [...] in these rows into `out` [..., width]."""

    def __init__(self, weight: nn.Parameter, first: int, padding_idx: int | None) -> None:
        super().__init__()
        self.weight, self.first = weight, first
        self.padding_idx = None
        if padding_idx is not None and first <= padding_idx < first + len(weight):
            self.padding_idx = padding_idx - first

    def forward(self, ids: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        local = ids - self.first
        mine = (local >= 0) & (local < len(self.weight))
        found = functional.embedding(local.where(mine, 0), self.weight, self.padding_idx)
        return found.where(mine[..., None], 0.0 if out is None else out)


class CutParameter(Hidden, torch.Tensor):  # type: ignore[misc]
    """Stands for a parameter that is cut into tiles: a hidden tensor of its shape, dtype and device. Freezing it
    freezes its parts. Gradients and hooks of the whole raise UsageError."""

    __slots__ = ()
    parts: list[nn.Parameter]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        whole, name = args[0] if args else None, getattr(func, "__name__", "")
        if not isinstance(whole, CutParameter) or "parts" not in vars(whole):
            return super().__torch_function__(func, types, tuple(args), kwargs)
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        gets_gradient = attribute == "grad" and (name == "__set__" or any(p.grad is not None for p in whole.parts))
        if gets_gradient or name in ("register_hook", "register_post_accumulate_grad_hook", "retain_grad"):
            raise UsageError(
                f"{name_of(whole)!r} has no {attribute or name}, because its layer is cut into tiles, each with "
                "parameters of its own (module.parameters()). Register hooks before wrap(), which then leaves the "
                "layer whole, or raise tiles.tile_limit."
            )
        if name == "requires_grad_" or (name == "__set__" and attribute == "requires_grad"):
            for part in whole.parts:
                part.requires_grad_(*args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, tuple(args), kwargs)


class Tiled(nn.Module):
    """A layer in tiles. Its state dict is that of the whole layer."""

    def __init__(
        self, tiles: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]], first_row: int = 0
    ) -> None:
        """`tiles` have consecutive rows from `first_row` on: all rows of the layer, or this rank's rows."""
        super().__init__()
        self.tiles = nn.ModuleDict(tiles)
        self.shapes = dict(shapes)
        """Parameter of the whole layer -> shape. Each is cut along its first dimension."""
        self._first_row = first_row
        self._loads: str | None = None
        self.register_state_dict_post_hook(Tiled._join)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(Tiled._cut)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(Tiled._report)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """For a parameter of the whole layer, return a tensor that stands for it."""
        shape = self.__dict__.get("shapes", {}).get(name)
        if shape is None:
            return super().__getattr__(name)
        parts = [part for part, _ in self.parts(name)]
        nan = torch.full((), torch.nan, dtype=parts[0].dtype, device=parts[0].device)
        layer = name_of(parts[0]).rpartition(".tiles.")[0]
        whole: Any = hide(nan.expand(shape), f"{layer}.{name}" if layer else name)
        whole.requires_grad_(parts[0].requires_grad)
        whole.__class__, whole.parts = CutParameter, parts
        return whole

    def parts(self, name: str) -> Iterator[tuple[nn.Parameter, int]]:
        """The tiles' parts of a parameter, each with the index of its first element in the whole parameter."""
        shape = self.shapes[name]
        start = self._first_row * prod(shape[1:])
        for tile in self.tiles.values():
            part = tile.get_parameter(name)
            yield part, start
            start += part.numel()

    def _join(self, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """Join a parameter if all of it is here. If ranks divide it, each rank keeps its tiles under their own
        names."""
        for name, shape in self.shapes.items():
            keys = self._keys(prefix, name)
            if all(key in state_dict for key in keys) and self.is_whole(name):
                parts = [state_dict.pop(key) for key in keys]
                shown = any(isinstance(part, Hidden) for part in parts)  # with `keep_vars`
                state_dict[prefix + name] = getattr(self, name) if shown else _joined(parts, shape)

    def is_whole(self, name: str) -> bool:
        """Whether all of a parameter is here, not only a rank's part."""
        return sum(part.numel() for part, _ in self.parts(name)) == prod(self.shapes[name])

    def _keys(self, prefix: str, name: str) -> list[str]:
        return [f"{prefix}tiles.{tile}.{name}" for tile in self.tiles]

    def _cut(self, state_dict: dict[str, Any], prefix: str, _metadata: Any, *reports: Any) -> None:
        self._loads = prefix
        _strict, missing, _unexpected, errors = reports
        for name, shape in self.shapes.items():
            whole, keys = state_dict.pop(prefix + name, None), self._keys(prefix, name)
            if whole is None:
                if self.is_whole(name) or not all(key in state_dict for key in keys):
                    missing.append(prefix + name)
            elif tuple(whole.shape) != shape:
                errors.append(
                    f"size mismatch for {prefix}{name}: copying a param with shape {whole.shape} from checkpoint, the "
                    f"shape in current model is {torch.Size(shape)}."
                )
            elif isinstance(whole, CutParameter):
                state_dict.update(zip(keys, whole.parts, strict=True))
            else:
                flat = whole.reshape(-1)
                for key, (part, start) in zip(keys, self.parts(name), strict=True):
                    state_dict[key] = flat[start : start + part.numel()].view(part.shape)

    def _report(self, incompatible: Any) -> None:
        """Remove missing keys of tiles: those of the whole layer have been reported."""
        keys = incompatible.missing_keys
        keys[:] = [key for key in keys if not key.startswith(f"{self._loads}tiles.")]


class TiledLinear(Tiled):
    """A linear layer in tiles of outputs. Outputs are those of the whole layer. In backward, the gradient of the input
    is a sum over tiles, and each term is rounded to its dtype."""

    def __init__(self, tiles: Sequence[LinearTile], in_features: int, out_features: int, bias: bool) -> None:
        shapes = {"weight": (out_features, in_features), **({"bias": (out_features,)} if bias else {})}
        super().__init__(_numbered(tiles), shapes)
        self.in_features, self.out_features = in_features, out_features

    def forward(self, hidden: torch.Tensor, visit: Visit | None = None) -> Any:
        outputs = [tile(hidden, visit) for tile in self.tiles.values()]
        return None if visit is not None else torch.cat(outputs, -1)


class TiledEmbedding(Tiled):
    """An embedding in tiles of vectors, with the same vectors and gradients as the whole layer."""

    def __init__(self, tiles: Sequence[EmbeddingTile], num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(_numbered(tiles), {"weight": (num_embeddings, embedding_dim)})
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor | None = None
        for tile in self.tiles.values():
            out = tile(ids, out)
        assert out is not None
        return out


def _numbered(tiles: Sequence[nn.Module]) -> dict[str, nn.Module]:
    return {str(index): tile for index, tile in enumerate(tiles)}


def _joined(values: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that `values` are parts of. It is not a copy if they are views of one tensor."""
    whole = values[0]._base
    if whole is not None and whole.shape == shape and all(value._base is whole for value in values):
        return whole
    return torch.cat(values)
