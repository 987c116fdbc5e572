"""The training loop: checks every input, then trains, writing nothing before a first step has succeeded."""

import json
import os
import random
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pagoda.api import plan_of, wrap
from pagoda.checkpoint.directory import read_manifest
from pagoda.checkpoint.model_config import model_record
from pagoda.checkpoint.pretrained import attach_weights, weight_files
from pagoda.config.training import Activations, MixedPrecision, Tiles, Updates
from pagoda.construction.construct import init
from pagoda.distributed.mesh import Mesh, open_mesh
from pagoda.distributed.world import was_restarted
from pagoda.errors import CheckpointError, ConfigError, PagodaError
from pagoda.forecast.chrome_trace import write_trace
from pagoda.forecast.report import plan_table
from pagoda.memory.sizes import format_bytes
from pagoda.models import build_model
from pagoda.models.build import is_encoder_decoder, model_directory
from pagoda.models.chunked_loss import chunked_loss
from pagoda.models.lora import LoraConfig, add_adapters
from pagoda.optim.param_groups import no_decay_groups
from pagoda.optimizer import PagedOptimizer
from pagoda.plan.planner import Plan
from pagoda.train.choice import choose_plan, chunks_loss, precision_hint
from pagoda.train.config import TrainConfig
from pagoda.train.data import VOCABULARY, Batches, ByteText
from pagoda.train.metrics import StepMetrics
from pagoda.train.progress import Progress
from pagoda.train.rank_metrics import MetricsFiles, share_metrics
from pagoda.train.resume import CONFIG, Beginning, begin
from pagoda.train.run_dir import RunCheckpoint, RunDir
from pagoda.train.stop_signal import StopSignal

_TOKENIZERS = (
    "*tokenizer*",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Files of a Hugging Face directory that only a model with a tokenizer has."""


_VERSION = "transformers_version"


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What one call of `run` did."""

    out: Path
    plan: Plan
    first_step: int
    """First step this call ran, counted from 1."""
    last_step: int
    """Last step it ran: below the configured steps only if it was interrupted."""
    first_loss: float
    final_loss: float
    tokens_per_s: float
    """Over all of this call's steps, without checkpoints."""
    checkpoint: Path | None
    """The last checkpoint it saved."""
    stopped_by: int | None
    """Number of the signal that interrupted it, or None."""


def run(config: TrainConfig, console: Console | None = None) -> TrainResult | None:
    """Trains as `config` says and shows plan and progress on `console`; None if a run that is resumed has finished.

    Interrupted by SIGINT or SIGTERM it ends its step, saves a checkpoint and returns. A user error before the
    end of the first step leaves `config.out` as it was. A run that is resumed goes on from its last checkpoint that is
    whole; later ones, which are damaged, are named on `console` and kept under other names.

    Raises:
        ConfigError: a setting, path, text or model that cannot be used; `out` is in use by another run, or holds one
            already, or none to resume.
        BudgetError, StorageError: the state does not fit, or a directory cannot be used.
        CheckpointError: no checkpoint can be used, or the last one is of another model or text.
        NonFiniteGradientError: a gradient is NaN or infinite.
    """
    mesh = open_mesh(config.zero_stage, config.replicas, config.expert_parallel)
    console = Console(quiet=True) if mesh.rank else console or Console()
    run_dir = RunDir(config.out)
    with ExitStack() as held:
        beginning = begin(config, run_dir, was_restarted(), mesh, console, held)
        if beginning.done >= config.steps:
            console.print(
                f"The run in {run_dir.path} has finished: {beginning.done} of {config.steps} steps are done. Give a "
                "larger --steps to continue it.",
                soft_wrap=True,
                highlight=False,
            )
            return None
        return _run(config, run_dir, beginning, mesh, console)


def _run(config: TrainConfig, run_dir: RunDir, beginning: Beginning, mesh: Mesh, console: Console) -> TrainResult:
    """Builds what a run needs, and runs it."""
    checkpoint = beginning.checkpoint
    _check_trace(config, beginning.done)
    if checkpoint is None:
        _check_tokens(config)
    rule = config.optim.build(config.seed, config.optimizer)
    text = ByteText.open(config.data)
    batches = Batches(
        text=text,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        accumulation_steps=config.accumulation_steps,
        seed=config.seed,
        continued=is_encoder_decoder(config.model),
        rank=mesh.rank,
        ranks=mesh.size,
    )
    _show_text(console, batches)
    if checkpoint is None and (hint := precision_hint(config)):  # a run that is resumed keeps its precision
        console.print(hint, soft_wrap=True, highlight=False)
    chosen = choose_plan(config, console, mesh)
    _seed(config.seed)
    built = _built_model(config)
    if checkpoint is None:
        _give_weights(config, built, console)
    if chunks_loss(config, built):
        chunked_loss(built)
        console.print("Loss: in chunks, so that logits are never whole", highlight=False)
    if config.lora.rank is not None:
        built = add_adapters(built, config.lora)
        _show_adapters(console, built, config.lora)
    matrices_only = config.optim.decay == "matrices"
    model, optimizer = wrap(
        built,
        rule,
        param_groups=no_decay_groups(built, rule.defaults().get("weight_decay", 0.0)) if matrices_only else None,
        memory=replace(chosen.memory, ssd_checkpoints=config.kept_on_ssd(mesh.world.nodes)),
        precision=chosen.part(MixedPrecision),
        clip_grad_norm=config.clip_grad_norm,
        accumulation_steps=config.accumulation_steps,
        update=chosen.part(Updates),
        activations=chosen.part(Activations),
        tiles=chosen.part(Tiles),
        mesh=mesh,
    )
    try:
        console.print(plan_table(plan_of(model)))
        loop = _Loop(config, run_dir, batches, model, optimizer, mesh, console)
        if checkpoint is not None:
            loop.restore(checkpoint)
        return loop.run(beginning)
    finally:
        optimizer.close()


class _Loop:
    """The state of a run between its steps."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: RunDir,
        batches: Batches,
        model: nn.Module,
        optimizer: PagedOptimizer,
        mesh: Mesh,
        console: Console,
    ) -> None:
        self.mesh = mesh
        self.config = config
        self.run_dir = run_dir
        self.batches = batches
        self.model = model
        self.optimizer = optimizer
        self.console = console
        self.is_switch = getattr(model.config, "model_type", None) == "switch_transformers"
        self.scheduler = LambdaLR(optimizer, lambda step: config.optim.lr_factor(step, config.steps))
        self.device = next(model.parameters()).device
        self.saved: RunCheckpoint | None = None
        self.ran = False
        """Whether the model has been run."""
        # Initialisation draws random numbers in an order that may follow the memory split; dropout must not. Ranks drop
        # elements of their own.
        _seed(config.seed + mesh.rank)

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Loads `checkpoint`. Raises CheckpointError where it is of another model or text."""
        self._check_model(checkpoint)
        extra = self.optimizer.load_checkpoint(checkpoint.path)
        if extra.get("text") != self.batches.text.fingerprint:
            raise CheckpointError(
                f"{checkpoint.path} was trained on another text than data {self.config.data!r}:"
                " give --data the bytes that the run started with"
            )
        self.batches = replace(self.batches, first_step=checkpoint.step, first_sample=extra["samples"])
        self.scheduler.last_epoch = checkpoint.step
        # Recomputed because `steps` may have changed; otherwise this is the value it has already.
        factor = self.config.optim.lr_factor(checkpoint.step, self.config.steps)
        for group, base in zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
            group["lr"] = base * factor
        self.console.print(f"Resuming {self.run_dir.path} after step {checkpoint.step}", highlight=False)

    def _check_model(self, checkpoint: RunCheckpoint) -> None:
        """Raises CheckpointError where the model's own configuration is not that of the checkpoint."""
        saved, mine = read_manifest(checkpoint.path).get("model"), model_record(self.model)
        if saved is None or mine is None:
            return
        theirs, ours = saved["config"], mine["config"]
        if theirs.get(_VERSION) != ours.get(_VERSION):
            return  # another version of transformers may say the same in other words
        if differing := sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)):
            raise CheckpointError(
                f"{checkpoint.path} was trained with another config.json than --model {self.config.model} has: "
                + ", ".join(f"{name} was {theirs.get(name)} and is {ours.get(name)}" for name in differing)
                + ". Put back what it was"
            )

    def run(self, beginning: Beginning) -> TrainResult:
        """Runs the steps that are left."""
        config, done = self.config, beginning.done
        losses: list[float] = []
        seconds = 0.0
        step = done
        files: MetricsFiles | None = None
        stopped_by: int | None = None
        try:
            with StopSignal() as stop, Progress(self.console, config.steps, done) as progress:
                while True:
                    traced = config.trace is not None and step == done + config.trace_step - 1
                    if traced:
                        self.optimizer.trace_next_step()
                    mine = self._step(step)
                    if files is None and self.mesh.rank == 0:  # before any rank goes on and may take their names
                        for damaged in beginning.damaged:
                            self.run_dir.put_aside(damaged)
                    metrics, stopped_by = share_metrics(self.mesh, mine, stop.received)
                    step += 1
                    losses.append(metrics.loss)
                    seconds += metrics.step_s
                    if files is None:
                        if self.mesh.rank == 0:
                            self.run_dir.create(config)
                        files = MetricsFiles(self.run_dir, self.mesh, after_step=done)
                    files.write(metrics, mine)
                    if traced and self.mesh.rank == 0:
                        self._write_trace(step)
                    progress.show(metrics)
                    due = config.checkpoint_every and step % config.checkpoint_every == 0
                    if due or stopped_by is not None or (config.save_at_end and step == config.steps):
                        self._save(step, files)
                    if stopped_by is not None or step == config.steps:
                        break
            self.optimizer.wait_for_checkpoint()
        finally:
            if files is not None:
                files.close()
        result = TrainResult(
            out=self.run_dir.path,
            plan=plan_of(self.model),
            first_step=done + 1,
            last_step=step,
            first_loss=losses[0],
            final_loss=losses[-1],
            tokens_per_s=len(losses) * self.batches.tokens_per_step / seconds,
            checkpoint=self.saved.path if self.saved else None,
            stopped_by=stopped_by,
        )
        self._show_end(result)
        return result

    def _on_device(self, tokens: torch.Tensor) -> torch.Tensor:
        """Where compute runs. From pinned memory, so that what was queued before goes on meanwhile."""
        tokens = tokens.contiguous()
        return tokens.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tokens

    def _step(self, step: int) -> StepMetrics:
        """Runs step number `step`, counted from 0."""
        started = time.perf_counter()
        passes = self.config.accumulation_steps
        loss_sum = torch.zeros((), device=self.device)
        balance: torch.Tensor | None = None
        for index in range(passes):
            ids, labels = self.batches.batch(step, index)
            output = self._forward(self._on_device(ids), self._on_device(labels))
            self.optimizer.scale(output.loss / passes).backward()  # type: ignore[no-untyped-call]
            loss_sum += output.loss.detach().float()
            if (figure := _balance_of(output)) is not None:
                balance = figure / passes + (0 if balance is None else balance)
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        loss_mean = (loss_sum / passes).item()
        step_s = time.perf_counter() - started
        stats = self.optimizer.stats
        return StepMetrics(
            step=step + 1,
            loss=loss_mean,
            grad_norm=stats.grad_norm,
            loss_scale=stats.loss_scale,
            skipped=stats.skipped,
            aux_loss=None if balance is None else balance.item(),
            lr=lr,
            step_s=step_s,
            tokens_per_s=self.batches.tokens_per_step / step_s,
            stall_s=dict(stats.stall_s),
            bytes_moved=dict(stats.bytes_moved),
            peak_bytes=dict(stats.peak_bytes),
            accesses=dict(stats.accesses),
            prefetch_hit_rate=stats.prefetch_hit_rate,
            faults=stats.faults,
            activation_bytes=asdict(stats.activation_bytes),
            updates_kept=stats.updates_kept,
            updates_undone=stats.updates_undone,
            staleness={unit: asdict(seen) for unit, seen in stats.staleness.items()},
        )

    def _forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """What the model says. Raises ConfigError where one from a directory cannot work as its config.json says."""
        # Switch Transformers have no such setting in their config.json.
        asked = {"output_router_logits": True} if self.is_switch else {}
        try:
            return self.model(input_ids=ids, labels=labels, **asked)
        except (PagodaError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # sizes that do not fit each other show here at the earliest
            if self.ran or model_directory(self.config.model) is None:
                raise
            raise ConfigError(
                f"model {self.config.model!r} fails in its first forward pass: {type(error).__name__}: {error}. Check "
                "its config.json"
            ) from error
        finally:
            self.ran = True

    def _write_trace(self, step: int) -> None:
        timeline = self.optimizer.timeline
        assert timeline is not None, "a step that was traced has ended"
        assert self.config.trace is not None
        try:
            write_trace(timeline, f"{self.config.model}, step {step}, measured", self.config.trace)
        except ConfigError as error:
            self.console.print(f"{error}; the run goes on", soft_wrap=True, highlight=False)

    def _save(self, step: int, files: MetricsFiles) -> None:
        """Saves the state after `step` steps; the metrics up to it are on disk before it is."""
        files.sync()
        path = self.run_dir.checkpoint(step)
        self.run_dir.make_checkpoints()
        extra = {
            "step": step,
            CONFIG: json.loads(self.config.to_json()),
            "text": self.batches.text.fingerprint,
            "samples": self.batches.samples_before(step),
        }
        self.optimizer.wait_for_checkpoint()
        old = self.run_dir.all_checkpoints()
        keep = self.config.keep_checkpoints
        replaced = old[: max(0, len(old) + 1 - keep)] if keep else []
        self.optimizer.save_checkpoint(path, extra, wait=False, replaces=[checkpoint.path for checkpoint in replaced])
        self.saved = RunCheckpoint(step, path)

    def _show_end(self, result: TrainResult) -> None:
        lines = [
            f"Steps {result.first_step} to {result.last_step}: loss {result.first_loss:.4f} ->"
            f" {result.final_loss:.4f}, {result.tokens_per_s:,.0f} tokens/s. Metrics: {self.run_dir.metrics}"
        ]
        if self.config.trace is not None and result.last_step >= result.first_step + self.config.trace_step - 1:
            lines.append(f"Trace: {self.config.trace}")
        if result.checkpoint is not None:
            lines.append(f"Checkpoint: {result.checkpoint}")
        elif result.stopped_by is None:
            lines.append("No checkpoint was saved (--no-save-at-end): the trained weights are not kept.")
        if result.stopped_by is not None:
            lines.append(f"Interrupted. Continue with: pagoda train --resume --out {self.run_dir.path}")
        for line in lines:
            self.console.print(line, soft_wrap=True, highlight=False)


def _balance_of(output: Any) -> torch.Tensor | None:
    """The load-balancing loss in what a model gives, without its weight; None where it gives none."""
    names = ("aux_loss", "encoder_aux_loss", "decoder_aux_loss")
    found = [figure for name in names if isinstance(figure := getattr(output, name, None), torch.Tensor)]
    return torch.stack(found).detach().float().mean() if found else None


def _check_trace(config: TrainConfig, done: int) -> None:
    if config.trace is None:
        return
    if config.steps - done < config.trace_step:
        raise ConfigError(
            f"--trace-step is {config.trace_step}, but this command runs {config.steps - done} steps:"
            " give more --steps, or a smaller --trace-step"
        )
    parent = config.trace.absolute().parent
    if config.trace.is_dir() or not (os.access(parent, os.W_OK) or parent == config.out.absolute()):
        raise ConfigError(f"--trace {config.trace} cannot be written: name a file in a directory that is there")


def _check_tokens(config: TrainConfig) -> None:
    """Raises ConfigError for a model whose weights know tokens of a tokenizer: byte-level text would mean others."""
    directory = model_directory(config.model)
    if directory is None or not weight_files(directory):
        return  # random weights know no tokens yet
    names = sorted(path.name for path in directory.iterdir())
    if found := [name for name in names if any(fnmatch(name, pattern) for pattern in _TOKENIZERS)]:
        raise ConfigError(
            f"model {config.model!r} has weights that were trained with a tokenizer ({', '.join(found[:3])}), and "
            "`pagoda train` reads text as bytes, which are other tokens to it. Train it in a loop of your own, with "
            "its tokenizer, pagoda.load and pagoda.wrap; or give a directory with its config.json alone, to start "
            "from random weights"
        )


def _built_model(config: TrainConfig) -> nn.Module:
    with init():
        model = build_model(config.model, seq_len=config.seq_len)
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if vocabulary < VOCABULARY:
        raise ConfigError(
            f"model {config.model!r} has a vocabulary of {vocabulary}, but byte-level text has {VOCABULARY}"
            " tokens: set vocab_size in its config.json to 256 or more"
        )
    return model


def _give_weights(config: TrainConfig, model: nn.Module, console: Console) -> None:
    """Lets the model start from the weights beside its config.json, if there are any, and says what it starts from."""
    directory = model_directory(config.model)
    files = weight_files(directory) if directory is not None else []
    if directory is None or not files:
        console.print(f"Weights: random, seed {config.seed}", highlight=False)
        return
    found = attach_weights(model, directory)
    line = f"Weights: {directory}, {format_bytes(found.nbytes)} in {found.files} file{'s' * (found.files > 1)}"
    for text in (line, *found.warnings()):
        console.print(text, soft_wrap=True, highlight=False)


def _show_adapters(console: Console, model: nn.Module, lora: LoraConfig) -> None:
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    line = f"Adapters: rank {lora.rank}, {trained:,} parameters train, and the model's own are frozen"
    console.print(line, soft_wrap=True, highlight=False)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _show_text(console: Console, batches: Batches) -> None:
    text = batches.text
    line = f"Text: {text.source}, {format_bytes(len(text))} in {text.files} files, {batches.windows:,} sequences"
    console.print(line, soft_wrap=True, highlight=False)
    if text.skipped:
        shown = ", ".join(f"{entry.path.name} ({entry.reason})" for entry in text.skipped[:3])
        more = f" and {len(text.skipped) - 3} more" if len(text.skipped) > 3 else ""
        console.print(f"Skipped {len(text.skipped)} files: {shown}{more}", soft_wrap=True, highlight=False)
