"""Snapshots: every state of a live model, parameter by parameter, to and from a checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.directory import committed, read_manifest, write_manifest
from pagoda.checkpoint.rng import restore_rng, rng_state
from pagoda.checkpoint.tensors import TensorFile, TensorSpec, chunks, write_tensors
from pagoda.errors import CheckpointError
from pagoda.plan.placement import WEIGHT
from pagoda.runtime.engine import Engine
from pagoda.runtime.unit import LiveUnit

_BUFFERS = "buffers"


class Snapshot:
    """Reads and writes states by parameter name, so that a checkpoint knows nothing of units, pages or tiers.

    A checkpoint holds one safetensors file per state (`weight.safetensors` is the model's, in its compute dtype),
    the persistent buffers, and a manifest with step counts, hyperparameters and RNG states.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self._states = engine.plan.layout.states
        self.moment_names = [s.name for s in self._states if s.name.startswith("exp_avg")]

    def read(self, unit: LiveUnit, slot: int, state: str) -> torch.Tensor:
        """One parameter's state, shape of the parameter, in the state's dtype."""
        placed = unit.spec.slots[slot]
        flat = self._engine.store.read(unit.index, state, placed.offset, placed.param.numel)
        return flat.view(placed.param.shape)

    def write(self, unit: LiveUnit, slot: int, state: str, value: torch.Tensor) -> None:
        """Overwrite one parameter's state."""
        flat = value.detach().to(self._engine.store.dtype(state)).reshape(-1)
        self._engine.store.write(unit.index, state, unit.spec.slots[slot].offset, flat)

    def save(self, directory: Path, groups: list[dict[str, Any]], extra: dict[str, Any]) -> None:
        """Write a checkpoint of the state after the last `step()`."""
        self._engine.drain()
        with committed(directory) as folder:
            for state in self._states:
                specs = [
                    TensorSpec(unit.name(slot), state.dtype, unit.spec.slots[slot].param.shape)
                    for unit, slot in self._slots(state.name)
                ]
                write_tensors(folder / f"{state.name}.safetensors", specs, self._pieces(state.name))
            buffers = self._buffers()
            write_tensors(
                folder / f"{_BUFFERS}.safetensors",
                [TensorSpec(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()],
                (buffer.detach().reshape(-1) for buffer in buffers.values()),
            )
            write_manifest(
                folder,
                {
                    "states": [state.name for state in self._states],
                    "steps": {
                        unit.name(slot): unit.steps[slot]
                        for unit in self._engine.units
                        for slot in range(unit.trainable)
                    },
                    "param_groups": groups,
                    "rng": rng_state(),
                    "extra": extra,
                },
            )

    def load(self, directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Restore a checkpoint; returns its param groups and extra."""
        self._engine.drain()
        self._engine.gradients.clear()
        manifest = read_manifest(directory)
        wanted = [state.name for state in self._states]
        if manifest["states"] != wanted:
            raise CheckpointError(
                f"{directory} holds the states {manifest['states']}, this run keeps {wanted}: "
                "wrap with the precision and optimizer of the run that saved it."
            )
        files = {name: TensorFile(directory / f"{name}.safetensors") for name in [*wanted, _BUFFERS]}
        try:
            self._check(directory, files)
            for name in wanted:
                for unit, slot in self._slots(name):
                    placed = unit.spec.slots[slot]
                    for start, count in chunks(placed.param.numel):
                        values = files[name].read(unit.name(slot), start, count)
                        self._engine.store.write(unit.index, name, placed.offset + start, values)
            for name, buffer in self._buffers().items():
                buffer.copy_(files[_BUFFERS].read(name, 0, buffer.numel()).view(buffer.shape))
        finally:
            for file in files.values():
                file.close()
        for unit in self._engine.units:
            for param in unit.params:
                param.grad = None
            unit.steps = [manifest["steps"][unit.name(slot)] for slot in range(unit.trainable)]
            self._engine.weights_changed(unit)
        restore_rng(manifest["rng"])
        for group in manifest["param_groups"]:
            group["betas"] = tuple(group["betas"])
        return manifest["param_groups"], manifest["extra"]

    def _slots(self, state: str) -> Iterator[tuple[LiveUnit, int]]:
        for unit in self._engine.units:
            for slot in range(len(unit.params) if state == WEIGHT else unit.trainable):
                yield unit, slot

    def _pieces(self, state: str) -> Iterator[torch.Tensor]:
        for unit, slot in self._slots(state):
            placed = unit.spec.slots[slot]
            for start, count in chunks(placed.param.numel):
                yield self._engine.store.read(unit.index, state, placed.offset + start, count)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers, by name."""
        return {
            f"{prefix}.{name}".lstrip("."): buffer
            for prefix, module in self._model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }

    def _check(self, directory: Path, files: dict[str, TensorFile]) -> None:
        """Every tensor this model needs is there, with its shape; nothing has been changed yet."""
        for state in self._states:
            specs = files[state.name].specs
            expected = {unit.name(slot): unit.spec.slots[slot].param.shape for unit, slot in self._slots(state.name)}
            for name in expected.keys() | specs.keys():
                found = specs[name].shape if name in specs else None
                if found != expected.get(name):
                    raise CheckpointError(
                        f"{directory} does not belong to this model: {state.name} of {name!r} has shape {found} in the "
                        f"checkpoint and {expected.get(name)} in the model."
                    )
        missing = self._buffers().keys() - files[_BUFFERS].specs.keys()
        if missing:
            raise CheckpointError(f"{directory} does not belong to this model: it lacks the buffers {sorted(missing)}.")
