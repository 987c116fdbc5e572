"""The order of training: which tokens a step reads, as a pure function of seed and step.

The tokens of a data set are cut into rows of at most `max_length` tokens. Text is continuous: rows are consecutive
windows, and the last incomplete one is dropped.
Conversations, and prompts with their completions, are kept whole: a row has as many as fit, and is padded. Within a
row, attention and loss end at the end of each document: positions start again, and no token is predicted from another
document.

An epoch visits every row once, in an order keyed by (seed, epoch). In a mixture, rows of some sources are there more
than once. Sample number g = ((step * gradient_accumulation_steps + index) * ranks + rank) * batch_size + position is
row g % rows of epoch g // rows. So in each forward pass, ranks have consecutive parts of the batch that one rank would
have. A resumed run needs only the number of steps done (`first_step`, and `first_sample` if the number of ranks has
changed). The order does not depend on a library's random generator, on earlier batches or on the memory split.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from pagoda.errors import ConfigError
from pagoda.prepare.sequence_parallel import IGNORED
from pagoda.train.tokens import Tokens

_HELD_OUT = 1 << 32
"""Stands for an epoch in the key of the order that chooses the held-out rows."""
_FEISTEL_ROUNDS = 6


@dataclass(frozen=True, eq=False)
class Rows:
    """Sequences: consecutive parts of the tokens, row i from `starts[i]` to `stops[i]`."""

    tokens: Tokens
    length: int
    """Tokens that each row is padded to."""
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    cut: int = 0
    """Number of whole documents with more than `length` tokens. They are cut to that length."""
    longest: int = 0
    """Tokens of the longest whole document."""
    dropped: int = 0
    """Number of whole documents, or of sequences of a text, that were left out because the loss counts none of their
    tokens. These may all be after the cut."""

    @staticmethod
    def of(tokens: Tokens, length: int, packs: bool = True) -> "Rows":
        """All rows of the tokens in which the loss counts a token. Without `packs`, each conversation has its own.

        Raises ConfigError if there are none, and for texts that are not to be packed.
        """
        if not packs and not tokens.about.whole:
            raise ConfigError(f"--no-packing is for conversations, and data {tokens.about.source!r} has texts")
        rows = _whole_documents(tokens, length, packs) if tokens.about.whole else _windows(tokens, length)
        if not len(rows):
            why = f"holds {len(tokens)} tokens, less than one sequence of {length}: use a longer text"
            if tokens.about.whole:
                longest = f"the longest document has {rows.longest}"
                why = f"has nothing to learn within --max-length {length} tokens ({longest}): use other data"
            elif rows.dropped:
                why = (
                    "has texts of a single token each, and the first token of a text is not predicted: use longer texts"
                )
            raise ConfigError(f"data {tokens.about.source!r} {why}, or another --max-length")
        return rows

    def __len__(self) -> int:
        return len(self.starts)

    def held_out(self, count: int, seed: int) -> "tuple[Rows, Rows]":
        """Two parts: the rows to train on, and `count` rows chosen by the seed."""
        order = _permuted(np.arange(len(self), dtype=np.int64), len(self), (seed, _HELD_OUT))
        chosen, kept = np.sort(order[:count]), np.sort(order[count:])
        first, second = (Rows(self.tokens, self.length, self.starts[at], self.stops[at]) for at in (kept, chosen))
        return first, second

    def mixed(self, probabilities: Sequence[float], seed: int) -> "Rows":
        """Rows in a mixture: each is of a source of the data with the probability of that source, drawn from the seed
        as `datasets.interleave_datasets` does, until all rows of every source are among them.

        Raises ConfigError if a source has no row.
        """
        source = np.searchsorted(self.tokens.about.parts, self.starts, "right")
        parts = [np.flatnonzero(source == at) for at in range(len(probabilities))]
        if not all(map(len, parts)):
            raise ConfigError(f"data {self.tokens.about.source!r} include some without a sequence: leave them out")
        chosen = np.concatenate(parts)[_interleaved(tuple(map(len, parts)), tuple(probabilities), seed)]
        return replace(self, starts=self.starts[chosen], stops=self.stops[chosen])

    def ids_and_labels(self, chosen: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The token ids and the labels of rows, both int64 [rows, length]. Padding has id 0 and no label."""
        ids = np.zeros((len(chosen), self.length), dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        for at, row in enumerate(chosen):
            start, stop = self.starts[row], self.stops[row]
            found = self.tokens.ids[start:stop].astype(np.int64)
            ids[at, : stop - start] = np.where(found < 0, ~found, found)
            labels[at, : stop - start] = np.where(found < 0, IGNORED, found)
            labels[at, self._beginnings(row)[1:]] = IGNORED
        return ids, labels

    def positions(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The position of each token in its document, or in the part of the document that is in the row, int64 [rows,
        length]."""
        positions = np.tile(np.arange(self.length, dtype=np.int64), (len(chosen), 1))
        for at, row in enumerate(chosen):
            beginnings = self._beginnings(row)
            lengths = np.diff([*beginnings, self.length])
            positions[at] -= np.repeat(beginnings, lengths)
        return positions

    def _beginnings(self, row: np.int64) -> npt.NDArray[np.int64]:
        """The first token of each document in a row, starting with 0, and of the padding, if there is any."""
        if not self.tokens.about.separates:
            return np.zeros(1, dtype=np.int64)
        start, stop, ends = self.starts[row], self.stops[row], self.tokens.ends
        inside = ends[np.searchsorted(ends, start, "right") : np.searchsorted(ends, stop, "left")]
        padding = [stop - start] if stop - start < self.length else []
        return np.array([0, *(inside - start), *padding], dtype=np.int64)


def _windows(tokens: Tokens, length: int) -> Rows:
    """Rows of consecutive tokens. Those in which every token begins a text are left out, as none is predicted."""
    starts = np.arange(len(tokens) // length, dtype=np.int64) * length
    kept = starts
    if tokens.about.separates:
        ends = tokens.ends
        inside = np.searchsorted(ends, starts + length, "left") - np.searchsorted(ends, starts, "right")
        kept = starts[inside < length - 1]
    return Rows(tokens, length, kept, kept + length, dropped=len(starts) - len(kept))


def _whole_documents(tokens: Tokens, length: int, packs: bool) -> Rows:
    """Rows of whole documents: one, or with `packs` as many as fit. A longer one has a row of its own and is cut."""
    starts: list[int] = []
    stops: list[int] = []
    cut = longest = dropped = begin = 0
    for end in tokens.ends.tolist():
        longest = max(longest, end - begin)
        stop = end
        if end - begin > length:
            cut += 1
            stop = begin + length
        # Nothing precedes the first token of a conversation, so it is not predicted.
        if not (tokens.ids[begin + 1 : stop] >= 0).any():
            dropped, begin = dropped + 1, end
            continue
        if packs and starts and stops[-1] == begin and stop - starts[-1] <= length:
            stops[-1] = stop
        else:
            starts.append(begin)
            stops.append(stop)
        begin = end
    bounds = np.array([starts, stops], dtype=np.int64).reshape(2, -1)
    return Rows(tokens, length, bounds[0], bounds[1], cut, longest, dropped)


@dataclass(frozen=True, eq=False, kw_only=True)
class Batches(Dataset[dict[str, torch.Tensor]]):
    """The batches of a run: rows in a keyed order, which the module's docstring defines."""

    rows: Rows
    batch_size: int
    """Sequences per forward pass of one rank, B."""
    gradient_accumulation_steps: int = 1
    """Forward passes per optimizer step."""
    seed: int = 0
    positions: bool = False
    """Whether a batch contains the position of each token in its document. Models use it to keep documents apart."""
    rank: int = 0
    ranks: int = 1
    first_step: int = 0
    """The step that begins with `first_sample`."""
    first_sample: int = 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens one optimizer step reads, on all ranks."""
        return self.samples_per_step * self.rows.length

    @property
    def samples_per_step(self) -> int:
        """Sequences one optimizer step reads, on all ranks."""
        return self.batch_size * self.gradient_accumulation_steps * self.ranks

    def samples_before(self, step: int) -> int:
        """Number of sequences that were read before a step."""
        return self.first_sample + (step - self.first_step) * self.samples_per_step

    def row_indices(self, step: int, index: int = 0, rank: int | None = None) -> npt.NDArray[np.int64]:
        """The rows, int64 [B], of forward pass `index` of optimizer step `step` (both counted from 0)."""
        rank = self.rank if rank is None else rank
        first = self.samples_before(step) + (index * self.ranks + rank) * self.batch_size
        count = len(self.rows)
        epochs, positions = np.divmod(np.arange(first, first + self.batch_size), count)
        result = np.empty(self.batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = _permuted(positions[chosen], count, (self.seed, int(epoch)))
        return result

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, chosen: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """See `of_rows`. A DataLoader calls this, as of any data set."""
        return self.of_rows(chosen)

    def order(self, first: int, steps: int, at_once: int = 1) -> Iterator[npt.NDArray[np.int64]]:
        """The rows of all forward passes of the steps from `first` (from 0) to before `steps`, `at_once` passes
        together."""
        for step in range(first, steps):
            passes = [self.row_indices(step, index) for index in range(self.gradient_accumulation_steps)]
            for start in range(0, len(passes), at_once):
                yield np.concatenate(passes[start : start + at_once])

    def of_rows(self, chosen: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels` of rows, and `position_ids` if documents are kept apart, each int64 [B, T].

        Labels equal the inputs where the loss counts them, because causal models shift labels inside the loss.
        """
        ids, labels = map(torch.from_numpy, self.rows.ids_and_labels(chosen))
        found = {"input_ids": ids, "labels": labels}
        if self.positions:
            found["position_ids"] = torch.from_numpy(self.rows.positions(chosen))
        return found

    def targets_of_step(self, step: int) -> int:
        """Number of tokens in all forward passes of a step, on all ranks, that the loss counts."""
        about = self.rows.tokens.about
        if not about.separates and about.targets == about.tokens:  # then the loss counts as many tokens of every row
            return self.samples_per_step * (self.rows.length - 1)
        passes = [(index, rank) for index in range(self.gradient_accumulation_steps) for rank in range(self.ranks)]
        return sum(counted(self.of_rows(self.row_indices(step, *each))["labels"]) for each in passes)


def counted(labels: torch.Tensor) -> int:
    """Number of tokens in a batch that the loss counts, but at least 1."""
    return max(1, int(labels[:, 1:].ne(IGNORED).sum()))


@lru_cache(1)  # it takes half a minute for a million, and a run asks before and after it chooses its settings
def _interleaved(counts: tuple[int, ...], probabilities: tuple[float, ...], seed: int) -> npt.NDArray[np.int64]:
    """Numbers of the elements of sources one after another, with `counts` elements each, in the order of a mixture."""
    from datasets import Dataset, interleave_datasets

    bounds = [0, *accumulate(counts)]
    sources = [Dataset.from_dict({"number": range(*pair)}) for pair in pairwise(bounds)]
    shares = [each / sum(probabilities) for each in probabilities]  # they add up to 1 but for rounding
    mixture = interleave_datasets(sources, shares, seed, stopping_strategy="all_exhausted")
    numbers: npt.NDArray[np.int64] = mixture.with_format("numpy")[:]["number"]
    return numbers


def _permuted(positions: npt.NDArray[np.int64], size: int, key: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Where a keyed permutation of range(size) sends `positions`, without a table of `size` entries.

    A Feistel network permutes the smallest range of an even number of bits that contains range(size). A result outside
    range(size) is permuted again until it is inside ("cycle walking"), so the result is a permutation of range(size).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    seed, epoch = (np.array([part], dtype=np.uint64) for part in key)
    salt = _mixed(_mixed(seed) ^ epoch)
    round_keys = [_mixed(salt + np.uint64(i)) for i in range(_FEISTEL_ROUNDS)]
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mixed(right ^ round_key) & mask)
        values[outside] = left << half | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), elementwise modulo 2**64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
