"""What a forecast is asked for, as the command line and Python share it."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pagoda.errors import ConfigError
from pagoda.memory.page import PAGE_ALIGN
from pagoda.memory.sizes import parse_bytes
from pagoda.plan.activations import ActivationMode
from pagoda.plan.batch_tiles import BatchTiles, tile_tokens
from pagoda.settings import MemoryConfig, PlanMode, StatesConfig, check_batch_tiles, check_tile_limit, require

if TYPE_CHECKING:
    from pagoda.optim.rule import Rule, StateSpec


_MOST_TOKENS = 1 << 40
"""Of one forward pass: the sizes of more could not be counted in 64 bits."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Say, before anything is allocated, whether a model trains on a machine, how fast, what binds, what would help.

    Exit code 0 if it fits, 1 if it does not, 2 for settings that cannot be used.
    """

    model: str | None = None
    """Built-in shape, directory with a Hugging Face config.json, gpt-LAYERSxHIDDEN, or a paper's shape (gpt-13b,
    gpt3-175b, gpt-1t, t5-58b, t5-moe-1.2t, ...)."""
    max_model: bool = False
    """Instead of --model: find the largest GPT that fits, and plan it."""
    hardware: str = "auto"
    """This machine as `pagoda calibrate` measured it (auto), a named machine (h100, a100-40g, rtx4090, ...), or a
    hardware file."""
    nodes: int = 1
    """Equal nodes."""
    gpus_per_node: int | None = None
    """GPUs of a node in use, or processes where the CPU computes; by default all that the hardware has. Each computes
    on a batch of its own, and all of them share out the state."""
    zero_stage: Literal[1, 2, 3] = 3
    """What several ranks share out: moments (1), gradients too (2), weights too (3)."""
    replicas: int = 1
    """Whole copies of the state: each is shared out over ranks / replicas consecutive ranks."""
    expert_parallel: int = 1
    """Of a mixture of experts (t5-moe-1.2t): ranks that divide the experts of every layer. Tokens travel to them."""
    batch_size: int = 1
    """Sequences per forward pass on each GPU."""
    seq_len: int = 1024
    """Tokens per sequence."""
    accumulation_steps: int = 1
    """Forward and backward passes per optimizer step."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of weights and gradients in forward and backward; the master weights are fp32 either way. fp16 is taken
    to compute as fast as bf16."""
    gradients: Literal["bf16", "fp32"] | None = None
    """What gradients are accumulated in; by default the precision of the weights."""
    optimizer: str = "adamw"
    """adamw, adam, sgd, lion, adafactor, muon, a class of torch.optim (Adagrad), or MODULE:CLASS of any other. Updates
    are taken to be as fast as those of AdamW with fp32 moments."""
    optim: StatesConfig = field(default_factory=StatesConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """What is left out follows from the hardware. Of a machine that is not this one, memory.ssd may be a size alone."""
    clip_grad_norm: float | None = 1.0
    """Largest global norm of the gradient, or None for no clipping."""
    speculate: bool | None = None
    """With clipping and state on SSD, update under backward as if nothing would be clipped, and redo that where
    something is. By default where there is room to keep the old state. The forecast step is not clipped."""
    update: Literal["sync", "async"] = "sync"
    """async: forward and backward do not wait for updates, whose results lag by at most --max-staleness steps."""
    max_staleness: int = 1
    """With async, the most steps whose gradients may be missing in the weights that a forward reads."""
    keep_checkpoints: int = 0
    """Checkpoints that the run keeps: state on SSD takes this many times more room there. `pagoda train` keeps 2, if
    --checkpoint-every is given."""
    activations: ActivationMode = "recompute"
    """What becomes of the activations of each layer, as for `pagoda train`. auto: the policy for all layers with which
    a step is fastest, which is what `pagoda train` then takes on a measured machine."""
    chunked_loss: bool | None = None
    """Compute the loss without ever holding all logits. By default where they would be the peak of activations."""
    batch_tiles: BatchTiles | None = None
    """Micro-batches in which each layer runs its batch. auto: as few as keep products of matrices at full speed and
    small, or as many more as it takes to fit."""
    tile_limit: str | None = None
    """Linear layers and embeddings whose weights take more bytes than this (such as 256MiB) are tiles that are fetched
    one after another."""
    plan: PlanMode = "search"
    """search: forecast the fastest of several plans, which is what `pagoda train` then takes on a measured machine.
    usual: the planner's first choice."""
    json: bool = False
    """Print JSON only, with the keys that docs/plan.md describes: fits, params, bytes, step_s, tokens_per_s,
    tflops_per_gpu, binding_lane, lanes, ssd_bytes_written_per_step, advice, and some more."""
    plot: Path | None = None
    """Draw the lanes' timeline and each tier's bytes over the step into this PNG."""
    trace: Path | None = None
    """Write the predicted step as JSON for Perfetto or chrome://tracing."""

    def __post_init__(self) -> None:
        if self.gpus_per_node is not None:
            require(self.gpus_per_node >= 1, "gpus_per_node", self.gpus_per_node, "must be at least 1")
        for name in ("nodes", "replicas", "expert_parallel", "batch_size", "accumulation_steps"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        require(self.seq_len >= 2, "seq_len", self.seq_len, "must be at least 2 (a token and the next)")
        require(self.tokens < _MOST_TOKENS, "batch_size", self.batch_size, "and --seq-len make too many tokens")
        if self.memory.page_size is not None:
            page = parse_bytes(self.memory.page_size, "memory.page_size")
            fits = page % PAGE_ALIGN == 0 and page & (page - 1) == 0
            require(fits, "memory.page_size", page, f"must be a power of two and a multiple of {PAGE_ALIGN}")
        if self.clip_grad_norm is not None:
            require(self.clip_grad_norm > 0, "clip_grad_norm", self.clip_grad_norm, "must be above 0, or None")
        require(self.max_staleness >= 0, "max_staleness", self.max_staleness, "must be 0 or more")
        if self.update == "async" and self.speculate:
            raise ConfigError("--speculate is for updates that forward waits for: leave it out with --update async")
        check_batch_tiles(self.batch_tiles)
        check_tile_limit(self.tile_limit)
        if (self.model is None) != self.max_model:
            raise ConfigError("give either --model NAME, or --max-model to find the largest GPT that fits")

    @cached_property
    def states(self) -> "tuple[StateSpec, ...]":
        """What the optimizer keeps, the weights first.

        Raises ConfigError where there is no optimizer of that name, it has not one of the settings, or it takes
        parameters whole and they are to be in tiles.
        """
        return self.rule.states(self.precision)

    @property
    def rule(self) -> "Rule":
        """The update rule. Raises ConfigError for settings that it does not have."""
        from pagoda.construction.rule_checks import check_rule
        from pagoda.optim.named import parsed_options, rule_named

        moments = {"moments": self.optim.moments} if self.optimizer == "adamw" else {}
        require(bool(moments) or self.optim.moments == "fp32", "optim.moments", self.optim.moments, "is for adamw")
        rule = rule_named(self.optimizer, moments | parsed_options(self.optim.options))
        check_rule(rule, tiled=self.tile_limit is not None)
        return rule

    @property
    def tile_elements(self) -> int | None:
        """Most elements of a matrix that is not in tiles; None where none is."""
        if self.tile_limit is None:
            return None
        return parse_bytes(self.tile_limit, "tile_limit") // self.states[0].dtype.itemsize

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass on one GPU."""
        return self.batch_size * self.seq_len

    @property
    def tile_tokens(self) -> int:
        """Tokens that a layer runs at a time."""
        return tile_tokens(self.batch_tiles, self.batch_size, self.seq_len)
