"""Chooses the settings that the user leaves open, each with its reason."""

from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from pagoda.budgets import HOST_SHARE, compute_device
from pagoda.calibrate.matmul import usual_precision
from pagoda.checkpoint.pretrained import weight_files
from pagoda.config.memory import FIRST_SHARE
from pagoda.config.reading import Reading, names_of
from pagoda.config.settings import flag
from pagoda.console import say
from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.activations import MALLOC, activations_of
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.model_description import ModelDescription, describe_model
from pagoda.forecast.step_size import TOKENS_PER_STEP, sequences_at_once, usual_length
from pagoda.memory.ram import free_ram
from pagoda.memory.sizes import format_bytes
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_first
from pagoda.mesh.world import may_be_restarted, was_restarted
from pagoda.models.build import model_directory, positions_of
from pagoda.train.config import TrainConfig
from pagoda.train.data import Rows
from pagoda.train.run_dir import LAST, RunDir, unused
from pagoda.train.seen import many
from pagoda.train.sources import STDLIB
from pagoda.train.tokens import DataSets, Tokens

_MOST_SEQ_LEN = 4096
_STEPS = 100
"""Fewest steps for which a step has more than one sequence, unless the user gives the tokens of a step."""
_LEAST_SEQUENCES = 8
"""Fewest sequences of a text. With less text, sequences are shorter."""
_FEW_STEPS = 50
_EVAL_SHARE, _LEAST_TO_HOLD_OUT = 0.05, 40
_EVALUATIONS, _EVAL_ROWS = 10, 256
"""Most evaluations in a run after the first step, and sequences in each."""
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

    def choices() -> Choices:
        asked, run_dir = config, None if config.output_dir is None else RunDir(config.output_dir)
        if run_dir is not None and not run_dir.config.exists() and asked.resume_from_checkpoint == LAST:
            asked = replace(asked, resume_from_checkpoint=None)
            say(console, f"{run_dir.path} has no run yet: it begins with its first step")
        if run_dir is not None and not asked.resume_from_checkpoint and asked.depends_on_data:
            if was_restarted() and run_dir.config.exists():  # these processes continue what others began
                return Choices(replace(run_dir.started_config(), output_dir=run_dir.path, trace=asked.trace))
            run_dir.check_free()
        chosen = Choices(asked, asked.ranks_with_batches(mesh.ranks.data_parallel))
        chosen.make(data)
        return chosen

    chosen = from_first(mesh, "the choice of settings", choices)
    say(console, *(f"Chosen: {reason}" for reason in chosen.reasons))
    return chosen.config


def sequence_length(asked: Reading, tokens: Tokens) -> tuple[int, str]:
    """Tokens of a sequence, and why."""
    positions = positions_of(asked.model)
    most = _MOST_SEQ_LEN if positions is None else min(positions, _MOST_SEQ_LEN)
    if tokens.about.whole:
        lengths = np.diff(tokens.ends, prepend=0)
        needed = int(np.quantile(lengths, 0.99, method="inverted_cdf"))
        seq_len = min(most, 1 << (max(needed, 16) - 1).bit_length())
        whole = (lengths <= seq_len).mean()
        kind = "conversations" if tokens.about.chats else "documents"
        limit = "the model's positions" if positions == seq_len else "the most by default"
        return seq_len, f"{int(100 * whole)}% of {kind} have as many tokens or fewer" + f"; {limit}" * (
            needed > seq_len
        )
    usual, why = usual_length(asked.model)
    seq_len = usual
    while seq_len > 16 and len(tokens) < _LEAST_SEQUENCES * seq_len:
        seq_len //= 2
    if seq_len < usual:
        return seq_len, f"the data has no more than {len(tokens):,} tokens"
    return seq_len, why


@dataclass
class Choices:
    """A configuration whose open settings are chosen one after another, and the reasons."""

    config: TrainConfig
    ranks: int = 1
    """Number of ranks, or groups of ranks, with batches of their own."""
    reasons: list[str] = field(default_factory=list)

    def choose(self, why: str, /, **settings: Any) -> None:
        """Give a setting a value. An empty `why` is not told."""
        ((name, value),) = settings.items()
        self.config = replace(self.config, **settings)
        if why:
            shown = f"{value:g}" if isinstance(value, float) else f"{value:,}" if name == "max_steps" else value
            self.reasons.append(f"{flag(name)} {shown}" + f": {why}" * (why != "-"))

    def make(self, data: DataSets) -> None:
        """Choose all of them."""
        asked = self.config
        if asked.learning_rate is None:
            self._learning_rate()
        if asked.data is None:
            if self._kind != "random weights":
                raise ConfigError(
                    "--data is missing: name a file or folder with the texts or conversations to train on"
                )
            self.choose("the source code of Python's standard library", data=STDLIB)
        if asked.output_dir is None:
            self.choose("-", output_dir=_new_directory(self.config))
        if asked.memory.device is None and torch.cuda.is_available():
            self._gpu(torch.cuda.mem_get_info()[0])
        if asked.precision is None:
            precision, why = usual_precision(compute_device(asked.memory))
            self.choose(why, precision=precision)
        held = 0
        if asked.depends_on_data:
            assert self.config.data is not None, "it is chosen now"
            held = self._by_data(data.open(self.config.data, asked.dataset_train_split))
        if self.config.activations is None:  # as `pagoda plan` decides, since the batch is the user's
            estimate = replace(Estimate.of_run(self.config), kept=1)
            self.activations(self.config.per_device_train_batch_size, estimate)
        self.evaluations(held)
        if asked.warmup_steps is None:
            self._warmup()

    @property
    def _kind(self) -> str:
        """What is trained: a key of `_LRS`."""
        if self.config.lora_r is not None:
            return "adapters"
        directory = model_directory(self.config.model)
        return "all of a pretrained model" if directory is not None and weight_files(directory) else "random weights"

    def _learning_rate(self) -> None:
        optim = self.config.optim
        share = _LR_SHARES.get(optim)
        lr = _LRS["random weights"] if share is None else round(_LRS[self._kind] * share, 12)
        why = f"usual for {self._kind} with {optim}" if share else f"a guess: {optim} may need another"
        self.choose(why, learning_rate=lr)

    def _gpu(self, free: int) -> None:
        """Give pages a part of the GPU's `free` memory."""
        memory = self.config.memory
        after = memory.adapt_after
        if after is None and not self.config.asynchronous:
            after = _ADAPT_AFTER
        if after is None:  # a second placement would change what asynchronous updates compute
            free = int(free * FIRST_SHARE)
            why = [f"--memory.device {format_bytes(free)}: {FIRST_SHARE:.0%} of the GPU's free memory"]
        else:
            why = [
                f"--memory.device {format_bytes(free)}: the GPU's free memory",
                f"--memory.adapt-after {after}: until then, pages take {FIRST_SHARE:.0%} of it, and then what "
                "activations leave",
            ]
        self.choose("", memory=replace(memory, device=str(free), adapt_after=after))
        self.reasons += why

    def _by_data(self, tokens: Tokens) -> int:
        """Choose what depends on the data. Returns the number of sequences that are held out."""
        if not self.config.max_length:
            seq_len, why = sequence_length(self.config, tokens)
            self.choose(why, max_length=seq_len)
        every = Rows.of(tokens, self.config.max_length, self.config.packing)
        rows = len(every)
        if self.config.eval_share is None:
            holds_out = self.config.eval_data is None and self._kind != "random weights" and rows >= _LEAST_TO_HOLD_OUT
            why = f"of {rows:,} sequences, to see whether what is learned holds" if holds_out else ""
            self.choose(why, eval_share=_EVAL_SHARE if holds_out else 0.0)
        held = round(rows * (self.config.eval_share or 0))
        left = rows - held
        if self.config.probabilities:
            left = len(every.held_out(held, self.config.seed)[0].mixed(self.config.probabilities, self.config.seed))
        usual = 3.0 if tokens.about.whole else 1.0
        epochs = self.config.num_train_epochs or usual
        smaller = "fewer --tokens-per-step"
        if self.config.per_device_train_batch_size:
            smaller = "a smaller --per-device-train-batch-size"
        else:
            self.batch(min(epochs, usual) * left)
        if not self.config.max_steps:
            asked = self.config
            sequences = asked.per_device_train_batch_size * asked.gradient_accumulation_steps * self.ranks
            steps = max(1, ceil(epochs * left / sequences))
            why = f"{epochs:g} epoch{'s' * (epochs != 1)} of {many(left, 'sequence')}, {sequences:,} a step"
            if steps < _FEW_STEPS:
                why += f". A model learns little in fewer than {_FEW_STEPS}: give more data, --max-steps or "
                why += "--num-train-epochs" + f", or {smaller}" * (sequences > self.ranks)
            self.choose("", num_train_epochs=None)
            self.choose(why, max_steps=steps)
        return held

    def evaluations(self, held: int) -> None:
        """Choose how often and on how much the run evaluates: evaluations take at most a tenth of its time, as far as
        the user leaves both open. A forward takes at most half of the time of a forward with its backward. `held`:
        number of sequences to evaluate on, or 0 if it is not known."""
        asked = self.config
        if not asked.evaluates:
            return
        each, steps = asked.per_device_train_batch_size * self.ranks, asked.max_steps
        trained = steps * asked.gradient_accumulation_steps
        most = int(
            trained * _EVAL_TIME / _FORWARD
        )  # forwards of all evaluations, one of which is before the first step
        known = asked.max_eval_samples or _EVAL_ROWS
        known = min(known, held or known)
        wanted = ceil(known / each)
        least = wanted if asked.max_eval_samples else min(wanted, ceil(_LEAST_EVAL_ROWS / each))
        every = asked.eval_steps or ceil(steps / max(1, min(_EVALUATIONS, steps, most // least - 1)))
        count = 1 + ceil(steps / every)
        if not asked.eval_steps:
            self.choose(f"{count} evaluations, one of them before the first step", eval_steps=every)
        if not asked.max_eval_samples:
            rows = min(_EVAL_ROWS, max(1, min(wanted, most // count)) * each)
            share = _FORWARD * count * ceil(min(rows, known) / each) / trained
            self.choose(f"evaluations take at most about {share:.0%} of the time", max_eval_samples=rows)

    def _warmup(self) -> None:
        asked = self.config
        if asked.resume_from_checkpoint and asked.output_dir is not None:
            run_dir = RunDir(asked.output_dir)
            if run_dir.config.exists():  # it may have begun with another number of steps
                self.choose("", warmup_steps=run_dir.started_config().warmup_steps or 0)
                return
        share = _WARMUP_OF_ADAPTERS if self._kind == "adapters" else _WARMUP
        warmup = min(_MOST_WARMUP, int(share * asked.max_steps))
        most = ", the most by default" * (warmup == _MOST_WARMUP)
        self.choose(f"{warmup / asked.max_steps:.1%} of the steps{most}" * bool(warmup), warmup_steps=warmup)

    def activations(self, batch: int, estimate: "Estimate") -> None:
        """Choose what happens to activations of that many sequences, unless it is given."""
        asked = self.config
        if asked.activations is not None:
            return
        recompute, offload = (replace(asked, activations=mode) for mode in ("recompute", "recompute+offload"))
        has_tier = asked.memory.device is not None or asked.memory.ssd is not None
        if has_tier and estimate.takes(offload, batch) <= estimate.room < estimate.takes(recompute, batch):
            self.choose("with recompute, they do not fit", activations="recompute+offload")
        else:
            self.choose("", activations="recompute")

    def batch(self, sequences: float) -> None:
        """Choose the sequences of a forward pass, the passes of a step, and what happens to activations, in a run that
        reads that many `sequences` by default."""
        estimate, seq_len, ranks = Estimate.of_run(self.config), self.config.max_length, self.ranks
        self.activations(1, estimate)
        asked = self.config
        most = (asked.tokens_per_step or TOKENS_PER_STEP) / seq_len
        few = not asked.tokens_per_step and sequences < _STEPS * most
        target = max(1, int(sequences // _STEPS / ranks) if few else round(most / ranks))
        room = format_bytes(estimate.room)
        if (least := estimate.takes(asked, 1)) > estimate.room:
            raise BudgetError(
                f"the activations of one sequence of {seq_len} tokens take about {format_bytes(least)}, and {room} are "
                f"left for them ({estimate.of}): use a smaller --max-length{_more_room(asked)}"
            )
        stages = asked.pipeline_parallel
        batch = sequences_at_once(target, stages, lambda count: estimate.takes(asked, count) <= estimate.room)
        why = f"activations take about {format_bytes(estimate.takes(asked, batch))} of {room} ({estimate.of})"
        self.choose(why + ", with what malloc keeps" * (estimate.kept > 1), per_device_train_batch_size=batch)
        passes, why = asked.gradient_accumulation_steps, "as asked for"
        if passes == 1:
            passes = max(stages, target // batch if few else round(target / batch))
            why = f"{batch * passes * ranks * seq_len:,} tokens a step (--tokens-per-step)"
            if few:
                why += f", so that the usual epochs give {ceil(sequences / (batch * passes * ranks)):,} steps"
        self.choose(why, gradient_accumulation_steps=passes)


@dataclass(frozen=True)
class Estimate:
    """By how many bytes activations let this process grow."""

    described: ModelDescription
    room: int
    of: str
    """Where the room comes from."""
    kept: int
    """Factor for what malloc keeps."""

    @classmethod
    def of_run(cls, asked: TrainConfig) -> "Estimate":
        described = describe_model(
            PlanConfig(model=asked.model, max_length=asked.max_length, gradient_accumulation_steps=1), count_flops=False
        )
        asks_for_room = asked.memory.activation_bytes is not None
        kept = MALLOC if compute_device(asked.memory).type == "cpu" and not asks_for_room else 1
        return cls(described, *_room(asked), kept)

    def takes(self, asked: TrainConfig, batch: int) -> int:
        """Bytes for that many sequences."""
        return self.kept * activations_of(replace(asked, per_device_train_batch_size=batch), self.described).total


def _new_directory(asked: TrainConfig) -> Path:
    """A directory in runs/ that does not exist yet, with the names of model and data."""
    assert asked.data is not None, "it is chosen first"
    stem = f"{Path(asked.model).resolve().name}-{Path(names_of(asked.data)[0]).stem}".replace("*", "")
    return unused(Path("runs") / stem, "-")


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
