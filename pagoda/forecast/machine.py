"""The machine of a forecast: its hardware, and how many bytes of pages each tier may hold."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pagoda.budgets import HOST_SHARE, ssd_budget
from pagoda.calibrate.matmul import precision_for
from pagoda.config.memory import Memory
from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.activations import ActivationEstimate
from pagoda.forecast.config import PlanConfig
from pagoda.memory.ram import free_ram
from pagoda.memory.sizes import format_at_least, format_bytes, parse_bytes
from pagoda.plan.ranks import ALONE, Ranks
from pagoda.plan.reasons import shared
from pagoda.plan.second_placement import left_for_pages
from pagoda.plan.tiers import DEVICE, HOST, Budgets
from pagoda.simulate.hardware import Figure, Hardware
from pagoda.simulate.machines import AUTO, hardware_named

CONTEXT_BYTES = 1 << 30
"""Bytes of a GPU's memory taken by CUDA and its libraries, or lost to the allocator's fragmentation."""

_GIVEN_RAM = "as asked"


@dataclass(frozen=True)
class Machine:
    """Hardware, and the part of it that the forecast uses."""

    hardware: Hardware
    here: bool
    """Whether this process runs on that machine."""
    ranks: Ranks = ALONE
    """The ranks that divide the state."""

    @property
    def ram(self) -> int:
        """Bytes of RAM per rank: its share of the RAM that is free now, or of all RAM if the machine is another one."""
        whole = free_ram() if self.here else int(self.hardware.cpu.memory_bytes.value)
        return whole // self.hardware.gpus_per_node

    @property
    def compute_memory(self) -> int:
        """Bytes, pages included, of the memory where one rank computes: GPU memory without CUDA's own, or RAM."""
        device = self.hardware.device
        return self.ram if device is None else int(device.memory_bytes.value) - CONTEXT_BYTES

    def doubts(self) -> Iterator[str]:
        """Why a forecast for this machine may be wrong, in sentences."""
        hardware = self.hardware
        if not hardware.measured:
            yield (
                f"{hardware.name} was not measured: its speeds are from datasheets and papers, or assumed. "
                "`pagoda calibrate` on it writes a file for --hardware."
            )
        if hardware.device is not None:
            yield "No run on a GPU has confirmed a plan yet."

    def speeds(self) -> Iterator[str]:
        """The speeds of links, drives and RAM of a machine that was not measured here, with their sources."""
        hardware, ssd = self.hardware, self.hardware.ssd
        if self.here:
            return
        yield f"RAM: {_rate(hardware.cpu.memory_bytes_per_s)}."
        if (link := hardware.link) is not None:
            yield f"link to the GPU: {_rate(link.h2d_bytes_per_s)}."
        if ssd is not None:
            yield f"drives: read {_rate(ssd.read_bytes_per_s)}, write {_rate(ssd.write_bytes_per_s)}."
        joined = self.ranks.nodes_per_domain
        for where, network in (
            ("within a node" if joined == 1 else f"within {joined} nodes", hardware.intra_node_bytes_per_s),
            (f"between nodes{self._rails()}", hardware.inter_node_bytes_per_s),
        ):
            if network is not None and self.ranks.count > 1:
                yield f"collectives {where}: {_rate(network)}."

    def _rails(self) -> str:
        """The rails of the network, in words."""
        rails, spine = self.hardware.rails, self.hardware.oversubscription
        if rails == 1:
            return ""
        return f", on {rails} rails" + (f" with a spine oversubscribed {spine:g}:1" if spine > 1 else "")


def _rate(figure: Figure) -> str:
    return f"{figure.value / 1e9:.3g} GB/s ({figure.source})"


def find_machine_for(config: PlanConfig) -> Machine:
    """The hardware that the configuration names, and its ranks.

    Raises ConfigError for unknown or unreadable hardware, for more GPUs than it has, and for several nodes without a
    network.
    """
    hardware = hardware_named(config.hardware)
    if config.ram is not None:
        ram = Figure(parse_bytes(config.ram, "ram"), _GIVEN_RAM)
        hardware = replace(hardware, cpu=replace(hardware.cpu, memory_bytes=ram))
    if config.gpus_per_node is not None:
        hardware = hardware.with_gpus(config.gpus_per_node)
    if config.nodes > 1 and hardware.inter_node_bytes_per_s is None:
        raise ConfigError(
            f"--nodes is {config.nodes}, but hardware {hardware.name!r} says nothing of a network: leave --nodes out"
        )
    per_node = hardware.gpus_per_node
    count = config.nodes * per_node
    stages, parts = config.pipeline_parallel, config.tensor_parallel
    data_parallel = count // stages // parts
    for flag, groups, among in (
        ("--pipeline-parallel", stages, count),
        ("--tensor-parallel", parts, count // stages),
        ("--expert-parallel", config.expert_parallel, data_parallel),
        ("--replicas", config.replicas, data_parallel),
        ("--sequence-parallel", config.sequence_parallel, data_parallel),
    ):
        if among % groups:
            raise ConfigError(f"{flag} is {groups}, which does not divide the ranks, of which there are {among}")
    degrees = (config.zero_stage, config.expert_parallel, config.replicas, parts, stages)
    joined = hardware.nodes_joined(config.nodes)
    ranks = Ranks(data_parallel, per_node, *degrees, nodes_per_domain=joined, rails=hardware.rails)
    return Machine(hardware, config.hardware == AUTO, ranks)


def with_precision(config: PlanConfig, hardware: Hardware) -> tuple[PlanConfig, tuple[str, ...]]:
    """The configuration with the precision that a run on this hardware chooses, unless it has one, and why."""
    if config.precision is not None:
        return config, ()
    bf16, fp32 = hardware.cpu.bf16, hardware.cpu.fp32
    if hardware.device is not None or fp32 is None or bf16 is None:
        return replace(config, precision="bf16"), ()
    slowdown = fp32.reached_flop_per_s.value / bf16.reached_flop_per_s.value
    precision, why = precision_for(slowdown)
    return replace(config, precision=precision), (f"precision: {precision}, because {why}.",)


def budgets_for(machine: Machine, memory: Memory, activations: ActivationEstimate) -> tuple[Budgets, tuple[str, ...]]:
    """How many bytes of pages each tier of one rank may hold, and how these budgets were chosen.

    Pages leave room for activations and the CUDA context, on the GPU or, if the CPU computes, in RAM.

    Raises ConfigError for a setting that cannot be used, and BudgetError if activations alone do not fit.
    """
    notes = []
    if (ranks := machine.ranks).count > 1:
        notes.append(f"ranks: {'; '.join(shared(ranks))}; bytes and budgets are one rank's.")
    device = _device_budget(machine, memory, activations, notes)
    beside = activations.total + (device or 0) if machine.hardware.device is None else 0
    host = _host_budget(machine, memory, beside, notes)
    return Budgets(host, device, _ssd_budget(machine, memory, notes)), tuple(notes)


def _device_budget(machine: Machine, memory: Memory, activations: ActivationEstimate, notes: list[str]) -> int | None:
    hardware, asked = machine.hardware, memory.device_bytes
    computes_on_cpu = hardware.device is None
    if asked is not None and memory.arena_for_device != computes_on_cpu:
        reason = "has no GPU: use cpu:SIZE" if computes_on_cpu else "computes on its GPU: give SIZE"
        raise ConfigError(f"memory.device is {memory.device!r}, but hardware {hardware.name!r} {reason}")
    if asked is not None:
        here = f"an arena in RAM of {format_bytes(asked)}" if computes_on_cpu else f"{memory.device} as asked"
        if memory.adapt_after is None:
            notes.append(f"device: {here}.")
            return asked
        left = max(memory.device_pages or 0, left_for_pages(asked, activations.total))
        notes.append(
            f"device: {here}, less what about {format_bytes(activations.total)} of activations need, after "
            f"{memory.adapt_after} steps."
        )
        return left
    if hardware.device is None:
        return None
    whole = int(hardware.device.memory_bytes.value)
    left = whole - CONTEXT_BYTES - activations.total
    if left <= 0:
        raise _no_room(DEVICE, whole, CONTEXT_BYTES + activations.total)
    notes.append(
        f"device: {format_bytes(whole)} less {format_bytes(CONTEXT_BYTES)} for CUDA and "
        f"{format_bytes(activations.total)} for activations."
    )
    return left


def _host_budget(machine: Machine, memory: Memory, beside: int, notes: list[str]) -> int:
    """Budget of RAM for pages. `beside` is the number of bytes that each rank needs for anything else."""
    if memory.host_bytes is not None:
        notes.append(f"host: {memory.host} as asked.")
        return memory.host_bytes
    ram, ranks = machine.ram, machine.hardware.gpus_per_node
    most = int(ram * HOST_SHARE)
    host = min(most, ram - beside)
    if host <= 0:
        raise _no_room(HOST, ram, beside)
    source = machine.hardware.cpu.memory_bytes.source
    what = f"the {format_bytes(ram * ranks)} of RAM that " + ("are free now" if machine.here else "it has")
    if not machine.here:
        what += f" ({source})" if source == _GIVEN_RAM else f" ({source}; --ram sets it)"
    what += f", shared by {ranks}" if ranks > 1 else ""
    if host < most:
        notes.append(f"host: {what}, less {format_bytes(beside)} for other things.")
    else:
        notes.append(f"host: {HOST_SHARE:.0%} of {what}.")
    return host


def _ssd_budget(machine: Machine, memory: Memory, notes: list[str]) -> int | None:
    drive, ranks = machine.hardware.ssd, machine.hardware.gpus_per_node
    if machine.here:
        ssd = ssd_budget(memory, ranks)
        notes.append("ssd: none, as --memory.ssd DIR is not given." if ssd is None else f"ssd: {memory.ssd}.")
        return ssd
    size = "" if memory.ssd is None else str(memory.ssd).rpartition(":")[2]
    if size[:1].isdigit():
        notes.append(f"ssd: {size} as asked.")
        return parse_bytes(size, "memory.ssd")
    if drive is None:
        notes.append(f"ssd: none, as hardware {machine.hardware.name!r} has none.")
        return None
    whole = int(drive.capacity_bytes.value)
    shared = f", shared by {ranks}" if ranks > 1 else ""
    notes.append(f"ssd: all of {format_bytes(whole)} ({drive.capacity_bytes.source}; --memory.ssd sets it){shared}.")
    return whole // ranks


def _no_room(tier: str, there: int, needed: int) -> BudgetError:
    return BudgetError(
        f"The activations do not fit: {tier} has {format_bytes(there)}, and they need {format_at_least(needed)} in "
        "addition to the pages.",
        tier=tier,
        needed_bytes=needed,
    )
