"""Parsing and formatting of byte counts, and formatting of rates."""

import os
import re
from fractions import Fraction

from pagoda.errors import ConfigError

_PREFIXES = ("K", "M", "G", "T", "P")
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate(_PREFIXES, 1)}
_UNITS |= {prefix: 1024**power for power, prefix in enumerate(_PREFIXES, 1)}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate(_PREFIXES, 1)}

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str | int, what: str = "size") -> int:
    """The number of bytes in `text`: "20GiB", "20G" (the same, as in Slurm and Docker), "512 MiB", "1.5GB" (decimal),
    "4096" or an int, in any case.

    A fraction of a byte is dropped. `what` names the setting in the error. Raises ConfigError if the text is not a
    size, its unit is unknown, or it is below one byte.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ConfigError(f"{what}: {text!r} is not a size; write bytes as an int or text such as '20GiB'")
    if isinstance(text, int):
        nbytes = text
    else:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{what}: {text!r} is not a size; write for example '20GiB', '1.5GB' or '4096'")
        number, unit = match.groups()
        if unit.upper() not in _UNITS:
            raise ConfigError(
                f"{what}: {text!r} has the unknown unit {unit!r}; use B, "
                f"{', '.join(p + 'iB' for p in _PREFIXES)} or {', '.join(_PREFIXES)} (powers of 1024) or "
                f"{', '.join(p + 'B' for p in _PREFIXES)} (powers of 1000)"
            )
        nbytes = int(Fraction(number) * _UNITS[unit.upper()])
    if nbytes < 1:
        raise ConfigError(f"{what}: {text!r} is {nbytes} bytes; it must be at least 1 byte")
    return nbytes


def format_bytes(n: int) -> str:
    """`n` bytes in the largest binary unit that keeps the number below 1024: "512 B", "1.50 GiB"."""
    if abs(n) < 1024:
        return f"{n} B"
    value = float(n)
    for prefix in _PREFIXES:
        value /= 1024
        # Compare what will be shown: 1 MiB minus one byte is "1.00 MiB", not "1024.00 KiB".
        if round(abs(value), 2) < 1024 or prefix == _PREFIXES[-1]:
            return f"{value:.2f} {prefix}iB"
    raise AssertionError("unreachable: the last prefix always returns")


def format_at_least(n: int) -> str:
    """`n` bytes rounded up, in the format of `format_bytes`, for needed sizes: parsing the text gives at least `n`."""
    if n < 1024:
        return f"{n} B"
    power = min((n.bit_length() - 1) // 10, len(_PREFIXES))
    whole, hundredths = divmod(-(-n * 100 // 1024**power), 100)
    return f"{whole}.{hundredths:02d} {_PREFIXES[power - 1]}iB"


def format_rate(rate: float) -> str:
    """A number per second with three digits or more: "0.82", "12.3", "1,234"."""
    places = 0 if rate >= 99.95 else 1 if rate >= 9.995 else 2
    return f"{rate:,.{places}f}"


def directory_and_size(text: str) -> tuple[str, str]:
    """The parts of "DIR:SIZE". The size is empty if it is missing."""
    directory, colon, size = text.rpartition(":")
    if not colon or os.sep in size:
        return text, ""
    return directory, size
