"""The stages of a pipeline. Each trains its own layers, and together they are one model with one norm."""

from collections.abc import Collection
from itertools import chain, zip_longest
from typing import NamedTuple, TypeVar

from pagoda.errors import ConfigError, UsageError
from pagoda.mesh.mesh import Mesh
from pagoda.ranks.transport import Transport

T = TypeVar("T")


class Links(NamedTuple):
    """How this process communicates with the others of its run."""

    mesh: Mesh
    ranks: Transport | None
    """With the ranks of its stage. None if there are no others."""
    stages: "Stages | None"
    """With its peers in other stages. None without a pipeline."""
    saver: Transport | None
    """With all processes, for the thread that writes checkpoints. None if there are no others."""

    @classmethod
    def open(cls, mesh: Mesh) -> "Links":
        """Every process must call it at the same point."""
        return cls(
            mesh,
            Transport(mesh.world) if mesh.world.size > 1 else None,
            Stages(mesh) if mesh.peers.size > 1 else None,
            Transport(mesh.everyone) if mesh.everyone.size > 1 else None,
        )


class StepTerms(NamedTuple):
    """A stage's contribution to the norm of a step's gradients."""

    square_sums: list[list[float]]
    """Sums of squares of gradients, by param group."""
    non_finite: str | None
    """The name of the first parameter whose gradient is NaN or infinite."""
    factors: frozenset[float]
    """The factors by which gradients have been multiplied."""
    is_scaled: bool
    """Whether this stage has scaled the loss."""


class Stages:
    """This rank and its peers, one in every stage. They call each method at the same point of their programs."""

    def __init__(self, mesh: Mesh) -> None:
        self.transport = Transport(mesh.peers)

    def announce(self, what: str, value: T) -> list[T]:
        """Every stage's value, by stage. Raises UsageError on all stages if their `what` differs."""
        said = self.transport.announce((what, value))
        if len({place for place, _ in said}) > 1:
            places = ", ".join(f"stage {stage} is at {place}" for stage, (place, _) in enumerate(said))
            raise UsageError(f"Stages are at different points, but each of these needs all stages: {places}.")
        return [value for _, value in said]

    def all_terms(self, what: str, mine: StepTerms) -> StepTerms:
        """The terms of the whole model. Raises UsageError on every stage if gradients have been multiplied by different
        factors."""
        said = self.announce(what, mine)
        factors = {terms.factors for terms in said if terms.factors}
        if len(factors) > 1:
            raise UsageError(
                "Stages have multiplied their gradients by different numbers: clip with wrap(max_grad_norm=...), or "
                "with optimizer.clip_grad_norm_(max_norm) on every rank. torch.nn.utils.clip_grad_norm_ only sees "
                "the gradients of one stage."
            )
        return StepTerms(
            [[*chain(*groups)] for groups in zip_longest(*(terms.square_sums for terms in said), fillvalue=())],
            next((terms.non_finite for terms in said if terms.non_finite is not None), None),
            next(iter(factors), frozenset()),
            any(terms.is_scaled for terms in said),
        )

    def check_names(self, names: Collection[str]) -> None:
        """Raises ConfigError if two stages use the same name, because checkpoints identify parameters and buffers by
        name."""
        mine = self.transport.rank
        for stage, others in enumerate(self.announce("the names of parameters", [*names])):
            shared = next((name for name in others if name in names and stage != mine), None)
            if shared is not None:
                raise ConfigError(
                    f"Stages {mine} and {stage} both have {shared!r}. A checkpoint has the whole model, so give "
                    "each stage the names that its layers have in it: delete other layers from the whole model, or put "
                    "a stage's layers into an nn.ModuleDict under their numbers. Stages cannot tie a parameter."
                )
