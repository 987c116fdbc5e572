"""Tokens that travel to the ranks that have their experts, and back: in which accesses of a step."""

from collections.abc import Iterator, Mapping, Sequence

from pagoda.plan.ops import COLLECTIVE, Op, OpKind
from pagoda.plan.trace import Trace
from pagoda.plan.units import UnitSpec, is_within


def exchange_ops(units: Sequence[UnitSpec], exchanges: Mapping[str, int], trace: Trace) -> Iterator[Op]:
    """Tokens go and come back at the first access of a row of experts in each pass. `exchanges` are the plan's."""
    before = None
    for tick, access in enumerate(trace.accesses[:-1]) if exchanges else ():
        module = units[access.unit].module
        experts = next((row for row in exchanges if is_within(module, (row,))), None)
        if experts is not None and (experts, access.phase) != before:
            for _ in range(2):
                yield Op(OpKind.ALL_TO_ALL, access.unit, COLLECTIVE, exchanges[experts], tick)
        before = (experts, access.phase)
