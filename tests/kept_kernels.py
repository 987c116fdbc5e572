"""Compiled kernels outlive a checkout: those of another with the same source are not compiled again.

Numba keeps a kernel in `__pycache__` beside the source, and compiles it anew when that file has changed. But a kernel
has code of other files too, so here it is kept for all of them. It takes a minute or two to compile what tests use.
"""

import hashlib
import os
import shutil
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "pagoda"
FOLDERS = ("optim", "memory/ssd")
KEPT_VERSIONS = 4


def restore() -> Path:
    """Copy the kernels that are kept for this source to where Numba looks for them; returns where they are kept.
    Kernels that are older than the source are deleted."""
    sources = [PACKAGE / "jit.py", *(path for folder in FOLDERS for path in sorted((PACKAGE / folder).glob("*.py")))]
    changed_at = max(path.stat().st_mtime for path in sources)
    for index in _indices(PACKAGE):
        if index.stat().st_mtime < changed_at:
            index.unlink()
    version = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    kept = Path(os.environ["XDG_CACHE_HOME"], "kernels", version)
    _copy(kept, PACKAGE)
    return kept


def keep(kept: Path) -> None:
    """Keep this checkout's kernels where `restore` has said, unless the source has changed since; and forget the oldest
    of other sources."""
    if restore() != kept:
        return
    kept.mkdir(parents=True, exist_ok=True)
    _copy(PACKAGE, kept)
    os.utime(kept)  # used last
    versions = sorted(kept.parent.iterdir(), key=lambda version: version.stat().st_mtime)
    for version in versions[:-KEPT_VERSIONS]:
        shutil.rmtree(version, ignore_errors=True)


def _indices(root: Path) -> list[Path]:
    """Numba's index of each kernel."""
    return [index for folder in FOLDERS for index in (root / folder / "__pycache__").glob("*.nbi")]


def _copy(source: Path, to: Path) -> None:
    """Copy the kernels that are not there."""
    for index in _indices(source):
        target = to / index.parent.relative_to(source)
        if (target / index.name).exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        for file in (*index.parent.glob(f"{index.stem}.*.nbc"), index):  # what an index names is there before it
            copied = target / f"{file.name}.tmp.{os.getpid()}"
            shutil.copyfile(file, copied)
            os.replace(copied, target / file.name)
