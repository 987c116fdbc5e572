"""Muon on whole matrices, and AdamW on all else.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the scale of Liu et al.,
"Muon is Scalable for LLM Training" (2025). torch's own function updates matrices, so the bits are those of
``torch.optim.Muon``. All other parameters are updated as in `adamw`. That rule is element-wise, so a large embedding
need not be in RAM whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, muon

from pagoda.config.settings import are_texts
from pagoda.optim.adamw import AdamW
from pagoda.optim.rule import StateSpec, TensorRule, UpdateWork, are_values, fp32, is_number

BUFFER = "momentum_buffer"
ADAMW_FOR = ("*embed*", "*wte*", "*wpe*", "*shared*", "*lm_head*", "*relative_attention_bias*")
"""Names of matrices that are not layers: embeddings and the output head, in common models."""
_OF_TORCH = ["lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"]
"""Settings of torch's function."""


@dataclass(frozen=True, kw_only=True)
class Muon(TensorRule):
    """Settings of Muon, with the names of ``torch.optim.Muon``, and of AdamW for parameters that Muon does not update.

    lr, weight_decay: for Muon and AdamW, >= 0.
    momentum, nesterov, ns_coefficients, eps, ns_steps: as in torch.
    adjust_lr_fn: how lr is scaled for a matrix. "match_rms_adamw" (not torch's default) makes updates as large as
        AdamW's, so that the same lr and weight_decay suit both. "original" is Jordan's scale.
    betas, adamw_eps: of AdamW. It updates all parameters that are not matrices, and matrices named by adamw_for.
    adamw_for: shell patterns for names of matrices. The default matches embeddings and output heads.

    In addition to the fp32 master, Muon's parameters take 4 bytes each and AdamW's take 8.
    Raises ConfigError, naming the field, for a value outside its range.
    """

    name: ClassVar[str] = "Muon"
    fixed: ClassVar[tuple[str, ...]] = ("adamw_for",)
    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = "match_rms_adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    adamw_eps: float = 1e-8
    adamw_for: tuple[str, ...] = ADAMW_FOR

    def __post_init__(self) -> None:
        self._require(
            "adamw_eps", is_number(self.adamw_eps) and fp32(self.adamw_eps) > 0, "a finite number > 0 in fp32"
        )
        self.adamw()
        self._require_bools("nesterov")
        self._require("adamw_for", are_texts(self.adamw_for), "a tuple of patterns")
        self._require("momentum", is_number(self.momentum) and 0 <= self.momentum < 1, "in [0, 1)")
        self._require("ns_steps", type(self.ns_steps) is int and 0 < self.ns_steps < 100, "from 1 to 99")
        numbers = are_values(self.ns_coefficients, 3) and all(map(is_number, self.ns_coefficients))
        self._require("ns_coefficients", numbers, "three numbers")
        self._require("eps", is_number(self.eps) and self.eps > 0, "a finite number > 0")
        known = (None, "original", "match_rms_adamw")
        self._require("adjust_lr_fn", self.adjust_lr_fn in known, f"one of {known}")

    def takes_whole(self, parameter: str, shape: tuple[int, ...]) -> bool:
        """Whether Muon updates a parameter. AdamW updates all others, and they may be cut."""
        return len(shape) == 2 and not any(fnmatchcase(parameter, pattern) for pattern in self.adamw_for)

    def work(self, parameter: str, shape: tuple[int, ...]) -> UpdateWork:
        """For a matrix of r rows and c >= r columns, each of the `ns_steps` iterations multiplies [r, c] by [c, r],
        [r, r] by [r, r] and [r, r] by [r, c]."""
        if not self.takes_whole(parameter, shape):
            return self.adamw().work(parameter, shape)
        rows, columns = sorted(shape)
        return UpdateWork(4.0 * rows * columns, self.ns_steps * (4.0 * rows * rows * columns + 2.0 * rows**3))

    def own_states(self) -> tuple[StateSpec, ...]:
        """The momentum of matrices, and both moments of all other parameters."""
        return (
            StateSpec(BUFFER, torch.float32, shape_of=self._of_matrices),
            StateSpec("exp_avg", torch.float32, shape_of=self._of_others),
            StateSpec("exp_avg_sq", torch.float32, shape_of=self._of_others),
        )

    def update(
        self, step: int, weight: torch.Tensor, gradient: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> None:
        """One step, in place."""
        if BUFFER not in states:
            from pagoda.optim.flat import update  # imports Numba

            rule = self.adamw()
            update(rule, {"weight": weight, **states}, gradient, rule.scalars(step))
            return
        settings = {name: getattr(self, name) for name in _OF_TORCH}
        muon([weight], [gradient], [states[BUFFER]], **settings, has_complex=False)

    def torch_state(self, step: int, kept: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The entry of torch's Muon or AdamW. Muon does not count steps."""
        return dict(kept) if BUFFER in kept else super().torch_state(step, kept)

    def steps_in(self, state: Mapping[str, Any]) -> int:
        """For a matrix, 1 if there was an update, otherwise 0."""
        return int(state.get("step", BUFFER in state))

    def adamw(self) -> AdamW:
        """The rule of parameters that are not matrices."""
        return AdamW(lr=self.lr, betas=self.betas, eps=self.adamw_eps, weight_decay=self.weight_decay)

    def _of_matrices(self, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return shape if self.takes_whole(parameter, shape) else None

    def _of_others(self, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return None if self.takes_whole(parameter, shape) else shape
