"""Free RAM is what the machine has available, or what this process's control groups leave if that is less."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import nn

import pagoda
from pagoda.budgets import budgets_of
from pagoda.memory.ram import filesystem_in_ram, free_ram, ram_bytes

MIB = 1 << 20
UNLIMITED = 9223372036854771712
"""What version 1 shows for no limit."""
V2_MOUNT = "31 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"


def write(root: Path, files: Mapping[str, str]) -> Path:
    """A tree of files that stands in for `/`; a machine with 64 GiB available unless the files say more."""
    for name, text in {"proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 67108864 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(group: str, *, limit: str = "max", high: str = "max", used: int = 0, cache: int = 0) -> dict[str, str]:
    """The files of a group of version 2, in MiB; `cache` is page cache that can be reclaimed."""
    return {
        f"{group}/memory.max": limit if limit == "max" else f"{int(limit) * MIB}\n",
        f"{group}/memory.high": high if high == "max" else f"{int(high) * MIB}\n",
        f"{group}/memory.current": f"{used * MIB}\n",
        f"{group}/memory.stat": f"anon 4096\nfile {9 * cache * MIB}\ninactive_file {cache * MIB}\nactive_file 4096\n",
    }


def v1(group: str, *, limit: int, used: int = 0, cache: int = 0) -> dict[str, str]:
    return {
        f"{group}/memory.limit_in_bytes": f"{limit}\n",
        f"{group}/memory.usage_in_bytes": f"{used * MIB}\n",
        f"{group}/memory.stat": f"cache 4096\ninactive_file 1\ntotal_inactive_file {cache * MIB}\n",
    }


def test_without_groups_it_is_what_the_machine_has_available(tmp_path: Path) -> None:
    assert free_ram(write(tmp_path, {})) == 64 << 30


def test_a_system_that_does_not_say_is_refused_naming_the_setting(tmp_path: Path) -> None:
    with pytest.raises(pagoda.ConfigError, match=r"set memory\.host"):
        free_ram(tmp_path)


@pytest.mark.parametrize(
    ("groups", "free"),
    [
        (v2("a/b", limit="2048"), 2048),
        (v2("a/b", limit="2048", used=1000), 1048),
        (v2("a/b", limit="2048", used=1000, cache=600), 1648),
        (v2("a/b", limit="2048", high="1024", used=1000), 24),
        (v2("a/b", limit="2048", used=2049), 0),
        (v2("a/b") | v2("a", limit="512", used=12), 500),
        (v2("a/b", limit="400") | v2("a", limit="512", used=500), 12),
        (v2("a/b", limit="max") | v2("a/c", limit="1"), 64 << 10),
    ],
)
def test_every_group_of_version_2_and_its_ancestors_count(tmp_path: Path, groups: Mapping[str, str], free: int) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in groups.items()}
    root = write(tmp_path, {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": f"{V2_MOUNT}\n", **files})
    assert free_ram(root) == free * MIB


def test_a_group_of_version_1_counts(tmp_path: Path) -> None:
    cgroup = "9:name=systemd:/x\n4:cpu,memory:/jobs/one\n1:cpuset:/y\n0::/\n"
    groups = (
        v1("jobs/one", limit=UNLIMITED) | v1("jobs", limit=2048 * MIB, used=1000, cache=500) | v1(".", limit=1 << 50)
    )
    files = {f"sys/fs/cgroup/memory/{name}": text for name, text in groups.items()}
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    root = write(tmp_path, {"proc/self/cgroup": cgroup, "proc/self/mountinfo": f"{V1_MOUNT}\n{unified}\n", **files})
    assert free_ram(root) == 1548 * MIB


@pytest.mark.parametrize(
    ("path", "top"),
    [("/", "/"), ("/docker/abc", "/docker/abc"), ("/docker/abc", "/"), ("/../..", "/"), ("/docker/abc", "/docker/ab")],
)
def test_a_container_that_sees_its_own_group_as_the_top_is_found(tmp_path: Path, path: str, top: str) -> None:
    files = {f"my groups/{name}": text for name, text in v2(".", limit="300", used=100).items()}
    mount = rf"31 23 0:26 {top} /my\040groups rw - cgroup2 cgroup2 rw"
    root = write(tmp_path, {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": f"{mount}\n", **files})
    assert free_ram(root) == 200 * MIB


def test_all_ram_is_that_of_the_machine_or_of_the_smallest_limit(tmp_path: Path) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in (v2("a", limit="5", used=3) | v2("a/b")).items()}
    root = write(tmp_path, {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": f"{V2_MOUNT}\n", **files})
    assert ram_bytes(root) == 5 * MIB
    assert ram_bytes(tmp_path / "nothing") > 64 * MIB


def test_every_budget_that_is_left_open_counts_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.memory.ram._limits", lambda root: iter([(900 * MIB, 800 * MIB)]))
    assert budgets_of(pagoda.Memory()).host == 80 * MIB
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model, optimizer = pagoda.wrap(
        model, pagoda.AdamW(), memory=pagoda.Memory(host="20MiB"), activations="auto", precision="bf16"
    )
    limit = pagoda.plan_of(model).options.activation_bytes
    optimizer.close()
    assert 0 < limit <= 100 * MIB


@pytest.mark.parametrize(
    ("kind", "in_ram"),
    [("tmpfs tmpfs", True), ("ramfs none", True), ("ext4 /dev/zram0", True), ("ext4 /dev/vda", False)],
)
def test_a_directory_for_the_ssd_tier_that_is_in_ram_is_named(
    kind: str, in_ram: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = f"30 1 {os.major(device)}:{os.minor(device)} / /mnt rw,nosuid shared:3 - {kind} rw\n"
    root = write(tmp_path, {"proc/self/mountinfo": f"{V2_MOUNT}\n{mounts}"})
    monkeypatch.setattr("pagoda.budgets.filesystem_in_ram", lambda path: filesystem_in_ram(path, root))
    memory = pagoda.Memory(host="64MiB", ssd=tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        budgets_of(memory)
    assert [f"'{tmp_path}' is in RAM" in str(warning.message) for warning in told] == [True] * in_ram
