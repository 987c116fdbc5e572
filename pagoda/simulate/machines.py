"""Named machines, from public datasheets and papers, for plans on machines that are not at hand.

Each figure names its source. "assumed" marks a rule of ours, "unverified" a number that was recalled without its
source. On a machine at hand, `pagoda calibrate` replaces both by measurements. RAM and GPU memory are sold in powers of
1024, so "80 GB" of either is 80 GiB here. Drives are not.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pagoda.errors import ConfigError, unknown_name
from pagoda.simulate.hardware import (
    Cpu,
    DeviceSpeeds,
    Drive,
    Figure,
    Hardware,
    Link,
    MatmulRate,
    hardware_file,
    read_hardware,
)

AUTO = "auto"
"""The name of this machine."""

_GIB = float(1 << 30)
_GB = 1e9
_TB = 1e12
_TFLOP = 1e12

UPDATE_BYTES = 28
"""Memory traffic of AdamW on the bf16 split master, per parameter: 14 bytes read, 12 written, and 2 to clear the
gradient for the next step."""

_REACHED_SHARE = 0.6
_CPU_UPDATE_SHARE = 0.6
_GPU_UPDATE_SHARE = 0.9
_FP32_SHARE = 0.8
_BOTH_SHARE = 0.8
_COLLECTIVE_SHARE = 0.7
_NETWORK_SHARE = 0.8
_DRIVE_WRITES = 600


_REACHED = (
    f"assumed: {_REACHED_SHARE} of peak; Megatron-LM reaches 0.57 on A100s, collectives included, arXiv 2205.05198, "
    "table 5"
)


def _device(
    name: str, gib: float, memory: float, bf16: float, fp32: float, reached: tuple[float, str] | None = None
) -> DeviceSpeeds:
    """A GPU by its datasheet: memory in GiB, bandwidth in bytes/s, rates in TFLOP/s. `reached`: the bf16 rate of a
    transformer, and its source."""
    flops, why = reached or (round(_REACHED_SHARE * bf16), _REACHED)
    sheet = f"{name} datasheet"
    return DeviceSpeeds(
        memory_bytes=Figure(gib * _GIB, sheet),
        memory_bytes_per_s=Figure(memory, sheet),
        bf16=MatmulRate(Figure(bf16 * _TFLOP, f"{sheet}, dense"), Figure(flops * _TFLOP, why)),
        fp32=MatmulRate(
            Figure(fp32 * _TFLOP, f"{sheet}, without TF32"),
            Figure(fp32 * _TFLOP * _FP32_SHARE, f"assumed: {_FP32_SHARE} of peak"),
        ),
        update_params_per_s=Figure(
            memory * _GPU_UPDATE_SHARE / UPDATE_BYTES,
            f"assumed: {_GPU_UPDATE_SHARE} of memory bandwidth at {UPDATE_BYTES} bytes a parameter, the share behind "
            "Elixir's 50 G parameters/s on an A100-40G",
        ),
    )


def _cpu(memory: Figure, cores: int, bandwidth: float, source: str) -> Cpu:
    return Cpu(
        cores=cores,
        memory_bytes=memory,
        memory_bytes_per_s=Figure(bandwidth, source),
        update_params_per_s=Figure(
            bandwidth * _CPU_UPDATE_SHARE / UPDATE_BYTES,
            f"assumed: {_CPU_UPDATE_SHARE} of RAM bandwidth at {UPDATE_BYTES} bytes a parameter, the share behind "
            "Elixir's 8.6 G parameters/s on an 8xA100 node",
        ),
    )


def _link(h2d: float, d2h: float, source: str, gpus: int = 1) -> Link:
    return Link(
        h2d_bytes_per_s=Figure(h2d, source),
        d2h_bytes_per_s=Figure(d2h, source),
        both_bytes_per_s=Figure((h2d + d2h) * _BOTH_SHARE, f"assumed: {_BOTH_SHARE} of the sum of the two directions"),
        gpus=gpus,
    )


def rated_endurance(capacity_bytes: float) -> Figure:
    """Total bytes written that a drive of this capacity is usually rated for. Used if its own rating is not known."""
    return Figure(
        capacity_bytes * _DRIVE_WRITES,
        f"assumed: {_DRIVE_WRITES} times their capacity, as a Samsung 990 PRO; drives for data centres are rated for "
        "about three times that",
    )


def _drive(capacity: Figure, read: Figure, write: Figure, endurance: Figure | None = None) -> Drive:
    return Drive(
        capacity_bytes=capacity,
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        both_bytes_per_s=Figure(
            2 / (1 / read.value + 1 / write.value), "assumed: reading and writing take turns, half of the bytes each"
        ),
        endurance_bytes=endurance or rated_endurance(capacity.value),
    )


def _nvlink(both_ways: float, name: str) -> Figure:
    return Figure(
        both_ways / 2 * _COLLECTIVE_SHARE,
        f"{name} datasheet: {both_ways / _GB:.0f} GB/s both ways; assumed: {_COLLECTIVE_SHARE} of one direction, as in "
        "NVIDIA/nccl-tests issue 149 (about 200 of 300 GB/s on 8 A100)",
    )


def _network(gigabits: float, source: str) -> Figure:
    return Figure(gigabits / 8 * _GB * _NETWORK_SHARE, f"{source}; assumed: {_NETWORK_SHARE} of it is reached")


def _gen4_drives(count: int, system: str) -> Drive:
    return _drive(
        Figure(count * 3.84 * _TB, f"{system}: {count} x 3.84 TB NVMe"),
        Figure(count * 6.25 * _GB, "NVIDIA's DGX A100 announcement, 2020: 25 GB/s for 4 drives; unverified"),
        Figure(count * 3.8 * _GB, "Samsung PM1733 3.84 TB datasheet: 3.8 GB/s a drive; unverified"),
    )


def _dgx(
    name: str, model: str, cpu: tuple[int, float, str], device: DeviceSpeeds, link: Link, nvlink: Figure, port: float
) -> Hardware:
    """A DGX of eight GPUs, eight drives, 2 TB of RAM and eight ports of `port` Gb/s, each on a rail, as in NVIDIA's
    DGX SuperPODs. Their spine is as fast as the ports."""
    sheet = f"NVIDIA DGX {model} datasheet"
    return Hardware(
        name=name,
        cpu=_cpu(Figure(2048 * _GIB, f"{sheet}: 2 TB"), *cpu),
        gpus_per_node=8,
        device=device,
        link=link,
        ssd=_gen4_drives(8, sheet),
        intra_node_bytes_per_s=nvlink,
        inter_node_bytes_per_s=_network(8 * port, f"{sheet}: 8 x {port:.0f} Gb/s"),
        rails=8,
    )


def _workstation(name: str, device: DeviceSpeeds, link: Link) -> Hardware:
    """One GPU in a desktop computer with a drive for consumers."""
    return Hardware(
        name=name,
        cpu=_cpu(Figure(128 * _GIB, "assumed: 4 x 32 GB"), 16, 89.6 * _GB, "assumed: 2 channels of DDR5-5600"),
        device=device,
        link=link,
        ssd=_drive(
            Figure(2 * _TB, "Samsung 990 PRO 2 TB datasheet"),
            Figure(7.45 * _GB, "Samsung 990 PRO 2 TB datasheet"),
            Figure(
                1.5 * _GB,
                "assumed: as the 980 PRO 1 TB once its cache is full (TechPowerUp); the 990 PRO's datasheet "
                "has 6.9 GB/s into the cache",
            ),
            Figure(1_200 * _TB, "Samsung 990 PRO 2 TB datasheet"),
        ),
    )


def _with_cards(machine: Hardware, name: str, count: int) -> Hardware:
    """A desktop computer with several of its cards, which share the lanes of one."""
    assert machine.link is not None
    rate = machine.link.h2d_bytes_per_s.value * _COLLECTIVE_SHARE / count
    source = f"assumed: {_COLLECTIVE_SHARE} of a card's part of PCIe, which {count} cards share"
    return replace(
        machine,
        name=name,
        gpus_per_node=count,
        link=replace(machine.link, gpus=count),
        intra_node_bytes_per_s=Figure(rate, source),
    )


def _one_of(node: Hardware, name: str) -> Hardware:
    """One GPU of a node, with its part of the processors and RAM, a link of its own and one drive."""
    of, whole = node.gpus_per_node, node.cpu
    memory, bandwidth, update = (
        Figure(figure.value / of, f"1/{of} of {node.name}: {figure.source}")
        for figure in (whole.memory_bytes, whole.memory_bytes_per_s, whole.update_params_per_s)
    )
    return Hardware(
        name=name,
        cpu=Cpu(whole.cores // of, memory, bandwidth, update),
        device=node.device,
        link=node.link and replace(node.link, gpus=1),
        ssd=_gen4_drives(1, "assumed"),
    )


_V100 = _device(
    "NVIDIA V100 SXM3 32GB",
    32,
    900 * _GB,
    125.0,
    15.7,
    (70.0, "achievable peak of a V100 in ZeRO-Infinity, arXiv 2104.07857"),
)
_A100_40G = replace(
    _device("NVIDIA A100 SXM4 40GB", 40, 1_555 * _GB, 312.0, 19.5),
    memory_bytes=Figure(42_405_855_232.0, "deviceQuery on an A100-SXM4-40GB, in PC2 Paderborn's documentation"),
)
_A100_80G = _device("NVIDIA A100 SXM4 80GB", 80, 2_039 * _GB, 312.0, 19.5)
_H100 = _device("NVIDIA H100 SXM5 80GB", 80, 3_350 * _GB, 989.4, 66.9)
_H200 = replace(
    _device("NVIDIA H200 SXM5 141GB", 141, 4_800 * _GB, 989.4, 66.9),
    memory_bytes=Figure(143_771.0 * (1 << 20), "nvidia-smi on an H200: 143,771 MiB; unverified"),
)
_H100_PCIE = _device("NVIDIA H100 PCIe 80GB", 80, 2_000 * _GB, 756.0, 51.0)
_B200 = _device("NVIDIA B200 180GB", 180, 8_000 * _GB, 2_250.0, 80.0)
_GB200 = _device("NVIDIA GB200 NVL72", 186, 8_000 * _GB, 2_500.0, 80.0)
_RTX6000_ADA = _device("NVIDIA RTX 6000 Ada", 48, 960 * _GB, 364.2, 91.1)
_RTX3090 = _device("NVIDIA GeForce RTX 3090", 24, 936 * _GB, 71.0, 35.6)
_RTX4090 = _device("NVIDIA GeForce RTX 4090", 24, 1_008 * _GB, 165.2, 82.6)
_RTX5090 = _device("NVIDIA GeForce RTX 5090", 32, 1_792 * _GB, 209.5, 104.8)

_XEON_8168 = (48, 256 * _GB, "2 Xeon Platinum 8168, 6 channels of DDR4-2666 each, as in the DGX-2; unverified")
_EPYC_7742 = (128, 409.6 * _GB, "2 EPYC 7742, 8 channels of DDR4-3200 each, as in the DGX A100")
_XEON_8480 = (112, 614.4 * _GB, "2 Xeon Platinum 8480C, 8 channels of DDR5-4800 each, as in the DGX H100")

_XEON_8570 = (112, 716.8 * _GB, "2 Xeon Platinum 8570, 8 channels of DDR5-5600 each, as in the DGX B200")
_GRACE = (144, 1_024 * _GB, "2 Grace, 512 GB/s of LPDDR5X each; unverified")

_A100_LINK = _link(
    (16.3 * 8 + 8.7) / 8 * _GB,
    (15.8 * 8 + 2.3) / 8 * _GB,
    "Elixir's calibration of an 8xA100 node, all GPUs at once: 16.3 n + 8.7 GB/s down and 15.8 n + 2.3 up for n GPUs",
)
_A100_NVLINK = _nvlink(600 * _GB, "NVIDIA A100 SXM4")
_GEN4_LINK = _link(25 * _GB, 25 * _GB, "assumed: 25 of the 32 GB/s of PCIe Gen4 x16")
_GEN5_LINK = _link(55 * _GB, 55 * _GB, "assumed: 55 of the 64 GB/s of PCIe Gen5 x16")

_A100_NODE = Hardware(
    name="a100-40gx8",
    cpu=_cpu(Figure(1024 * _GIB, "1 TB, arXiv 2108.05818 and 2303.02868"), *_EPYC_7742),
    gpus_per_node=8,
    device=_A100_40G,
    link=_A100_LINK,
    ssd=_drive(
        Figure(11 * _TB, "11 TB, Angel-PTM, arXiv 2303.02868; unverified"),
        Figure(3.5 * _GB, "assumed: one PCIe Gen3 drive's worth; the paper's figure is not at hand"),
        Figure(3.5 * _GB, "assumed: one PCIe Gen3 drive's worth; the paper's figure is not at hand"),
    ),
    intra_node_bytes_per_s=_A100_NVLINK,
    inter_node_bytes_per_s=_network(100, "100 Gb/s RDMA, articles on AngelPTM's ZeRO-Cache"),
)
_H100_NODE = _dgx("h100x8", "H100", _XEON_8480, _H100, _GEN5_LINK, _nvlink(900 * _GB, "NVIDIA H100 SXM5"), 400)
_V100_NODE = Hardware(
    name="v100-32gx16",
    cpu=_cpu(Figure(1536 * _GIB, "NVIDIA DGX-2 datasheet: 1.5 TB"), *_XEON_8168),
    gpus_per_node=16,
    device=_V100,
    link=_link(
        12 * _GB,
        12 * _GB,
        "ZeRO-Infinity, arXiv 2104.07857: about 12 GB/s for one link; fig. 2b: 3 GB/s for each of 16 GPUs, "
        "so four share a link (unverified)",
        gpus=4,
    ),
    ssd=_drive(
        Figure(28 * _TB, "ZeRO-Infinity, arXiv 2104.07857, fig. 2b: 28 TB a node; unverified"),
        Figure(25.6 * _GB, "ZeRO-Infinity, fig. 2b: 1.6 GB/s for each of 16 GPUs; unverified"),
        Figure(25.6 * _GB, "assumed: as reading; ZeRO-Infinity gives one figure"),
    ),
    intra_node_bytes_per_s=_nvlink(300 * _GB, "NVIDIA V100 SXM3"),
    inter_node_bytes_per_s=_network(800, "ZeRO, arXiv 1910.02054: 800 Gb/s between DGX-2 nodes"),
)
_A100_80G_NODE = _dgx("a100-80gx8", "A100 640GB", _EPYC_7742, _A100_80G, _A100_LINK, _A100_NVLINK, 200)
_H200_NODE = replace(_H100_NODE, name="h200x8", device=_H200)
_B200_NODE = _dgx("b200x8", "B200", _XEON_8570, _B200, _GEN5_LINK, _nvlink(1_800 * _GB, "NVIDIA B200"), 400)
_GB200_NODE = Hardware(
    name="gb200x4",
    cpu=_cpu(Figure(960 * _GIB, "NVIDIA GB200 NVL72: 480 GB for each of 2 Grace CPUs"), *_GRACE),
    gpus_per_node=4,
    device=_GB200,
    link=_link(
        0.8 * 450 * _GB, 0.8 * 450 * _GB, "assumed: 0.8 of the 450 GB/s of NVLink-C2C, which two GPUs share", gpus=2
    ),
    ssd=_gen4_drives(4, "assumed"),
    intra_node_bytes_per_s=_nvlink(1_800 * _GB, "NVIDIA GB200 NVL72"),
    inter_node_bytes_per_s=_network(4 * 400, "4 x 400 Gb/s, one port a GPU; unverified"),
    nodes_per_domain=18,
    rails=4,
)

MACHINES: Mapping[str, Hardware] = MappingProxyType(
    {
        machine.name: machine
        for machine in (
            _V100_NODE,
            Hardware(
                name="v100-32gx8",
                cpu=_cpu(Figure(240 * _GB, "PatrickStar, arXiv 2108.05818: 240 GB"), *_XEON_8168),
                gpus_per_node=8,
                device=_V100,
                link=_link(12 * _GB, 12 * _GB, "as one link of a DGX-2; assumed: two GPUs share it", gpus=2),
                intra_node_bytes_per_s=_nvlink(300 * _GB, "NVIDIA V100 SXM2"),
            ),
            _A100_NODE,
            replace(
                _A100_NODE,
                name="a100-40gx8-dgx",
                ssd=_gen4_drives(4, "NVIDIA DGX A100 320GB datasheet"),
                inter_node_bytes_per_s=_network(1600, "NVIDIA DGX A100 datasheet: 8 x 200 Gb/s"),
            ),
            _A100_80G_NODE,
            _H100_NODE,
            _H200_NODE,
            _B200_NODE,
            _GB200_NODE,
            _one_of(_V100_NODE, "v100-32g"),
            _one_of(_A100_NODE, "a100-40g"),
            _one_of(_A100_80G_NODE, "a100-80g"),
            _one_of(_H100_NODE, "h100"),
            _one_of(_H200_NODE, "h200"),
            _one_of(_B200_NODE, "b200"),
            _workstation("rtx3090", _RTX3090, _GEN4_LINK),
            _workstation("rtx4090", _RTX4090, _GEN4_LINK),
            _workstation("rtx5090", _RTX5090, _GEN5_LINK),
            _workstation("rtx6000-ada", _RTX6000_ADA, _GEN4_LINK),
            _workstation("h100-pcie", _H100_PCIE, _GEN5_LINK),
        )
    }
)
"""All named machines: one node, and the network between such nodes. A name that ends with xN has N GPUs, any other one.
`find_machine` finds other numbers of GPUs, too."""


def find_machine(name: str) -> Hardware:
    """The machine called `name`. GPUxN is a node of N such GPUs: a part of the smallest node that has as many. If no
    node has such GPUs, it is a desktop computer with N cards.

    Raises ConfigError if there is no such machine. The message lists the names and suggests the closest one.
    """
    if name in MACHINES:
        return MACHINES[name]
    if (counted := re.fullmatch(r"(.+?)x([1-9]\d{0,3})", name)) is not None:
        gpu, count = counted[1], int(counted[2])
        if count == 1 and gpu in MACHINES:
            return MACHINES[gpu]
        nodes = [node for node in MACHINES.values() if node.name == f"{gpu}x{node.gpus_per_node}"]
        nodes.sort(key=lambda node: node.gpus_per_node)
        if enough := [node for node in nodes if node.gpus_per_node >= count]:
            return replace(enough[0].with_gpus(count), name=name)
        if nodes:
            most = nodes[-1]
            raise ConfigError(
                f"hardware {name!r} is larger than a node of {most.gpus_per_node}: use {most.name} with --nodes"
            )
        if gpu in MACHINES:
            return _with_cards(MACHINES[gpu], name, count)
    offer = f"Named machines: {', '.join(MACHINES)}, and as many GPUs as you like (h100x4); 'auto' is this one."
    raise unknown_name(name, MACHINES, f"unknown hardware {name!r}.", offer)


def hardware_named(name: str) -> Hardware:
    """What --hardware names: this machine as it was measured, a file, or a named machine.

    Raises ConfigError for unknown or unreadable hardware, and if this machine has not been measured.
    """
    if name == AUTO:
        path = hardware_file()
        if not path.exists():
            raise ConfigError(
                f"this machine has not been measured yet ({path} does not exist): run `pagoda calibrate --ssd DIR` "
                f"first, which takes a minute, or name a machine in --hardware: {', '.join(MACHINES)}"
            )
        return read_hardware(path)
    if name not in MACHINES and (Path(name).suffix == ".json" or Path(name).is_file()):
        return read_hardware(Path(name))
    return find_machine(name)
