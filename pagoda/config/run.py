"""The settings that `pagoda train` and `pagoda plan` have in common."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pagoda.config.memory import Memory
from pagoda.config.settings import Settings, flag, require, require_count
from pagoda.config.training import Training
from pagoda.errors import ConfigError

Moments = Literal["fp32", "bf16", "8bit"]
"""The formats in which AdamW can store its moments."""
PlanMode = Literal["usual", "search"]
"""Whether a run takes the planner's first choice, or simulates several plans and takes the fastest."""


PACKAGES = {"4bit": "bitsandbytes", "8bit": "torchao"}
"""Format -> the package that has its layers."""


def needs_package(bits: str) -> str:
    """The refusal where the package of a format is not installed."""
    return f"--load-in-{bits} needs {PACKAGES[bits]}: pip install 'pagoda-train[quantized]'"


@dataclass(frozen=True, kw_only=True)
class StatesConfig(Settings):
    """Settings of an optimizer that may affect which states it keeps."""

    optim_args: tuple[str, ...] = ()
    """Other settings of --optim, as NAME=VALUE: momentum=0.9 nesterov=true."""
    moments: Moments = "fp32"
    """Format of AdamW's moments: fp32 (exact, 8 bytes per parameter), or bf16 (4) or 8bit (2), which are
    stochastically rounded. These two change the algorithm."""


USUAL_LENGTH = 1024
"""Tokens of a sequence if nothing else is asked for, as far as the model has positions."""


@dataclass(frozen=True, kw_only=True)
class Workload(Settings):
    """What one forward pass computes."""

    model: str | None
    per_device_train_batch_size: int
    """Sequences per forward pass, on each rank."""
    max_length: int
    """Tokens per sequence. For a T5, of the encoder's input and of the decoder's output each."""


@dataclass(frozen=True, kw_only=True)
class Run(StatesConfig, Training, Workload):
    """The settings that decide how much memory and time a run takes."""

    zero_stage: Literal[1, 2, 3] = 3
    """Stage of ZeRO. Ranks divide the optimizer's state (1), gradients too (2), weights too (3)."""
    replicas: int = 1
    """Number of whole copies of the state (hybrid sharding). Ranks / replicas consecutive ranks divide each."""
    expert_parallel: int = 1
    """In a mixture of experts: number of ranks over which the experts of each layer are divided. Tokens are sent to the
    ranks of their experts."""
    tensor_parallel: int = 1
    """Number of consecutive ranks that divide every layer and get the same batches."""
    pipeline_parallel: int = 1
    """Number of pipeline stages, each of which has equally many ranks and a part of the layers. The micro-batches of a
    step, --gradient-accumulation-steps, pass through the stages. `pagoda train` needs at least as many as stages."""
    sequence_parallel: int = 1
    """Number of consecutive ranks that divide each sequence, and exchange tokens for heads around attention. They get
    the same batches. It must divide --max-length and the number of attention heads."""
    ordered_sums: bool = False
    """Add each rank's gradient of a micro-batch by itself, in the order of ranks. Gradients then have the same bits on
    1, 2, 4, ... ranks that take the same micro-batches (--zero-stage 2 or 3). `pagoda plan` assumes that this takes no
    more time."""
    save_steps: int = 0
    """Steps from one checkpoint to the next. 0: by time, see --save-minutes."""
    save_minutes: float = 30.0
    """Minutes of training from one checkpoint to the next, without --save-steps. 0: save only at the end, and
    when the run is interrupted."""
    save_total_limit: int = 2
    """Number of checkpoints to keep, the best one included. Older ones are deleted after a new one is complete. With
    --save-steps, a checkpoint does not copy state on SSD but keeps its pages, so this state takes that many times more
    space there. Without --save-steps, one checkpoint keeps its pages, if there is room. 0: delete no checkpoint, and
    copy the state on SSD into each."""
    gradient_accumulation_steps: int = 1  # and not None: a run always announces its passes
    optim: str = "adamw"
    """adamw, adam, sgd, signsgd, lion, adafactor, muon, a class of torch.optim (Adagrad), or MODULE:CLASS for any other
    class. `pagoda plan` assumes that updates are as fast as those of AdamW with fp32 moments."""
    memory: Memory = field(default_factory=Memory)
    """Where training state may live, and how much of it. `pagoda plan` takes missing values from the hardware. There,
    memory.ssd may be only a size if the hardware is not this machine."""
    chunked_loss: bool | None = None
    """Compute the loss in blocks, without ever holding all logits. This takes one more matrix product with the output
    layer, and rounds the loss in another order. By default it is used if all logits would be the peak of activations.
    """
    load_in_4bit: bool = False
    """With --lora-r: hold the model's own linear layers and experts in 4 bits (NF4 of bitsandbytes), as in QLoRA. They
    then compute slightly different outputs."""
    load_in_8bit: bool = False
    """As --load-in-4bit, in 8 bits (integers of torchao)."""
    plan: PlanMode | None = None
    """search: simulate several plans, with the machine's speeds from `pagoda calibrate`, and take the fastest. usual:
    take the planner's first choice. The bits are the same. The default is search. For `pagoda train`, it is usual on
    several ranks, and on a machine that has not been measured."""
    trace: Path | None = None
    """File for a trace of one step, as JSON for Perfetto or chrome://tracing: what compute does, and every lane
    (transfers, updates). `pagoda plan` writes the predicted step, `pagoda train` the third step that it runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        others = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
        for name in ("replicas", "sequence_parallel", *others):
            require_count(name, getattr(self, name), 1)
        if self.sequence_parallel > 1:
            self._check_sequences(others)
        for name in ("save_steps", "save_total_limit"):
            require_count(name, getattr(self, name), 0)
        if self.load_in_4bit and self.load_in_8bit:
            raise ConfigError("give --load-in-4bit or --load-in-8bit, not both")
        minutes = self.save_minutes
        require(0 <= minutes < math.inf, "save_minutes", minutes, "0 or more, and finite")

    def _check_sequences(self, others: tuple[str, ...]) -> None:
        """Raises ConfigError if ranks cannot divide the sequences. `others`: how else they may divide a pass."""
        ranks = self.sequence_parallel
        if self.max_length % ranks:
            raise ConfigError(
                f"--sequence-parallel {ranks} does not divide --max-length {self.max_length}: give a multiple"
            )
        if also := next((flag(name) for name in others if getattr(self, name) > 1), None):
            raise ConfigError(f"--sequence-parallel does not work with {also}: leave out one of them")

    @property
    def quantized_format(self) -> Literal["4bit", "8bit"] | None:
        """The format in which the model's own layers are held. None: as they are."""
        return "4bit" if self.load_in_4bit else "8bit" if self.load_in_8bit else None

    @property
    def saves_by_time(self) -> bool:
        """Whether checkpoints are due by time, not by steps."""
        return self.save_minutes > 0 and not self.save_steps

    def kept_on_ssd(self, nodes: int) -> int | None:
        """Number of checkpoints for which state on SSD has spare pages. None, for checkpoints by time: one if there is
        room, because a default must not make a run fail. 0 if a run saves only at its end, because that checkpoint
        copies, and on several nodes, because other nodes may not see this node's drives."""
        if nodes > 1 or not self.save_total_limit or not (self.save_steps or self.saves_by_time):
            return 0
        return self.save_total_limit if self.save_steps else None
