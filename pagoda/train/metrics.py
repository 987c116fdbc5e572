"""The figures of a run: metrics.jsonl has one line of JSON per optimizer step, and evals.jsonl one per evaluation.

No step appears twice, even if the run was interrupted.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from pagoda.memory.files import append_to, read_regular, storage_errors, write_durably
from pagoda.memory.json_forms import Form, FormError, check

_log = logging.getLogger("pagoda")
_MOST_BYTES = 1 << 34
"""More bytes than the lines of any run take."""
_LARGEST = 1e100
"""The largest number that readers accept: larger ones cannot be drawn or added up."""

Line = dict[str, Any]
"""A line of a file: key -> value in JSON's types. `step` is the number of steps that were done."""


class MetricsFile:
    """Appends lines to a file. Any reader sees a line once `write` has returned.

    The file is created if it is missing. Lines after `after_step` are dropped: steps that an interrupted run did after
    the checkpoint from which it resumes, and a line that a crash has cut short.

    Raises StorageError if the file cannot be created. Later, lines that cannot be written (a full disk) are kept and
    tried again with the next ones.
    """

    def __init__(self, path: Path, after_step: int = 0, warn: Callable[[str], None] = _log.warning) -> None:
        """`warn` gets a sentence when writing fails for the first time, and when it succeeds again."""
        self._path, self._warn = path, warn
        self._waiting, self._fails = bytearray(), False
        self._sync_due = False
        """Whether a sync was asked for and has failed."""
        with storage_errors(f"{path} cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            before = _lines(path) if path.exists() else ()  # replaced, atomically, by what is kept
            write_durably(path, b"".join(text + b"\n" for text, line in before if line["step"] <= after_step))
            self._file = append_to(path)

    def write(self, line: Line) -> None:
        """Append a line. A number that is not finite becomes null."""
        self._waiting += json.dumps(finite(line), allow_nan=False).encode() + b"\n"
        self.flush()

    def flush(self, *, sync: bool = False) -> None:
        """Write what is waiting. With `sync`, all lines survive a power loss. If that fails, the next flush syncs."""
        why = ""
        self._sync_due = self._sync_due or sync
        try:
            while self._waiting:  # the system may take a part, as on a disk that is almost full
                del self._waiting[: self._file.write(bytes(self._waiting))]
            if self._sync_due:
                self._sync()
                self._sync_due = False
        except OSError as error:
            why = f"{self._path} cannot be written: {error.strerror}. The run continues and tries again after each step"
        if bool(why) != self._fails:
            self._fails = bool(why)
            self._warn(why or f"{self._path} can be written again, and lacks nothing")

    def _sync(self) -> None:
        if not self._fails:
            os.fsync(self._file.fileno())
            return
        # What a sync has failed to write, a later sync may leave out. So the file is written anew.
        write_durably(self._path, read_regular(self._path, most_bytes=_MOST_BYTES))
        before, self._file = self._file, append_to(self._path)
        before.close()

    def close(self) -> None:
        self.flush()
        self._file.close()


def number(value: object) -> bool:
    """a number"""
    return type(value) in (int, float) and abs(cast(float, value)) <= _LARGEST  # not NaN, which is not below it


def number_or_null(value: object) -> bool:
    """a number or null"""
    return value is None or number(value)


_ANY: dict[str, Form] = {"step": int}
STEP_FORM = {"step": int, "loss": number_or_null, "step_s": number, "tokens_per_s": number, "peak_bytes": {str: int}}
"""What a report needs of the line of a step; see `memory.json_forms`."""
_EVALUATION_FORM = {"step": int, **dict.fromkeys(("loss", "perplexity", "bits_per_byte"), number_or_null)}


def read_metrics(path: Path, form: Mapping[str, Form] = _ANY) -> list[Line]:
    """The lines of a file, in order. Leaves out lines that are damaged or cut short by a crash, or lack what `form`
    needs. Empty if there is no file.

    Raises StorageError if the file cannot be read.
    """
    with storage_errors(f"{path} cannot be read"):
        return [line for _, line in _lines(path) if _has_form(line, form)] if path.exists() else []


def read_evaluations(path: Path, data: str | None = None) -> list[Line]:
    """The lines of evaluations whose losses can be compared: those on the sequences `data`, or on those of the last
    line."""
    lines = read_metrics(path, _EVALUATION_FORM)
    data = data or (lines[-1].get("data") if lines else None)
    return [line for line in lines if line.get("data") == data]


def _has_form(line: Line, form: Mapping[str, Form]) -> bool:
    try:
        check({key: line[key] for key in form if key in line}, dict(form))
    except FormError:
        return False
    return True


def _lines(path: Path) -> Iterator[tuple[bytes, Line]]:
    """Every line that has a step, as bytes and decoded."""
    for text in read_regular(path, most_bytes=_MOST_BYTES).split(b"\n"):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and type(line.get("step")) is int:
            yield text, line


def finite(value: Any) -> Any:
    """`value` with every float that JSON cannot hold replaced by None."""
    if isinstance(value, Mapping):
        return {str(name): finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
