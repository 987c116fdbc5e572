"""The simulator's clock: work on lanes, and the speed of each lane while others work."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf

from pagoda.plan.lanes import ALL_LANES, LaneName
from pagoda.schedule.waits import Ended
from pagoda.simulate.rates import Rates
from pagoda.simulate.timeline import TimelineSpan


@dataclass(eq=False, slots=True)
class Work:
    """One kind of work on a lane. It may be submitted several times."""

    lane: str
    name: str
    nbytes: int
    seconds: float
    """Seconds at the lane's full rate."""
    pieces: int = 1
    """How often the runtime hands something over to the lane for it."""
    python_s: float = 0.0
    """Seconds of Python on compute's thread, in addition to the model's own."""


@dataclass(eq=False, slots=True)
class Task:
    """One submission of work. It starts when everything that it depends on has ended."""

    work: Work
    left: float
    """Remaining seconds at the lane's full rate."""
    start: float = 0.0
    end: float = 0.0
    beside: str = ""
    """The other lane of its resource, if that was busy."""
    lost_s: float = 0.0
    """Seconds that it has lost to that lane."""
    done: bool = False
    waiting: int = 0
    """Number of tasks that must end before."""
    then: list[Callable[[], None]] = field(default_factory=list)
    """Called when it has ended."""

    def span(self, since: float) -> TimelineSpan:
        """The span of a task that has ended, by a clock that starts at `since`."""
        return TimelineSpan(self.work.lane, self.work.name, self.start - since, self.end - since, self.work.nbytes)


class SimulatedLanes:
    """The clock, and the work of every lane."""

    def __init__(self, rates: Rates) -> None:
        self.now = 0.0
        self.ended: list[Task] = []
        """Tasks in the order of their ends."""
        self._rates = rates
        self._shared = cache(rates.shared)
        self._lost = cache(rates.lost)
        self._ready: dict[str, deque[Task]] = {lane: deque() for lane in ALL_LANES}
        self._active: dict[str, Task] = {}
        self._handed_over = 0
        """Number of pieces of work handed to lanes since compute last began something."""
        self._queued_s = 0.0
        """The time by which Python has queued all work for the GPU so far. It may be long past."""

    def submit(self, work: Work, after: Iterable[Task] = ()) -> Task:
        """Submit work, which starts once `after` have ended."""
        seconds = work.seconds
        if work.lane == LaneName.COMPUTE:
            seconds += self._late(work.python_s + self._handed_over * self._rates.task_switch_s)
            self._handed_over = 0
        else:
            self._handed_over += work.pieces
        task = Task(work, seconds)
        for other in after:
            if not other.done:
                task.waiting += 1
                other.then.append(partial(self._let_go, task))
        if not task.waiting:
            self._ready[work.lane].append(task)
        return task

    def _late(self, python_s: float) -> float:
        """Seconds by which Python delays compute's next work, if it takes `python_s` to queue it."""
        if not self._rates.python_ahead:
            return python_s
        self._queued_s += python_s
        return max(0.0, self._queued_s - self.now)

    def python_waits(self) -> None:
        """Python has waited for the work that it has queued, so it is no longer ahead of the GPU."""
        self._queued_s = max(self._queued_s, self.now)

    def in_turn(self, works: Sequence[Work]) -> Task:
        """Submit work, one piece after another. Returns the last task."""
        tasks: list[Task] = []
        for work in works:
            tasks = [self.submit(work, tasks)]
        return tasks[0]

    def move(self, lane: str, name: str, nbytes: int, pieces: int = 1) -> Work:
        """The work of a lane that moves bytes."""
        return Work(lane, name, nbytes, self._rates.seconds(lane, nbytes), pieces)

    def ended_work(self) -> Iterator[Ended]:
        """The work of `ended`, the latest first."""
        for task in reversed(self.ended):
            share = task.lost_s / (task.end - task.start) if task.lost_s else 0.0
            yield Ended(task.work.lane, task.start, task.end, task.beside, share)

    def _let_go(self, task: Task) -> None:
        task.waiting -= 1
        if not task.waiting:
            self._ready[task.work.lane].append(task)

    def advance(self) -> None:
        """Let time pass until some work ends."""
        active = self._active
        for lane, ready in self._ready.items():
            if ready and lane not in active:
                active[lane] = ready.popleft()
                active[lane].start = self.now
        assert active, "the simulated step waits for something that nothing will do"
        busy = frozenset(active)
        rates = self._shared(busy)
        elapsed = inf
        for lane, task in active.items():
            needed = task.left / rates[lane]
            if needed < elapsed:
                elapsed = needed
        self.now += elapsed
        for lane, (other, share) in self._lost(busy).items():
            active[lane].beside = other
            active[lane].lost_s += elapsed * share
        ended = []
        for lane, task in active.items():
            task.left -= elapsed * rates[lane]
            if task.left <= 1e-12:
                ended.append(task)
        for task in ended:
            del active[task.work.lane]
            task.done, task.end = True, self.now
            self.ended.append(task)
            for then in task.then:
                then()
