"""Reads a checkpoint: its manifest, and its tensors from wherever they are stored."""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from pagoda.checkpoint.directory import read_manifest
from pagoda.checkpoint.lazy import LazyTensor, cat, tensors_of
from pagoda.checkpoint.paged import PAGED, PAGED_FORM, Pages
from pagoda.checkpoint.tensors import TensorFile, TensorSpec, chunks
from pagoda.errors import CheckpointError
from pagoda.memory.identity import CHECKPOINT_ID, MANIFEST
from pagoda.memory.json_forms import FormError, check
from pagoda.plan.layout import WEIGHT, WEIGHT_BACK

TILES = "tiles"
"""In a manifest: whole parameter -> its shape, and the names of its stored parts in order."""
SHARDS = "shards"
"""In a manifest: whole parameter -> its shape, the dimension along which tensor-parallel ranks divided it, and the
names of its stored parts in order."""
LATE = "late"
"""In a manifest, if weights lack the last step's asynchronous update: the stored names of these parameters. WEIGHT_BACK
then has the weights that steps read."""
BUFFERS = "buffers"
"""The model's persistent buffers, which a checkpoint has in addition to its states."""
MODULE_STATES = "module_states"
"""What modules keep otherwise, such as the results of `get_extra_state()`, as bytes. Absent if there is nothing."""
_CUT = {"shape": [int], "parts": [str]}
_FORM = {
    "id": CHECKPOINT_ID,
    "states": [str],
    "parameters": [str],
    "hashes": {str: {str: [(int, re.compile("[0-9a-f]{16}"))]}},
    "steps": {str: int},
    TILES: {str: _CUT},
    SHARDS: {str: {**_CUT, "dim": int}},
    "loss_scale": dict,
    "param_groups": [dict],
    "rng": dict,
    "rank_rng": [dict],
    "extra": object,
}
"""The fields of every manifest. Code that has the model checks whether they match it."""
_OPTIONAL_FORM = {
    PAGED: PAGED_FORM,
    LATE: [str],
}


class SavedCheckpoint(AbstractContextManager["SavedCheckpoint"]):
    """A checkpoint directory that is open for reading; a context manager.

    A state has one tensor for each parameter, in the parameter's shape and under its name. `BUFFERS` can be read like a
    state. Opening reads the manifest and locates every tensor, but does not read tensors.

    Raises CheckpointError if the directory is not a checkpoint, or if a part of it is missing or damaged.
    """

    def __init__(self, directory: Path, places: Sequence[str | Path] = (), all_pages: bool = True) -> None:
        """`places`: more directories in which to look for pages on SSD. If pages are missing, opening fails with
        `all_pages`; otherwise only reading them fails."""
        self.directory = directory
        self.manifest = read_manifest(directory)
        self._check_manifest()
        self._cuts: dict[str, Any] = {**self.manifest[TILES], **self.manifest[SHARDS]}
        """Parameter that is stored in parts -> its shape, the names of its parts in order, and the dimension of
        shards."""
        self.apart = (BUFFERS, *(state for state in (MODULE_STATES,) if state in self.manifest["hashes"]))
        """What it has in addition to states of parameters."""
        self.tensors: dict[str, dict[str, LazyTensor]] = {}
        """State, or one of `apart` -> name -> tensor, in the order of the model. Reading one raises CheckpointError if
        its data is damaged."""
        self._elements: dict[str, int] = {}
        """Stored part of a parameter -> number of its elements."""
        with ExitStack() as opened:
            for state in (*self.manifest["states"], *self.apart):
                file = TensorFile(directory / f"{state}.safetensors", self.manifest["hashes"].get(state, {}))
                opened.enter_context(closing(file))
                self.tensors[state] = tensors_of(file)
            self.pages: Pages | None = None
            """Its pages on SSD."""
            if PAGED in self.manifest:
                self.pages = opened.enter_context(closing(Pages(directory, self.manifest[PAGED], places)))
                if all_pages:
                    self.pages.check()
                order = {name: index for index, name in enumerate(self.manifest["parameters"])}
                for state, tensors in self.pages.tensors.items():
                    found = self.tensors[state] | tensors
                    names = sorted(found, key=lambda name: order.get(name, len(order)))
                    self.tensors[state] = {name: found[name] for name in names}
            for name in self.late:
                if name not in self.tensors[WEIGHT]:
                    raise self._damaged(f"{name!r} lags, but has no weights")
            if self.late:  # weights that do not lag are stored once
                self.tensors[WEIGHT_BACK] = {**self.tensors[WEIGHT], **self.tensors[WEIGHT_BACK]}
            for whole, cut in self._cuts.items():
                self._join(whole, cut["shape"], cut.get("dim", 0), cut["parts"])
            self.states = [state for state in self.manifest["states"] if self.tensors[state] or state == WEIGHT]
            """The states that a parameter has."""
            self._check_dtypes()
            self.steps = self._steps()
            """Trainable parameter -> name of each stored part -> number of updates that the part has had."""
            self._opened = opened.pop_all()

    def specs(self, state: str) -> dict[str, TensorSpec]:
        """The tensors of a state in the order of the model."""
        return {name: tensor.spec(name) for name, tensor in self.tensors[state].items()}

    def parts(self, name: str) -> list[str]:
        """The names under which a parameter is stored."""
        return list(self._cuts[name]["parts"]) if name in self._cuts else [name]

    def parts_with(self, name: str, start: int, count: int) -> list[str]:
        """The names of the parts that have some of `count` elements of a parameter, which begin at element `start`."""
        if name not in self._cuts:
            return [name]
        found, at = [], 0
        for part in self.parts(name):
            before, at = at, at + self._elements[part]
            if before < start + count and start < at:
                found.append(part)
        return found

    @property
    def late(self) -> Sequence[str]:
        """Stored names of the parameters whose weights lag."""
        found: Sequence[str] = self.manifest.get(LATE, ())
        return found

    def division(self, name: str) -> tuple[int, int]:
        """The dimension along which tensor-parallel ranks divided a parameter, and their number. 0 and 1 if
        undivided."""
        cut = self.manifest[SHARDS].get(name)
        return (0, 1) if cut is None else (cut["dim"], len(cut["parts"]))

    def damage(self, share: int = 0, of: int = 1) -> Iterator[str]:
        """Read every tensor, and yield an error message for each damaged one.

        Several readers can divide the work: this one reads share number `share` of `of`.
        """
        tensors = [tensor for state in (*self.states, *self.apart) for tensor in self.tensors[state].values()]
        for tensor in islice(tensors, share, None, of):
            try:
                for start, count in chunks(tensor.numel()):
                    tensor.read(start, count)
            except CheckpointError as error:
                yield str(error)

    def check(self, state: str, expected: list[TensorSpec]) -> None:
        """Raises CheckpointError unless a state has exactly the expected tensors, with their dtypes and shapes."""
        wanted, found = {spec.name: spec for spec in expected}, self.specs(state)
        for name in sorted(wanted.keys() | found.keys()):
            mine, other = wanted.get(name), found.get(name)
            if mine != other:
                raise CheckpointError(
                    f"{self.directory} does not belong to this model: {name!r} among its {state} is "
                    f"{other or 'absent'}, but {mine or 'absent'} in the model."
                )

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _join(self, whole: str, shape: list[int], dim: int, parts: list[str]) -> None:
        """Replace the parts of a parameter by the whole in every state. A state must have all parts or none."""
        if not parts:
            raise self._damaged(f"{whole!r} has no parts")
        for state, tensors in self.tensors.items():
            held = [tensors[part] for part in parts if part in tensors]
            if not held:
                continue
            axis = 0 if held[0].ndim == 1 else dim  # a state with fewer elements than the parameter is flat
            if len(held) != len(parts) or axis >= held[0].ndim:
                raise self._damaged(f"its {state} lacks parts of {whole!r}")
            if state == WEIGHT:
                self._elements |= {part: tensor.numel() for part, tensor in zip(parts, held, strict=True)}
            try:
                joined = cat(held, axis)
            except CheckpointError as error:
                raise self._damaged(f"the parts of {whole!r}: {error}") from error
            if list(joined.shape) != shape and not (joined.ndim == 1 and joined.numel() < prod(shape)):
                raise self._damaged(f"the parts of {whole!r} are {list(joined.shape)}, not {shape}")
            tensors[parts[0]] = joined
            self.tensors[state] = {
                whole if name == parts[0] else name: tensor
                for name, tensor in tensors.items()
                if name == parts[0] or name not in parts
            }

    def _steps(self) -> dict[str, dict[str, int]]:
        left: dict[str, int] = dict(self.manifest["steps"])
        found: dict[str, dict[str, int]] = {}
        for whole in self.tensors[WEIGHT]:
            parts = self.parts(whole)
            if whole in left:
                found[whole] = dict.fromkeys(parts, left.pop(whole))
            elif not left.keys().isdisjoint(parts):
                found[whole] = {part: left.pop(part, -1) for part in parts}
        if left or any(min(of_parts.values()) < 0 for of_parts in found.values()):
            raise self._damaged("'steps' does not have the names of its parameters")
        return found

    def _check_manifest(self) -> None:
        """Raises CheckpointError unless every field has the right form."""
        try:
            check({key: self.manifest[key] for key in _FORM if key in self.manifest}, _FORM, "manifest")
            for key, form in _OPTIONAL_FORM.items():
                if key in self.manifest:
                    check(self.manifest[key], form, f"manifest.{key}")
        except FormError as error:
            raise self._damaged(str(error)) from error
        states = self.manifest["states"]
        if (
            not all(map(str.isidentifier, states))
            or {BUFFERS, MODULE_STATES} & {*states}
            or len({*states}) < len(states)
        ):
            raise self._damaged(f"'states' is {states}")
        late = self.manifest.get(LATE)
        if (WEIGHT_BACK in states) is (late is None):
            raise self._damaged(f"'states' is {states}, and {LATE!r} says otherwise")
        if late is not None and not late:
            raise self._damaged(f"{LATE!r} is {late}")
        if WEIGHT not in states or (PAGED in self.manifest and {*self.manifest[PAGED]["dtypes"]} != {*states}):
            raise self._damaged(f"'states' is {states}, which lacks {WEIGHT!r} or differs from the states of its pages")

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.directory / MANIFEST} is damaged: {what}")

    def _check_dtypes(self) -> None:
        """Raises CheckpointError unless all tensors of a state have one dtype. Those of weights may differ."""
        for state in self.states:
            found = {tensor.dtype for tensor in self.tensors[state].values()}
            if not found or (len(found) > 1 and state not in (WEIGHT, WEIGHT_BACK)):
                raise CheckpointError(
                    f"{self.directory} is damaged: its {state} is {sorted(map(str, found))}, but should have one dtype"
                )
