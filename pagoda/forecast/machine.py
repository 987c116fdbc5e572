"""The machine that a forecast is for: its hardware, and what each tier may hold of pages."""

from dataclasses import dataclass
from pathlib import Path

from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.activations import Activations
from pagoda.forecast.config import PlanConfig
from pagoda.memory.ram import free_ram
from pagoda.memory.sizes import format_at_least, format_bytes, parse_bytes
from pagoda.plan.ops import DEVICE, HOST
from pagoda.plan.placement import Budgets
from pagoda.plan.ranks import Ranks
from pagoda.settings import MemoryConfig
from pagoda.simulate.hardware import Hardware, hardware_file, read_hardware
from pagoda.simulate.machines import MACHINES, find_machine
from pagoda.tiers import HOST_SHARE, Memory

AUTO = "auto"
CONTEXT_BYTES = 1 << 30
"""Of a GPU's memory that CUDA, its libraries and what the allocator cannot use take."""


@dataclass(frozen=True)
class Machine:
    """Hardware, with as much of it in use as the forecast is for."""

    hardware: Hardware
    here: bool
    """Whether it is the machine that this runs on."""
    ranks: Ranks | None = None
    """Who shares out the state; None for a single rank."""

    @property
    def rank_count(self) -> int:
        return 1 if self.ranks is None else self.ranks.count


def find_machine_for(config: PlanConfig) -> Machine:
    """The hardware that a configuration names, and the ranks on it.

    Raises ConfigError: unknown or unreadable hardware, more GPUs than it has, several nodes of what has no network.
    """
    hardware = _hardware(config.hardware)
    if config.gpus_per_node is not None:
        hardware = hardware.with_gpus(config.gpus_per_node)
    if config.nodes > 1 and hardware.inter_node_bytes_per_s is None:
        raise ConfigError(f"--nodes is {config.nodes}, but hardware {hardware.name!r} says nothing of a network")
    per_node = hardware.gpus_per_node
    count = config.nodes * per_node
    experts = config.expert_parallel
    if count % experts:
        raise ConfigError(
            f"--expert-parallel is {experts}, which does not divide the ranks, of which there are {count}"
        )
    if count % config.replicas:
        raise ConfigError(
            f"--replicas is {config.replicas}, which does not divide the ranks, of which there are {count}"
        )
    if count == 1:
        return Machine(hardware, config.hardware == AUTO)
    ranks = Ranks(count, per_node, config.zero_stage, experts, config.replicas)
    return Machine(hardware, config.hardware == AUTO, ranks)


def _hardware(name: str) -> Hardware:
    if name == AUTO:
        path = hardware_file()
        if not path.exists():
            raise ConfigError(
                f"this machine has not been measured yet ({path} is not there): run `pagoda calibrate --ssd DIR` "
                f"first, which takes a minute, or name a machine in --hardware: {', '.join(MACHINES)}"
            )
        return read_hardware(path)
    if name not in MACHINES and (Path(name).suffix == ".json" or Path(name).is_file()):
        return read_hardware(Path(name))
    return find_machine(name)


def compute_memory(machine: Machine) -> int:
    """Bytes that one rank has where it computes, pages included: of the GPU what CUDA leaves, else of RAM."""
    hardware = machine.hardware
    if hardware.device is not None:
        return int(hardware.device.memory_bytes.value) - CONTEXT_BYTES
    whole = free_ram() if machine.here else int(hardware.cpu.memory_bytes.value)
    return whole // hardware.gpus_per_node


def budgets_for(machine: Machine, memory: MemoryConfig, activations: Activations) -> tuple[Budgets, tuple[str, ...]]:
    """What each tier of one rank may hold of pages, and how that was chosen.

    Activations and the CUDA context are kept free of pages: on the GPU, or in RAM where the CPU computes.

    Raises ConfigError for a setting that cannot be used; BudgetError if activations alone do not fit.
    """
    hardware = machine.hardware
    device, notes = _device_budget(hardware, memory, activations)
    on_cpu = hardware.device is None
    host, host_note = _host_budget(machine, memory, (activations.total if on_cpu else 0) + (device or 0) * on_cpu)
    ssd, ssd_note = _ssd_budget(machine, memory)
    return Budgets(host, device, ssd), (*_ranks_note(machine), *notes, host_note, ssd_note)


def _ranks_note(machine: Machine) -> tuple[str, ...]:
    ranks = machine.ranks
    if ranks is None:
        return ()
    return (
        f"ranks: {ranks.data_parallel} share out the state as in ZeRO stage {ranks.stage}; bytes and budgets are one "
        "rank's.",
    )


def _device_budget(
    hardware: Hardware, memory: MemoryConfig, activations: Activations
) -> tuple[int | None, tuple[str, ...]]:
    asked = memory.device
    if hardware.device is None:
        if asked is None:
            return None, ()
        if not asked.startswith("cpu:"):
            raise ConfigError(f"--memory.device is {asked!r}, but hardware {hardware.name!r} has no GPU: use cpu:SIZE")
        return parse_bytes(asked.removeprefix("cpu:"), "memory.device"), (f"device: an arena in RAM of {asked[4:]}.",)
    memory_bytes = int(hardware.device.memory_bytes.value)
    if asked is not None:
        if asked.startswith("cpu:"):
            raise ConfigError(f"--memory.device is {asked!r}, but hardware {hardware.name!r} computes on its GPU")
        return parse_bytes(asked, "memory.device"), (f"device: {asked} as asked.",)
    left = memory_bytes - CONTEXT_BYTES - activations.total
    if left <= 0:
        raise _no_room(DEVICE, memory_bytes, CONTEXT_BYTES + activations.total)
    return left, (
        f"device: {format_bytes(memory_bytes)} less {format_bytes(CONTEXT_BYTES)} for CUDA and "
        f"{format_bytes(activations.total)} for activations.",
    )


def _host_budget(machine: Machine, memory: MemoryConfig, beside: int) -> tuple[int, str]:
    """`beside`: bytes of RAM that each rank takes outside the host tier."""
    if memory.host is not None:
        return parse_bytes(memory.host, "memory.host"), f"host: {memory.host} as asked."
    ranks = machine.hardware.gpus_per_node
    whole = free_ram() if machine.here else int(machine.hardware.cpu.memory_bytes.value)
    ram = whole // ranks
    host = min(int(ram * HOST_SHARE), ram - beside)
    if host <= 0:
        raise _no_room(HOST, ram, beside)
    what = "the RAM that is free now" if machine.here else "RAM"
    each = f", shared by {ranks}" if ranks > 1 else ""
    if host < int(ram * HOST_SHARE):
        return host, f"host: {format_bytes(ram)} of {what}{each}, less {format_bytes(beside)} beside the pages."
    return host, f"host: {HOST_SHARE:.0%} of {what}{each}."


def _ssd_budget(machine: Machine, memory: MemoryConfig) -> tuple[int | None, str]:
    drive, ranks = machine.hardware.ssd, machine.hardware.gpus_per_node
    if machine.here:
        if memory.ssd is None:
            return None, "ssd: none, as --memory.ssd DIR is not given."
        ssd = Memory(host=1, ssd=memory.ssd).budgets().ssd
        assert ssd is not None
        return ssd // ranks, f"ssd: {memory.ssd}."
    if memory.ssd is not None:
        size = memory.ssd.rpartition(":")[2]
        if size[:1].isdigit():
            return parse_bytes(size, "memory.ssd"), f"ssd: {size} as asked."
    if drive is None:
        return None, f"ssd: none, as hardware {machine.hardware.name!r} has none."
    return int(drive.capacity_bytes.value) // ranks, "ssd: all of its capacity" + (f" / {ranks}." if ranks > 1 else ".")


def _no_room(tier: str, there: int, needed: int) -> BudgetError:
    return BudgetError(
        f"Activations alone do not fit: {tier} has {format_bytes(there)}, and beside the pages "
        f"{format_at_least(needed)} are needed. Lower --batch-size or --seq-len, and raise --accumulation-steps "
        "instead.",
        tier=tier,
        needed_bytes=needed,
    )
