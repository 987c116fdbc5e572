"""Measures how long a model's compute takes, with models of one and of several of its layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from pagoda.calibrate.meter import now, repeated
from pagoda.config.training import Precision, require_choice
from pagoda.models import build_model, layer_count
from pagoda.optim.rule import DTYPES
from pagoda.prepare.construct import deferred_init

_FEW, _LEAST_MORE = 1, 3
_CACHED_BYTES = 64 << 20
"""Least bytes of weights of the larger model, if the full model has that many. No step finds that many in the CPU's
caches."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
_PATTERN = 1 << 20


Times = tuple[float, float]
"""Seconds of one forward and of one backward."""


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """The times of one batch in plain PyTorch, with all weights in memory.

    A layer is one block of the decoder. It counts as often as the model has layers. Backward includes what gradient
    checkpointing recomputes. The head is everything except layers and embedding: the last norm, the output projection
    and the loss.
    """

    layer: Times
    head: Times
    embedding: Times


Round = tuple[Times, Times, Times]
"""Times with few layers, with more layers, and of the embedding alone."""


class ComputeProfiler:
    """Times plain PyTorch on a model's modules with one batch. Rounds may be far apart in time.

    Two models, of one and of several layers, take turns. Their weights are random, in `precision`. The difference of
    their times is the layers' time. The rest belongs to the head and the embedding, and the embedding is also measured
    alone. The full model is never built. Gradients are dropped as they arrive, because Pagoda takes them away too.

    Each call restores torch's state (random generators, threads, gradient mode).
    """

    def __init__(
        self,
        name_or_dir: str,
        *,
        batch_size: int,
        seq_len: int,
        precision: Precision = "bf16",
        gradient_checkpointing: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """Build both models and warm them up. Raises ConfigError as `build_model` does, and for an unknown
        precision."""
        require_choice("precision", precision, Precision)
        self._device = device or torch.device("cpu")
        with _torch_kept(self._device):
            self._few = _built(name_or_dir, seq_len, gradient_checkpointing, _FEW)
            self.layers = _layers_wanted(name_or_dir, self._few)
            """Number of layers of the larger model."""
            self._more = _built(name_or_dir, seq_len, gradient_checkpointing, self.layers)
            _materialise(self._more, DTYPES[precision], self._device)
            # Both have the same parameters, with their hooks.
            self._few.load_state_dict(self._more.state_dict(keep_vars=True), strict=False, assign=True)
            self._few.to(self._device)  # buffers
            vocabulary = self._more.get_input_embeddings().num_embeddings  # type: ignore[operator]
            self._ids = torch.randint(min(256, vocabulary), (batch_size, seq_len)).to(self._device)
            _round(self._few, self._more, self._ids)

    def measure(self, budget_s: float = 15.0) -> ComputeProfile:
        """Measure rounds for `budget_s` seconds, but at least three."""
        return profile_of(self.rounds(_LEAST_ROUNDS, _MOST_ROUNDS, budget_s), self.layers)

    def rounds(self, least: int, most: int, budget_s: float) -> list[Round]:
        """As many rounds as fit `budget_s` seconds, between `least` and `most`."""
        with _torch_kept(self._device):
            return repeated(lambda: _round(self._few, self._more, self._ids), least, most, budget_s)


def profile_of(rounds: Sequence[Round], layers: int) -> ComputeProfile:
    """The times of a layer, the head and the embedding: medians over rounds. Differences are taken within a round and
    are never below zero. `layers` is the number of layers of the larger model."""
    few, more, embedding = np.moveaxis(np.array(rounds), 1, 0)  # [rounds, (forward, backward)] each

    def median(seconds: Any) -> Any:
        return np.maximum(0.0, np.median(seconds, axis=0))

    layer, alone = median((more - few) / (layers - _FEW)), median(embedding)
    head = np.maximum(0.0, median(few) - _FEW * layer - alone)
    return ComputeProfile(*((float(forward), float(backward)) for forward, backward in (layer, head, alone)))


def _layers_wanted(name_or_dir: str, few: nn.Module) -> int:
    table: int = few.get_input_embeddings().weight.numel()  # type: ignore[operator]
    layer = (sum(p.numel() for p in few.parameters()) - table) // _FEW
    return max(_LEAST_MORE, min(layer_count(name_or_dir), -(-_CACHED_BYTES // (2 * layer))))


def _round(few: nn.Module, more: nn.Module, ids: torch.Tensor) -> Round:
    embedding = more.get_input_embeddings()  # type: ignore[operator]
    return (
        _timed(lambda: few(input_ids=ids, labels=ids).loss, ids.device),
        _timed(lambda: more(input_ids=ids, labels=ids).loss, ids.device),
        _timed(lambda: embedding(ids), ids.device),
    )


def _timed(forward: Callable[[], Any], device: torch.device) -> Times:
    start = now(device)
    out = forward()
    middle = now(device)
    grad = torch.ones_like(out)
    begin = now(device)
    out.backward(grad)
    return middle - start, now(device) - begin


def _built(name_or_dir: str, seq_len: int, gradient_checkpointing: bool, layers: int) -> nn.Module:
    with deferred_init():
        return build_model(name_or_dir, seq_len=seq_len, gradient_checkpointing=gradient_checkpointing, layers=layers)


def _materialise(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give the parameters values. Ordinary numbers suffice for timing and are fast to make."""
    pattern = (torch.randn(_PATTERN) * 0.02).to(device, dtype)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param not in made:
                data = torch.ones(param.shape, dtype=dtype, device=device)
                if param.dim() > 1:
                    data = pattern.repeat(-(-param.numel() // _PATTERN))[: param.numel()].view(param.shape)
                made[param] = nn.Parameter(data)
                made[param].register_post_accumulate_grad_hook(drop_gradient)  # type: ignore[no-untyped-call]
            setattr(module, name, made[param])
    model.to(device)  # buffers


def drop_gradient(param: torch.Tensor) -> None:
    """A hook that drops the gradient."""
    param.grad = None


@contextmanager
def _torch_kept(device: torch.device) -> Iterator[None]:
    """Turn gradients on inside, and restore the random generators afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        yield
