"""Runs test suites of transformers, PEFT, TRL and Accelerate with Pagoda's classes in place of their own.

    python tests/nightly/peers.py accelerate peft   # all suites without a name

Each suite runs twice: as it is, and with `peers_plugin.py`. Tests that pass as they are must pass with Pagoda, except
those in `peers_differences.yaml`, which must not. Sources are those of the installed versions, from pip or the tag of
the repository, in `~/.cache/pagoda-peers`, or in a directory that PAGODA_PEERS names, as `NAME-VERSION/tests`. Its
directory `hub` may have stand-ins for what suites read from the Hub, such as `hub/trl-internal-testing/zen`.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class UnavailableError(Exception):
    """The sources of a suite cannot be had."""


@dataclass(frozen=True)
class Suite:
    """Test files of a package. `select` is what pytest's `-k` takes, and `needs` what they import besides."""

    files: tuple[str, ...]
    select: str = ""
    needs: tuple[str, ...] = ("parameterized",)


SUITES = {
    "transformers": Suite(
        tuple(
            f"trainer/test_trainer{part}.py"
            for part in ("", "_callback", "_checkpointing", "_data", "_evaluation", "_optimizers", "_seq2seq")
        )
    ),
    "peft": Suite(
        ("test_custom_models.py",),
        "only_params_are_updated or parameters_after_loading_model or disable_adapters_with_merging or training_works "
        "or (test_disable_adapters and not exiting)",
        ("diffusers", "importlib_metadata", "zipp", "pillow"),
    ),
    "trl": Suite(
        tuple(f"test_{name}_trainer.py" for name in ("sft", "dpo", "kto", "reward", "grpo")),
        "not Slow and not vlm and not liger and not vllm and not Chunked",
    ),
    "accelerate": Suite(
        tuple(f"test_{name}.py" for name in ("optimizer", "scheduler", "state_checkpointing", "accelerator")),
        "not multiprocess and not test_accumulation",
    ),
}
"""PEFT's tests that train. TRL's that need neither images nor a GPU. Accelerate's without several ranks: those that its
`debug_launcher` forks lose a connection in `wrap` and wait for ever."""


def cache() -> Path:
    return Path(os.environ.get("PAGODA_PEERS", Path.home() / ".cache" / "pagoda-peers")).expanduser()


def sources(name: str) -> Path:
    """The directory with the sources of the installed version. Raises UnavailableError if they cannot be had."""
    version, suite = metadata.version(name), SUITES[name]
    folder = cache() / f"{name}-{version}"
    if not _has(folder, suite):
        if folder.exists():
            raise UnavailableError(f"{folder} has no tests of {name}: move it, and its sources are brought here")
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as scratch:
            found = _from_pip(name, version, Path(scratch))
            if not _has(found, suite):
                found = Path(scratch, "repository")
                url = f"https://github.com/huggingface/{name}"
                _run("git", "clone", "--quiet", "--depth", "1", "--branch", f"v{version}", url, str(found))
            found.rename(folder)
    (folder / "tests" / "__init__.py").touch()
    missing = [need for need in suite.needs if not [*(site := cache() / "site").glob(f"{need.replace('-', '_')}-*")]]
    if missing:
        _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), *missing)
    return folder


def _has(folder: Path, suite: Suite) -> bool:
    return any((folder / "tests" / file).exists() for file in suite.files)


def _from_pip(name: str, version: str, into: Path) -> Path:
    """The directory with the source distribution."""
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation")
    _run(*pip, "--no-binary", ":all:", "-d", str(into), f"{name}=={version}")
    (archive,) = into.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(into, filter="data")
    return into / archive.name.removesuffix(".tar.gz")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def outcomes(name: str, ours: bool) -> dict[str, dict[str, Any]]:
    """The outcome of each test: of the suite as it is, or with our classes."""
    folder, suite = sources(name), SUITES[name]
    hub = cache() / "hub"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", cache() / "site")))}
    environment |= {"HF_HUB_OFFLINE": "1"} if hub.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch, "outcomes")
        for file in suite.files:  # a file that cannot be imported must not end the others
            if not (folder / "tests" / file).exists():
                continue
            command = [sys.executable, "-m", "pytest", "-q", str(folder / "tests" / file), "--rootdir", str(folder)]
            command += ["-c", os.devnull, "--timeout", "120", "-k", suite.select, "-W", "ignore"]
            command += [
                "-p",
                "no:cacheprovider",
                "-p",
                "nightly.peers_plugin",
                "--peer",
                name,
                "--outcomes",
                str(found),
            ]
            subprocess.run(
                command + ["--ours"] * ours,
                cwd=hub if hub.exists() else scratch,
                env=environment,
                stdout=subprocess.DEVNULL,
                check=False,
            )
        lines = found.read_text().splitlines() if found.exists() else ()
    return {each["test"].partition("tests/")[2] or each["test"]: each for each in map(json.loads, lines)}


def is_listed(name: str, test: str) -> bool:
    """Whether a test is listed as one that passes without Pagoda alone."""
    listed = yaml.safe_load((HERE / "peers_differences.yaml").read_text()).get(name) or ()

    def among(patterns: Iterable[str]) -> bool:
        return any(fnmatchcase(test, pattern.replace("[", "[[]")) for pattern in patterns)

    return any(among(each["tests"]) and not among(each.get("except", ())) for each in listed)


def compared(name: str) -> tuple[int, int, list[str]]:
    """The number of tests that pass as they are, how many of these pass with Pagoda, and what is not as listed."""
    stock, ours = outcomes(name, ours=False), outcomes(name, ours=True)
    passing = [test for test, each in stock.items() if each["outcome"] == "passed"]
    kept, wrong = 0, []
    for test in passing:
        mine = ours.get(test, {"outcome": "missing", "why": "it did not run"})
        listed, passed = is_listed(name, test), mine["outcome"] == "passed"
        kept += passed
        if passed and listed:
            wrong.append(f"{test} passes, and is listed as a difference")
        elif not passed and not listed:
            wrong.append(f"{test}: {mine['outcome']}: {mine['why']}")
    return len(passing), kept, wrong


def main() -> None:
    unlike = 0
    for name in sys.argv[1:] or SUITES:
        count, kept, wrong = compared(name)
        unlike += len(wrong)
        print(f"{name} {metadata.version(name)}: {kept} of {count}", *wrong, sep="\n  ", flush=True)
    raise SystemExit(unlike > 0)


if __name__ == "__main__":
    main()
