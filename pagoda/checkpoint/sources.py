"""Where the values of waiting tensors come from: files, random draws, and recorded writes."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.lazy import Deferred, LazyTensor

_INITIALISERS = frozenset({"reset_parameters", "_reset_parameters", "_init_weights"})


class Draw(Deferred):
    """A random operation that runs when its result is read, with a seed of its own."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(function, args, {})
        self.module, self.of_model = _initialised_module()
        """The module that is being initialised, None outside the usual initialisers, and whether the model does it."""
        self.seed: int | None = None
        self.early = False
        """Whether the result was read before `wrap`, which gives all ranks the same seed."""

    def on(self, values: Callable[[LazyTensor], torch.Tensor]) -> Any:
        if self.seed is None:
            self.seed, self.early = int(torch.randint(2**62, (1,), device="cpu")), True
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return super().on(values)


@dataclass(frozen=True)
class ValueSource:
    """What the values of a tensor come from."""

    values: LazyTensor
    draws: tuple[Draw, ...] = ()
    """All random operations that they depend on."""
    unset: bool = False
    """Whether some of them have never been set. Reading these gives NaN."""
    in_ram: bool = False
    """Whether some are in this process's RAM only, so that ranks may differ."""
    depth: int = 0
    """Number of recorded writes of which each changes the result of the one before."""

    @property
    def of_rank(self) -> bool:
        """Whether ranks that run the same program may have different values."""
        return self.in_ram or any(draw.early for draw in self.draws)


class SharedValues:
    """What stands for the memory of waiting tensors that are views of each other."""

    def __init__(self, source: ValueSource, replays: bool) -> None:
        self.source = source
        """The values of the whole memory. Not used if it is in RAM."""
        self.ram: torch.Tensor | None = None
        """The memory itself, once something has used it directly."""
        self.replays = replays
        """Whether random operations are recorded, and not run at once, because `pagoda.deferred_init` seeds them."""

    @property
    def elements(self) -> int:
        if self.ram is not None:
            return self.ram.untyped_storage().nbytes() // self.ram.itemsize
        return self.source.values.numel()

    def load(self) -> torch.Tensor:
        """Bring it into RAM for good."""
        if self.ram is None:
            self.ram = self.source.values.whole().reshape(-1)
        return self.ram

    def write(
        self,
        view: torch.Tensor,
        function: Callable[[torch.Tensor], Any],
        sources: Sequence[ValueSource] = (),
        *,
        keeps: bool = False,
        random: bool = False,
    ) -> None:
        """Record a call of `function` with this memory as its argument, in the shape, strides and offset of `view`.

        `sources`: where the values that it writes come from. `keeps`: it does not overwrite all of the memory.
        `random`: it draws random numbers.
        """
        source = combined(*sources, *([self.source] if keeps else []))
        before = self.source.values if keeps else None
        geometry = view.size(), view.stride(), view.storage_offset()
        call = _written, (function, view.dtype, self.elements, geometry, before)
        record = Draw(*call) if random else Deferred(*call, {})
        draws = (*source.draws, record) if isinstance(record, Draw) else source.draws
        values = LazyTensor(view.dtype, (self.elements,), partial(record.read, 0))
        self.source = replace(source, values=values, draws=draws, depth=source.depth + 1)


def combined(*sources: ValueSource) -> ValueSource:
    """A source without values that depends on all that the given ones depend on."""
    return ValueSource(
        LazyTensor(torch.float32, (0,), torch.empty),
        draws=tuple(dict.fromkeys(draw for source in sources for draw in source.draws)),
        unset=any(source.unset for source in sources),
        in_ram=any(source.in_ram for source in sources),
        depth=max((source.depth for source in sources), default=0),
    )


def _written(
    function: Callable[[torch.Tensor], Any],
    dtype: torch.dtype,
    elements: int,
    view: tuple[Any, ...],
    before: torch.Tensor | None,
) -> torch.Tensor:
    memory = torch.empty(elements, dtype=dtype, device="cpu") if before is None else before.reshape(-1)
    function(memory.as_strided(*view))
    return memory


def _initialised_module() -> tuple[nn.Module | None, bool]:
    """The module whose initialiser is running, and whether it is the model's `_init_weights(module)`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _INITIALISERS:
            given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
            module = next((each for each in reversed(given) if isinstance(each, nn.Module)), None)
            return module, code.co_name == "_init_weights"
        frame = frame.f_back
    return None, False
