"""metrics.jsonl: one line of JSON per optimizer step. No step appears twice, even if the run was interrupted.

evals.jsonl and samples.jsonl are the same with a line per evaluation and per sample.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pagoda.errors import StorageError
from pagoda.memory.files import append_to, read_regular, storage_errors, write_durably
from pagoda.memory.forms import Form, FormError, check
from pagoda.schedule.served import AccessCounts

if TYPE_CHECKING:
    from pagoda.runtime.stats import StepStats

_log = logging.getLogger("pagoda")
LINE_BYTES = 1024
"""About the size of the line of a step."""
_MOST_BYTES = 1 << 34
"""More bytes than the lines of any run take."""
_LARGEST = 1e100
"""The largest number that readers accept: larger ones cannot be drawn or added up."""
DATA = "data"
"""Key in `stall_s`, in addition to the lanes: seconds in which the next sequences were read."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line. Its fields are the keys."""

    step: int
    """Steps done."""

    def to_json(self) -> str:
        """One line of JSON, without the newline. A number that is not finite becomes null."""
        return json.dumps(finite(asdict(self)), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class StepMetrics(Entry):
    """The figures of one optimizer step."""

    loss: float
    """Mean over the tokens of the step, before its update. NaN on a rank whose stage of a pipeline computes no loss."""
    grad_norm: float | None
    """Global norm before clipping. None if the step was skipped."""
    lr: float
    aux_loss: float | None = None
    """Load-balancing loss of a mixture of experts, as transformers computes it, without its weight. If the load is
    even, it is the number of experts that see a token. None if the model's config.json does not ask for it."""
    step_s: float
    """Seconds from the end of the previous step to the end of this one, without checkpoints."""
    tokens_per_s: float
    stall_s: Mapping[str, float]
    """Seconds compute waited, per lane, and for data."""
    bytes_moved: Mapping[str, int]
    """Bytes each lane moved."""
    peak_bytes: Mapping[str, int]
    """Most bytes in use so far, per tier."""
    tier_use: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """tier -> share of its budget that pages took in this step: mean and peak."""
    accesses: AccessCounts = field(default_factory=dict)
    """By where the weights come from (a tier, or `ranks`): how many accesses were a `hit`, `late` or a `fault`, and the
    seconds that compute waited in them (`late_s`, `fault_s`)."""
    hit_rate: float = 1.0
    """Share of accesses that found the weights in compute's memory."""
    faults: int = 0
    """Accesses whose weights had to be fetched on demand."""
    activation_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that graphs kept in compute's memory at the peak of the step (kept), and offloaded at most so far (host,
    ssd)."""
    loss_scale: float = 1.0
    """The factor by which the loss was multiplied before backward."""
    skipped: bool = False
    """True if a scaled gradient was not finite, so that the step changed only the scale."""
    updates_kept: int = 0
    """Number of units that were updated during backward before the norm was known, and whose update was kept because
    nothing was clipped."""
    updates_called_off: int = 0
    """Number of units whose update during backward was called off and done again."""
    staleness: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """With asynchronous updates: unit -> how many steps its weights lagged, in this step (last) and so far (max,
    mean)."""

    @classmethod
    def of(cls, stats: "StepStats", **own: Any) -> "StepMetrics":
        """The figures of an optimizer's last step that have the same names here, together with `own`, the loop's
        figures."""
        said = {**asdict(stats), "faults": stats.faults, "hit_rate": stats.hit_rate, **own}
        return cls(**{field.name: said[field.name] for field in fields(cls)})


class MetricsFile:
    """Appends a line per step or evaluation. Any reader sees a line once `write` has returned.

    The file is created if it is missing. Lines after `after_step` are dropped: steps that an interrupted run did after
    the checkpoint from which it resumes, and a line that a crash has cut short.

    Raises StorageError if the file cannot be created. Later, lines that cannot be written (a full disk) are kept and
    tried again with the next ones.
    """

    def __init__(self, path: Path, after_step: int = 0, warn: Callable[[str], None] = _log.warning) -> None:
        """`warn` gets a sentence when writing fails for the first time, and when it succeeds again."""
        self._path, self._warn = path, warn
        self._unsynced, self._written = bytearray(), 0
        """Lines since the last sync that succeeded, and how many of their bytes are in the file."""
        self._in_doubt = False
        """Whether a sync has failed: the kernel may have dropped what is not on the disk, and say nothing more."""
        self._fails = False
        with storage_errors(f"{path} cannot be written"):
            before = _lines(path) if path.exists() else ()  # replaced, atomically, by what is kept
            write_durably(path, b"".join(line + b"\n" for line, metrics in before if metrics["step"] <= after_step))
            self._file = append_to(path)  # nothing is left to be written when it is closed
            self._synced = path.stat().st_size
            """Bytes of the file that are on the disk."""

    def write(self, metrics: Entry) -> None:
        """Appends one entry, after those that could not be written before."""
        self._unsynced += metrics.to_json().encode() + b"\n"
        with self._going_on():
            self._append()

    def sync(self) -> None:
        """Make every line survive a power loss. Called before a checkpoint of the same step."""
        with self._going_on():
            self._append()
            self._in_doubt = True
            os.fsync(self._file.fileno())
            self._all_is_on_disk(self._synced + self._written)

    def close(self) -> None:
        with self._going_on():
            try:
                self._append()
            finally:
                self._file.close()

    def _append(self) -> None:
        if self._in_doubt:  # the same lines, in a new file
            whole = read_regular(self._path, most_bytes=_MOST_BYTES)[: self._synced] + self._unsynced
            write_durably(self._path, whole)
            self._file.close()
            self._file = append_to(self._path)
            self._all_is_on_disk(len(whole))
        while self._written < len(self._unsynced):  # a raw file may take a part, as on a disk that is almost full
            self._written += self._file.write(bytes(self._unsynced[self._written :]))

    def _all_is_on_disk(self, nbytes: int) -> None:
        self._synced, self._written, self._in_doubt = nbytes, 0, False
        self._unsynced.clear()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Continue if the block fails to write. Warns when that begins, and when it ends."""
        why = ""
        try:
            yield
        except (OSError, StorageError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            why = f"{self._path} cannot be written: {reason}. The run continues and tries again after each step"
        if bool(why) != self._fails:
            self._fails = bool(why)
            self._warn(why or f"{self._path} can be written again, and lacks nothing")


def number(value: object) -> bool:
    """a number"""
    return type(value) in (int, float) and abs(cast(float, value)) <= _LARGEST  # not NaN, which is not below it


def number_or_null(value: object) -> bool:
    """a number or null"""
    return value is None or number(value)


def seconds(value: object) -> bool:
    """a positive number"""
    return number(value) and cast(float, value) > 0


_ANY: dict[str, Form] = {"step": int}
STEP_FORM: dict[str, Form] = {
    "step": int,
    "loss": number_or_null,
    "grad_norm": number_or_null,
    "lr": number_or_null,
    "step_s": seconds,
    "tokens_per_s": number,
    "stall_s": {str: number},
    "bytes_moved": {str: int},
    "peak_bytes": {str: int},
}
"""What readers need of the line of a step; see `memory.forms`."""
EVALUATION_FORM: dict[str, Form] = {
    "step": int,
    "loss": number_or_null,
    "perplexity": number_or_null,
    "bits_per_byte": number_or_null,
}
"""What readers need of the line of an evaluation."""


def read_metrics(path: Path, form: Mapping[str, Form] = _ANY) -> list[dict[str, Any]]:
    """The lines of a file, in order. Leaves out lines that are damaged or cut short by a crash, or lack what `form`
    needs. Empty if there is no file.

    Raises StorageError if the file cannot be read.
    """
    with storage_errors(f"{path} cannot be read"):
        return [metrics for _, metrics in _lines(path) if has_form(metrics, form)] if path.exists() else []


def read_evaluations(path: Path, data: str | None = None) -> list[dict[str, Any]]:
    """The lines of evaluations whose losses can be compared: those on the sequences `data`, or on those of the last
    line."""
    lines = read_metrics(path, EVALUATION_FORM)
    data = data or (lines[-1].get("data") if lines else None)
    return [line for line in lines if line.get("data") == data]


def has_form(found: Mapping[str, Any], form: Mapping[str, Form]) -> bool:
    """Whether the entries that `form` names are there and have their form."""
    try:
        check({key: found[key] for key in form if key in found}, dict(form))
    except FormError:
        return False
    return True


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every line that is a step, as bytes and decoded."""
    for line in read_regular(path, most_bytes=_MOST_BYTES).split(b"\n"):
        try:
            metrics = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(metrics, dict) and type(metrics.get("step")) is int:
            yield line, metrics


def finite(value: Any) -> Any:
    """`value` with every float that JSON cannot hold replaced by None."""
    if isinstance(value, Mapping):
        return {str(name): finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
