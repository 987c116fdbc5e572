"""Builds the wheel, installs `pagoda-train[train]` from it into a bare environment, and trains a tiny model there.

    python tests/nightly/installs.py                                          # the newest packages that it allows
    python tests/nightly/installs.py --oldest                                 # the oldest of each
    python tests/nightly/installs.py -c constraints.txt                       # those of `make`
    python tests/nightly/installs.py --python python3.13 torch==2.11.0 transformers==5.17.0

Packages come from where pip gets them. `.github/workflows/nightly.yml` has the combinations.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, EXTRA = "pagoda-train", "train"
WRITE = """
import json, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from text_files import chats, write_lines, write_pretrained

write_pretrained(Path("model"))
rows = [{"messages": messages} for messages in chats(60)]
write_lines(Path("chats.jsonl"), rows)
import datasets
datasets.Dataset.from_list(rows).to_parquet("chats.parquet")
"""
"""A model with a tokenizer, and conversations as JSON and as Parquet, made by the installed packages."""
TRAIN = "pagoda train --model model --precision fp32 --memory.host 600KiB --memory.ssd pages"
COMMANDS = (
    f"{TRAIN} --data chats.jsonl --max-steps 4 --output-dir runs/json",
    "pagoda train --resume-from-checkpoint last --output-dir runs/json --memory.ssd pages --max-steps 6",
    f"{TRAIN} --data chats.parquet --max-steps 2 --output-dir runs/parquet",
    "pagoda inspect runs/json --verify",
    "pagoda generate runs/json --prompt Hello --max-new-tokens 4",
    "pagoda export runs/json tuned",
)


def wheel(folder: Path, *flags: str) -> Path:
    """The wheel of this checkout, built in a folder by pip with these flags."""
    source = folder / "source"
    shutil.copytree(ROOT / "pagoda", source / "pagoda", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *flags, "-w", str(folder / "wheels"), str(source)])
    (built,) = (folder / "wheels").glob("pagoda_train-*.whl")
    return built


def oldest(built: Path) -> list[str]:
    """`NAME==VERSION` of the least version that the wheel allows of each package, its extra included."""
    with zipfile.ZipFile(built) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    required = re.findall(
        r"^Requires-Dist: ([\w-]+)(?:\[([\w,]+)\])?([^;\n]*)(?:; extra == \"(\w+)\")?$", metadata, re.M
    )
    extras = {"", EXTRA, *(within for name, within, _, extra in required if (name, extra) == (PACKAGE, EXTRA))}
    least = {name: re.search(r">=([\d.]+)", versions) for name, _, versions, extra in required if extra in extras}
    return [f"{name}=={version[1]}" for name, version in least.items() if version]


def run(command: list[str], folder: Path | None = None) -> str:
    """What a command prints. Ends the script, with its output, if it fails."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone["PATH"] = f"{Path(command[0]).parent}{os.pathsep}{alone['PATH']}"
    done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment")
    parser.add_argument("--wheel", type=Path, help="a wheel that has been built")
    parser.add_argument("-c", dest="constraints", type=Path, help="constraints for pip, as its -c takes them")
    parser.add_argument("--oldest", action="store_true", help="the oldest version of each package")
    parser.add_argument("pins", nargs="*", help="NAME==VERSION of packages, which replaces the oldest")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = arguments.wheel.resolve() if arguments.wheel else wheel(folder)
        names = zipfile.ZipFile(built).namelist()
        assert any(re.search(r"\.dist-info/licenses/LICENSE$", name) for name in names), "the wheel has its licence"
        pins = {pin.partition("==")[0]: pin for pin in [*(oldest(built) if arguments.oldest else ()), *arguments.pins]}
        run([arguments.python, "-m", "venv", str(folder / "venv")])
        binaries = folder / "venv" / "bin"
        python = str(binaries / "python")
        constraints = ["-c", str(arguments.constraints)] if arguments.constraints else []
        run([python, "-m", "pip", "install", "--quiet", f"{built}[{EXTRA}]", *pins.values(), *constraints])
        installed = json.loads(run([python, "-m", "pip", "list", "--format", "json"]))
        print(*(f"{package['name']}=={package['version']}" for package in installed))
        run([python, "-m", "pip", "check"])
        run([python, "-c", WRITE, str(ROOT / "tests")], folder)
        (folder / "pages").mkdir()
        for command in COMMANDS:
            print(f"$ {command}\n{run([str(binaries / 'pagoda'), *command.split()[1:]], folder)}")


if __name__ == "__main__":
    main()
