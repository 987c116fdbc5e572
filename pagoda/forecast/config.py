"""The settings of a forecast, for `pagoda plan` and for Python."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from pagoda.config.run import USUAL_LENGTH, Run
from pagoda.config.settings import flag, require, require_count
from pagoda.errors import ConfigError
from pagoda.memory.sizes import parse_bytes
from pagoda.models.lora import LoraConfig
from pagoda.plan.tiles import piece_tokens, tile_tokens
from pagoda.simulate.machines import AUTO

if TYPE_CHECKING:
    from pagoda.optim.rule import Rule, StateSpec

Degree = Literal["tensor", "pipeline", "expert", "replicas"]
_MOST_TOKENS = 1 << 40
"""Of one forward pass: the sizes of more could not be counted in 64 bits."""


@dataclass(frozen=True, kw_only=True)
class SizedRun(LoraConfig, Run):
    """The settings of a run and of its adapters, and the sizes of its forward passes that follow from them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_r is None and (bits := self.quantized_format) is not None:
            raise ConfigError(f"--load-in-{bits} is for a model whose adapters train: give --lora-r too, such as 16")
        if self.lora_r is not None:
            for name, what in (
                ("tile_limit", "layers"),
                ("tensor_parallel", "layers"),
                ("pipeline_parallel", "models"),
            ):
                if getattr(self, name) not in (None, 1):
                    raise ConfigError(f"--lora-r adapts whole {what}: leave out {flag(name)}")

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the weights that compute uses, and of activations."""
        return 4 if self.chosen_precision == "fp32" else 2

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence: the usual number if it is still to be chosen."""
        return self.max_length or USUAL_LENGTH

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass on one GPU. It has one sequence if the number is still to be chosen."""
        return max(1, self.per_device_train_batch_size) * self._part

    @property
    def tile_tokens(self) -> int:
        """Tokens that a layer runs at a time."""
        return tile_tokens(self.batch_tiles, max(1, self.per_device_train_batch_size), self._part)

    @property
    def piece_tokens(self) -> int:
        """Tokens that an MLP processes at a time."""
        return piece_tokens(self.sequence_tiles, self.tile_tokens)

    @property
    def _part(self) -> int:
        """Tokens of a sequence on one GPU."""
        return self.seq_len // self.sequence_parallel


@dataclass(frozen=True, kw_only=True)
class PlanConfig(SizedRun):
    """Say before a run whether a model fits a machine, how fast it trains, what limits it, and what would help.

    Exit code 0 if it fits, 1 if it does not, 2 for settings that cannot be used.
    """

    model: str | None = None
    """Built-in shape, directory with a Hugging Face config.json, gpt-LAYERSxHIDDEN, or a paper's shape (gpt-13b,
    gpt3-175b, gpt-1t, t5-58b, t5-moe-1.2t, ...)."""
    max_model: bool = False
    """Instead of --model: find the largest GPT that fits, and plan it."""
    hardware: str = "auto"
    """This machine as `pagoda calibrate` measured it (auto; measured now if it was not), a named machine, or a hardware
    file. A machine has one GPU (h100, a100-40g, rtx4090, ...), or as many as its name says (h100x4)."""
    ram: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """RAM of a node of named hardware, such as 64GiB. By default what its vendor puts in, or what is assumed, as the
    plan then says."""
    nodes: int = 1
    """Number of equal nodes."""
    gpus_per_node: int | None = None
    """GPUs in use on each node, or processes if the CPU computes. By default all that the hardware has. Each has its
    own batches, and all of them divide the state."""
    search_degrees: tuple[Degree, ...] = ()
    """Degrees to choose for the fastest step: tensor, pipeline, expert, replicas. What is not named stays as set. A
    step keeps its sequences: ranks that share a batch have more --gradient-accumulation-steps."""
    per_device_train_batch_size: int = 0
    """Sequences per forward pass, on each rank. 0: as many as have room, of those of --tokens-per-step."""
    max_length: int = 0
    """Tokens per sequence. For a T5, of the encoder's input and of the decoder's output each. 0: 1024, or as many as
    the model has positions for, if these are fewer."""
    tokens_per_step: int | None = None
    """Without --per-device-train-batch-size: about how many tokens a step has, over all ranks. By default 16384, as for
    `pagoda train`.
    """
    max_steps: int = 1000
    """Steps of the run, for its time and what it writes to the SSD."""
    json: bool = False
    """Print JSON only, with the keys that docs/plan.md describes: fits, params, bytes, step_s, tokens_per_s,
    tflops_per_gpu, binding_lane, lanes, ssd_bytes_written_per_step, advice, and some more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("nodes", "max_steps"):
            require_count(name, getattr(self, name), 1)
        require_count("per_device_train_batch_size", self.per_device_train_batch_size, 0)
        if self.tokens_per_step is not None:
            require_count("tokens_per_step", self.tokens_per_step, 1)
            require(
                not self.per_device_train_batch_size,
                "tokens_per_step",
                self.tokens_per_step,
                "left out, or per_device_train_batch_size",
            )
        require_count("max_length", self.max_length, 0)
        require(self.max_length != 1, "max_length", self.max_length, "at least 2 (a token and the next)")
        if self.max_model and (self.pipeline_parallel > 1 or self.tensor_parallel > 1 or self.search_degrees):
            raise ConfigError("--max-model searches with data-parallel ranks only: name the model in --model")
        if self.gpus_per_node is not None:
            require_count("gpus_per_node", self.gpus_per_node, 1)
        if self.ram is not None:
            require(parse_bytes(self.ram, "ram") > 0, "ram", self.ram, "above 0")
            if self.hardware == AUTO:
                raise ConfigError("--ram is for a machine that --hardware names: limit pages here with --memory.host")
        require(
            self.tokens < _MOST_TOKENS,
            "per_device_train_batch_size",
            self.per_device_train_batch_size,
            "smaller, or max_length: too many tokens",
        )
        if self.max_model and self.lora_r is not None:
            raise ConfigError("--max-model searches for a model whose weights all train: name one in --model")
        if (self.model is None) != self.max_model:
            raise ConfigError("give either --model NAME, or --max-model to find the largest GPT that fits")

    @cached_property
    def states(self) -> "tuple[StateSpec, ...]":
        """What the optimizer keeps, the weights first. Raises as `rule`."""
        return self.rule.states(self.chosen_precision)

    @property
    def rule(self) -> "Rule":
        """The update rule. Raises ConfigError for an unknown name, and for a setting that the rule does not have."""
        from pagoda.optim.named import rule_from

        return rule_from(self.optim, self, {}).predicting(self.ahead)

    @property
    def tile_elements(self) -> int | None:
        """Most elements of a matrix that is not in tiles; None where none is."""
        return None if self.tile_bytes is None else self.tile_bytes // self.itemsize

    @property
    def looked_up_elements(self) -> int | None:
        """Most elements of an embedding whose rows the CPU does not look up; None without such a limit."""
        limit = self.memory.embedding_bytes
        return None if limit is None else limit // self.itemsize

    @property
    def degrees(self) -> dict[str, int]:
        """How ranks are divided, and the micro-batches of a step."""
        names = "tensor_parallel", "pipeline_parallel", "expert_parallel", "replicas", "gradient_accumulation_steps"
        return {name: getattr(self, name) for name in names}
