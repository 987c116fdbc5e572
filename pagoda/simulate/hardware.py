"""Hardware: the memories of a machine and their speeds, as a planner and a simulator need them.

Every number is a `Figure`: a value in the base unit that its field names, and the source of the value. Named machines
are in `pagoda.simulate.machines`. `pagoda calibrate` measures the machine that it runs on and writes the same fields as
JSON.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from pagoda.config.decode import decoded
from pagoda.errors import ConfigError
from pagoda.memory.files import read_regular
from pagoda.plan.lanes import LARGE_TRANSFER_BYTES

FORMAT = "pagoda-hardware"
VERSION = 5
"""Version of the JSON file. A file of another version is refused, because measuring again takes a minute."""

MatmulType = Literal["bf16", "fp32"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and its source.

    `source` is a datasheet, a paper or "measured …". It says if the number is an assumption or was recalled without the
    source. `spread` is the relative spread of a measurement, and 0 for other numbers.
    """

    value: float
    source: str
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value > 0):
            raise ConfigError(f"a figure must be above zero and finite, not {self.value} ({self.source})")
        if not (math.isfinite(self.spread) and self.spread >= 0):
            raise ConfigError(f"a relative spread must be zero or more, not {self.spread} ({self.source})")
        if not self.source.strip():
            raise ConfigError(f"the figure {self.value} does not say where it comes from")


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """Rate of dense matrix products in one dtype, of one GPU or of all cores of a CPU."""

    peak_flop_per_s: Figure
    """The rate to which a share of peak refers. On a calibrated machine, the rate of the fastest product."""
    reached_flop_per_s: Figure
    """The rate of a transformer's forward and backward with all data in memory."""


@dataclass(frozen=True, slots=True)
class DeviceSpeeds:
    """One GPU."""

    memory_bytes: Figure
    memory_bytes_per_s: Figure
    """Reads and writes of its own memory, added up."""
    bf16: MatmulRate
    """16-bit products. Devices without bf16 run fp16, at the same rate."""
    fp32: MatmulRate
    update_params_per_s: Figure
    """AdamW on the split master, with all state in this device's memory."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """All processors and all RAM of one node.

    The optional figures are needed if the CPU computes.
    """

    cores: int
    """Cores. On a calibrated machine, those that the process may use."""
    memory_bytes: Figure
    memory_bytes_per_s: Figure
    """Reads and writes of RAM, added up. Updates, PCIe copies and SSD transfers share it."""
    update_params_per_s: Figure
    """AdamW on the split master, with all cores and nothing else running."""
    bf16: MatmulRate | None = None
    """Matrix products on the CPU."""
    fp32: MatmulRate | None = None
    copy_bytes_per_s: Figure | None = None
    """Bytes copied from RAM to an arena that stands in for a device, by one lane thread. Each byte is read and
    written."""
    gradient_bytes_per_s: Figure | None = None
    """Bytes of gradient through the kernel that stores it and sums its squares, on one lane thread."""
    task_switch_s: Figure | None = None
    """Seconds that compute loses to each piece of work that another thread starts, in addition to the work itself."""
    parameter_s: Figure | None = None
    """Seconds per step and trainable parameter, whatever its size: leases, hooks, and passing on its gradient."""

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise ConfigError(f"a CPU has at least one core, not {self.cores}")


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between RAM and GPUs. `gpus` GPUs share the figures of one link."""

    h2d_bytes_per_s: Figure
    d2h_bytes_per_s: Figure
    both_bytes_per_s: Figure
    """Both directions added up, while both are busy."""
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class SmallTransfers:
    """A drive's figures for transfers of another size."""

    nbytes: int
    """Bytes of one transfer, less than LARGE_TRANSFER_BYTES."""
    read_bytes_per_s: Figure
    write_bytes_per_s: Figure
    both_bytes_per_s: Figure
    cpu_share: Figure
    beside_bytes_per_s: Figure


@dataclass(frozen=True, slots=True)
class Drive:
    """All SSDs of one node, striped."""

    capacity_bytes: Figure
    read_bytes_per_s: Figure
    write_bytes_per_s: Figure
    """The sustained rate, not the rate into a cache."""
    both_bytes_per_s: Figure
    """Reads and writes added up, while half of the traffic is each."""
    endurance_bytes: Figure
    """Rated total bytes written."""
    cpu_share: Figure | None = None
    """Share of all cores that transfers take from compute at the same time. Its spread is a share of all cores too.
    None if it was not measured."""
    beside_bytes_per_s: Figure | None = None
    """Reads and writes added up, while all cores compute. None if compute does not slow transfers."""
    small: SmallTransfers | None = None
    """None if only large transfers are known. Then other transfers are assumed to be as fast."""

    def in_transfers_of(self, nbytes: int) -> "Drive":
        """The drive's figures for transfers of `nbytes`.

        Each transfer takes time of the drive and of a core, for itself and for its bytes. So the time lies on the line
        through the measurements at two sizes. A transfer below the smaller size takes as long as one of that size.
        """
        small = self.small
        if small is None or nbytes >= LARGE_TRANSFER_BYTES:
            return self

        def at(few: float, many: float) -> float:
            """The cost of a transfer of `nbytes`, from that of a small and a large one. No byte is cheaper in a small
            transfer."""
            slope = (many - few) / (LARGE_TRANSFER_BYTES - small.nbytes)
            return max(few + slope * max(0, nbytes - small.nbytes), many * nbytes / LARGE_TRANSFER_BYTES)

        def rate(few: Figure, many: Figure) -> Figure:
            return replace(many, value=nbytes / at(small.nbytes / few.value, LARGE_TRANSFER_BYTES / many.value))

        both = rate(small.both_bytes_per_s, self.both_bytes_per_s)
        share = self.cpu_share
        if share is not None:
            few = small.cpu_share.value * small.nbytes / small.both_bytes_per_s.value
            many = share.value * LARGE_TRANSFER_BYTES / self.both_bytes_per_s.value
            share = replace(share, value=min(1.0, at(few, many) * both.value / nbytes))
        beside = self.beside_bytes_per_s
        return replace(
            self,
            read_bytes_per_s=rate(small.read_bytes_per_s, self.read_bytes_per_s),
            write_bytes_per_s=rate(small.write_bytes_per_s, self.write_bytes_per_s),
            both_bytes_per_s=both,
            cpu_share=share,
            beside_bytes_per_s=None if beside is None else rate(small.beside_bytes_per_s, beside),
            small=None,
        )


@dataclass(frozen=True, slots=True)
class Hardware:
    """One node, and the network between equal nodes."""

    name: str
    cpu: Cpu
    gpus_per_node: int = 1
    """GPUs, or the processes of a node without GPUs."""
    device: DeviceSpeeds | None = None
    """Each GPU. None if the CPU computes."""
    link: Link | None = None
    """None exactly if `device` is None."""
    ssd: Drive | None = None
    intra_node_bytes_per_s: Figure | None = None
    """Bytes per second that each GPU sends, while it receives as many, in a collective within the node. An all-gather
    of S bytes over n GPUs takes S * (n - 1) / n divided by this. None for a single GPU."""
    inter_node_bytes_per_s: Figure | None = None
    """Bytes per second that each node sends, while it receives as many, in a collective over nodes. None for one
    node."""
    nodes_per_domain: int = 1
    """Number of nodes whose GPUs send to each other as fast as within one, as in a rack that NVLink joins."""
    rails: int = 1
    """Number of networks (rails) to which a node's adapters connect, one or several adapters to each. GPU i uses rail
    i, counted around. 1 if one network joins all adapters."""
    oversubscription: float = 1.0
    """Rate of a node's adapters, divided by the rate at which its bytes pass from rail to rail, over the spine. 1 if
    there is one rail."""

    def __post_init__(self) -> None:
        if (self.device is None) != (self.link is None):
            raise ConfigError(f"hardware {self.name!r}: a device needs a link to host RAM, and a link a device")
        if self.gpus_per_node < 1 or (self.link and not 1 <= self.link.gpus <= self.gpus_per_node):
            raise ConfigError(f"hardware {self.name!r}: it needs at least one GPU or process, and one per link")
        if self.nodes_per_domain < 1:
            raise ConfigError(f"hardware {self.name!r}: nodes_per_domain must be at least 1")
        if not 1 <= self.rails <= self.gpus_per_node:
            raise ConfigError(f"hardware {self.name!r}: rails must be from 1 to its {self.gpus_per_node} GPUs")
        if not 1 <= self.oversubscription < math.inf:
            raise ConfigError(f"hardware {self.name!r}: oversubscription must be at least 1 and finite")
        if self.rails == 1 and self.oversubscription > 1:
            raise ConfigError(f"hardware {self.name!r}: oversubscription is of the spine between rails: give rails")
        if self.gpus_per_node > 1 and self.intra_node_bytes_per_s is None:
            raise ConfigError(
                f"hardware {self.name!r}: {self.gpus_per_node} GPUs or processes need intra_node_bytes_per_s, which "
                "`torchrun ... -m pagoda calibrate` measures with as many processes"
            )

    @property
    def measured(self) -> bool:
        """Whether `pagoda calibrate` has measured these figures."""
        return self.cpu.update_params_per_s.source.startswith("measured")

    def matmul(self, dtype: MatmulType | Literal["fp16"]) -> MatmulRate:
        """The rate of the processor that computes: one GPU, or the CPU. fp16 is assumed to be as fast as bf16.

        Raises ConfigError if the file has no rate for the CPU.
        """
        rate = getattr(self.device or self.cpu, "bf16" if dtype == "fp16" else dtype)
        if not isinstance(rate, MatmulRate):
            raise ConfigError(f"hardware {self.name!r} has no GPU and no {dtype} rate of its CPU")
        return rate

    def with_gpus(self, count: int) -> "Hardware":
        """The same node with `count` of its GPUs in use, spread over its links, and all of the host. They use as many
        of its rails.

        Raises ConfigError for more GPUs than the node has.
        """
        if self.link is not None and not 1 <= count <= self.gpus_per_node:
            has = f"hardware {self.name!r} has {self.gpus_per_node} GPU{'s' * (self.gpus_per_node > 1)} per node"
            raise ConfigError(f"{has}, not {count}: name another in --hardware; h100x8 has eight, h100 one")
        rails, network, link = min(self.rails, count), self.inter_node_bytes_per_s, self.link
        if network is not None and rails < self.rails:
            source = f"{rails} of {self.rails} rails: {network.source}"
            network = replace(network, value=network.value * rails / self.rails, source=source)
        if link is not None:
            links = self.gpus_per_node // link.gpus
            link = replace(link, gpus=-(-count // links))
        spine = self.oversubscription if rails > 1 else 1.0
        used = replace(self, gpus_per_node=count, link=link, rails=rails, oversubscription=spine)
        return replace(used, inter_node_bytes_per_s=network)

    def nodes_joined(self, nodes: int) -> int:
        """How many of `nodes` nodes are in one domain, if all domains have equally many. 1 for a prime number of nodes
        that one domain does not hold."""
        domains = next(n for n in range(-(-nodes // self.nodes_per_domain), nodes + 1) if nodes % n == 0)
        return nodes // domains

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps({"format": FORMAT, "version": VERSION, "hardware": asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str = "hardware file") -> "Hardware":
        """The hardware that `to_json` wrote.

        Raises ConfigError with `origin` and the wrong entry if the text is not such a file.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise ConfigError(f'it is not JSON with "format": "{FORMAT}"')
            if data.get("version") != VERSION:
                raise ConfigError(f"it is of version {data.get('version')}; this Pagoda reads version {VERSION}")
            return decoded(cls, data.get("hardware"), of="it")
        except (json.JSONDecodeError, ConfigError) as error:
            raise ConfigError(
                f"{origin} cannot be used: {error}. Run `pagoda calibrate` to write a new one."
            ) from error


def hardware_file() -> Path:
    """The file in the user's cache directory that `pagoda calibrate` writes and `--hardware auto` reads."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says that relative paths are ignored.
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "pagoda" / "hardware.json"


def write_hardware(hardware: Hardware, path: Path) -> None:
    """Write a file for `read_hardware`, as a whole or not at all. Creates its directory.

    Raises ConfigError if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # which no file of the user has
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(hardware.to_json(), encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"hardware file {path} cannot be written: {error.strerror}; name another") from error


def read_hardware(path: Path) -> Hardware:
    """The hardware in a file. Raises ConfigError if it cannot be read or has another form."""
    try:
        text = read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hardware file {path} cannot be read: {error}") from error
    return Hardware.from_json(text, f"hardware file {path}")
