"""What a run refuses at once, before torch is imported, data are read and a model is built."""

import os
from pathlib import Path

from pagoda.config.memory import Memory
from pagoda.config.reading import names_of
from pagoda.config.run import PACKAGES, needs_package
from pagoda.errors import ConfigError, check_installed
from pagoda.memory.ssd.lock import lock_directories
from pagoda.models.build import model_directory
from pagoda.models.lora import NO_PEFT
from pagoda.simulate.hardware import hardware_file
from pagoda.train.config import TrainConfig
from pagoda.train.run_dir import LAST, RunDir, check_not_in_use
from pagoda.train.sources import check_exists


def refuse_early(config: TrainConfig, ranks: int = 1, again: bool = False) -> None:
    """Refuse what settings, files and packages show by themselves, the fastest check first. Writes nothing.

    `ranks`: number of ranks of the run. `again`: torchrun has restarted it.

    Raises ConfigError, CheckpointError and StorageError.
    """
    _check_packages(config)
    if config.plan == "search" and not hardware_file().exists():
        raise ConfigError("--plan search needs a machine that was measured: run `pagoda calibrate --ssd DIR` first")
    _check_directories(config.memory, ranks)
    _check_run(config, again)
    if not config.download:
        model_directory(config.model)
    if config.tokenizer not in (None, "bytes") and not Path(config.tokenizer).is_dir():
        raise ConfigError(f"--tokenizer {config.tokenizer} is not a directory with the files of a tokenizer")
    for name in (*names_of(config.data or ()), *names_of(config.eval_data or ())):
        check_exists(name)


def _check_packages(config: TrainConfig) -> None:
    check_installed("accelerate", "pagoda train needs accelerate: pip install 'pagoda-train[train]'")
    if (bits := config.quantized_format) is not None:
        check_installed(PACKAGES[bits], needs_package(bits))
    if config.lora_r is not None:
        check_installed("peft", NO_PEFT)
    for name in config.report_to:
        package = {"azure_ml": "azureml", "flyte": "flytekit"}.get(name, name)
        check_installed(package, f"--report-to {name} needs {package}: pip install {package}")


def _check_directories(memory: Memory, ranks: int) -> None:
    """Raises StorageError for an SSD directory that cannot be used, or that another process uses."""
    own = list(memory.ssd_directories)
    if ranks > 1:  # each rank has a directory in each, which may not be there yet
        own = [path / "rank-0" for path in own if (path / "rank-0").exists() or not path.is_dir()]
    lock_directories(own).close()


def _check_run(config: TrainConfig, again: bool) -> None:
    """Raises ConfigError or CheckpointError if the run's directory or the file of its trace cannot be used."""
    if config.output_dir is not None:
        run = RunDir(config.output_dir)
        run.check_place()
        check_not_in_use(run.path)
        if not (config.resume_from_checkpoint or again):
            run.check_free()
        elif config.resume_from_checkpoint not in (None, LAST) and not again:
            run.started_config()
            run.named(config.resume_from_checkpoint)
    if config.trace is not None:
        parent, created = config.trace.absolute().parent, config.output_dir and config.output_dir.absolute()
        if config.trace.is_dir() or not (os.access(parent, os.W_OK) or parent == created):
            raise ConfigError(f"--trace {config.trace} cannot be written: name a file in a directory that exists")
