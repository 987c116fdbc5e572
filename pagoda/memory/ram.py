"""How much RAM this process may use: the machine's RAM, or the limit of its control groups if that is less. Files may
take some of it."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagoda.errors import ConfigError

_ROOT = Path("/")
_KINDS_IN_RAM = ("tmpfs", "ramfs", "devtmpfs")
_DRIVES_IN_RAM = ("/dev/ram", "/dev/zram")


@dataclass(frozen=True, slots=True)
class _Files:
    """The names of a control group's memory files. They differ between the two versions of control groups."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str
    """The line of `memory.stat` for the page cache that the kernel drops before it kills a process."""


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def free_ram(root: Path = _ROOT) -> int:
    """Bytes of RAM that this process can still use without swapping and without being killed.

    This is the minimum of the machine's available RAM and of what each control group of this process, and each ancestor
    group, leaves: its limit minus its usage. Reclaimable page cache does not count as usage. `root` is the directory
    that contains `/proc` and `/sys`.

    Raises ConfigError if the system does not say how much RAM is available.
    """
    return max(0, min([_available(root), *(limit - used for limit, used in _limits(root))]))


def ram_bytes(root: Path = _ROOT) -> int:
    """Bytes of RAM that this process could use if nothing else ran: the machine's RAM, or the smallest limit if that is
    less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for limit, _ in _limits(root))])


def resident_bytes(peak: bool = False, root: Path = _ROOT) -> int | None:
    """Bytes of RAM that this process holds now, or at its `peak` since `restart_peak`. None if the system does not
    tell."""
    name = "VmHWM:" if peak else "VmRSS:"
    found = (line.split() for line in _lines(root / "proc/self/status") if line.startswith(name))
    return next((int(line[1]) * 1024 for line in found), None)


def restart_peak(root: Path = _ROOT) -> bool:
    """Count the peak of `resident_bytes` from now on. Returns False if the system does not let this process."""
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def filesystem_in_ram(path: Path, root: Path = _ROOT) -> str | None:
    """The type of the filesystem of a path if its files take RAM, such as "tmpfs". None for any other filesystem."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        kind, source = filesystem.split(" ", 2)[:2]
        if mount.split()[2] == number and (kind in _KINDS_IN_RAM or source.startswith(_DRIVES_IN_RAM)):
            return kind
    return None


def _available(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("Cannot find out how much RAM is free on this system: set memory.host.")


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of each control group of this process that has a limit, including ancestors."""
    for group, files in _groups(root):
        limits = [int(text) for name in files.limits for text in _lines(group / name) if text.isdigit()]
        usage = [int(text) for text in _lines(group / files.usage) if text.isdigit()]
        if limits:
            lines = (line.split() for line in _lines(group / "memory.stat"))
            cache = sum(int(line[1]) for line in lines if line[0] == files.reclaimable)
            yield min(limits), max(0, sum(usage) - cache)


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The directories of this process's control groups and of all their visible ancestors."""
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
        # A container may see only its own group, mounted as if it were the root. The path is then not below the mount.
        below = path.removeprefix(top).split("/") if f"{path}/".startswith(f"{top}/") else []
        group = root / point.lstrip("/")
        yield group, files
        for name in below:
            if name in ("", ".."):
                continue
            group /= name
            yield group, files


def _unescaped(field: str) -> str:
    """A path of `mountinfo`, in which blanks are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _lines(path: Path) -> list[str]:
    """The lines of a file without surrounding blanks. Empty if it cannot be read."""
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        return []
