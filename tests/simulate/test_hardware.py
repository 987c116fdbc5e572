"""Every figure of a machine is positive and sourced, and a hardware file reads back as it was written."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagoda.errors import ConfigError
from pagoda.plan.lanes import LARGE_TRANSFER_BYTES
from pagoda.simulate.hardware import Drive, Figure, Hardware, MatmulRate, SmallTransfers, read_hardware
from pagoda.simulate.machines import MACHINES, UPDATE_BYTES, find_machine
from tests.forecast.machines import SMALL

from .figures import walk


@pytest.mark.parametrize("name", MACHINES)
def test_every_figure_is_positive_sourced_not_claimed_as_measured_and_consistent_with_others(name: str) -> None:
    machine = MACHINES[name]
    assert machine.name == name
    for field, figure in walk(machine):
        assert figure.value > 0, field
        assert len(figure.source) > 8, field
        assert figure.spread == 0, field
    for rate in (machine.device.bf16, machine.device.fp32):
        assert rate.reached_flop_per_s.value <= rate.peak_flop_per_s.value
    assert machine.device.fp32.peak_flop_per_s.value < machine.device.bf16.peak_flop_per_s.value
    for part in (machine.device, machine.cpu):
        assert part.update_params_per_s.value * UPDATE_BYTES < part.memory_bytes_per_s.value
    link = machine.link
    one_way = (link.h2d_bytes_per_s.value, link.d2h_bytes_per_s.value)
    assert max(one_way) <= link.both_bytes_per_s.value <= sum(one_way)
    if machine.ssd is not None:
        one_way = (machine.ssd.read_bytes_per_s.value, machine.ssd.write_bytes_per_s.value)
        assert min(one_way) * 0.999 <= machine.ssd.both_bytes_per_s.value <= sum(one_way)
        assert machine.ssd.endurance_bytes.value > machine.ssd.capacity_bytes.value


@pytest.mark.parametrize(("count", "sharing"), [(1, 1), (4, 1), (5, 2), (16, 4)])
def test_fewer_gpus_spread_over_the_links(count: int, sharing: int) -> None:
    node = MACHINES["v100-32gx16"].with_gpus(count)
    assert (node.gpus_per_node, node.link.gpus) == (count, sharing)
    assert node.cpu == MACHINES["v100-32gx16"].cpu


def test_fewer_gpus_use_fewer_rails() -> None:
    node, whole = MACHINES["h100x8"].with_gpus(2), MACHINES["h100x8"].inter_node_bytes_per_s
    assert (node.rails, node.inter_node_bytes_per_s.value) == (2, whole.value / 4)
    assert MACHINES["a100-40gx8"].with_gpus(2).inter_node_bytes_per_s == MACHINES["a100-40gx8"].inter_node_bytes_per_s


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_has_as_many_gpus_as_its_name_says_and_otherwise_one(name: str) -> None:
    said = re.search(r"gx(\d+)(-|$)|00x(\d+)$", name)
    machine = MACHINES[name]
    assert machine.gpus_per_node == (int(said[1] or said[3]) if said else 1)
    if said is None and (node := MACHINES.get(f"{name}x8")) is not None:
        assert machine.device == node.device
        assert machine.cpu.memory_bytes.value < node.cpu.memory_bytes.value


@pytest.mark.parametrize(("nodes", "joined"), [(1, 1), (16, 16), (18, 18), (32, 16), (19, 1), (54, 18), (1024, 16)])
def test_nodes_are_spread_evenly_over_domains(nodes: int, joined: int) -> None:
    assert MACHINES["gb200x4"].nodes_joined(nodes) == joined
    assert MACHINES["b200x8"].nodes_joined(nodes) == 1


def test_gpus_reach_the_same_share_of_their_peak_unless_a_source_says_another() -> None:
    for machine in MACHINES.values():
        rate = machine.device.bf16
        if rate.reached_flop_per_s.source.startswith("assumed"):
            share = rate.reached_flop_per_s.value / rate.peak_flop_per_s.value
            assert share == pytest.approx(0.6, abs=0.006), machine.name


def test_an_unknown_machine_lists_the_names_and_the_closest() -> None:
    assert find_machine("h100") is MACHINES["h100"]
    with pytest.raises(ConfigError, match=r"Did you mean 'a100-80g'\?.*rtx4090"):
        find_machine("a100-80")


def test_what_computes_is_the_gpu_else_the_cpu() -> None:
    h100 = MACHINES["h100"]
    assert h100.matmul("bf16") == h100.device.bf16
    rate = MatmulRate(Figure(2e11, "measured"), Figure(1e11, "measured"))
    laptop = Hardware("laptop", replace(h100.cpu, fp32=rate))
    assert laptop.matmul("fp32") == rate
    with pytest.raises(ConfigError, match="no bf16 rate"):
        laptop.matmul("bf16")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ((0.0, "datasheet"), "above zero"),
        ((float("inf"), "datasheet"), "above zero"),
        ((1.0, " "), "where it comes from"),
        ((1.0, "measured", -0.1), "spread"),
    ],
)
def test_a_figure_that_is_no_rate_or_has_no_source_is_refused(given: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Figure(*given)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    h100 = MACHINES["h100x8"]
    with pytest.raises(ConfigError, match="needs a link"):
        replace(h100, link=None)
    with pytest.raises(ConfigError, match="intra_node_bytes_per_s"):
        replace(h100, intra_node_bytes_per_s=None)
    with pytest.raises(ConfigError, match="at least one"):
        replace(h100, gpus_per_node=0)
    with pytest.raises(ConfigError, match="nodes_per_domain"):
        replace(h100, nodes_per_domain=0)
    with pytest.raises(ConfigError, match="rails"):
        replace(h100, rails=9)
    with pytest.raises(ConfigError, match="oversubscription"):
        replace(h100, oversubscription=0.5)
    with pytest.raises(ConfigError, match="give rails"):
        replace(h100, rails=1, oversubscription=2.0)
    assert replace(h100, oversubscription=2.0).with_gpus(1).oversubscription == 1
    with pytest.raises(ConfigError, match="at least one core"):
        replace(h100.cpu, cores=0)


@pytest.mark.parametrize("machine", [*MACHINES.values(), SMALL], ids=lambda machine: machine.name)
def test_any_machine_survives_its_file(machine: Hardware) -> None:
    assert Hardware.from_json(machine.to_json()) == machine


def damaged(**changes: Any) -> str:
    """The file of a machine with entries replaced, by dotted path; `...` removes one."""
    data = json.loads(MACHINES["h100"].to_json())
    for path, value in changes.items():
        *parents, last = path.split(".")
        entry = data
        for parent in parents:
            entry = entry[parent]
        if value is ...:
            del entry[last]
        else:
            entry[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Expecting value"),
        ("[]", "not JSON with"),
        (damaged(version=1), "version 1; this Pagoda reads version 5"),
        (damaged(hardware=3), "it has 3, which is not an object with the settings of Hardware"),
        (damaged(**{"hardware.cpu": ...}), "incomplete: it lacks cpu"),
        (damaged(**{"hardware.tpu": 1}), "unknown settings: 'tpu'"),
        (damaged(**{"hardware.name": 4}), "name as 4"),
        (damaged(**{"hardware.gpus_per_node": True}), "gpus_per_node as True"),
        (damaged(**{"hardware.cpu.memory_bytes.value": "2 TB"}), r"cpu\.memory_bytes\.value as '2 TB'"),
        (damaged(**{"hardware.cpu.memory_bytes.value": -1}), "a figure must be above zero"),
        (damaged(**{"hardware.cpu.memory_bytes.value": 10**400}), r"cpu\.memory_bytes\.value as"),
        (damaged(**{"hardware.link": None}), "hardware 'h100': a device needs a link"),
    ],
)
def test_a_bad_file_is_refused_naming_the_file_and_the_entry(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_hardware(path)
    assert str(path) in str(caught.value)
    assert "pagoda calibrate" in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff")
    for name in ("missing", "latin"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_hardware(tmp_path / name)


@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 17, 1 << 20, 1 << 22, 1 << 23])
def test_a_drive_costs_in_transfers_of_a_size_what_lies_between_the_two_that_were_measured(nbytes: int) -> None:
    def fig(value: float) -> Figure:
        return Figure(value, "a test")

    few = SmallTransfers(1 << 17, *map(fig, (1e9, 2e9, 1.5e9, 0.4, 0.5e9)))
    drive = Drive(*map(fig, (1e12, 3e9, 6e9, 4e9, 1e15, 0.1, 2e9)), few)
    found = drive.in_transfers_of(nbytes)
    if nbytes >= LARGE_TRANSFER_BYTES:
        assert found == drive
        return
    for name in ("read_bytes_per_s", "write_bytes_per_s", "both_bytes_per_s", "beside_bytes_per_s"):
        slow, fast = getattr(few, name).value, getattr(drive, name).value
        takes = nbytes / getattr(found, name).value
        assert (
            max(nbytes / fast, min(nbytes, few.nbytes) / slow) * (1 - 1e-9) <= takes <= max(nbytes, few.nbytes) / slow
        )
    assert 0.1 < found.cpu_share.value <= 0.4 + 1e-9


@pytest.mark.parametrize(
    ("name", "node", "gpus_of_a_link"),
    [
        ("h100x4", "h100x8", 1),
        ("v100-32gx12", "v100-32gx16", 3),
        ("gb200x2", "gb200x4", 1),
        ("rtx4090x3", "rtx4090", 3),
    ],
)
def test_a_name_may_ask_for_any_number_of_gpus(name: str, node: str, gpus_of_a_link: int) -> None:
    machine = find_machine(name)
    assert (machine.name, machine.gpus_per_node) == (name, int(name.rpartition("x")[2]))
    assert machine.cpu == MACHINES[node].cpu
    assert machine.link is not None
    assert machine.link.gpus == gpus_of_a_link
    assert find_machine("h100x1") == MACHINES["h100"]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("h100x9", "use h100x8 with --nodes"), ("h100x0", "unknown hardware"), ("rtx9090", "Did you mean 'rtx")],
)
def test_more_gpus_than_a_node_has_and_gpus_that_are_unknown_are_refused(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        find_machine(name)
