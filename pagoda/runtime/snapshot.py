"""Snapshots: every state of a live model, parameter by parameter, to and from a checkpoint."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.directory import MANIFEST, check_absent, committed, write_manifest
from pagoda.checkpoint.model_config import model_record
from pagoda.checkpoint.reader import BUFFERS, Checkpoint
from pagoda.checkpoint.rng import check_rng, restore_rng, rng_state
from pagoda.checkpoint.tensors import TensorSpec, TensorWriter, chunks, tensor_bytes
from pagoda.errors import CheckpointError, UsageError
from pagoda.optim.adamw import Hyper, StateSpec
from pagoda.plan.placement import WEIGHT
from pagoda.runtime.capture import Capture, Piece
from pagoda.runtime.engine import Engine
from pagoda.runtime.unit import LiveUnit


class Snapshot:
    """Reads and writes states by parameter name, so that a checkpoint knows nothing of units, pages or tiers.

    A checkpoint holds one safetensors file per state (`weight.safetensors` is the model's, in its compute dtype),
    the persistent buffers, and a manifest with step counts, hyperparameters and RNG states.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self._states = engine.plan.layout.states

    def save(self, directory: Path, groups: list[dict[str, Any]], extra: dict[str, Any]) -> None:
        """Start writing a checkpoint of the state after the last `step()`; the saver's thread finishes it.

        One at a time: waits for the one before, and raises its error. Raises UsageError where updates under backward
        have left the state after `step()` behind already.
        """
        if any(unit.updated for unit in self._engine.units):
            raise UsageError(
                "save_checkpoint() between backward and step(): with accumulation_steps announced, some units have had "
                "this step's update already and others have not. Call optimizer.step() first."
            )
        saver = self._engine.saver
        saver.wait()
        check_absent(directory)
        buffers = self._buffers()
        self._buffer_specs(buffers)
        content = {
            "states": [state.name for state in self._states],
            "steps": {unit.name(slot): unit.steps[slot] for unit, slot in self._trainable()},
            "param_groups": [{key: _plain(value) for key, value in group.items()} for group in groups],
            "rng": rng_state(),
            "model": model_record(self._model),
            "extra": extra,
        }
        content = json.loads(json.dumps(content))  # as it is now: the caller's dictionaries may change
        copies = {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}
        capture = self._engine.capture(self._pieces)
        saver.start(lambda: self._write(directory, capture, copies, content))

    def _write(
        self, directory: Path, capture: Capture, buffers: dict[str, torch.Tensor], content: dict[str, Any]
    ) -> None:
        """On the saver's thread: fill the directory and commit it."""
        try:
            with committed(directory) as folder, ExitStack() as opened:

                def create(name: str, specs: list[TensorSpec]) -> TensorWriter:
                    return opened.enter_context(closing(TensorWriter(folder / f"{name}.safetensors", specs)))

                files = {state.name: create(state.name, self._specs(state)) for state in self._states}
                files[BUFFERS] = create(BUFFERS, self._buffer_specs(buffers))
                for piece, data in capture.pieces():
                    files[piece.state].write(piece.name, piece.index, data)
                for name, buffer in buffers.items():
                    for index, (start, count) in enumerate(chunks(buffer.numel())):
                        piece_of_it = buffer.reshape(-1)[start : start + count]
                        files[BUFFERS].write(name, index, tensor_bytes(piece_of_it))
                for file in files.values():
                    file.finish()
                write_manifest(folder, {**content, "hashes": {name: file.hashes for name, file in files.items()}})
        finally:
            self._engine.end_capture(capture)

    def load(self, directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Restore a checkpoint; returns its param groups and extra. Nothing changes before all of it is checked."""
        self._engine.settle()
        buffers = self._buffers()
        with Checkpoint(directory) as checkpoint:
            self._check_fits(checkpoint)
            for state in self._states:
                checkpoint.check(state.name, self._specs(state))
            checkpoint.check(BUFFERS, self._buffer_specs(buffers))
            self._engine.zero_grad()
            for state in self._states:
                for unit, slot in self._slots(state.name):
                    placed = unit.spec.slots[slot]
                    for start, count in chunks(state.elements(placed.param.numel)):
                        values = checkpoint.read(state.name, unit.name(slot), start, count)
                        first = state.elements(placed.offset) + start
                        self._engine.store.write(unit.index, state.name, first, values)
            for name, buffer in buffers.items():
                buffer.detach().copy_(checkpoint.read(BUFFERS, name, 0, buffer.numel()).view(buffer.shape))
            manifest = checkpoint.manifest
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
        """Every parameter that has a state."""
        for unit in self._engine.units:
            for slot in range(len(unit.params) if state == WEIGHT else unit.trainable):
                yield unit, slot

    def _trainable(self) -> Iterator[tuple[LiveUnit, int]]:
        for unit in self._engine.units:
            for slot in range(unit.trainable):
                yield unit, slot

    def _specs(self, state: StateSpec) -> list[TensorSpec]:
        """The tensors of one state, in the order in which they are written."""
        return [
            TensorSpec(unit.name(slot), state.dtype, state.shape(unit.spec.slots[slot].param.shape))
            for unit, slot in self._slots(state.name)
        ]

    def _pieces(self, index: int) -> Iterator[Piece]:
        """Every piece of every state of a unit."""
        unit = self._engine.units[index]
        for state in self._states:
            for slot in range(len(unit.params) if state.name == WEIGHT else unit.trainable):
                placed = unit.spec.slots[slot]
                for number, (start, count) in enumerate(chunks(state.elements(placed.param.numel))):
                    first = state.elements(placed.offset) + start
                    yield Piece(index, state.name, unit.name(slot), number, first, count, state.per)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers, by name, and parameters that are not floating-point: no unit holds those."""
        buffers = {
            f"{prefix}.{name}".lstrip("."): buffer
            for prefix, module in self._model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
        return buffers | {n: p.data for n, p in self._model.named_parameters() if not p.is_floating_point()}

    def _buffer_specs(self, buffers: dict[str, torch.Tensor]) -> list[TensorSpec]:
        for name, buffer in buffers.items():
            if buffer.layout is not torch.strided:
                raise CheckpointError(
                    f"Buffer {name!r} is {buffer.layout}, which a checkpoint cannot hold. Register it with "
                    "persistent=False."
                )
        return [TensorSpec(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()]

    def _check_fits(self, checkpoint: Checkpoint) -> None:
        """Everything the manifest says can be restored into this model and optimizer."""
        directory, manifest = checkpoint.directory, checkpoint.manifest
        path = directory / MANIFEST
        wanted = [state.name for state in self._states]
        if manifest["states"] != wanted:
            raise CheckpointError(
                f"{directory} holds the states {manifest['states']}, this run keeps {wanted}: "
                "wrap with the precision, optimizer and moments of the run that saved it."
            )
        differing = checkpoint.steps.keys() ^ {unit.name(slot) for unit, slot in self._trainable()}
        if differing:
            raise CheckpointError(
                f"{directory} does not belong to this model: only one of the two trains {min(differing)!r}."
            )
        self._check_groups(path, manifest["param_groups"])
        try:
            check_rng(manifest["rng"])
        except CheckpointError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def _check_groups(self, path: Path, groups: list[Any]) -> None:
        live = {id(group): group for group in (self._engine.group_of(*at) for at in self._trainable())}
        try:
            sizes = [len(group["params"]) for group in groups]
            for group in groups:
                Hyper.from_group(group, step=1)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path} is damaged: 'param_groups' cannot be used: {error!r}") from error
        wanted = [len(group["params"]) for group in live.values()]
        if sorted(sizes) != sorted(wanted):
            raise CheckpointError(f"{path} has 'param_groups' of {sizes} parameters; this run has {wanted}.")


def _plain(value: Any) -> Any:
    """A hyperparameter as JSON has it: torch allows tensors of one element."""
    return value.item() if isinstance(value, torch.Tensor) else value
