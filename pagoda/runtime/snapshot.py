"""Snapshots: every state of a live model, parameter by parameter, to and from a checkpoint."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.directory import MANIFEST, check_absent, commit_of, remove, write_manifest
from pagoda.checkpoint.model_config import model_record
from pagoda.checkpoint.paged import PAGED, PagedParameter, PagedUnit, describe_pages
from pagoda.checkpoint.reader import BUFFERS, SHARDS, TILES, Checkpoint
from pagoda.checkpoint.rng import check_rng, restore_rng, rng_state
from pagoda.checkpoint.shards import read_part
from pagoda.checkpoint.tensors import TensorSpec, chunks, tensor_bytes
from pagoda.errors import CheckpointError, UsageError
from pagoda.optim.rule import StateSpec, plain_setting
from pagoda.plan.ops import SSD
from pagoda.plan.packed import Span
from pagoda.plan.placement import SPARE
from pagoda.runtime.capture import Capture, Piece
from pagoda.runtime.contents import Contents
from pagoda.runtime.engine import Engine
from pagoda.runtime.groups import NamedGroup, check_groups
from pagoda.runtime.rank_files import Files
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

    def save(
        self, directory: Path, groups: list[dict[str, Any]], extra: dict[str, Any], replaces: Sequence[Path] = ()
    ) -> None:
        """Start writing a checkpoint of the state after the last `step()`; the saver's thread finishes it.

        One at a time: waits for the one before, and raises its error. `replaces` are checkpoints to delete once this
        one is complete. Raises UsageError where updates under backward have left the state after `step()` behind
        already.
        """
        if any(unit.updated for unit in self._engine.units):
            raise UsageError(
                "save_checkpoint() between backward and step(): with accumulation_steps announced, some units have had "
                "this step's update already and others have not. Call optimizer.step() first."
            )
        self._engine.damage.check()
        saver = self._engine.saver
        saver.wait()
        check_absent(directory)
        buffers = self._buffers()
        self._buffer_specs(buffers)
        generators = self._generators()
        contents = Contents.of(self._engine.units, self._engine.plan.layout, groups, self._engine.together)
        content = {
            "states": [state.name for state in self._states],
            "parameters": list(contents.stored),
            "steps": contents.steps,
            TILES: contents.tiles(),
            SHARDS: contents.shards(),
            "param_groups": [{key: _plain(value) for key, value in group.items()} for group in contents.groups(groups)],
            "loss_scale": self._engine.stepper.scaler.state_dict(),
            "rng": generators[0],
            "rank_rng": generators[1:],
            "model": model_record(self._model),
            "extra": extra,
        }
        content = json.loads(json.dumps(content))  # as it is now: the caller's dictionaries may change
        copies = {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}
        self._engine.prepare_capture()
        kept = self._kept_on_ssd(replaces)
        capture = self._engine.capture(
            lambda unit: self._pieces(unit, kept.get(unit)),
            {unit: list(paged.extents.values()) for unit, paged in kept.items()},
        )
        specs = {state.name: contents.specs(state, _kept_of(state, kept)) for state in self._states}
        saver.start(lambda: self._write(directory, capture, kept, specs, copies, content, replaces))

    def _kept_on_ssd(self, replaces: Sequence[Path]) -> dict[int, PagedUnit]:
        """unit -> what of it the checkpoint keeps as pages; empty where there is no room to keep one more."""
        ssd, plan = self._engine.store.ssd, self._engine.plan
        if ssd is None:
            return {}
        state_pages = sum(plan.placement.pages(SSD, state.name) for state in self._states)
        room = plan.placement.pages(SSD, SPARE) // state_pages if state_pages else 0
        going = set()
        for old in replaces:
            with suppress(CheckpointError):
                going.add((commit_of(old) or {}).get("commit"))
        if len(ssd.commits - going) >= room:
            return {}
        units = {unit.index: self._paged(unit) for unit in self._engine.units}
        return {index: unit for index, unit in units.items() if unit.extents}

    def _paged(self, unit: LiveUnit) -> PagedUnit:
        """A unit's layout, and the states of it whose home is SSD."""
        parameters = (PagedParameter(s.param.name, s.offset, s.param.shape, s.param.trainable) for s in unit.spec.slots)
        store = self._engine.store
        runs = {s.name: store.run(unit.index, store.newest_extent(unit.index, s.name)) for s in self._states}
        packed = {
            state.name: tuple(
                PagedParameter(unit.name(slot), span.first, span.shape, True) for slot, span in self._spans(unit, state)
            )
            for state in self._states
            if state.shape_of is not None
        }
        return PagedUnit(tuple(parameters), {state: run for state, run in runs.items() if run is not None}, packed)

    def _write(
        self,
        directory: Path,
        capture: Capture,
        kept: dict[int, PagedUnit],
        specs: dict[str, list[TensorSpec]],
        buffers: dict[str, torch.Tensor],
        content: dict[str, Any],
        replaces: Sequence[Path],
    ) -> None:
        """On the saver's thread: fill the directory and commit it."""
        complete = False
        try:
            together = self._engine.together
            wire = together.saver_wire if together is not None else None
            files = Files(directory, {**specs, BUFFERS: self._buffer_specs(buffers)}, wire)
            with files.open():
                self._engine.saver.divide(partial(_write_pieces, capture, files))
                for name, buffer in buffers.items() if files.first else ():
                    for start, count in chunks(buffer.numel()):
                        files.write(BUFFERS, name, start, tensor_bytes(buffer.reshape(-1)[start : start + count]))
                content["hashes"] = files.finish()
                if capture.frozen is not None:
                    dtypes = {state.name: state.dtype for state in self._states}
                    reference = capture.frozen.commit(directory)
                    content[PAGED] = describe_pages(list(kept.values()), dtypes, reference)
                if files.first:
                    write_manifest(files.folder, content)
            complete = True
            for old in replaces if files.first else ():
                remove(old)
        finally:
            self._engine.end_capture(capture)
            if capture.frozen is not None:  # last: stores may wait for the slots of what was replaced
                capture.frozen.close() if complete else capture.frozen.release()

    def load(self, directory: Path, groups: list[NamedGroup]) -> tuple[list[NamedGroup], dict[str, Any]]:
        """Restore a checkpoint into the run whose param groups are given; returns its own groups and extra.

        Nothing changes before all that can be checked without reading its data has been. Where data turns out to be
        damaged, the optimizer is of no use until another checkpoint is loaded.
        """
        buffers = self._buffers()
        contents = Contents.of(self._engine.units, self._engine.plan.layout, groups, self._engine.together)
        with Checkpoint(directory, self._engine.ssd_directories) as checkpoint:
            self._check_fits(checkpoint, contents, groups)
            for state in self._states:
                checkpoint.check(state.name, contents.whole_specs(state))
            checkpoint.check(BUFFERS, self._buffer_specs(buffers))
            manifest = checkpoint.manifest
            with self._engine.replacing():
                for unit in self._engine.units:
                    for state in self._states:
                        if not self._adopt(checkpoint, unit, state.name):
                            self._copy_in(checkpoint, unit, state)
                for name, buffer in buffers.items():
                    buffer.detach().copy_(checkpoint.read(BUFFERS, name, 0, buffer.numel()).view(buffer.shape))
                for unit in self._engine.units:
                    for param in unit.params:
                        param.grad = None
                    unit.steps = [manifest["steps"][_whole(unit, slot)[0]] for slot in range(unit.trainable)]
                    self._engine.weights_changed(unit)
                self._engine.stepper.scaler.load_state_dict(manifest.get("loss_scale", {}))
        self._restore_generators(manifest)
        defaults = self._engine.rule.defaults()
        for group in manifest["param_groups"]:  # JSON has no tuples
            group.update({key: plain_setting(group[key], old) for key, old in defaults.items()})
        return manifest["param_groups"], manifest["extra"]

    def _adopt(self, checkpoint: Checkpoint, unit: LiveUnit, state: str) -> bool:
        """Let an extent have the pages that the checkpoint keeps in this very store; False where it does not."""
        pages, ssd, runs = checkpoint.pages, self._engine.store.ssd, self._engine.store.runs(unit.index, state)
        if pages is None or ssd is None or not runs or self._engine.together is not None:
            return False
        its_run = pages.extent(self._paged(unit), state)
        return its_run is not None and all(ssd.adopt(run, pages.committed, its_run) for run in runs)

    def _copy_in(self, checkpoint: Checkpoint, unit: LiveUnit, state: StateSpec) -> None:
        """Copy one state of a unit from the checkpoint, parameter by parameter."""
        for slot, span in self._spans(unit, state):
            name, before = _whole(unit, slot)
            for start, count in chunks(span.count):
                first = span.first + start
                if not self._engine.store.holds(unit.spec, state.name, first, first + count):
                    continue
                read = partial(checkpoint.read, state.name, name)
                shard = unit.spec.slots[slot].param.shard
                if shard is None:
                    values = read(state.elements(before) + start, count)
                else:
                    values = read_part(read, shard, unit.part_index(slot), start, count)
                self._engine.store.write(unit.index, state.name, first, values)

    def _spans(self, unit: LiveUnit, state: StateSpec) -> Iterator[tuple[int, Span]]:
        """Each slot of a unit that has a state, and where it lies."""
        for slot in range(len(unit.params)):
            span = self._engine.plan.layout.span(unit.spec, slot, state)
            if span is not None:
                yield slot, span

    def _pieces(self, index: int, but: PagedUnit | None) -> Iterator[Piece]:
        """Every piece of every state of a unit that this rank writes, without what `but` has of it."""
        unit = self._engine.units[index]
        for state in self._states:
            if but is not None and state.name in but.extents:
                continue
            for slot, span in self._spans(unit, state):
                placed = unit.spec.slots[slot]
                if not self._engine.store.shards.writes(unit.spec, slot):
                    continue
                for start, count in chunks(span.count):
                    first = span.first + start
                    for begin, end, at in self._engine.store.written_here(unit.spec, state.name, first, first + count):
                        begins = start + begin - first
                        changed = placed.offset, placed.offset + placed.param.numel
                        if state.shape_of is None:
                            changed = begin * state.per, end * state.per
                        name = unit.stored_name(slot)
                        yield Piece(index, state.name, name, begins, begin, end - begin, at, *changed)

    def _generators(self) -> list[dict[str, Any]]:
        """The state of every rank's random number generators, as JSON."""
        mine, together = rng_state(), self._engine.together
        if together is None:
            return [mine]
        return [json.loads(said) for said in together.announce("save_checkpoint()", json.dumps(mine).encode())]

    def _restore_generators(self, manifest: dict[str, Any]) -> None:
        """Put the generators back; those of a rank that the writing run did not have stay as they are."""
        together = self._engine.together
        rank = together.rank if together is not None else 0
        states = [manifest["rng"], *manifest["rank_rng"]]
        if rank < len(states):
            restore_rng(states[rank])

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

    def _check_fits(self, checkpoint: Checkpoint, contents: Contents, groups: list[NamedGroup]) -> None:
        """Everything the manifest says can be restored into this model and optimizer."""
        directory, manifest = checkpoint.directory, checkpoint.manifest
        path = directory / MANIFEST
        wanted = [state.name for state in self._states]
        if manifest["states"] != wanted:
            raise CheckpointError(
                f"{directory} holds the states {manifest['states']}, this run keeps {wanted}: "
                "wrap with the precision, optimizer and moments of the run that saved it."
            )
        differing = checkpoint.steps.keys() ^ contents.steps.keys()
        if differing:
            raise CheckpointError(
                f"{directory} does not belong to this model: only one of the two trains {min(differing)!r}."
            )
        try:
            for group in manifest["param_groups"]:
                self._engine.rule.with_group(group)
                iter(group["params"])
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path} is damaged: 'param_groups' cannot be used: {error!r}") from error
        check_groups(str(path), manifest["param_groups"], contents.groups(groups))
        try:
            self._engine.stepper.scaler.check_state(manifest.get("loss_scale", {}))
            for state in (manifest["rng"], *manifest["rank_rng"]):
                check_rng(state)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error


def _write_pieces(capture: Capture, files: Files) -> None:
    """Write pieces until none are left, as one of several threads; an error of one ends the work of all."""
    try:
        for piece, data in capture.pieces():
            files.write(piece.state, piece.name, piece.start, data)
    except BaseException:
        capture.end()
        raise


def _whole(unit: LiveUnit, slot: int) -> tuple[str, int]:
    """Name of the parameter that a parameter was cut from, or its own, and its first element there."""
    spec = unit.spec.slots[slot].param
    return (spec.name, 0) if spec.part is None else (spec.part.whole, spec.part.start)


def _kept_of(state: StateSpec, kept: Mapping[int, PagedUnit]) -> set[str]:
    """Names of the parameters of which a state is kept as pages."""
    return {param.name for unit in kept.values() if state.name in unit.extents for param in unit.parameters}


def _plain(value: Any) -> Any:
    """A hyperparameter as JSON has it: torch allows tensors of one element."""
    return value.item() if isinstance(value, torch.Tensor) else value
