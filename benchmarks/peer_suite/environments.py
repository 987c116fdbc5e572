"""Virtual environments of the peers, outside the one that runs the benchmark.

Each has its pinned packages. torch, transformers and what else they need are those of the interpreter that runs this:
so every system computes with the same ones, and nothing large is installed twice.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LONGEST_INSTALL_S = 1800


class InstallError(Exception):
    """A peer cannot be installed here; says why."""


@dataclass(frozen=True)
class Environment:
    """What a peer needs."""

    name: str
    pins: tuple[str, ...]
    """Packages and versions; nothing else is installed."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its processes."""
    prepare: str = ""
    """Python code that builds what the peer would otherwise build when it first trains."""

    def folder(self, cache: Path) -> Path:
        """Its place in a cache: another one for other versions and for another interpreter."""
        key = "\n".join((*self.pins, sys.version, _packages()))
        return cache.resolve() / f"{self.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    def process(self, cache: Path) -> tuple[str, dict[str, str]]:
        """(interpreter, environment variables) of its processes; installs it first unless that has been done.

        Raises InstallError.
        """
        folder = self.folder(cache)
        python = folder / "bin" / "python"
        extensions = folder / "extensions"
        path = os.pathsep.join((str(folder / "bin"), os.environ.get("PATH", os.defpath)))
        variables = {**self.variables, "TORCH_EXTENSIONS_DIR": str(extensions), "PATH": path}
        done = folder / "installed"
        for lock in extensions.glob("*/lock"):
            lock.unlink()  # of a build that was stopped: torch would wait for it
        if not done.exists() or done.read_text() != self.prepare:
            print(f"installing {', '.join(self.pins)} in {folder}", file=sys.stderr)
            _run([sys.executable, "-m", "venv", str(folder)])
            packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
            (Path(packages) / "shared.pth").write_text(_packages() + "\n")
            _run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *self.pins])
            if self.prepare:
                _run([str(python), "-c", self.prepare], variables)
            done.write_text(self.prepare)
        return str(python), variables


def _packages() -> str:
    return sysconfig.get_path("purelib")


def _run(command: list[str], variables: Mapping[str, str] | None = None) -> None:
    """Run one step of an installation; its last line of output is the reason if it fails."""
    environment = {**os.environ, **(variables or {})}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST_INSTALL_S,
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"installing took more than {LONGEST_INSTALL_S} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        raise InstallError(next((line for line in reversed(lines) if "rror" in line), (lines or ["no output"])[-1]))
