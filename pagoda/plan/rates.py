"""Rates: how fast each lane of one rank works on given hardware, alone and beside the others."""

from pagoda.errors import ConfigError
from pagoda.plan.hardware import Figure, Hardware
from pagoda.plan.timeline import COMPUTE

READ, WRITE, H2D, D2H, UPDATE = "ssd_read", "ssd_write", "h2d", "d2h", "update"
_PAIRS = ((READ, WRITE), (H2D, D2H))


class Rates:
    """One rank's share of a node: ranks of a node work at the same time and share its CPU, RAM, SSDs and links."""

    def __init__(self, hardware: Hardware) -> None:
        """Raises ConfigError when the hardware lacks a figure that its kind of machine needs."""
        cpu, ssd, link = hardware.cpu, hardware.ssd, hardware.link
        ranks = hardware.gpus_per_node
        self._params_per_s = cpu.update_params_per_s.value / ranks
        if link is None:
            self._bytes_per_s = {
                H2D: _known(cpu.copy_bytes_per_s, hardware, "copies to an arena"),
                D2H: _known(cpu.gradient_bytes_per_s, hardware, "gradients"),
            }
        else:
            self._bytes_per_s = {
                H2D: link.h2d_bytes_per_s.value / link.gpus,
                D2H: link.d2h_bytes_per_s.value / link.gpus,
            }
        together = {}
        if link is not None:
            together[H2D, D2H] = link.both_bytes_per_s.value / link.gpus / sum(self._bytes_per_s.values())
        if ssd is not None:
            self._bytes_per_s[READ] = ssd.read_bytes_per_s.value / ranks
            self._bytes_per_s[WRITE] = ssd.write_bytes_per_s.value / ranks
            both = ssd.read_bytes_per_s.value + ssd.write_bytes_per_s.value
            together[READ, WRITE] = ssd.both_bytes_per_s.value / both
        self._together = {pair: min(1.0, factor) for pair, factor in together.items()}
        """Pairs of lanes that are two directions of one thing -> what is left of each one's rate while both work."""
        self._demand = self._demands(hardware)
        self._shares: dict[frozenset[str], dict[str, float]] = {}

    def seconds(self, lane: str, nbytes: int) -> float:
        """How long a lane that moves bytes takes for `nbytes` alone. Raises ConfigError if there is no such lane."""
        if lane not in self._bytes_per_s:
            raise ConfigError("the plan uses an SSD, of which the hardware says nothing: calibrate with --ssd DIR")
        return nbytes / self._bytes_per_s[lane]

    def update_seconds(self, parameters: int) -> float:
        """How long the update of so many parameters takes with nothing beside it."""
        return parameters / self._params_per_s

    def shared(self, lanes: frozenset[str]) -> dict[str, float]:
        """lane -> share of its own rate that it has while `lanes` are busy."""
        known = self._shares.get(lanes)
        if known is None:
            asked = sum(self._demand.get(lane, 0.0) for lane in lanes)
            known = {lane: 1.0 / max(1.0, asked) if lane in self._demand else 1.0 for lane in lanes}
            for pair, factor in self._together.items():
                if lanes.issuperset(pair):
                    for lane in pair:
                        known[lane] *= factor
            self._shares[lanes] = known
        return known

    def _demands(self, hardware: Hardware) -> dict[str, float]:
        """lane -> share of what all of them need that it takes at its full rate: of the cores where the CPU computes,
        else of RAM's bandwidth."""
        cpu, ssd = hardware.cpu, hardware.ssd
        if hardware.device is None:
            demand = {COMPUTE: 1.0, UPDATE: 1.0, H2D: 1.0 / cpu.cores, D2H: 1.0 / cpu.cores}
            if ssd is not None and ssd.cpu_share is not None:
                demand |= {READ: ssd.cpu_share.value / 2, WRITE: ssd.cpu_share.value / 2}
            return demand
        ram = cpu.memory_bytes_per_s.value / hardware.gpus_per_node
        return {UPDATE: 1.0, **{lane: rate / ram for lane, rate in self._bytes_per_s.items()}}


def _known(figure: Figure | None, hardware: Hardware, what: str) -> float:
    if figure is None:
        raise ConfigError(f"hardware {hardware.name!r} computes on its CPU but has no rate for {what}: calibrate it")
    return figure.value
