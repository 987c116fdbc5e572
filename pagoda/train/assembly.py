"""Assembles transformers' trainer for `pagoda train`. Every input is checked before the first step."""

import random
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import torch
from rich.console import Console
from torch import nn
from transformers.integrations import integration_utils

from pagoda.api import plan_of, wrap
from pagoda.config.reading import names_of
from pagoda.config.run import PACKAGES, needs_package
from pagoda.config.training import Activations, MixedPrecision, Tiles, Updates
from pagoda.console import lasting, say
from pagoda.errors import ConfigError, check_installed, unknown_name
from pagoda.forecast.report import plan_table
from pagoda.integrations.checkpoints import wear_of
from pagoda.memory.ssd.lock import lock_directories
from pagoda.mesh.mesh import Mesh, open_mesh
from pagoda.mesh.sharing import from_first
from pagoda.mesh.world import was_restarted
from pagoda.models.build import build_model
from pagoda.models.divisions import divide
from pagoda.models.hub import download, is_hub_name
from pagoda.models.lora import NO_PEFT
from pagoda.models.stages import to_stage
from pagoda.optim.param_groups import no_decay_groups
from pagoda.optim.rule import Rule
from pagoda.optimizer import PagedOptimizer
from pagoda.plan.combinations import check_features
from pagoda.prepare.construct import deferred_init
from pagoda.prepare.sequence_parallel import check_division, divide_sequences
from pagoda.simulate.hardware import hardware_file
from pagoda.train.callbacks import RunCallback, TrainResult
from pagoda.train.choice import choose_plan
from pagoda.train.config import TrainConfig
from pagoda.train.defaults import completed
from pagoda.train.evaluate import Evaluator
from pagoda.train.inputs import batches_of, example, keep_apart, opened_tokens
from pagoda.train.model import check_weights, ready
from pagoda.train.passes import Passes
from pagoda.train.progress import Progress, expected
from pagoda.train.resume import Beginning, begin
from pagoda.train.run_dir import RunDir, check_not_in_use
from pagoda.train.sources import check_exists
from pagoda.train.tokens import DataSets
from pagoda.train.trainer import RunTrainer

_WORN = 0.01
"""Share of what a drive is rated for of which a run tells without --verbose."""


def run(config: TrainConfig, console: Console | None = None) -> TrainResult | None:
    """Train as `config` says. Shows the plan and the progress on `console`. Returns None if a resumed run was already
    finished.

    After SIGINT or SIGTERM, the run finishes its step, saves a checkpoint and returns. After a user error before the
    end of the first step, `config.output_dir` is as it was before. A resumed run continues from its last complete
    checkpoint. Later checkpoints are damaged; they are named on `console` and kept under other names.

    Raises ConfigError for a setting, path, text or model that cannot be used, and if `out` is in use, contains a run
    already, or contains none to resume. Raises BudgetError or StorageError if the state does not fit or a directory
    cannot be used. Raises CheckpointError if no checkpoint can be used, or if the last one belongs to another model or
    text. Raises NonFiniteGradientError if a gradient is NaN or infinite.
    """
    degrees = config.replicas, config.expert_parallel, config.tensor_parallel, config.pipeline_parallel
    mesh = open_mesh(config.zero_stage, *degrees, ordered_sums=config.ordered_sums)
    console = Console(quiet=True) if mesh.everyone.rank else console or Console()
    with ExitStack() as held:
        output = held.enter_context(lasting(console))
        from_first(mesh, "the settings", lambda: _check_places(config, mesh.everyone.size, was_restarted()))
        _check_optimizer(config)
        if config.download:
            from_first(mesh, "the download of the model", lambda: _download(config.model))
        check_weights(config)
        data = DataSets(config, console)
        config = completed(config, data, mesh, console)
        assert config.output_dir is not None, "it is chosen now"
        _check_micro_batches(config)
        run_dir = RunDir(config.output_dir)
        output.instead = run_dir.output
        beginning = begin(config, run_dir, was_restarted(), mesh, console, held)
        if beginning.done >= config.max_steps:
            done = f"The run in {run_dir.path} has finished: {beginning.done:,} steps are done"
            say(console, f"{done}, and --max-steps is {config.max_steps:,}. Give a larger --max-steps to continue it.")
            return None
        return _run(config, data, run_dir, beginning, mesh, console)


def _run(
    config: TrainConfig, data: DataSets, run_dir: RunDir, beginning: Beginning, mesh: Mesh, console: Console
) -> TrainResult:
    """Build what a run needs, then run it."""
    assert config.data is not None, "it is chosen now"
    checkpoint = beginning.checkpoint
    rule = config.build_rule(config.seed, config.optim)
    tokens = opened_tokens(config.data, config.dataset_train_split, data, mesh, console)
    plan = choose_plan(config, console, mesh)
    chosen = plan.config
    _seed_all(config.seed)
    with deferred_init():
        built = build_model(config.model, seq_len=config.max_length)
    check_division(built, config.sequence_parallel)
    batches, evaluated = batches_of(config, tokens, data, built, mesh, console)
    parameters = sum(param.numel() for param in built.parameters()) if config.quantized_format else None
    built = ready(config, built, console, from_files=checkpoint is None)
    if config.pipeline_parallel > 1:
        _reduce(built, mesh, console)
    if config.tensor_parallel > 1:
        divide(built, config.model, mesh.tensor)
    model, optimizer = _wrapped(chosen, built, rule, mesh)
    try:
        console.print(plan_table(plan_of(model), parameters, explained=config.verbose))
        if config.verbose:
            say(console, *(f"- {reason}" for reason in plan.reasons))
        passes = _passes(config, model, optimizer, mesh)
        if checkpoint is not None:
            batches = replace(batches, first_step=checkpoint.step, first_sample=beginning.samples)
            say(console, f"Resuming {run_dir.path} after step {checkpoint.step}")
        batches, evaluated = keep_apart(passes, batches, evaluated, mesh, console)
        if config.sequence_parallel > 1:
            passes.sequences = divide_sequences(model, config.sequence_parallel)
        if checkpoint is None:
            say(console, *example(batches.rows, data.tokenizer))
        step_s = plan.predicted["step_s"] if plan.predicted else None
        say(console, expected(batches, config.max_steps, beginning.done, step_s, evaluated is not None))
        steps = config.max_steps - beginning.done
        share, worn = wear_of(plan_of(model), config.memory.ssd_directories, steps, mesh)
        say(console, *([worn] if worn and (config.verbose or share >= _WORN) else []))
        plan = replace(plan, reasons=(*plan.reasons, *([f"{worn}."] if worn else [])))
        evaluator = None
        if evaluated is not None:
            evaluator = Evaluator(evaluated, data.tokenizer, mesh, config.sequence_parallel)
        trainer = RunTrainer(config, passes, batches, evaluator, run_dir, beginning.done, mesh, console)
        progress = Progress(console, config.max_steps, beginning.done)
        callback = RunCallback(trainer, data.tokenizer, plan, beginning, progress)
        trainer.add_callback(callback)
        # Initialisation draws random numbers in an order that may depend on the memory split. Dropout must not depend
        # on it. Ranks with other batches, layers or parts of sequences drop other elements.
        part = mesh.pipeline_stage or mesh.rank % config.sequence_parallel
        _seed_all(config.seed + part * batches.ranks + batches.rank)
        with closing(callback):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.path))
        return callback.result()
    finally:
        optimizer.close()


def _wrapped(config: TrainConfig, built: nn.Module, rule: Rule, mesh: Mesh) -> tuple[nn.Module, PagedOptimizer]:
    kept = config.kept_on_ssd(mesh.everyone.nodes) and config.most_checkpoints
    matrices_only = config.weight_decay_on == "matrices"
    return wrap(
        built,
        rule,
        param_groups=no_decay_groups(built, rule.defaults().get("weight_decay", 0.0)) if matrices_only else None,
        memory=replace(config.memory, ssd_checkpoints=kept),
        precision=config.part(MixedPrecision),
        max_grad_norm=config.max_grad_norm,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        update=config.part(Updates),
        activations=config.part(Activations),
        tiles=config.part(Tiles),
        mesh=mesh,
    )


def _seed_all(seed: int) -> None:
    """Seed every random generator that a model may use."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _check_places(config: TrainConfig, ranks: int, again: bool) -> None:
    """Raises ConfigError, CheckpointError or StorageError if a package is not installed, or if a directory or data
    cannot be used. Writes nothing. `again`: torchrun has restarted the run."""
    if (bits := config.quantized_format) is not None:
        check_installed(PACKAGES[bits], needs_package(bits))
    if config.lora_r is not None:
        check_installed("peft", NO_PEFT)
    for tracker in config.report_to:
        known = integration_utils.INTEGRATION_TO_CALLBACK
        if tracker not in known:
            said = f"--report-to {tracker} is no tracker of transformers."
            raise unknown_name(tracker, known, said, f"It has {', '.join(sorted(known))}.")
        other = {"azure_ml": "azureml", "flyte": "flytekit", "kubeflow": "transformers"}  # it has no package
        module = other.get(tracker, tracker)
        check_installed(module, f"--report-to {tracker} needs {module}: pip install {module}")
    if config.plan == "search" and not hardware_file().exists():
        raise ConfigError("--plan search needs a machine that was measured: run `pagoda calibrate --ssd DIR` first")
    places = list(config.memory.ssd_directories)
    if ranks > 1:  # each rank has a directory in each, which may not be there yet
        places = [path / "rank-0" for path in places if (path / "rank-0").exists() or not path.is_dir()]
    lock_directories(places).close()
    if config.output_dir is not None:
        run_dir = RunDir(config.output_dir)
        run_dir.check_place()
        check_not_in_use(run_dir.path)
        if not (config.resume_from_checkpoint or again):
            run_dir.check_free()
    for name in (*names_of(config.data or ()), *names_of(config.eval_data or ())):
        check_exists(name)


def _check_optimizer(config: TrainConfig) -> None:
    """Raises ConfigError for an optimizer that cannot be used, or not with the other settings."""
    rule = config.build_rule(config.seed, config.optim).predicting(config.ahead)
    states = rule.states(config.precision or "fp32")  # which states there are does not depend on their dtypes
    check_features(states, config.tile_bytes is not None)


def _check_micro_batches(config: TrainConfig) -> None:
    """Raises ConfigError if a step has fewer micro-batches than a pipeline has stages."""
    if config.gradient_accumulation_steps < config.pipeline_parallel:
        raise ConfigError(
            f"--pipeline-parallel {config.pipeline_parallel} needs as many micro-batches in a step, or more, and "
            f"--gradient-accumulation-steps is {config.gradient_accumulation_steps}: give "
            f"--gradient-accumulation-steps {config.pipeline_parallel}"
        )


def _reduce(model: nn.Module, mesh: Mesh, console: Console) -> None:
    """Reduce a model to the stage of this rank."""
    of_stages = to_stage(model, mesh.pipeline_stage, mesh.ranks.pipeline_parallel)
    counts = ", ".join(str(len(layers)) for layers in of_stages)
    say(console, f"Pipeline: {len(of_stages)} stages, with {counts} layers. The plan is that of the first")


def _passes(config: TrainConfig, model: nn.Module, optimizer: PagedOptimizer, mesh: Mesh) -> Passes:
    """How this rank runs the wrapped model."""
    if config.pipeline_parallel == 1:
        return Passes(config, model, optimizer)
    from pagoda.train.pipeline import StagePasses  # torch takes seconds to import what it needs

    return StagePasses(config, model, optimizer, mesh)


def _download(name: str) -> None:
    """Raises ConfigError if the model cannot be downloaded, or if its name is not one of the Hub."""
    if not is_hub_name(name):
        raise ConfigError(f"--download is for a model of the Hugging Face Hub, ORG/NAME, and --model is {name!r}")
    download(name)
