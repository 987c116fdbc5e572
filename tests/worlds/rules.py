"""What a random world is like."""

from dataclasses import dataclass, replace
from random import Random

import pagoda
from pagoda.config.training import LossScale
from pagoda.optim.rule import Rule


@dataclass(frozen=True)
class Rules:
    """What a world is like. Drawn at random."""

    sizes: tuple[tuple[int, ...], ...]
    """Elements of the parameters of each layer."""
    frozen: frozenset[int]
    """Layers that are not trained."""
    unread: frozenset[int]
    """Layers of whose weights backward reads nothing, as of an embedding's."""
    experts: int
    """The last so many layers are experts. A router chooses some of them."""
    steady: bool
    """Whether it always chooses the same."""
    order: tuple[int, ...]
    """Layers as forward uses them at first, without experts."""
    precision: str
    mode: str
    accumulation: int
    announced: bool
    speculates: bool
    """Whether all units with room for it are updated before it is known whether gradients are clipped."""
    device: bool
    """Whether weights are leased in a separate memory."""
    queued: bool
    """Whether the device has queues, as a GPU does."""
    ssd: bool
    scarce: float
    """How little memory the world has: 0 for the least, 1 for plenty."""
    device_updates: float
    """Share of the updates on the device."""
    whole: bool
    """Whether the optimizer's rule takes whole parameters."""
    steps: int
    holds: float
    """How likely the program keeps a view of weights that it uses."""
    departures: float
    """How likely a use is left out, an evaluation comes between, or an exception ends a pass."""
    reorders: float
    """How likely a step uses its layers in another order from then on."""
    changes: float
    """How likely a step has other hyperparameters than its backward."""
    clips: bool
    """Whether gradients are often clipped."""
    failures: float
    """How likely a copy of the device fails."""
    infinite: float
    """How likely a gradient is not finite."""
    checkpoints: float
    """How likely a checkpoint begins after a step."""
    keeps_pages: bool
    """Whether checkpoints keep their pages on SSD."""
    small_pieces: bool
    """Whether gradients leave one by one."""
    cut: bool
    """Whether large layers are several units."""
    ranks: int
    stage: int
    """Of ZeRO."""
    inline: bool
    """Whether small work is done by the thread that submits it."""
    ordered: bool
    """Whether each rank's gradients are added by themselves."""
    in_ram: frozenset[int]
    """Layers that compute in RAM, as embeddings that the CPU looks up."""
    outage: float
    """How likely the drive's next transfer fails too, after one has."""
    fails: tuple[str, ...]
    """Transfers that fail."""
    drive_failures: float
    """How likely a transfer of the drive fails."""
    signals: float
    """How likely a signal comes where compute could wait. Its handler raises an error."""
    offloads: bool = False
    """Whether layers save activations that are offloaded."""
    kernel_failures: float = 0.0
    """How likely a kernel of the CPU fails, when it has changed what it should."""
    adapts: bool = False
    """Whether homes are chosen again after the first step."""
    homes: bool = False
    """Whether the device is home to a part of the states that it updates."""
    predicts: bool = False
    """Whether weights are predicted where they are late."""
    loss_scale: LossScale | float = 1.0
    """By what the loss is multiplied, in fp16."""

    @staticmethod
    def draw(rng: Random) -> "Rules":
        count = rng.randint(1, 6)
        mode = rng.choice([*["clipped"] * 4, *["during backward"] * 2, *["asynchronous"] * 2, "plain"])
        announced = mode == "during backward" or (mode == "clipped" and rng.random() < 0.7)
        device, whole = rng.random() < 0.55, rng.random() < 0.12
        queued = device and not whole and rng.random() < 0.7
        ranks = 2 if not queued and not whole and rng.random() < 0.25 else 1
        experts = rng.randint(1, count - 2) if count > 2 and ranks == 1 and rng.random() < 0.2 else 0
        plain = [*range(count - experts)]
        return Rules(
            sizes=tuple(
                tuple(rng.choice([40, 700, 1500, 4200]) for _ in range(rng.choice([1, 1, 2]))) for _ in range(count)
            ),
            frozen=frozenset(layer for layer in range(count) if rng.random() < 0.12),
            unread=(unread := frozenset(layer for layer in plain if rng.random() < 0.15)),
            experts=experts,
            steady=rng.random() < 0.5,
            order=tuple(rng.sample(plain, len(plain))),
            precision=rng.choice(["fp32", "bf16"]),
            mode=mode,
            accumulation=rng.choice([1, 1, 2]),
            announced=announced,
            speculates=announced and mode == "clipped" and rng.random() < 0.7,
            device=device,
            queued=queued,
            ssd=rng.random() < 0.75,
            scarce=rng.choice([0.0, 0.0, 0.3, 0.6, 1.0]),
            device_updates=rng.choice([0.0, 0.0, 0.5, 1.0]),
            whole=whole,
            steps=rng.randint(2, 5),
            holds=rng.choice([0.0, 0.0, 0.3]),
            departures=rng.choice([0.0, 0.1, 0.3]),
            reorders=rng.choice([0.0, 0.0, 0.3]),
            changes=rng.choice([0.0, 0.0, 0.3]),
            clips=rng.random() < 0.3,
            failures=(failures := 0.0 if ranks > 1 else rng.choice([0.0, 0.0, 0.01, 0.04])),
            infinite=0.0 if ranks > 1 else rng.choice([0.0, 0.06]) if announced else rng.choice([0.0, 0.0, 0.06]),
            checkpoints=rng.choice([0.0, 0.3, 0.8]),
            keeps_pages=rng.random() < 0.5,
            small_pieces=rng.random() < 0.5,
            cut=mode != "asynchronous" and rng.random() < 0.3,
            stage=(stage := rng.choice([1, 2, 3, 3])),
            inline=not queued and rng.random() < 0.15,
            ordered=ranks > 1 and stage > 1 and rng.random() < 0.3,
            ranks=ranks if ranks == 1 else rng.choice([2, 2, 2, 4]),
            in_ram=unread if device and ranks == 1 and len(unread) < count and rng.random() < 0.5 else frozenset(),
            outage=rng.choice([0.0, 0.5, 0.9]),
            fails=rng.choice([("read", "write"), ("read",), ("write",)]),
            signals=0.0 if ranks > 1 else rng.choice([0.0, 0.0, 0.001, 0.004]),
            drive_failures=failures * rng.choice([1, 1, 8]),
        )

    def as_drawn(self) -> "Rules":
        """These rules."""
        return self

    def offloading(self) -> "Rules":
        """The same with activations that are offloaded."""
        return replace(self, offloads=True, ssd=True)

    def failing_kernels(self) -> "Rules":
        """The same on one rank, with kernels of the CPU that fail."""
        failing = replace(self, kernel_failures=0.05, device_updates=0.0, ssd=True)
        return replace(failing, ranks=1, ordered=False, experts=0, order=self._all)

    def passing(self) -> "Rules":
        """The same, speculating, with weights on the device, while other states pass it for their update."""
        one_device = replace(self, homes=True, device=True, device_updates=1.0, ranks=1, ordered=False, whole=False)
        plain = replace(one_device, experts=0, order=self._all)
        return replace(plain, mode="clipped", announced=True, speculates=True)

    def adapting(self) -> "Rules":
        """The same with homes that are chosen again, on one rank."""
        one_device = replace(self, adapts=True, device=True, ranks=1, ordered=False, experts=0, order=self._all)
        return replace(one_device, mode="clipped") if self.mode == "asynchronous" else one_device

    def predicting(self) -> "Rules":
        """The same with asynchronous updates that predict weights."""
        late = replace(self, mode="asynchronous", announced=False, speculates=False, cut=False, whole=False)
        return replace(late, predicts=True)

    def scaling(self) -> "Rules":
        """The same in fp16, with a loss that is scaled. Gradients are infinite now and then: if the scale is constant,
        steps are refused, else skipped, so that updates before the step are undone."""
        rng = Random(repr(self))  # draws nothing from the stream of other worlds
        scaled = replace(self, precision="fp16", infinite=0.06, loss_scale=LossScale(init_scale=4.0, growth_interval=2))
        if self.mode != "during backward":
            return scaled
        return rng.choice([replace(scaled, loss_scale=4.0), replace(scaled, mode="plain", speculates=True)])

    @property
    def _all(self) -> tuple[int, ...]:
        """The order of layers if none is an expert."""
        return (*self.order, *range(len(self.order), len(self.sizes)))

    @property
    def unit_limit(self) -> int:
        """Layers are units, or the parameters of large ones."""
        return max(4096, max(map(sum, self.sizes)) * (4 if self.precision == "fp32" else 2) // (1 + self.cut))

    @property
    def rule(self) -> Rule:
        return pagoda.SGD(lr=0.125, momentum=0.5)

    @property
    def trained(self) -> list[int]:
        return [layer for layer in range(len(self.sizes)) if layer not in self.frozen]
