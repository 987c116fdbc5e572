"""Tensor files are safetensors files, written and read in pieces; what is not one is refused."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from pagoda.checkpoint import tensors
from pagoda.checkpoint.tensors import TensorFile, TensorSpec, TensorWriter
from pagoda.errors import CheckpointError
from pagoda.memory.arena import tensor_bytes

DTYPES = sorted(tensors.DTYPE_NAMES, key=str)
LIBRARY_READS = [dtype for dtype in DTYPES if dtype is not torch.float8_e8m0fnu]
"""The library writes the scales of MX formats, but has no torch dtype for them when it reads."""
in_a_folder = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def tensor_sets(draw: st.DrawFn, dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    """Tensors of every dtype and of 0 to 3 dimensions, some without elements; every bit pattern occurs."""
    names = draw(st.lists(st.text("aZ0._é/", min_size=1, max_size=8), max_size=6, unique=True))
    found = {}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    for name in names:
        dtype = draw(st.sampled_from(dtypes))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        numel = torch.Size(shape).numel()
        high = 2 if dtype is torch.bool else 256
        data = torch.randint(high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        found[name] = data.view(dtype).reshape(shape)
    return found


def specs_of(found: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_kind = a.dtype is b.dtype and a.shape == b.shape
    return same_kind and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def write(path: Path, found: dict[str, torch.Tensor]) -> Path:
    path.unlink(missing_ok=True)
    writer = TensorWriter(path, specs_of(found))
    for name, tensor in found.items():
        writer.write(name, 0, tensor_bytes(tensor))
    writer.close()
    return path


@in_a_folder
@given(tensor_sets(LIBRARY_READS), st.data())
def test_files_filled_in_any_order_are_read_by_the_safetensors_library(
    tmp_path: Path, found: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    path = tmp_path / "some.safetensors"
    path.unlink(missing_ok=True)
    writer = TensorWriter(path, specs_of(found))
    pieces = []
    for name, tensor in found.items():
        flat = tensor.reshape(-1)
        cut = data.draw(st.integers(0, flat.numel()))
        pieces += [(name, 0, flat[:cut]), (name, cut, flat[cut:])]
    for name, start, piece in data.draw(st.permutations(pieces)):
        writer.write(name, start, tensor_bytes(piece))
    writer.close()
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == found.keys()
    assert all(same_bits(loaded[name], tensor) for name, tensor in found.items())


def test_lengths_that_would_shift_other_tensors_off_the_drives_blocks_come_last(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    shapes = {"odd": (3,), "even": (256,), "longer": (1024,), "also_odd": (257,)}
    writer = TensorWriter(path, [TensorSpec(name, torch.bfloat16, shape) for name, shape in shapes.items()])
    writer.close()
    text = path.read_bytes()
    data = 8 + int.from_bytes(text[:8], "little")
    header = json.loads(text[8:data])
    assert data % 4096 == 0
    assert [name for name in header if name in shapes] == ["even", "longer", "odd", "also_odd"]
    assert header["odd"]["data_offsets"][0] == 2 * (256 + 1024)


@in_a_folder
@given(tensor_sets(DTYPES), st.data())
def test_files_of_the_safetensors_library_are_read_from_any_element_on(
    tmp_path: Path, found: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    path = tmp_path / "some.safetensors"
    safetensors.torch.save_file(found, path)
    file = TensorFile(path)
    assert {name: (spec.dtype, spec.shape) for name, spec in file.specs.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()
    }
    for name, tensor in found.items():
        start = data.draw(st.integers(0, tensor.numel()))
        count = data.draw(st.integers(0, tensor.numel() - start))
        assert same_bits(file.read(name, start, count), tensor.reshape(-1)[start : start + count])
    file.close()


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float4_e2m1fn_x2, torch.qint8], ids=str)
def test_a_dtype_that_the_format_lacks_is_refused_naming_the_tensor(dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=rf"'odd' is {dtype}, which a safetensors file cannot hold"):
        TensorSpec("odd", dtype, (1,))


def test_a_file_of_another_length_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "some.safetensors", {"a": torch.ones(4), "b": torch.ones(2, 3).bfloat16()})
    whole = path.read_bytes()
    for changed in (*(whole[:length] for length in (0, 7, 8, 99, 4095, 4096, len(whole) - 1)), whole + b"\0"):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"some\.safetensors is .*truncated"):
            TensorFile(path)


def test_a_file_that_is_missing_or_cut_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors cannot be read: No such file"):
        TensorFile(tmp_path / "none.safetensors")
    path = write(tmp_path / "some.safetensors", {"a": torch.zeros(1 << 20, dtype=torch.uint8)})
    file = TensorFile(path)
    os.truncate(path, 1 << 19)
    with pytest.raises(CheckpointError, match=r"some\.safetensors was truncated while 'a' was read"):
        file.read("a", 0, 1 << 20)
    file.close()


def test_a_disk_that_fails_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    failing = Path("/proc/self/mem")  # whose first pages give an input/output error
    with pytest.raises(CheckpointError, match=r"/proc/self/mem cannot be read: Input/output error"):
        TensorFile(failing)
    file = TensorFile(write(tmp_path / "some.safetensors", {"a": torch.zeros(1 << 20, dtype=torch.uint8)}))
    with failing.open("rb") as memory:
        os.dup2(memory.fileno(), file._file.fileno())
    with pytest.raises(CheckpointError, match=r"some\.safetensors cannot be read: Input/output error"):
        file.read("a", 0, 1 << 20)
    file.close()


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(16)


def entries(**found: object) -> bytes:
    return with_header(json.dumps(found).encode())


def entry(**changes: object) -> bytes:
    return entries(a={**GOOD, **changes})


GOOD = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
HALVES = {"dtype": "F32", "shape": [2]}

DAMAGED: dict[str, tuple[bytes, str]] = {
    "text": (with_header(b"{not json"), "has a damaged header"),
    "nested without end": (with_header(b"[" * 100_000), "has a damaged header"),
    "huge": ((1 << 60).to_bytes(8, "little") + b"{}", "is not a safetensors file"),
    "a list": (with_header(b"[1, 2]"), r"the header is \[1, 2\]"),
    "an entry that is no object": (entries(a=3), r"header\.a is 3"),
    "an entry without a dtype": (entries(a={"shape": [4], "data_offsets": [0, 16]}), r"header\.a lacks 'dtype'"),
    "an entry with more than there is": (entry(strides=[1]), r"header\.a has 'strides'"),
    "a dtype nobody knows": (entry(dtype="F7"), r"header\.a\.dtype is 'F7'"),
    "a shape below zero": (entry(shape=[-2, -2]), r"header\.a\.shape\[0\] is -2"),
    "offsets that are none": (entry(data_offsets=[]), r"header\.a\.data_offsets is \[\]"),
    "offsets that contradict the shape": (entry(data_offsets=[0, 8]), "puts 'a', torch.float32 of shape .4., at bytes"),
    "offsets beyond the file": (entry(shape=[8], data_offsets=[0, 32]), "truncated or damaged"),
    "tensors that overlap": (
        entries(a={**HALVES, "data_offsets": [0, 8]}, b={"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}),
        "puts 'b'.* at bytes 4 to 16.*ends at 8",
    ),
    "bytes that belong to nobody": (entries(a={**HALVES, "data_offsets": [8, 16]}), "puts 'a'.* at bytes 8.*ends at 0"),
    "bytes left over": (entries(a={**HALVES, "data_offsets": [0, 8]}), "truncated or damaged"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_header_is_refused_naming_file_and_tensor(tmp_path: Path, what: str) -> None:
    path = tmp_path / "some.safetensors"
    content, message = DAMAGED[what]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"some\.safetensors.*{message}"):
        TensorFile(path)


def test_tensors_may_lie_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    late, early = ({**HALVES, "data_offsets": [8, 16]}, {**HALVES, "data_offsets": [0, 8]})
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}
    path.write_bytes(entries(late=late, nothing=nothing, early=early)[:-16] + b"\0" * 8 + b"\1" * 8)
    file = TensorFile(path)
    assert file.read("early", 0, 2).tolist() == [0, 0]
    assert file.read("late", 0, 2).ne(0).all()
    assert file.read("nothing", 0, 0).numel() == 0
    file.close()


def test_a_piece_is_read_and_hashed_once_for_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export cuts merged experts into parts far smaller than a piece."""
    values = torch.arange(1000, dtype=torch.int16)
    path = write(tmp_path / "some.safetensors", {"a": values})
    pieces_of = [(300 * i, tensor_bytes(piece)) for i, piece in enumerate(values.split(300))]
    hashes = [(start, tensors.piece_hash(piece)) for start, piece in pieces_of]
    file = TensorFile(path, {"a": hashes})
    read, pieces = TensorFile._read, []

    def counted(self: TensorFile, name: str, start: int, count: int) -> torch.Tensor:
        pieces.append((start, count))
        return read(self, name, start, count)

    monkeypatch.setattr(TensorFile, "_read", counted)
    for start in range(0, 1000, 70):
        part = file.read("a", start, min(70, 1000 - start))
        assert torch.equal(part, values[start : start + 70])
        part.zero_()  # what is kept is not what was given
    assert pieces == [(0, 300), (300, 300), (600, 300), (900, 100)]
    file.close()
