"""The speed of each lane of one rank on given hardware, alone and while other lanes work."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import inf, prod

from pagoda.errors import ConfigError
from pagoda.optim.rule import Shape, UpdateWork
from pagoda.plan.exchanges import Exchange
from pagoda.plan.lanes import LARGE_TRANSFER_BYTES, LaneName, update_threads
from pagoda.plan.ranks import ALONE, Ranks
from pagoda.plan.units import UnitSpec
from pagoda.simulate.hardware import Figure, Hardware

_LEAST_LEFT = 0.01
"""Least share of the CPU for lanes that only get what transfers leave. Without it, a step might never end."""

_CORE_FLOP_PER_S = 50e9
"""Assumed rate of a CPU core whose matrix products were not measured."""

WorkOf = Callable[[str, Shape], UpdateWork]
"""The work of the update of a parameter, by its name and shape: `Rule.work`."""


def adamw_work(_: str, shape: Shape) -> UpdateWork:
    """The work of AdamW with fp32 moments."""
    return UpdateWork(prod(shape))


class Rates:
    """One rank's share of a node. All ranks of a node work at the same time and share its CPU, RAM, SSDs and links."""

    def __init__(
        self,
        hardware: Hardware,
        shared_by: Ranks = ALONE,
        transfer_bytes: int = LARGE_TRANSFER_BYTES,
        work: WorkOf = adamw_work,
    ) -> None:
        """`transfer_bytes` is the size of the SSD's transfers. `work` is that of the updates.

        Raises ConfigError if the hardware lacks a figure that its kind of machine needs, or has another number of ranks
        per node.
        """
        if hardware.ssd is not None:
            hardware = replace(hardware, ssd=hardware.ssd.in_transfers_of(transfer_bytes))
        self._hardware = hardware
        self._shared_by = shared_by
        if shared_by.count > 1 and shared_by.per_node != hardware.gpus_per_node:
            raise ConfigError(
                f"a plan for {shared_by.per_node} ranks per node and hardware {hardware.name!r} with "
                f"{hardware.gpus_per_node}: take Hardware.with_gpus"
            )
        cpu, ssd, link = hardware.cpu, hardware.ssd, hardware.link
        ranks = hardware.gpus_per_node
        self.update_threads = update_threads(max(1, cpu.cores // ranks))
        self._params_per_s = cpu.update_params_per_s.value / ranks
        # The CPU updates states in an arena that stands in for a device.
        self._device_params_per_s = (
            self._params_per_s if hardware.device is None else hardware.device.update_params_per_s.value
        )
        cpu_flop_per_s = _CORE_FLOP_PER_S * cpu.cores if cpu.bf16 is None else cpu.bf16.reached_flop_per_s.value
        self._flop_per_s = cpu_flop_per_s / ranks
        self._device_flop_per_s = (
            self._flop_per_s if hardware.device is None else hardware.device.bf16.reached_flop_per_s.value
        )
        self._work = cache(lambda unit: _work_per_parameter(unit, work))
        both: dict[tuple[str, str], float] = {}
        self._bytes_per_s: dict[str, float]
        if link is None:
            self._bytes_per_s = {
                LaneName.H2D: _known(cpu.copy_bytes_per_s, hardware, "copies to an arena"),
                LaneName.D2H: _known(cpu.gradient_bytes_per_s, hardware, "gradients"),
            }
        else:
            self._bytes_per_s = {
                LaneName.H2D: link.h2d_bytes_per_s.value / link.gpus,
                LaneName.D2H: link.d2h_bytes_per_s.value / link.gpus,
            }
            both[LaneName.H2D, LaneName.D2H] = link.both_bytes_per_s.value / link.gpus
        if ssd is not None:
            self._bytes_per_s[LaneName.SSD_READ] = ssd.read_bytes_per_s.value / ranks
            self._bytes_per_s[LaneName.SSD_WRITE] = ssd.write_bytes_per_s.value / ranks
            both[LaneName.SSD_READ, LaneName.SSD_WRITE] = ssd.both_bytes_per_s.value / ranks
        # A store reads and writes every byte.
        of_thread = 2 * cpu.gradient_bytes_per_s.value if cpu.gradient_bytes_per_s is not None else inf
        self._added_bytes_per_s = (
            of_thread if link is None else min(cpu.memory_bytes_per_s.value / ranks, self.update_threads * of_thread)
        )
        self._pair_shares = {pair: self._halves(pair, total) for pair, total in both.items()}
        """The two lanes of a resource, one for each direction -> the share of its own rate that each has while both
        work."""
        beside = None if ssd is None or hardware.device is not None else ssd.beside_bytes_per_s
        self._beside_compute = 1.0 if beside is None or ssd is None else beside.value / ssd.both_bytes_per_s.value
        """Share of the SSD's rates while the CPU computes."""
        self._demand = self._demands(hardware)
        self._yielding = frozenset(self._demand) - (
            frozenset() if hardware.device else {LaneName.SSD_READ, LaneName.SSD_WRITE}
        )
        """Lanes that only get what the others leave. Transfer threads sleep most of the time, so a computing CPU runs
        them first."""
        self.python_ahead = hardware.device is not None
        """Whether Python runs ahead of compute, as it does ahead of a GPU."""
        self.task_switch_s = cpu.task_switch_s.value if cpu.task_switch_s is not None else 0.0
        """Seconds that compute's thread loses to each piece of work of a lane."""
        self.parameter_s = cpu.parameter_s.value if cpu.parameter_s is not None else 0.0
        """Seconds per step that compute's thread loses to the bookkeeping of each trainable parameter."""

    def seconds(self, lane: str, nbytes: int) -> float:
        """Seconds that a lane takes to move `nbytes` if it works alone. Raises ConfigError if there is no such lane."""
        if lane not in self._bytes_per_s:
            raise ConfigError("the plan uses an SSD, and the hardware has no figures of one: calibrate with --ssd DIR")
        return nbytes / self._bytes_per_s[lane]

    def ring_seconds(self, sent: int, group: int) -> float:
        """Seconds of an all-gather or a reduce-scatter over `group` ranks in which each sends `sent` bytes.

        With S bytes and n ranks in m domains, each rank sends S (n - 1) / n to its neighbour in a ring, which is the
        minimum (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
        2005). Rings that follow the domains cross each network once. There are as many rings as ranks in a domain,
        each starting at another rank and using another adapter, as on rails. So a domain sends S (m - 1) / m at the
        rate of all its adapters, while its ranks pass on what arrives. The slower of the two sets the time, as in
        NCCL's rings. Latency is not counted.
        """
        return self._ring_seconds(sent, group, self._shared_by.members_per_domain(group)) if group > 1 else 0.0

    def merge_seconds(self, sent: int) -> float:
        """Seconds that ranks with the same slices, one per replica, take to gather what each of them sends."""
        ranks = self._shared_by
        return self._ring_seconds(sent, ranks.replicas, ranks.copies_per_domain)

    def _ring_seconds(self, sent: int, group: int, inside: int) -> float:
        """`inside`: number of ranks of the group in one domain."""
        ranks, domains = self._shared_by, group // inside
        whole = sent * group / (group - 1)
        seconds = [sent / self._inside()] if inside > 1 else []
        if domains > 1:
            # Groups that are spread over domains in the same way share the network.
            groups = max(1, min(ranks.per_domain, ranks.count) // inside)
            seconds.append(whole * (domains - 1) / domains * groups / self._across())
        return max(seconds)

    def exchange_seconds(self, exchange: Exchange) -> float:
        """Seconds of an exchange while nothing else is sent. Bytes that leave a domain share its network.

        Bytes for another rail first go to a GPU of this node on that rail, as NCCL sends them since 2.12 (PXN:
        "Doubling all2all Performance with NVIDIA Collective Communication Library 2.12", NVIDIA's blog, 2022), or over
        the spine, if that is faster. Rings stay on their rails, so they never need the spine.
        """
        inside = exchange.sent - exchange.over_network
        seconds = [inside / self._inside()] if inside else [0.0]
        if exchange.over_network:
            seconds.append(exchange.over_network * exchange.senders_at_once / self._across())
        if rerouted := exchange.to_other_rails:
            spine = rerouted * exchange.senders_at_once * self._hardware.oversubscription / self._across()
            seconds.append(min((inside + rerouted) / self._inside(), spine))
        return max(seconds)

    def _inside(self) -> float:
        return _known(self._hardware.intra_node_bytes_per_s, self._hardware, "collectives inside a node")

    def _across(self) -> float:
        of_node = _known(self._hardware.inter_node_bytes_per_s, self._hardware, "collectives between nodes")
        return of_node * self._shared_by.nodes_per_domain

    def update_seconds(self, unit: UnitSpec, parameters: int) -> float:
        """Seconds of the update of this many parameters of a unit while nothing else runs."""
        elements, flops = self._work(unit)
        return parameters * (elements / self._params_per_s + flops / self._flop_per_s)

    def device_update_seconds(self, unit: UnitSpec, parameters: int, blocks: int) -> float:
        """The same on the device, for states in its memory, with the time in which Python queues the blocks."""
        queued = blocks * self.task_switch_s if self.python_ahead else 0.0
        elements, flops = self._work(unit)
        return parameters * (elements / self._device_params_per_s + flops / self._device_flop_per_s) + queued

    def adding_seconds(self, touched: int) -> float:
        """Seconds in which the CPU adds or widens gradients and reads and writes `touched` bytes. One thread does that,
        or several for gradients from a GPU."""
        return touched / self._added_bytes_per_s

    def shared(self, lanes: frozenset[str]) -> dict[str, float]:
        """lane -> share of its own rate while `lanes` are busy."""
        shares = dict.fromkeys(lanes, 1.0)
        if LaneName.COMPUTE in lanes:
            for lane in lanes & {LaneName.SSD_READ, LaneName.SSD_WRITE}:
                shares[lane] = self._beside_compute
        for pair, halves in self._pair_shares.items():
            if lanes.issuperset(pair):
                for lane, half in zip(pair, halves, strict=True):
                    shares[lane] *= half
        # In the order of `_demand`, because a sum of floats depends on its order.
        demands = [(lane, demand) for lane, demand in self._demand.items() if lane in lanes]
        asked = sum(demand for lane, demand in demands if lane in self._yielding)
        taken = sum(demand * shares[lane] for lane, demand in demands if lane not in self._yielding)
        for lane, _ in demands:
            if lane in self._yielding:
                shares[lane] *= min(1.0, max(_LEAST_LEFT, 1.0 - taken) / asked)
        return shares

    def lost(self, lanes: frozenset[str]) -> dict[str, tuple[str, float]]:
        """lane -> the other lane of its resource, and the share of its time that it loses to that one while `lanes` are
        busy."""
        return {
            lane: (other, 1.0 - half)
            for pair, halves in self._pair_shares.items()
            if lanes.issuperset(pair)
            for lane, other, half in zip(pair, reversed(pair), halves, strict=True)
        }

    def _halves(self, pair: tuple[str, str], total: float) -> tuple[float, float]:
        """Shares of their own rates at which two lanes move `total` bytes per second: equally many each, unless one of
        them cannot."""
        one, other = (self._bytes_per_s[lane] for lane in pair)
        slower = min(one, other, total / 2)
        return min(one, total - min(slower, other)) / one, min(other, total - min(slower, one)) / other

    def _demands(self, hardware: Hardware) -> dict[str, float]:
        """lane -> share of the common resource that it takes at its full rate. The resource is the cores if the CPU
        computes, otherwise RAM's bandwidth."""
        cpu, ssd = hardware.cpu, hardware.ssd
        if hardware.device is None:
            thread = 1.0 / cpu.cores
            demand: dict[str, float] = {
                LaneName.COMPUTE: 1.0,
                LaneName.UPDATE: 1.0,
                LaneName.DEVICE_UPDATE: 1.0,
                LaneName.H2D: thread,
                LaneName.D2H: thread,
                LaneName.COLLECTIVE: thread,
            }
            if ssd is not None and ssd.cpu_share is not None:
                # A byte takes as much of the cores in one direction as in both at once, which is what was measured.
                measured = ssd.both_bytes_per_s.value * self._beside_compute
                demand |= {
                    LaneName.SSD_READ: ssd.cpu_share.value * ssd.read_bytes_per_s.value / measured,
                    LaneName.SSD_WRITE: ssd.cpu_share.value * ssd.write_bytes_per_s.value / measured,
                }
            return demand
        ram = cpu.memory_bytes_per_s.value / hardware.gpus_per_node
        return {LaneName.UPDATE: 1.0, **{lane: rate / ram for lane, rate in self._bytes_per_s.items()}}


def _known(figure: Figure | None, hardware: Hardware, what: str) -> float:
    if figure is None:
        raise ConfigError(f"hardware {hardware.name!r} has no rate for {what}: run pagoda calibrate")
    return figure.value


def _work_per_parameter(unit: UnitSpec, work: WorkOf) -> UpdateWork:
    """The mean work of a unit's trained parameters."""
    trained = [slot.param for slot in unit.slots if slot.param.trainable]
    works = [work(param.name, param.shape) for param in trained]
    numel = max(1, sum(param.numel for param in trained))
    return UpdateWork(sum(each.elements for each in works) / numel, sum(each.flops for each in works) / numel)
