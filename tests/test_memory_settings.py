"""`Memory(ssd=...)` with one directory or several: what is read from it, and that no drive changes a bit."""

from pathlib import Path

import pytest
import torch
from torch import nn

import pagoda
from pagoda.errors import BudgetError, ConfigError
from pagoda.plan.planner import Plan

GIB = 1 << 30


@pytest.mark.parametrize(
    ("ssd", "sizes"),
    [
        ("/a", [None]),
        ("/a:1GiB", [GIB]),
        ("/a,/b", [None, None]),
        ("/a:1GiB,/b:3GiB", [GIB, 3 * GIB]),
        ("/a,/b:1GiB", [GIB // 2, GIB // 2]),
        ("/a,/b,/c:1GiB", [340 * (1 << 20)] * 3),  # a third, in whole pages
    ],
)
def test_each_directory_has_its_size_or_a_share_of_that_of_all(ssd: str, sizes: list[int | None]) -> None:
    assert list(pagoda.Memory(ssd=ssd).ssd_directories.items()) == [
        (Path(f"/{name}"), size) for name, size in zip("abc", sizes, strict=False)
    ]


@pytest.mark.parametrize("ssd", ["{0}/a:1GiB,{0}/b", "{0}/a,{0}/a", "{0}/a,", "{0}/a:1GiB,{0}/b,{0}/c:1GiB"])
def test_directories_that_are_ambiguous_are_refused(ssd: str, tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"memory\.ssd is"):
        pagoda.Memory(ssd=ssd.format(tmp_path))


def trained(memory: pagoda.Memory) -> tuple[list[torch.Tensor], Plan]:
    """Weights after three clipped steps, and the plan."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=1e-2), memory=memory, max_grad_norm=1.0, precision="bf16")
    try:
        plan = pagoda.plan_of(model)
        for _ in range(3):
            model(torch.randn(4, 64, dtype=torch.bfloat16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [value.clone() for value in model.state_dict().values()], plan
    finally:
        optimizer.close()


def test_striping_over_drives_changes_no_bit(tmp_path: Path) -> None:
    drives = [tmp_path / name for name in "ab"]
    for drive in drives:
        drive.mkdir()
    common = {"page_size": "4KiB", "unit_limit": "16KiB"}
    resident, _ = trained(pagoda.Memory(host="64MiB", **common))
    for ssd in (f"{drives[0]}", f"{drives[0]},{drives[1]}:8MiB"):
        weights, plan = trained(pagoda.Memory(host="192KiB", ssd=ssd, **common))
        assert plan.bytes["ssd"]["exp_avg"] > 0
        assert all(torch.equal(a, b) for a, b in zip(resident, weights, strict=True))


def test_spare_pages_for_checkpoints_are_planned_where_they_fit_and_refused_where_asked_for(tmp_path: Path) -> None:
    def memory(ssd: int, kept: int | None = None) -> pagoda.Memory:
        sizes = {"host": "192KiB", "page_size": "4KiB", "unit_limit": "16KiB"}
        return pagoda.Memory(ssd=f"{tmp_path}:{ssd}", ssd_checkpoints=kept, **sizes)

    _, plan = trained(memory(GIB))
    lines = plan.bytes["ssd"]
    state = sum(nbytes for line, nbytes in lines.items() if line not in ("grad", "versions"))
    assert lines["versions"] == state  # one checkpoint
    least = sum(lines.values())
    assert trained(memory(least))[1].bytes["ssd"]["versions"] == state
    assert "versions" not in trained(memory(least - 1))[1].bytes["ssd"]
    assert trained(memory(GIB, kept=3))[1].bytes["ssd"]["versions"] == 3 * state
    assert "versions" not in trained(memory(GIB, kept=0))[1].bytes["ssd"]
    with pytest.raises(BudgetError, match=r"ssd needs at least .* lower memory.ssd_checkpoints") as caught:
        trained(memory(least, kept=2))
    trained(memory(caught.value.needed_bytes, kept=2))
    with pytest.raises(ConfigError, match="ssd_checkpoints"):
        memory(GIB, kept=-1)


def test_a_directory_may_be_a_path_and_must_be_a_directory(tmp_path: Path) -> None:
    assert pagoda.Memory(ssd=tmp_path).ssd_directories == {tmp_path: None}
    (tmp_path / "file").touch()
    with pytest.raises(pagoda.StorageError, match=r"file.*Not a directory"):
        trained(pagoda.Memory(ssd=tmp_path / "file"))
