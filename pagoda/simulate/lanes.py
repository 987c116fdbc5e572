"""The simulator's clock: tasks on lanes, and how fast each lane works beside the others."""

from collections import deque
from collections.abc import Callable, Iterable

from pagoda.plan.ops import COLLECTIVE, LANES
from pagoda.simulate.rates import Rates
from pagoda.simulate.timeline import COMPUTE, Span


class Task:
    """Work on a lane, `seconds` long at the lane's full rate, that starts once what it depends on has ended."""

    __slots__ = ("done", "lane", "left", "name", "nbytes", "start", "then", "waiting")

    def __init__(self, lane: str, name: str, seconds: float, nbytes: int) -> None:
        self.lane = lane
        self.name = name
        self.left = seconds
        self.nbytes = nbytes
        self.start = 0.0
        self.done = False
        self.waiting = 0
        self.then: list[Callable[[], None]] = []


class SimulatedLanes:
    """The clock, and what every lane is doing."""

    def __init__(self, rates: Rates) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self._rates = rates
        self._ready: dict[str, deque[Task]] = {lane: deque() for lane in (COMPUTE, *LANES, COLLECTIVE)}
        self._active: dict[str, Task] = {}
        self._handed_over = 0
        """Pieces of work that lanes have been given since compute last began something."""

    def submit(
        self, lane: str, name: str, nbytes: int, seconds: float, after: Iterable[Task] = (), pieces: int = 1
    ) -> Task:
        """Work of `seconds` at the lane's full rate; the runtime gives it to the lane in so many `pieces`."""
        if lane == COMPUTE:
            seconds += self._handed_over * self._rates.handover_s
            self._handed_over = 0
        else:
            self._handed_over += pieces
        task = Task(lane, name, seconds, nbytes)
        for other in after:
            if not other.done:
                task.waiting += 1
                other.then.append(lambda: self._let_go(task))
        if not task.waiting:
            self._ready[lane].append(task)
        return task

    def when_all(self, tasks: Iterable[Task], then: Callable[[], None]) -> None:
        """Call `then` once all of `tasks` have ended, or now."""
        open_tasks = [task for task in tasks if not task.done]
        left = len(open_tasks)

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for task in open_tasks:
            task.then.append(one_ended)
        if not open_tasks:
            then()

    def run_out(self) -> None:
        """Let time pass until no lane has anything to do."""
        while self._active or any(self._ready.values()):
            self.advance()

    def _let_go(self, task: Task) -> None:
        task.waiting -= 1
        if not task.waiting:
            self._ready[task.lane].append(task)

    def advance(self) -> None:
        """Let time pass until some work ends."""
        active = self._active
        for lane, ready in self._ready.items():
            if ready and lane not in active:
                active[lane] = ready.popleft()
                active[lane].start = self.now
        assert active, "the simulated step waits for something that nothing will do"
        rates = self._rates.shared(frozenset(active))
        elapsed = min(task.left / rates[lane] for lane, task in active.items())
        self.now += elapsed
        ended = []
        for lane, task in active.items():
            task.left -= elapsed * rates[lane]
            if task.left <= 1e-12:
                ended.append(task)
        for task in ended:
            del active[task.lane]
            self.spans.append(Span(task.lane, task.name, task.start, self.now, task.nbytes))
            task.done = True
            for callback in task.then:
                callback()
