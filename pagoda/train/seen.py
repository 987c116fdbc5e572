"""What was seen while data were read: formats, roles, keys that are ignored, and what was left out and why."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that chat templates know."""
_MOST_PLACES, _MOST_LISTED = 3, 24
_DIGITS = re.compile(r"\d+")


@dataclass(kw_only=True)
class Seen:
    """Counts of what was read, and of what was not, in JSON's types."""

    formats: Counter[str] = field(default_factory=Counter)
    """Columns that were read as a text or a conversation -> number of records."""
    roles: Counter[str] = field(default_factory=Counter)
    """Roles of messages, in the words of chat templates where there is one -> number of messages."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Keys with a value that nothing reads -> number of records. `messages[].KEY` is a key of messages."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Why records were left out -> number of records."""
    places: dict[str, list[str]] = field(default_factory=dict)
    """Reasons of `left_out` -> file and line of the first records."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Files that were left out, and why."""
    remarks: Counter[str] = field(default_factory=Counter)
    """What else a user should know about conversations -> how often it applies, which takes the place of `count`."""

    def leave_out(self, reason: object, where: str) -> None:
        """Count the record at `where` as left out. Reasons that differ in numbers alone are counted together."""
        text = str(reason).removeprefix(where).removeprefix(":").strip()
        shape = _DIGITS.sub("", text)
        text = next((known for known in self.left_out if _DIGITS.sub("", known) == shape), text)
        self.left_out[text] += 1
        places = self.places.setdefault(text, [])
        if len(places) < _MOST_PLACES:
            places.append(where)

    def lines(self) -> list[str]:
        """Messages about all of it."""
        unknown = sorted(self.roles.keys() - ROLES)
        warning = f". Unknown: {first(unknown)}; the loss does not count them" if unknown else ""
        counts = (
            ("Records", self.formats, ""),
            ("Roles", self.roles, warning),
            ("Keys that are ignored", self.ignored, ""),
        )
        lines = [f"{what}: {_counts(counter)}{more}" for what, counter, more in counts if counter]
        reasons = Counter(self.left_out).most_common()
        for reason, count in reasons[:_MOST_LISTED]:
            lines.append(f"Left out {many(count, 'record')}: {reason} ({first(self.places[reason], count)})")
        if rest := reasons[_MOST_LISTED:]:
            lines.append(f"Left out {many(sum(n for _, n in rest), 'record')} for {len(rest):,} other reasons")
        if self.skipped:
            files = [f"{path}: {reason}" for path, reason in self.skipped[:_MOST_PLACES]]
            lines.append(f"Left out {many(len(self.skipped), 'file')}: {first(files, len(self.skipped))}")
        return [*lines, *(remark.format(count=count) for remark, count in self.remarks.items())]


def _counts(counter: Mapping[str, int]) -> str:
    """Names with their counts, the most frequent ones first."""
    return first([f"{name} {count:,}" for name, count in Counter(counter).most_common()])


def first(some: Sequence[str], count: int = 0, between: str = "; ") -> str:
    """The first parts of a list, which has `count` parts, or as many as are given."""
    shown = some[:_MOST_LISTED]
    return between.join(shown) + f"{between}..." * (max(count, len(some)) > len(shown))


def many(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
