"""Snapshots: save every state of a live model to a checkpoint, parameter by parameter, and load it."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.contents import Contents
from pagoda.checkpoint.directory import Removable, check_absent, remove_leftovers, write_manifest
from pagoda.checkpoint.kept_pages import KeptPages, paged_unit
from pagoda.checkpoint.model_config import model_record
from pagoda.checkpoint.module_states import as_bytes, from_bytes, grown, load_into, module_states
from pagoda.checkpoint.optimizer_states import stored_entry
from pagoda.checkpoint.paged import PAGED, joined_pages, with_ranks
from pagoda.checkpoint.pretrained import listed
from pagoda.checkpoint.rank_files import Files
from pagoda.checkpoint.reader import BUFFERS, LATE, MODULE_STATES, SHARDS, TILES, SavedCheckpoint
from pagoda.checkpoint.rng import check_rng, restore_rng, rng_state
from pagoda.checkpoint.state import (
    OF_WEIGHTS,
    ParameterState,
    all_states,
    gather_from_all_stages,
    named_tensors,
    unpaged,
)
from pagoda.checkpoint.tensors import TensorSpec, chunks
from pagoda.config.settings import require
from pagoda.engine import Engine
from pagoda.errors import CheckpointError, ConfigError
from pagoda.memory.arena import tensor_bytes
from pagoda.memory.identity import MANIFEST, finished, new_checkpoint_id
from pagoda.memory.page import PageRun
from pagoda.memory.ssd.committed import CommittedPages
from pagoda.optim.param_groups import NamedGroup, check_groups, check_settings
from pagoda.optim.rule import StateSpec, plain_setting
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.layout import WEIGHT, WEIGHT_BACK
from pagoda.runtime.capture import Capture, CapturedPiece

Specs = dict[str, list[TensorSpec]]
"""File -> its tensors."""
Adoptable = dict[tuple[int, str], tuple[CommittedPages, PageRun]]
"""(unit, state) -> pages of a checkpoint that hold it in the same layout as this run."""
_log = logging.getLogger("pagoda")


class Snapshot:
    """Reads and writes states by parameter name, so that a checkpoint does not depend on units, pages or tiers.

    A checkpoint has one safetensors file for each state (`weight.safetensors` has the weights in the compute dtype),
    the persistent buffers, and a manifest with step counts, hyperparameters and RNG states.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self._states = engine.plan.layout.states
        self._shapes = {name: tensor.shape for name, tensor in unpaged(model)}
        """Those of buffers, when they were last compared."""

    def save(
        self,
        directory: Path,
        groups: list[dict[str, Any]],
        extra: dict[str, Any] | None,
        replaces: Sequence[Path] = (),
        on_error: Callable[[Exception], None] | None = None,
        on_complete: Callable[[], None] | None = None,
    ) -> None:
        """Start writing a checkpoint of the state after the last `step()`. The saver's thread finishes it.

        Only one is written at a time: the previous one has ended. No other thread computes meanwhile. `on_complete` is
        called on the first rank once this one is complete, then the checkpoints in `replaces` are deleted. `on_error`:
        see `Saver.start`. Raises UsageError if updates during backward have already changed the state since `step()`.
        """
        extra = {} if extra is None else extra
        require(isinstance(extra, dict), "extra", extra, "a dictionary")
        _check_json("extra", extra)
        self._engine.check_between_steps()
        check_absent(directory)
        self._warn_of_growth()
        apart = self._apart()
        apart_specs = self._apart_specs(apart)
        # The first rank decides which checkpoints are replaced, and the new checkpoint's id.
        mine = rng_state(), list(replaces), new_checkpoint_id()
        said = gather_from_all_stages(self._engine, "save_checkpoint()", mine)
        generators, (_, replaces, checkpoint_id) = [generator for generator, _, _ in said], said[0]
        contents = Contents.of(self._engine, groups)
        states = self._engine.plan.saved_states if contents.late else self._states
        content = {
            "id": checkpoint_id,
            "states": [state.name for state in states],
            "parameters": list(contents.stored),
            "steps": contents.steps,
            TILES: contents.cuts(shards=False),
            SHARDS: contents.cuts(shards=True),
            "param_groups": [
                {key: plain_setting(value, None) for key, value in group.items()} for group in contents.groups(groups)
            ],
            "loss_scale": self._engine.stepper.scaler.state_dict(),
            "rng": generators[0],
            "rank_rng": generators[1:],
            "model": model_record(self._model),
            "extra": extra,
        }
        for number, group in enumerate(content["param_groups"]):
            _check_json(f"param_groups[{number}]", group)
        if contents.late:
            content[LATE] = contents.late
        content = json.loads(json.dumps(content))  # a copy, because the caller's dictionaries may change
        copies = {file: {name: tensor.cpu().clone() for name, tensor in held.items()} for file, held in apart.items()}

        def start() -> None:
            self._engine.prepare_capture()
            kept = KeptPages.of(self._engine, replaces)
            specs = self._specs(states, contents, kept, apart_specs)
            extents = {unit: {s: PageRun(*run) for s, run in of.extents.items()} for unit, of in kept.units.items()}
            late = frozenset(u.index for u in self._engine.units if self._engine.scheduler.weights(u.index).lag)
            capture = self._engine.capture(lambda unit: self._pieces(unit, kept, unit in late), extents)
            write = partial(self._write, directory, capture, kept, specs, copies, content, replaces, on_complete)
            self._engine.saver.start(write, on_error)

        self._engine.accesses.compute_lock.run(start)

    def nbytes(self, groups: list[NamedGroup], copied: bool) -> int:
        """Bytes of the tensors in the files of a checkpoint. Without `copied`, what would stay in its pages does not
        count. All ranks call this at the same point."""
        kept = KeptPages({}, {}) if copied else KeptPages.of(self._engine, ())
        contents, apart = Contents.of(self._engine, groups), self._apart_specs(self._apart())
        specs = self._specs(self._states, contents, kept, apart)
        if self._engine.plan.options.asynchronous:  # all weights may lag
            specs[WEIGHT_BACK] = [spec for spec in specs[WEIGHT] if contents.stored[spec.name].steps is not None]
        return sum(spec.nbytes for of_file in specs.values() for spec in of_file)

    def _specs(self, states: Sequence[StateSpec], contents: Contents, kept: KeptPages, apart: Specs) -> Specs:
        """The tensors of each file."""
        specs = {state.name: contents.specs(state, kept.names.get(state.name, ())) for state in states}
        return specs | apart

    def _write(
        self,
        directory: Path,
        capture: Capture,
        kept: KeptPages,
        specs: Specs,
        apart: dict[str, dict[str, torch.Tensor]],
        content: dict[str, Any],
        replaces: Sequence[Path],
        on_complete: Callable[[], None] | None,
    ) -> None:
        """Fill the directory and commit it, on the saver's thread."""
        links = self._engine.links
        files = Files(directory, content["id"], specs, links.saver)
        complete = False
        try:
            with files.open():
                self._engine.saver.divide(partial(_write_pieces, capture, files))
                held = [(file, *one) for file, tensors in apart.items() for one in tensors.items()]
                for file, name, tensor in held if links.mesh.rank == 0 else ():
                    for start, count in chunks(tensor.numel()):
                        files.write(file, name, start, tensor_bytes(tensor.reshape(-1)[start : start + count]))
                content["hashes"] = files.finish()
                if any(kept.names.values()):
                    mine = None
                    if capture.snapshot is not None:
                        mine = capture.snapshot.commit(finished(directory), content["id"]), list(kept.units.values())
                    saved = {state.name: state.dtype for state in self._engine.plan.saved_states}
                    dtypes = {name: saved[name] for name in content["states"]}
                    content[PAGED] = joined_pages(dtypes, [said for said in files.of_all(mine) if said is not None])
                if files.first:
                    write_manifest(files.folder, content)
            if on_complete is not None:
                with files.failing_on_all():
                    if files.first:
                        on_complete()
            complete = True
            self._remove(replaces, files)
        finally:
            self._engine.end_capture(capture)
            if capture.snapshot is not None:  # last: stores may wait for slots of replaced checkpoints
                capture.snapshot.close() if complete or files.may_exist else capture.snapshot.release()

    def _remove(self, replaced: Sequence[Path], files: Files) -> None:
        """Delete checkpoints. Each rank frees the slots that they occupy in its own store. The new checkpoint is
        complete, so what cannot be deleted, or was moved meanwhile, is a warning."""
        places = with_ranks(self._engine.ssd_directories)
        retired: list[Removable] = []
        for path in replaced if files.first else ():
            with _warning_of(path):
                old = Removable.of(path)
                old.retire()
                retired.append(old)
        retired = files.of_all(retired)[0]
        forgotten: set[Path] = set()
        for old in retired:
            with _warning_of(old.directory):
                old.forget(places)
                forgotten.add(old.directory)
        forgotten.intersection_update(*files.of_all(forgotten))
        for old in retired if files.first else ():
            with _warning_of(old.directory):
                if old.directory in forgotten:  # by all ranks; `remove_leftovers` tries again with the others
                    old.delete()
        for parent in {path.parent for path in replaced} if files.first else ():
            with _warning_of(parent):
                remove_leftovers(parent, places)

    def load(self, directory: Path, groups: list[NamedGroup]) -> tuple[list[NamedGroup], dict[str, Any]]:
        """Restore a checkpoint into this run, which has the given param groups. Returns the checkpoint's groups and
        extra.

        Nothing changes until everything that can be checked without reading the data has been checked. If the data then
        proves to be damaged, the optimizer is unusable until another checkpoint is loaded.
        """
        self._engine.saver.settle()  # it may be the one that is being written
        contents = Contents.of(self._engine, groups)
        with SavedCheckpoint(directory, self._engine.ssd_directories, all_pages=False) as checkpoint:
            self._check_fits(checkpoint, contents, groups)
            steps = [
                [_steps(each, checkpoint) for each in self._parameters(unit)[: unit.trainable]]
                for unit in self._engine.units
            ]
            lags = self._lags(checkpoint)
            adoptable = self._adoptable(checkpoint)
            for state in self._states:
                checkpoint.check(state.name, contents.whole_specs(state, lambda name: checkpoint.division(name)[1]))
            if checkpoint.late:
                checkpoint.check(WEIGHT_BACK, contents.whole_specs(self._states[0], lambda _: 1))
            manifest = checkpoint.manifest
            self._engine.prepare_replacing()
            self._load_apart(checkpoint)
            with self._engine.replacing(lags):
                for unit in self._engine.units:
                    states = self._engine.plan.saved_states if lags and lags[unit.index] else self._states
                    self._load_unit(unit, states, checkpoint, adoptable)
                for unit in self._engine.units:
                    for param in unit.params:
                        param.grad = None
                    unit.steps = steps[unit.index]
                self._engine.stepper.scaler.load_state_dict(manifest["loss_scale"])
        rank, generators = self._engine.links.mesh.everyone.rank, [manifest["rng"], *manifest["rank_rng"]]
        if rank < len(generators):  # a rank that the saved run did not have keeps its own
            restore_rng(generators[rank])
        defaults = self._engine.rule.defaults()
        for group in manifest["param_groups"]:  # JSON has no tuples
            group.update({key: plain_setting(group[key], old) for key, old in defaults.items()})
        return manifest["param_groups"], manifest["extra"]

    def _lags(self, checkpoint: SavedCheckpoint) -> list[int]:
        """By unit, how far the checkpoint's weights lag. Empty if none do. None do, and a message says so, in a run
        without asynchronous updates."""
        late, lags = {*checkpoint.late}, [0] * len(self._engine.units)
        if late and not self._engine.plan.options.asynchronous:
            _log.warning(
                "%s was saved with updates that lag one step, and this run has other updates. The next step reads the "
                "newest weights, so later bits are not those of a run without an interruption.",
                checkpoint.directory,
            )
            return []
        for parameter in all_states(self._engine) if late else ():
            if not late.isdisjoint(_saved_parts(parameter, checkpoint)):
                lags[parameter.unit.index] = 1
        return lags

    def _load_unit(
        self, unit: LiveUnit, states: Sequence[StateSpec], checkpoint: SavedCheckpoint, adoptable: Adoptable
    ) -> None:
        """Restore the given states of a unit.

        If a different division over tensor-parallel ranks has moved the blocks of 8-bit moments, these are rounded
        again.
        """
        parameters, blocks = self._parameters(unit), any(state.per > 1 for state in self._states)
        store = self._engine.store
        moved = [each for each in parameters if blocks and each.division != checkpoint.division(each.whole)]
        for state in states:
            found, run = adoptable.get((unit.index, state.name)), store.run_on_ssd(unit.index, state.name)
            if found and run and store.ssd and store.ssd.adopt(run, *found):
                continue
            for parameter in parameters:
                is_copied = state.name in (*OF_WEIGHTS, WEIGHT_BACK) or parameter not in moved
                if parameter.span(state) is not None and is_copied:
                    parameter.copy_in(state, checkpoint.tensors[state.name][parameter.whole])
        for parameter in moved:
            if parameter.moments():
                entry = stored_entry(self._engine.rule, checkpoint, parameter.whole)
                parameter.write_entry({key: parameter.out_of(value) for key, value in entry.items()})

    def _adoptable(self, checkpoint: SavedCheckpoint) -> Adoptable:
        """The committed pages of this same store that extents can use as they are.

        Raises CheckpointError if other pages have to be copied and are missing.
        """
        pages, store = checkpoint.pages, self._engine.store
        found: Adoptable = {}
        for unit in self._engine.units if pages is not None else ():
            assert pages is not None
            names = {part for parameter in self._parameters(unit) for part in checkpoint.parts(parameter.whole)}
            mine = paged_unit(self._engine, unit)
            for state in self._engine.plan.saved_states:
                for committed, run in pages.like(mine, state.name):
                    if store.ssd is not None and committed.commit in store.ssd.commits:
                        found.setdefault((unit.index, state.name), (committed, run))
                if (unit.index, state.name) not in found and not names.isdisjoint(pages.tensors.get(state.name, ())):
                    pages.check()
        return found

    def _parameters(self, unit: LiveUnit) -> list[ParameterState]:
        return [ParameterState(self._engine, unit, slot) for slot in range(len(unit.params))]

    def _pieces(self, index: int, kept: KeptPages, lags: bool) -> Iterator[CapturedPiece]:
        """Every piece of a unit's states that this rank writes, parameter by parameter, without those kept as pages.
        `lags`: whether its weights lag, so that those that steps read are written too."""
        unit, shards = self._engine.units[index], self._engine.store.shards
        paged = kept.units[index].extents if index in kept.units else ()
        states = self._engine.plan.saved_states if lags else self._states
        mine = {s.name: shards.responsible(unit.spec, s.name) for s in states if s.name not in paged}
        for slot, parameter in enumerate(self._parameters(unit)):
            spans = {state.name: parameter.span(state) for state in states if shards.writes(unit.spec, slot)}
            for state, span in spans.items():
                if span is None:
                    continue
                for start, count in chunks(span.count):
                    first = span.first + start
                    for part in filter(None, (here.within(first, first + count) for here in mine.get(state, ()))):
                        begins, numel = start + part.start - first, part.stop - part.start
                        yield CapturedPiece(index, state, parameter.stored_name, begins, numel, part.at)

    def _warn_of_growth(self) -> None:
        """Warn, once for each, of buffers that a new model will not take from a checkpoint."""
        if names := grown(self._model, self._shapes):
            _log.warning(
                "%s got another shape since wrap(), or came later. Only a model in which it has that shape can load "
                "the checkpoint, or one whose module takes the saved shape in its _load_from_state_dict. Register it "
                "with persistent=False if no checkpoint needs it.",
                listed(names),
            )
            self._shapes.update({name: tensor.shape for name, tensor in unpaged(self._model)})

    def _apart(self) -> dict[str, dict[str, torch.Tensor]]:
        """File -> name -> tensor, for what this stage's model has in addition to units."""
        buffers = dict(unpaged(self._model))
        for name, buffer in buffers.items():
            if buffer.layout is not torch.strided:
                raise CheckpointError(
                    f"Buffer {name!r} is {buffer.layout}, which a checkpoint cannot hold. Register it with "
                    "persistent=False."
                )
        states = {name: as_bytes(name, state) for name, state in module_states(self._model).items()}
        return {BUFFERS: buffers, MODULE_STATES: states}

    def _apart_specs(self, apart: dict[str, dict[str, torch.Tensor]]) -> Specs:
        """The tensors in addition to units, of all stages. Every rank calls this at the same point."""
        mine = {
            file: {name: TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in of.items()}
            for file, of in apart.items()
        }
        said = gather_from_all_stages(self._engine, "the buffers of a checkpoint", mine)
        specs = {file: [*{name: spec for each in said for name, spec in each[file].items()}.values()] for file in apart}
        return {file: of for file, of in specs.items() if of or file == BUFFERS}

    def _load_apart(self, checkpoint: SavedCheckpoint) -> None:
        """Restore buffers and module states through the model's `load_state_dict()`. If a stage of a pipeline does not
        accept its own, all raise CheckpointError."""
        saved = {name: state for state in checkpoint.apart for name in checkpoint.tensors[state]}
        own, cause = self._own(saved), None
        try:
            found = {name: checkpoint.tensors[saved[name]][name].whole() for name in own}
            given = {name: from_bytes(t) if saved[name] == MODULE_STATES else t for name, t in found.items()}
            load_into(self._model, given, self._engine.device.torch_device)
        except CheckpointError as refused:
            cause = refused
        mine = str(cause or ""), own
        said = gather_from_all_stages(self._engine, "loading the buffers of a checkpoint", mine)
        if error := next(filter(None, (error for error, _ in said)), ""):
            message = f"{checkpoint.directory} does not belong to this model: {error.rstrip('.')}."
            raise CheckpointError(message) from cause
        if left := saved.keys() - {name for _, names in said for name in names}:
            raise CheckpointError(f"{checkpoint.directory} has {min(left)!r}, which is in no stage's model.")

    def _own(self, names: Iterable[str]) -> list[str]:
        """The names that belong to this stage's model: all of them, unless there are other stages."""
        if self._engine.links.stages is None:
            return [*names]
        modules = {name for name, _ in self._model.named_modules(remove_duplicate=False)} - {""}
        here = {name for name, _ in named_tensors(self._model, every_name=True)}
        return [name for name in names if name in here or name.rpartition(".")[0] in modules]

    def _check_fits(self, checkpoint: SavedCheckpoint, contents: Contents, groups: list[NamedGroup]) -> None:
        """Raises CheckpointError unless everything in the manifest can be restored into this model and optimizer."""
        directory, manifest = checkpoint.directory, checkpoint.manifest
        path = directory / MANIFEST
        wanted = [state.name for state in self._states]
        if [name for name in manifest["states"] if name != WEIGHT_BACK] != wanted:
            raise CheckpointError(
                f"{directory} holds the states {manifest['states']}, but this run keeps {wanted}: wrap with the "
                "precision, optimizer and moments of the run that saved it."
            )
        differing = checkpoint.steps.keys() ^ contents.trainable
        if differing:
            raise CheckpointError(
                f"{directory} does not belong to this model: only one of the two trains {min(differing)!r}."
            )
        check_settings(str(path), manifest["param_groups"], self._engine.rule)
        check_groups(str(path), manifest["param_groups"], contents.groups(groups))
        try:
            self._engine.stepper.scaler.check_state(manifest["loss_scale"])
            for state in (manifest["rng"], *manifest["rank_rng"]):
                check_rng(state)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error


def _saved_parts(parameter: ParameterState, checkpoint: SavedCheckpoint) -> list[str]:
    """The names of the parts of a checkpoint that have elements of a parameter of this run. Tiles may be others than
    those that were saved, even if they have the same names."""
    position = parameter.position
    if position.dim is None and checkpoint.division(parameter.whole)[1] == 1:
        return checkpoint.parts_with(parameter.whole, position.start, prod(parameter.spec.shape))
    if parameter.division == checkpoint.division(parameter.whole):
        return [parameter.stored_name]
    return checkpoint.parts(parameter.whole)


def _steps(parameter: ParameterState, checkpoint: SavedCheckpoint) -> int:
    """The number of updates that a parameter has had. Raises CheckpointError if its elements have had different
    numbers."""
    saved = checkpoint.steps[parameter.whole]
    numbers = {saved[part] for part in _saved_parts(parameter, checkpoint)}
    if len(numbers) > 1:
        raise CheckpointError(
            f"{checkpoint.directory} has {parameter.whole!r} in parts, some of which were frozen for a while, so they "
            f"have had from {min(numbers)} to {max(numbers)} updates. This run has other parts: wrap with the "
            "tile_limit and the ranks of the run that saved it."
        )
    return numbers.pop()


def _check_json(name: str, values: dict[str, Any]) -> None:
    """Raises ConfigError for the first of the values that JSON cannot store."""
    for key, value in values.items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{name}[{key!r}] cannot be saved: {error}. Give text, numbers, booleans, None, lists and dictionaries "
                "of these, such as TENSOR.tolist()."
            ) from error


@contextmanager
def _warning_of(path: Path) -> Iterator[None]:
    """Turn an error into a warning that a checkpoint was not deleted."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        _log.warning("checkpoint %s was not deleted: %s", path, error)


def _write_pieces(capture: Capture, files: Files) -> None:
    """Write pieces until none are left. Several threads run this; an error in one ends the work of all."""
    try:
        for piece, data in capture.pieces():
            files.write(piece.state, piece.name, piece.start, data)
    except BaseException:
        capture.end()
        raise
