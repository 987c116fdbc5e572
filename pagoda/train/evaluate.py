"""Evaluations: the loss on held-out data."""

import math
import time

import numpy as np
import xxhash

from pagoda.integrations.evaluation import bytes_of_counted
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_all
from pagoda.train.data import Batches, counted
from pagoda.train.metrics import Line
from pagoda.train.passes import Passes
from pagoda.train.tokenizer import Tokenizer


class Evaluator:
    """Measures the loss on rows, which are divided over the ranks of a run."""

    def __init__(self, batches: Batches, tokenizer: Tokenizer, mesh: Mesh, sequence_parallel: int = 1) -> None:
        """`sequence_parallel`: number of ranks that divide each row. Each has a part of its loss."""
        self.batches, self._mesh, self._divided = batches, mesh, sequence_parallel
        rows = batches.rows
        labels = (batches.of_rows(np.array([row]))["labels"][0, 1:].numpy() for row in range(len(rows)))
        self._nbytes = sum(bytes_of_counted(each, tokenizer.nbytes) for each in labels)
        digest = xxhash.xxh3_64(rows.tokens.about.fingerprint.encode())
        for bounds in (rows.starts, rows.stops):
            digest.update(np.ascontiguousarray(bounds).data)
        self.data = digest.hexdigest()
        """Identifies the rows. Losses on others are not compared."""
        # All ranks must call the model equally often, so a rank with fewer rows has batches without any.
        calls = -(-len(rows) // (batches.batch_size * batches.ranks))
        self._mine = np.array_split(np.arange(batches.rank, len(rows), batches.ranks), calls)

    def measure(self, passes: Passes, step: int) -> Line:
        """The line of evals.jsonl after `step` steps, the same on every rank: `loss` is the mean over the `tokens` that
        the loss counts, in nats, and `bits_per_byte` the same per byte of their text, which can be compared between
        tokenizers."""
        started = time.perf_counter()
        total = 0.0
        count = 0
        for chosen in self._mine:
            batch = self.batches.of_rows(chosen if len(chosen) else np.zeros(1, np.int64))
            tokens = counted(batch["labels"])
            loss = passes.loss(batch)
            if len(chosen) and loss is not None:
                total += loss * tokens
                count += tokens
        every = from_all(self._mesh, "an evaluation", (total, count))
        found = every[-self._mesh.size :: self._mesh.ranks.tensor_parallel]
        counts = sum(count for _, count in found)
        tokens, loss = counts // self._divided, math.fsum(part for part, _ in found) / counts
        return {
            "step": step,
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "bits_per_byte": loss * tokens / math.log(2) / max(1, self._nbytes),
            "sequences": len(self.batches.rows),
            "tokens": tokens,
            "data": self.data,
            "seconds": time.perf_counter() - started,
        }
