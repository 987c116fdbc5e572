"""The loss of an evaluation as a mean over tokens, in addition to a trainer's own mean over rows."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_all
from pagoda.prepare.sequence_parallel import IGNORED


class TokenMean:
    """Adds up the losses of batches whose labels are token ids [B, T].

    A trainer's `eval_loss` is a mean over rows, each with the mean over the tokens of its batch. So tokens in batches
    with few of them have more weight. Here each token that the loss counts has the same weight.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._batches: list[tuple[float, int]] = []
        """Loss, and number of tokens that it counts."""
        self._nbytes = 0

    def add(self, inputs: Any, loss: torch.Tensor | None) -> None:
        """Add one batch."""
        labels = inputs.get("labels") if hasattr(inputs, "get") else None
        if loss is None or not isinstance(labels, torch.Tensor) or labels.ndim != 2 or labels.is_floating_point():
            return
        if isinstance(shifted := inputs.get("shift_labels"), torch.Tensor):
            labels = shifted
        elif self._trainer._loss_shifts_labels:
            labels = labels[:, 1:]
        rows = labels.cpu().numpy()
        self._batches.append((float(loss), int((rows != IGNORED).sum())))
        tokenizer = self._trainer.processing_class
        if hasattr(tokenizer, "decode"):
            self._nbytes += sum(bytes_of_counted(row, lambda ids: _nbytes(tokenizer, ids)) for row in rows)

    def metrics(self, mesh: Mesh | None) -> dict[str, float]:
        """The mean over all tokens in nats and in bits, and in bits per byte of text if the trainer has a tokenizer.
        Empty if no batch has such labels. All ranks call this."""
        mine = self._batches, self._nbytes
        every = [mine] if mesh is None else from_all(mesh, "an evaluation", mine)
        total, tokens = 0.0, 0
        for batches in zip(*(batches for batches, _ in every), strict=False):
            counts = [count for _, count in batches]
            if self._averages and len(counts) > 1:  # each rank's loss is its sum, in the mean over ranks
                total += math.fsum(loss for loss, _ in batches) * sum(counts) / len(counts)
            else:
                total += math.fsum(loss * count for loss, count in batches if count)
            tokens += sum(counts)
        if not tokens:
            return {}
        found = {"token_loss": total / tokens, "bits_per_token": total / tokens / math.log(2)}
        if nbytes := sum(nbytes for _, nbytes in every):
            found["bits_per_byte"] = total / math.log(2) / nbytes
        return found

    @property
    def _averages(self) -> bool:
        trainer = self._trainer
        counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        return bool(trainer.args.average_tokens_across_devices and counts)


def _nbytes(tokenizer: Any, ids: list[int]) -> int:
    return len(tokenizer.decode(ids, skip_special_tokens=True).encode())


def bytes_of_counted(labels: npt.NDArray[np.int64], nbytes: Callable[[list[int]], int]) -> int:
    """Bytes of the text of the tokens in `labels` [T] that the loss counts. `nbytes`: those of some ids."""
    if not len(labels):
        return 0
    edges = np.flatnonzero(np.diff(labels != IGNORED)) + 1
    return sum(nbytes(part.tolist()) for part in np.split(labels, edges) if part[0] != IGNORED)
