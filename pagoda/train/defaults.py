"""Chooses the settings that the user leaves open, each with its reason."""

from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from pagoda.budgets import HOST_SHARE, compute_device
from pagoda.calibrate.matmul import usual_precision
from pagoda.checkpoint.pretrained import weight_files
from pagoda.config.memory import FIRST_SHARE
from pagoda.config.reading import Reading, names_of
from pagoda.console import say
from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.activations import MALLOC, activations_of
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.model_description import ModelDescription, describe_model
from pagoda.forecast.step_size import TOKENS_PER_STEP, sequences_at_once
from pagoda.memory.ram import free_ram
from pagoda.memory.sizes import format_bytes
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_first
from pagoda.mesh.world import may_be_restarted, was_restarted
from pagoda.models.build import model_directory, positions_of
from pagoda.train.config import EVAL_ROWS, EVALUATIONS, TrainConfig
from pagoda.train.data import Rows
from pagoda.train.run_dir import LAST, RunDir, unused
from pagoda.train.seen import many
from pagoda.train.sources import STDLIB
from pagoda.train.tokens import DataSets, Tokens

_SEQ_LEN, _MOST_SEQ_LEN = 1024, 4096
_STEPS = 100
"""Fewest steps for which a step has more than one sequence, unless the user gives the tokens of a step."""
_LEAST_SEQUENCES = 8
"""Fewest sequences of a text. With less text, sequences are shorter."""
_FEW_STEPS = 50
_EVAL_SHARE, _LEAST_TO_HOLD_OUT = 0.05, 40
_EVAL_TIME, _FORWARD, _LEAST_EVAL_ROWS = 0.1, 0.5, 32
"""Most of a run's time that evaluations take, the time of a forward without a backward, as a share of both, and
sequences of an evaluation, with fewer of which a run evaluates less often."""
_ADAPT_AFTER = 2
"""Steps that show what activations need on a GPU."""
_LRS = {"random weights": 3e-4, "all of a pretrained model": 2e-5, "adapters": 2e-4}
_LR_SHARES = {"adamw": 1.0, "adam": 1.0, "lion": 0.2, "signsgd": 0.2}
"""Share of these rates for each optimizer. The steps of Lion and SignSGD are longer."""
_WARMUP, _WARMUP_OF_ADAPTERS, _MOST_WARMUP = 0.03, 0.1, 100
"""Warm-up as a share of the steps, and its most steps. The learning rate of adapters is higher."""


def completed(config: TrainConfig, data: DataSets, mesh: Mesh, console: Console) -> TrainConfig:
    """The configuration with every setting chosen. Prints every choice. All ranks take the choices of the first one.

    Raises ConfigError if data, a model or a setting cannot be used, and StorageError if there is no room for tokens.
    """
    if config.resume_from_checkpoint and config.output_dir is None:
        raise ConfigError("--resume-from-checkpoint continues a run: name its directory with --output-dir")
    if config.output_dir is None and may_be_restarted():
        raise ConfigError("torchrun --max-restarts continues a run: name its directory with --output-dir")

    def choices() -> tuple[TrainConfig, list[str]]:
        asked, run_dir = config, None if config.output_dir is None else RunDir(config.output_dir)
        if run_dir is not None and not run_dir.config.exists() and asked.resume_from_checkpoint == LAST:
            asked = replace(asked, resume_from_checkpoint=None)
            say(console, f"{run_dir.path} has no run yet: it begins with its first step")
        if run_dir is not None and not asked.resume_from_checkpoint and asked.depends_on_data:
            if was_restarted() and run_dir.config.exists():  # these processes continue what others began
                return replace(run_dir.started_config(), output_dir=run_dir.path, trace=asked.trace), []
            run_dir.check_free()
        return _chosen(asked, asked.ranks_with_batches(mesh.ranks.data_parallel), data)

    chosen, reasons = from_first(mesh, "the choice of settings", choices)
    say(console, *(f"Chosen: {reason}" for reason in reasons))
    return chosen


def _chosen(asked: TrainConfig, ranks: int, data: DataSets) -> tuple[TrainConfig, list[str]]:
    """The configuration, and the reasons."""
    reasons: list[str] = []
    held = 0
    lr, why = _learning_rate(asked)
    reasons += why
    asked = replace(asked, learning_rate=lr)
    if asked.data is None:
        if _kind(asked) != "random weights":
            raise ConfigError("--data is missing: name a file or folder with the texts or conversations to train on")
        asked = replace(asked, data=STDLIB)
        reasons.append(f"--data {STDLIB}: the source code of Python's standard library")
    if asked.output_dir is None:
        asked = replace(asked, output_dir=_new_directory(asked))
        reasons.append(f"--output-dir {asked.output_dir}")
    if asked.memory.device is None and torch.cuda.is_available():
        asked, why = _of_gpu(asked, torch.cuda.mem_get_info()[0])
        reasons += why
    if asked.precision is None:
        precision, reason = usual_precision(compute_device(asked.memory))
        asked = replace(asked, precision=precision)
        reasons.append(f"--precision {precision}: {reason}")
    if asked.depends_on_data:
        assert asked.data is not None, "it is chosen now"
        asked, held, why = _by_data(asked, ranks, data.open(asked.data, asked.dataset_train_split))
        reasons += why
    if asked.activations is None:  # as `pagoda plan` decides, since the batch is the user's
        asked, why = _with_activations(
            asked, asked.per_device_train_batch_size, replace(_Estimate.of_run(asked), kept=1)
        )
        reasons += why
    asked, why = _evaluations(asked, ranks, held)
    reasons += why
    if asked.warmup_steps is None:
        warmup, why = _warmup(asked)
        asked = replace(asked, warmup_steps=warmup)
        reasons += why
    return asked, reasons


def _of_gpu(asked: TrainConfig, free: int) -> tuple[TrainConfig, list[str]]:
    """The configuration with a part of the GPU's `free` memory for pages, and why."""
    after = asked.memory.adapt_after
    if after is None and not asked.asynchronous:
        after = _ADAPT_AFTER
    if after is None:  # a second placement would change what asynchronous updates compute
        free = int(free * FIRST_SHARE)
        why = [f"--memory.device {format_bytes(free)}: {FIRST_SHARE:.0%} of the GPU's free memory"]
    else:
        why = [
            f"--memory.device {format_bytes(free)}: the GPU's free memory",
            f"--memory.adapt-after {after}: until then, pages take {FIRST_SHARE:.0%} of it, and then what activations "
            "leave",
        ]
    return replace(asked, memory=replace(asked.memory, device=str(free), adapt_after=after)), why


def _by_data(asked: TrainConfig, ranks: int, tokens: Tokens) -> tuple[TrainConfig, int, list[str]]:
    """The configuration with the settings that depend on the data; the sequences that are held out; and the reasons."""
    reasons: list[str] = []
    if not asked.max_length:
        seq_len, why = sequence_length(asked, tokens)
        asked = replace(asked, max_length=seq_len)
        reasons += why
    rows = len(Rows.of(tokens, asked.max_length, asked.packing))
    if asked.eval_share is None:
        holds_out = asked.eval_data is None and _kind(asked) != "random weights" and rows >= _LEAST_TO_HOLD_OUT
        asked = replace(asked, eval_share=_EVAL_SHARE if holds_out else 0.0)
        if holds_out:
            reasons.append(f"--eval-share {_EVAL_SHARE}: of {rows:,} sequences, to see whether what is learned holds")
    held = round(rows * (asked.eval_share or 0))
    left = rows - held
    usual = 3.0 if tokens.about.whole else 1.0
    epochs = asked.num_train_epochs or usual
    smaller = (
        "a smaller --per-device-train-batch-size" if asked.per_device_train_batch_size else "fewer --tokens-per-step"
    )
    if not asked.per_device_train_batch_size:
        asked, why = _batch(asked, ranks, min(epochs, usual) * left)
        reasons += why
    if not asked.max_steps:
        sequences = asked.per_device_train_batch_size * asked.gradient_accumulation_steps * ranks
        steps = max(1, ceil(epochs * left / sequences))
        few = ""
        if steps < _FEW_STEPS:
            few = (
                f". A model learns little in fewer than {_FEW_STEPS}: give more data, --max-steps or --num-train-epochs"
            )
            few += f", or {smaller}" if sequences > ranks else ""
        reasons.append(
            f"--max-steps {steps:,}: {epochs:g} epoch{'s' * (epochs != 1)} of {many(left, 'sequence')}, {sequences:,} "
            "a "
            f"step{few}"
        )
        asked = replace(asked, max_steps=steps, num_train_epochs=None)
    return asked, held, reasons


def _evaluations(asked: TrainConfig, ranks: int, held: int) -> tuple[TrainConfig, list[str]]:
    """The configuration with how often and on how much the run evaluates, and why: evaluations take at most a tenth of
    its time, as far as the user leaves both open. A forward takes at most half of the time of a forward with its
    backward. `held`: number of sequences to evaluate on, or 0 if it is not known."""
    if not asked.evaluates or (asked.eval_steps and asked.max_eval_samples):
        return asked, []
    each, steps = asked.per_device_train_batch_size * ranks, asked.max_steps
    trained = steps * asked.gradient_accumulation_steps
    most = int(trained * _EVAL_TIME / _FORWARD)  # forwards of all evaluations, one of which is before the first step
    known = asked.max_eval_samples or EVAL_ROWS
    known = min(known, held or known)
    wanted = ceil(known / each)
    least = wanted if asked.max_eval_samples else min(wanted, ceil(_LEAST_EVAL_ROWS / each))
    every = asked.eval_steps or ceil(steps / max(1, min(EVALUATIONS, steps, most // least - 1)))
    count = 1 + ceil(steps / every)
    passes = max(1, min(wanted, most // count))
    rows = asked.max_eval_samples or min(EVAL_ROWS, passes * each)
    share = _FORWARD * count * ceil(min(rows, known) / each) / trained
    why = [
        *[f"--eval-steps {every:,}: {count} evaluations, one of them before the first step"] * (not asked.eval_steps),
        *[f"--max-eval-samples {rows}: evaluations take at most about {share:.0%} of the time"]
        * (not asked.max_eval_samples),
    ]
    return replace(asked, eval_steps=every, max_eval_samples=rows), why


def _kind(config: TrainConfig) -> str:
    """What is trained: a key of `_LRS`."""
    if config.lora_r is not None:
        return "adapters"
    directory = model_directory(config.model)
    return "all of a pretrained model" if directory is not None and weight_files(directory) else "random weights"


def _learning_rate(config: TrainConfig) -> tuple[float, list[str]]:
    if config.learning_rate is not None:
        return config.learning_rate, []
    kind = _kind(config)
    share = _LR_SHARES.get(config.optim)
    lr = _LRS["random weights"] if share is None else round(_LRS[kind] * share, 12)
    why = f"usual for {kind} with {config.optim}" if share else f"a guess: {config.optim} may need another"
    return lr, [f"--learning-rate {lr:g}: {why}"]


def _warmup(config: TrainConfig) -> tuple[int, list[str]]:
    """Steps of warm-up."""
    if (
        config.resume_from_checkpoint
        and config.output_dir is not None
        and (run_dir := RunDir(config.output_dir)).config.exists()
    ):
        return run_dir.started_config().warmup_steps or 0, []  # it may have begun with another number of steps
    share = _WARMUP_OF_ADAPTERS if _kind(config) == "adapters" else _WARMUP
    warmup = min(_MOST_WARMUP, int(share * config.max_steps))
    most = ", the most by default" * (warmup == _MOST_WARMUP)
    return warmup, [f"--warmup-steps {warmup}: {warmup / config.max_steps:.1%} of the steps{most}"] * bool(warmup)


def _new_directory(asked: TrainConfig) -> Path:
    """A directory in runs/ that does not exist yet, with the names of model and data."""
    assert asked.data is not None, "it is chosen first"
    stem = f"{Path(asked.model).resolve().name}-{Path(names_of(asked.data)[0]).stem}".replace("*", "")
    return unused(Path("runs") / stem, "-")


def sequence_length(asked: Reading, tokens: Tokens) -> tuple[int, list[str]]:
    """Tokens of a sequence, and why."""
    positions = positions_of(asked.model)
    most = _MOST_SEQ_LEN if positions is None else min(positions, _MOST_SEQ_LEN)
    if tokens.about.whole:
        lengths = np.diff(tokens.ends, prepend=0)
        needed = int(np.quantile(lengths, 0.99, method="inverted_cdf"))
        seq_len = min(most, 1 << (max(needed, 16) - 1).bit_length())
        whole = (lengths <= seq_len).mean()
        kind = "conversations" if tokens.about.chats else "documents"
        why = f"{int(100 * whole)}% of {kind} have as many tokens or fewer"
        limit = "the model's positions" if positions == seq_len else "the most by default"
        return seq_len, [f"--max-length {seq_len}: {why}" + f"; {limit}" * (needed > seq_len)]
    seq_len = most = min(most, _SEQ_LEN)
    while seq_len > 16 and len(tokens) < _LEAST_SEQUENCES * seq_len:
        seq_len //= 2
    why = "the model's positions" if positions == seq_len else "usual for texts"
    if seq_len < most:
        why = f"the data has no more than {len(tokens):,} tokens"
    return seq_len, [f"--max-length {seq_len}: {why}"]


@dataclass(frozen=True)
class _Estimate:
    """By how many bytes activations let this process grow."""

    described: ModelDescription
    room: int
    of: str
    """Where the room comes from."""
    kept: int
    """Factor for what malloc keeps."""

    @classmethod
    def of_run(cls, asked: TrainConfig) -> "_Estimate":
        described = describe_model(
            PlanConfig(model=asked.model, max_length=asked.max_length, gradient_accumulation_steps=1), count_flops=False
        )
        asks_for_room = asked.memory.activation_bytes is not None
        kept = MALLOC if compute_device(asked.memory).type == "cpu" and not asks_for_room else 1
        return cls(described, *_room(asked), kept)

    def takes(self, asked: TrainConfig, batch: int) -> int:
        """Bytes for that many sequences."""
        return self.kept * activations_of(replace(asked, per_device_train_batch_size=batch), self.described).total


def _with_activations(asked: TrainConfig, batch: int, estimate: _Estimate) -> tuple[TrainConfig, list[str]]:
    """The configuration with what happens to activations of that many sequences, unless it is given, and why."""
    if asked.activations is not None:
        return asked, []
    recompute, offload = (replace(asked, activations=mode) for mode in ("recompute", "recompute+offload"))
    has_tier = asked.memory.device is not None or asked.memory.ssd is not None
    if not has_tier or not estimate.takes(offload, batch) <= estimate.room < estimate.takes(recompute, batch):
        return recompute, []
    return offload, ["--activations recompute+offload: with recompute, they do not fit"]


def _batch(asked: TrainConfig, ranks: int, sequences: float) -> tuple[TrainConfig, list[str]]:
    """The configuration with sequences of a forward pass, passes of a step, and what happens to activations, in a run
    that reads that many `sequences` by default. And the reasons."""
    estimate, seq_len = _Estimate.of_run(asked), asked.max_length
    asked, reasons = _with_activations(asked, 1, estimate)
    most = (asked.tokens_per_step or TOKENS_PER_STEP) / seq_len
    few = not asked.tokens_per_step and sequences < _STEPS * most
    target = max(1, int((sequences // _STEPS if few else most) / ranks))
    room = format_bytes(estimate.room)
    if (least := estimate.takes(asked, 1)) > estimate.room:
        raise BudgetError(
            f"the activations of one sequence of {seq_len} tokens take about {format_bytes(least)}, and {room} are "
            f"left for them ({estimate.of}): use a smaller --max-length{_more_room(asked)}"
        )
    stages = asked.pipeline_parallel
    batch = sequences_at_once(target, stages, lambda count: estimate.takes(asked, count) <= estimate.room)
    passes, why = asked.gradient_accumulation_steps, "as asked for"
    if passes == 1:
        passes = max(stages, target // batch)
        why = f"{batch * passes * ranks * seq_len:,} tokens a step (--tokens-per-step)"
        if few:
            why += f", so that the usual epochs give {ceil(sequences / (batch * passes * ranks)):,} steps"
    reasons += [
        f"--per-device-train-batch-size {batch}: activations take about {format_bytes(estimate.takes(asked, batch))} "
        f"of {room} "
        f"({estimate.of})" + ", with what malloc keeps" * (estimate.kept > 1),
        f"--gradient-accumulation-steps {passes}: {why}",
    ]
    return replace(asked, per_device_train_batch_size=batch, gradient_accumulation_steps=passes), reasons


def _more_room(asked: TrainConfig) -> str:
    """What else gives activations more room, as the end of a sentence."""
    memory = asked.memory
    if memory.activation_bytes is not None:
        return ", or a larger --memory.activations"
    if memory.device_bytes is not None and not memory.arena_for_device:
        return ", or a smaller --memory.device"
    return ", or a smaller --memory.host" + " with --memory.ssd DIR" * (memory.ssd is None)


def _room(asked: TrainConfig) -> tuple[int, str]:
    """Bytes for activations on the compute device, and where these come from."""
    memory = asked.memory
    if memory.activation_bytes is not None:
        return memory.activation_bytes, "--memory.activations"
    if memory.device_bytes is not None and not memory.arena_for_device:
        if not torch.cuda.is_available():
            raise ConfigError(f"--memory.device is {memory.device}, and torch finds no CUDA GPU here: leave it out")
        return max(0, torch.cuda.mem_get_info()[0] - (memory.device_pages or 0)), "of the GPU, without pages"
    free = free_ram()
    host = int(free * HOST_SHARE) if memory.host_bytes is None else memory.host_bytes
    return max(0, free - host), f"of {format_bytes(free)} free RAM, less {format_bytes(host)} for pages"
