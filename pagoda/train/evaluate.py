"""Evaluations: the loss on held-out data."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from pagoda.integrations.evaluation import bytes_of_counted
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_all
from pagoda.train.data import Batches, counted
from pagoda.train.metrics import Entry, read_evaluations
from pagoda.train.passes import Passes
from pagoda.train.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Evaluation(Entry):
    """The result of one evaluation. Its fields are the keys of a line of `evals.jsonl`."""

    loss: float
    """Mean over the tokens that the loss counts, in nats."""
    perplexity: float
    bits_per_byte: float
    """The loss in bits per byte of text. It can be compared between tokenizers."""
    sequences: int
    tokens: int
    """Tokens that the loss counts."""
    data: str
    """Identifies the sequences. Losses on others are not compared."""
    seconds: float

    def __str__(self) -> str:
        when = f"after step {self.step}" if self.step else "before the first step"
        return (
            f"Evaluation {when}: loss {self.loss:.4f}, perplexity {self.perplexity:,.2f}, {self.bits_per_byte:.4f} "
            f"bits per byte, {self.sequences:,} sequences in {self.seconds:.1f} s"
        )


class Evaluator:
    """Measures the loss on rows, which are divided over the ranks of a run."""

    def __init__(self, batches: Batches, tokenizer: Tokenizer, mesh: Mesh, sequence_parallel: int = 1) -> None:
        """`sequence_parallel`: number of ranks that divide each row. Each has a part of its loss."""
        self._batches, self._mesh, self._divided = batches, mesh, sequence_parallel
        self._nbytes = _text_bytes(batches, tokenizer)
        digest = xxhash.xxh3_64(batches.rows.tokens.about.fingerprint.encode())
        for bounds in (batches.rows.starts, batches.rows.stops):
            digest.update(np.ascontiguousarray(bounds).data)
        self.data = digest.hexdigest()
        count = len(batches.rows)
        # All ranks must call the model equally often, so a rank with fewer rows has batches without any.
        calls = -(-count // (batches.batch_size * batches.ranks))
        self._mine = np.array_split(np.arange(batches.rank, count, batches.ranks), calls)

    def measure(self, passes: Passes, step: int) -> Evaluation:
        """The loss after `step` steps, the same on every rank."""
        started = time.perf_counter()
        total = 0.0
        count = 0
        for chosen in self._mine:
            batch = self._batches.of_rows(chosen if len(chosen) else np.zeros(1, np.int64))
            tokens = counted(batch["labels"])
            loss = passes.loss(batch)
            if len(chosen) and loss is not None:
                total += loss * tokens
                count += tokens
        every = from_all(self._mesh, "an evaluation", (total, count))
        found = every[-self._mesh.size :: self._mesh.ranks.tensor_parallel]
        counts = sum(count for _, count in found)
        tokens, loss = counts // self._divided, math.fsum(part for part, _ in found) / counts
        return Evaluation(
            step=step,
            loss=loss,
            perplexity=math.exp(loss) if loss < 700 else math.inf,
            bits_per_byte=loss * tokens / math.log(2) / max(1, self._nbytes),
            sequences=len(self._batches.rows),
            tokens=tokens,
            data=self.data,
            seconds=time.perf_counter() - started,
        )


def _text_bytes(batches: Batches, tokenizer: Tokenizer) -> int:
    """Bytes of the text of all tokens that the loss counts."""
    nbytes = 0
    for row in range(len(batches.rows)):
        labels = batches.of_rows(np.array([row]))["labels"][0, 1:].numpy()
        nbytes += bytes_of_counted(labels, tokenizer.nbytes)
    return nbytes


def read_losses(path: Path, until: int, data: str) -> list[tuple[int, float]]:
    """(step, loss) of each evaluation on the sequences `data` in a file, up to step `until`."""
    known = [(line["step"], line["loss"]) for line in read_evaluations(path, data) if line["step"] <= until]
    return [(step, math.inf if loss is None else loss) for step, loss in known]


def best_step(losses: Sequence[tuple[int, float]]) -> int | None:
    """The number of steps before the evaluation with the lowest loss. The first one if several are equal, None if no
    loss is a finite number."""
    trained = [(loss, step) for step, loss in losses if step and math.isfinite(loss)]
    return min(trained)[1] if trained else None


def since_best(losses: Sequence[tuple[int, float]]) -> int:
    """The number of evaluations since the one with the lowest finite loss, or since the first one if no loss is finite.
    The evaluation before the first step counts too."""
    found = [loss if math.isfinite(loss) else math.inf for _, loss in losses]
    return len(found) - 1 - found.index(min(found)) if found else 0
