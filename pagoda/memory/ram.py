"""How much RAM this process may use: what the machine has, or what its control groups allow if that is less."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagoda.errors import ConfigError

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a control group that speak of memory; the two versions of control groups name them differently."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str
    """The line of `memory.stat` with the page cache that the kernel drops before it kills a process."""


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def free_ram(root: Path = _ROOT) -> int:
    """Bytes of RAM that this process can take from now on without swapping and without being killed.

    This is the least of what the machine has available and what each control group of this process, and each of their
    ancestors, leaves: its limit less its usage. Page cache that can be reclaimed is not usage. `root` is the directory
    that holds `/proc` and `/sys`.

    Raises ConfigError if the system does not say how much RAM is available.
    """
    return max(0, min([_available(root), *(limit - used for limit, used in _limits(root))]))


def ram_bytes(root: Path = _ROOT) -> int:
    """Bytes of RAM that this process could have if nothing else ran: those of the machine, or of the smallest limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for limit, _ in _limits(root))])


def _available(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("This system does not say how much RAM is free: set memory.host.")


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of each control group above this process that has a limit."""
    for group, files in _groups(root):
        limits = [int(text) for name in files.limits for text in _lines(group / name) if text.isdigit()]
        usage = [int(text) for text in _lines(group / files.usage) if text.isdigit()]
        if limits:
            lines = (line.split() for line in _lines(group / "memory.stat"))
            cache = sum(int(line[1]) for line in lines if line[0] == files.reclaimable)
            yield min(limits), max(0, sum(usage) - cache)


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The directories of this process's control groups and of all their ancestors that can be seen from here."""
    paths: dict[_Files, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[_V2] = path
        elif "memory" in controllers.split(","):
            paths[_V1] = path
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        files = _V2 if kind == "cgroup2" else _V1 if kind == "cgroup" and "memory" in options.split(",") else None
        if files is None or files not in paths:
            continue
        top, point = (_unescaped(field).rstrip("/") for field in mount.split()[3:5])
        path = paths[files]
        # A container may see its own group alone, mounted as if it were the top: then the path is not below the mount.
        below = path.removeprefix(top).split("/") if f"{path}/".startswith(f"{top}/") else []
        group = root / point.lstrip("/")
        yield group, files
        for name in below:
            if name in ("", ".."):
                continue
            group /= name
            yield group, files


def _unescaped(field: str) -> str:
    """A path of `mountinfo`, where blanks are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _lines(path: Path) -> list[str]:
    """The lines of a file, without blanks around them; none where it cannot be read."""
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        return []
