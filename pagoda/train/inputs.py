"""The inputs of a run: its data as tokens, cut into rows, in batches."""

import inspect
from dataclasses import replace

import numpy as np
import torch
from rich.console import Console
from torch import nn

from pagoda.budgets import compute_device
from pagoda.config.reading import Data
from pagoda.console import say
from pagoda.errors import ConfigError
from pagoda.memory.ram import free_ram
from pagoda.memory.sizes import format_at_least, format_bytes
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_all, from_first
from pagoda.prepare.documents import SHORT_TOKENS, attend_by_document, mask_bytes, window_of
from pagoda.train.config import TrainConfig
from pagoda.train.data import Batches, Rows
from pagoda.train.passes import Passes
from pagoda.train.seen import many
from pagoda.train.tokenizer import Tokenizer
from pagoda.train.tokens import DataSets, Tokens

_SHOWN, _SHOWN_LINES = 256, 10
"""Most tokens and lines of the document that is shown before the first step."""
_LENGTHS = "at least", "in the median", "at the 95th percentile", "at most"
_PROBED = 8
"""Tokens of each of the two documents with which `_crosses` tests a model."""
_ROUNDING, _ROUNDING_16 = 2e-6, 2e-4
"""Limits, in fp32 and in 16 bits, of changes of logits in the second document relative to those in the first. Rounding
causes at most 2e-7 in fp32. A model that reads the first document changes by 1e-4 or more."""


def opened_tokens(asked: Data, split: str, data: DataSets, mesh: Mesh, console: Console) -> Tokens:
    """The tokens of --data or --eval-data. Prints what was read, and what was ignored or left out. The first rank reads
    the data, and tokenises them if their tokens are not in the cache; the other ranks find them there.

    Raises ConfigError if data or tokenizer cannot be used, and StorageError if there is no room for the tokens.
    """
    tokens = data.open(asked, split, from_first(mesh, "the data", lambda: data.open(asked, split).key))
    say(console, *described(tokens, data.tokenizer))
    return tokens


def batches_of(
    config: TrainConfig, tokens: Tokens, data: DataSets, model: nn.Module, mesh: Mesh, console: Console
) -> tuple[Batches, Batches | None]:
    """The batches of a run, and those to evaluate on. Prints how the tokens are cut into sequences.

    Raises ConfigError if there is no sequence, or if the model does not know all tokens.
    """
    _check_vocabulary(config, model, tokens)
    rows = Rows.of(tokens, config.max_length, config.packing)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    say(console, *sequences(rows))
    evaluated: Rows | None = None
    if config.eval_data is not None:
        other = opened_tokens(config.eval_data, config.dataset_test_split, data, mesh, console)
        _check_vocabulary(config, model, other)
        evaluated = Rows.of(other, rows.length, config.packing)
    elif config.eval_share:
        count = max(1, round(config.eval_share * len(rows)))
        if count == len(rows):
            raise ConfigError(
                f"--eval-share {config.eval_share} leaves nothing of {len(rows)} sequences to train on: use more data, "
                "a smaller --max-length, or --eval-data"
            )
        rows, evaluated = rows.held_out(count, config.seed)
    if config.probabilities:
        rows = rows.mixed(config.probabilities, config.seed)
        say(console, f"Mixture: an epoch has {len(rows):,} sequences, until every source has been read whole")
    batches = Batches(
        rows=rows,
        batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        seed=config.seed,
        positions=tokens.about.separates and takes_positions,
        rank=mesh.batch_index // config.sequence_parallel,
        ranks=config.ranks_with_batches(mesh.ranks.data_parallel),
    )
    if evaluated is None:
        return batches, None
    kept = evaluated.held_out(min(config.max_eval_samples, len(evaluated)), config.seed)[1]
    few = f" of {len(evaluated):,}" if len(kept) < len(evaluated) else ""
    of = f"{len(kept):,}{few} sequences{' held out' if config.eval_share else ''}"
    every = config.eval_steps
    say(console, f"Evaluation: {of}, {f'every {every:,} steps' if every > 1 else 'after every step'}")
    return batches, replace(batches, rows=kept)


def example(rows: Rows, tokenizer: Tokenizer) -> list[str]:
    """Messages with the beginning of the first document, in which « and » are around what the loss counts."""
    start = int(rows.starts[0])
    ends = rows.tokens.ends
    stop = min(int(rows.stops[0]), int(ends[np.searchsorted(ends, start, "right")]), start + _SHOWN)
    ids = rows.tokens.ids[start:stop].astype(np.int64)
    counted = ids >= 0
    counted[0] = False  # nothing precedes it, so it is not predicted
    more = " ..." if stop == start + _SHOWN else ""
    text = tokenizer.marked(np.where(ids < 0, ~ids, ids), counted)
    lines = f"{text}{more}".rstrip("\n").split("\n")
    rest = ["..."] * (len(lines) > _SHOWN_LINES)
    return ["Example, with what the loss counts between « and »:", *lines[:_SHOWN_LINES], *rest]


def keep_apart(
    passes: Passes, batches: Batches, evaluated: Batches | None, mesh: Mesh, console: Console
) -> tuple[Batches, Batches | None]:
    """The batches to train and to evaluate on. They keep positions that start again with each document only if the
    model then keeps documents apart. Prints whether it does.

    Raises ConfigError if attention would need a mask of tokens times tokens for which there is no memory.
    """
    separates = batches.rows.tokens.about.separates
    crosses = not batches.positions or any(from_all(mesh, "whether documents stay apart", _crosses(passes, batches)))
    if separates and crosses:
        why = "reads earlier documents, even if positions start again" if batches.positions else "takes no position_ids"
        say(console, f"Documents: the model {why}, so attention crosses from document to document")
        batches = replace(batches, positions=False)
        evaluated = evaluated and replace(evaluated, positions=False)
    _keep_masks_small(passes, batches)
    if separates and not crosses:
        say(console, "Documents: attention ends where a document does")
    return batches, evaluated


def _keep_masks_small(passes: Passes, batches: Batches) -> None:
    """Let documents of long rows attend without a mask of tokens times tokens.

    Raises ConfigError if such a mask is needed and there is no memory for it.
    """
    tokens = batches.rows.length
    window = window_of(passes.model.config.get_text_config(), tokens)  # type: ignore[operator, union-attr]
    why = None if window is None else f"the model has layers that attend in a window of {window:,} tokens"
    if batches.positions and tokens > SHORT_TOKENS:
        try:
            attend_by_document(passes.model)
        except ConfigError as refusal:
            why = str(refusal)
    if why is None:
        return
    itemsize = 4 if passes.config.precision == "fp32" else 2
    room, needed = _free_of_compute(passes.config), mask_bytes(batches.batch_size * tokens, tokens, itemsize)
    if needed > room:
        most = int(tokens * (room / needed) ** 0.5)
        raise ConfigError(
            f"--max-length {tokens} needs {format_at_least(needed)} for a mask of tokens times tokens, and "
            f"{format_bytes(room)} are free: {why}. Use --max-length {most} or less"
        )


def _free_of_compute(config: TrainConfig) -> int:
    """Free bytes of the memory of compute."""
    if compute_device(config.memory).type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return free_ram()


def _crosses(passes: Passes, batches: Batches) -> bool:
    """Whether a model's logits in a document depend on the document before it.

    The model reads two short documents together, then again with other tokens in the first one. Its logits in the
    second one must stay the same, except for rounding: experts that get another number of tokens may round differently.
    """
    rows = batches.rows
    length = min(_PROBED, rows.length // 2)
    stored = rows.tokens.ids[: 1 << 16].astype(np.int64)
    known = np.unique(np.where(stored < 0, ~stored, stored))
    ids = np.tile(np.resize(known, 2 * length), (2, 1))
    ids[1, :length] = np.resize(np.roll(known, len(known) // 2), length)
    if (ids[0] == ids[1]).all():
        return False
    shape = batches.batch_size, 2 * length
    places = torch.arange(length).repeat(2).expand(shape)
    one, other = ({"input_ids": torch.tensor(row).expand(shape), "position_ids": places} for row in ids)
    logits, others = passes.logits(one), passes.logits(other)
    if logits is None or others is None:  # the last stage of a pipeline compares them
        return False
    changes = (logits - others)[0].abs().mean(dim=-1)
    limit = _ROUNDING if passes.config.precision == "fp32" else _ROUNDING_16
    return not float(changes[length:].max()) <= limit * float(changes[:length].mean())


def _check_vocabulary(config: TrainConfig, model: nn.Module, tokens: Tokens) -> None:
    """Raises ConfigError if the model does not know all tokens."""
    known, about = model.get_input_embeddings().num_embeddings, tokens.about  # type: ignore[operator]
    if known < about.most:
        raise ConfigError(
            f"model {config.model!r} has a vocabulary of {known}, and data {about.source!r} has tokens up to "
            f"{about.most - 1} ({about.tokenizer}): give the model's own tokenizer with --tokenizer, or, to start from "
            f"random weights, set vocab_size in config.json to {about.most} or more"
        )


def described(tokens: Tokens, tokenizer: Tokenizer) -> list[str]:
    """Messages about what was read from the files, and what was ignored or left out."""
    about = tokens.about
    kind = "conversation" if about.chats else "document"
    where = f" in {many(about.files, 'file')}" if about.files else ""
    lines = [
        f"Tokens: {tokenizer.name}",
        f"Data: {about.source}, {many(about.documents, kind)}{where}, "
        f"{about.tokens:,} tokens, of which the loss counts {about.targets / about.tokens:.0%}",
    ]
    if about.separates:
        lengths = np.quantile(np.diff(tokens.ends, prepend=0), (0, 0.5, 0.95, 1)).astype(int)
        shown = (f"{length:,} {what}" for length, what in zip(lengths, _LENGTHS, strict=True))
        lines.append(f"Lengths in tokens: {', '.join(shown)}")
    return [*lines, *about.seen.lines()]


def sequences(rows: Rows) -> list[str]:
    """Messages about how the tokens are cut into sequences."""
    about = rows.tokens.about
    kind = "conversation" if about.chats else "document"
    padding = 1 - (rows.stops - rows.starts).sum() / (len(rows) * rows.length)
    padded = f", {padding:.0%} padding" if about.whole else ""
    lines = [f"Sequences: {len(rows):,} of {rows.length:,} tokens{padded}"]
    if rows.cut:
        lines.append(
            f"{rows.cut:,} of {about.documents:,} {kind}s have more than --max-length {rows.length} tokens, the "
            f"longest {rows.longest:,}: they are cut"
        )
    if rows.dropped:
        what = many(rows.dropped, kind if about.whole else "sequence")
        lines.append(f"Left out {what} in which the loss counts no token")
    if not about.whole and (rest := len(rows.tokens) % rows.length):
        lines.append(f"Left out the last {many(rest, 'token')}, less than a sequence")
    return lines
