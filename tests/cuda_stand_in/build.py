"""Compiles the stand-in, once for each version of it, of torch and of Python."""

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("stand_in.cpp")
MODULE = "cuda_stand_in_native"


def compiler() -> str | None:
    """The C++ compiler of this machine, if it has one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def missing() -> str | None:
    """Why there can be no stand-in here, if so."""
    if compiler() is None:
        return "the stand-in for CUDA needs a C++ compiler"
    if (torch_root() / "lib" / "libtorch_cuda.so").exists():
        return "the stand-in for CUDA needs a torch that was built without CUDA"
    return None


def torch_root() -> Path:
    """Where torch lies, without importing it."""
    return Path(find_spec("torch").origin).parent


def build() -> Path:
    """The compiled library; it takes most of a minute when there is none yet. Raises CalledProcessError."""
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    made_for = f"{importlib.metadata.version('torch')} {sysconfig.get_config_var('SOABI')}"
    key = hashlib.sha256(SOURCE.read_bytes() + made_for.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"pagoda-{os.getuid()}-{key}" / f"{MODULE}.so"
    library.parent.mkdir(mode=0o700, exist_ok=True)
    assert library.parent.stat().st_uid == os.getuid(), "somebody else's directory"
    if library.exists():
        return library
    torch, python = torch_root(), sysconfig.get_path("include")
    includes = (torch / "include", torch / "include/torch/csrc/api/include", python)
    with tempfile.NamedTemporaryFile(dir=library.parent, suffix=".so", delete=False) as made:
        arguments = [
            *("-std=c++20", "-O1", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={MODULE}"),
            *(f"-isystem{path}" for path in includes),
            *(str(SOURCE), "-o", made.name, f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"),
            *("-ltorch_cpu", "-ltorch_python", "-lc10"),
        ]
        subprocess.run([compiler(), *arguments], check=True, capture_output=True, text=True)
    os.replace(made.name, library)  # whole or not at all: others may be building it too
    return library
