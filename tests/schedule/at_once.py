"""Operations that end as soon as a scheduler asks for them."""

from pagoda.schedule.operations import Operation, Question, Update
from pagoda.schedule.scheduler import Scheduler


def end(scheduler: Scheduler, op: Operation) -> None:
    """One operation ends; what is asked for is free."""
    if isinstance(op, Question):
        scheduler.reclaimed(op, freed=True)
    elif op.reported:
        if isinstance(op, Update):
            scheduler.gradient_used(op)
            scheduler.weights_written(op)
        scheduler.ended(op)


def end_all(scheduler: Scheduler, updates: bool = True, but: type[Operation] | None = None) -> list[Operation]:
    """All that is under way ends, and what follows, but for updates unless they shall too, and for operations of a kind
    `but`; returns all of it."""
    done: list[Operation] = []
    while new := scheduler.take():
        done += new
        for op in new:
            if type(op) is not but and (updates or not isinstance(op, Update)):
                end(scheduler, op)
    return done


def units_of(kind: type[Operation], operations: list[Operation]) -> list[int]:
    """The units of all operations of a kind."""
    return [op.unit for op in operations if type(op) is kind]
