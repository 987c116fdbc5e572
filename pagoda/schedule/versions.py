"""The versions of each unit's states: which of them are where, and who may still read them.

A version is the number of steps whose gradients the states contain. A version that something may still read is never
changed. An update changes states in place if nothing needs their old version. Otherwise it writes them to other runs,
and these replace the old ones once the update is final and has written the weights. So checkpoints, speculative updates
and weights that lag follow one rule: who needs a version refers to its runs. What reads a unit only for a while, such
as another rank, refers to none. It delays the time when a run that was left is free.
"""

from collections.abc import Callable, Sequence

from pagoda.memory.page import PageRun
from pagoda.memory.versions import EMPTY, VersionPool
from pagoda.plan.tiers import SSD
from pagoda.schedule.operations import Adopt, Free, Operation, SchedulePlan
from pagoda.schedule.records import GradientRecord, Lease, UpdateRecord, UpdateState, Weights


class Versions:
    """The states of every unit.

    Invariants: a run has one reference of the unit whose newest state it holds, and one of each checkpoint and update
    that uses it. An update in place has none of its own. Accesses read the newest weights. With asynchronous updates
    they may read older ones, and have a reference of their own. A run that accesses or updates have left is free once
    what read the unit then has ended.
    """

    def __init__(self, plan: SchedulePlan, issue: Callable[[Operation], None]) -> None:
        self._issue = issue
        self.of = [Weights() for _ in plan.units]
        """By unit."""
        self.failed = False
        """Whether an update has failed. States are then damaged until all are `restored`."""
        self.moved(plan)

    def moved(self, plan: SchedulePlan) -> None:
        """States have moved to their homes in a plan, where each has the first run of its own."""
        self._plan = plan
        self.pools = {tier: VersionPool(*sizes) for tier, sizes in version_pools(plan).items()}
        """Tier -> its pages for states."""
        self._readers: list[list[object]] = [[] for _ in plan.units]
        """By unit, what reads it: updates, leases that are being filled, and other ranks."""
        self._retiring: list[list[tuple[int, PageRun, list[object]]]] = [[] for _ in plan.units]
        """By unit, the runs that accesses or updates have left, with their states, and what may still read them."""
        self.changes = False
        """Whether a run has become free since `updates` last looked."""
        for unit, runs in enumerate(first_runs(plan, self.pools)):
            weights = self.of[unit]
            weights.runs, weights.read = runs, runs[0] if runs else EMPTY
            if plan.asynchronous:
                self._pin(unit, 0, weights.read)

    def replaced(self, lags: Sequence[int]) -> None:
        """Every state is about to be replaced, and nothing is under way. `lags`: by unit, how far its new weights lag,
        if any do. Accesses read the weights of these where the newest ones are not."""
        for unit, weights in enumerate(self.of):
            if weights.runs:
                self._read_newest(unit)
            if lags and lags[unit]:
                run = self._alloc(unit, 0)
                assert run is not None, "weights of asynchronous updates have two runs"
                before, weights.runs = weights.runs[0], (run, *weights.runs[1:])
                self._retire(unit, 0, before)

    def restored(self, lags: Sequence[int] = ()) -> None:
        """Every state has been replaced."""
        for unit, before in enumerate(self.of):
            lag = lags[unit] if lags else 0
            self.of[unit] = Weights(lag, lag, lag, before.runs, before.read, edition=before.edition)
        self.failed = False

    # --- where the next version is written ---

    def has_room(self, update: UpdateRecord) -> bool:
        """Whether each tier probably has room for what an update writes."""
        return all(
            self._pool(update.unit, state).has(run.count)
            for state, run in enumerate(self.of[update.unit].runs)
            if self._must_move_state(update, state)
        )

    def choose(self, update: UpdateRecord) -> bool:
        """Choose where an update writes. Returns False if a tier has no room now. The update then waits until a run is
        free, or nothing else needs the old version."""
        weights = self.of[update.unit]
        runs: list[PageRun] = []
        for state, before in enumerate(weights.runs):
            run = self._alloc(update.unit, state) if self._must_move_state(update, state) else before
            if run is None:
                for other, taken in enumerate(runs):
                    if taken != weights.runs[other]:
                        self._pool(update.unit, other).unpin(taken)
                return False
            runs.append(run)
        update.runs = tuple(runs)
        return True

    def weights_are_needed(self, unit: int) -> bool:
        """Whether something may read the newest weights, so that the next ones are written elsewhere."""
        return bool(self.of[unit].runs) and self._is_needed(unit, 0)

    def final_update_moves(self, unit: int) -> bool:
        """Whether the final update that runs, if any, writes to other runs than the newest version has."""
        final = self._running_final(unit)
        return final is not None and final.runs != self.of[unit].runs

    def adopt(self, update: UpdateRecord) -> None:
        """An update is final and has written the weights: what it writes is the newest version."""
        unit, weights = update.unit, self.of[update.unit]
        before, weights.runs = weights.runs, update.runs
        weights.newest += 1
        self.show(unit)
        for state, run in enumerate(before):
            if run != update.runs[state]:
                self._retire(unit, state, run)

    def show(self, unit: int) -> None:
        """Accesses read the newest weights, unless these are not to be seen yet. If an update must end first, accesses
        wait."""
        weights = self.of[unit]
        if weights.runs and (weights.newest == weights.version or not self._plan.asynchronous):
            self._read_newest(unit)

    def give_up(self, update: UpdateRecord) -> None:
        """Nothing needs what an update has written. It has ended, or has not begun, and was not adopted."""
        for state, run in enumerate(update.runs):
            if run != self.of[update.unit].runs[state]:
                self._unpin(update.unit, state, run)

    # --- who reads ---

    def pin(self, unit: int) -> tuple[PageRun, ...]:
        """Keep the newest version, and the weights that accesses read. Returns the runs of all states, and behind them
        that of these weights."""
        weights = self.of[unit]
        runs = (*weights.runs, weights.read)
        for state, run in self._with_states(runs):
            self._pin(unit, state, run)
        return runs

    def unpin(self, unit: int, runs: Sequence[PageRun]) -> None:
        """Something needs the runs of `pin` no more."""
        for state, run in self._with_states(runs):
            self._unpin(unit, state, run)

    def begin_read(self, unit: int, reader: object) -> None:
        """An update, a lease that is to be filled, or other ranks begin to read a unit."""
        self._readers[unit].append(reader)

    def end_read(self, unit: int, reader: object) -> None:
        """A read of a unit has ended."""
        self._readers[unit].remove(reader)
        left, self._retiring[unit] = self._retiring[unit], []
        for state, run, readers in left:
            if reader in readers:
                readers.remove(reader)
            if readers:
                self._retiring[unit].append((state, run, readers))
            else:
                self._unpin(unit, state, run)

    def is_retiring(self, unit: int) -> bool:
        """Whether something still reads an old run of a unit, so that its pages are not free yet. A further version
        would need more room than there is for a unit's versions."""
        return bool(self._retiring[unit])

    # --- questions ---

    def readable(self, unit: int) -> int | None:
        """The version of a unit's weights that can be read now. None if an operation must end first."""
        weights = self.of[unit]
        return None if self.failed or weights.await_update else weights.version

    def fetchable(self, unit: int) -> int | None:
        """The version of a unit's weights for which a FETCH can be issued. If ranks must agree on fetches, it does not
        depend on whether the update has ended, because the FETCH waits for that."""
        return self.of[unit].version if self._plan.ranks_fetch_alike else self.readable(unit)

    def awaited(self, unit: int, version: int) -> GradientRecord | None:
        """The gradient whose update a FETCH of this version must wait for, if ranks must agree and the update, or other
        ranks' parts of it, have not ended. Otherwise None."""
        weights = self.of[unit]
        missing = version - weights.newest
        if missing == 0 and weights.sharing:
            return weights.sharing[-1].gradient
        if not self._plan.ranks_fetch_alike or missing <= 0:
            return None
        coming = [weights.update, *weights.later]
        to_come = [each for each in coming if each and not (each.speculative or each.has_written)]
        return to_come[missing - 1].gradient

    def settled(self, unit: int) -> int | None:
        """The version of a unit's states. None while they change."""
        weights, final = self.of[unit], self._running_final(unit)
        changes = final is not None and (final.has_written or not self._moves_all_states(final))
        return None if changes or any(each.has_written for each in weights.sharing) else weights.newest

    # --- parts ---

    def _running_final(self, unit: int) -> UpdateRecord | None:
        """The update of a unit, if it is final and runs."""
        update = self.of[unit].update
        runs = update is not None and update.state is UpdateState.RUNNING and not update.speculative
        return update if runs else None

    def _moves_all_states(self, update: UpdateRecord) -> bool:
        """Whether an update writes every state elsewhere, so that the version before it stays whole."""
        pairs = zip(self.of[update.unit].runs, update.runs, strict=True)
        return all(before != run or not run.count for before, run in pairs)

    def _must_move_state(self, update: UpdateRecord, state: int) -> bool:
        """Whether an update must write a state elsewhere."""
        return update.speculative or self._is_needed(update.unit, state)

    def _is_needed(self, unit: int, state: int) -> bool:
        return self._pool(unit, state).is_shared(self.of[unit].runs[state])

    def _read_newest(self, unit: int) -> None:
        weights = self.of[unit]
        before, run = weights.read, weights.runs[0]
        if before == run:
            return
        weights.read = run
        self._issue(Adopt(unit, run, weights.newest))
        if self._plan.asynchronous:
            self._pin(unit, 0, run)
            self._retire(unit, 0, before)

    def _retire(self, unit: int, state: int, run: PageRun) -> None:
        """A reference ends once what reads the unit now has ended. The FETCH of a lease whose
        version is not written yet has not begun to read."""
        newest = self.of[unit].newest
        readers = [each for each in self._readers[unit] if not (isinstance(each, Lease) and each.version > newest)]
        if readers:
            self._retiring[unit].append((state, run, readers))
        else:
            self._unpin(unit, state, run)

    def _alloc(self, unit: int, state: int) -> PageRun | None:
        return self._pool(unit, state).alloc(self._plan.units[unit].states[state][1])

    def _pin(self, unit: int, state: int, run: PageRun) -> None:
        if run.count:
            self._pool(unit, state).pin(run)

    def _unpin(self, unit: int, state: int, run: PageRun) -> None:
        if run.count and self._pool(unit, state).unpin(run):
            self.changes = True
            self._issue(Free(unit, state, run))

    def _pool(self, unit: int, state: int) -> VersionPool:
        return self.pools[self._plan.units[unit].states[state][0]]

    @staticmethod
    def _with_states(runs: Sequence[PageRun]) -> list[tuple[int, PageRun]]:
        """The runs of `pin` with their states."""
        return [(0 if state == len(runs) - 1 else state, run) for state, run in enumerate(runs)]


def version_pools(plan: SchedulePlan) -> dict[str, tuple[list[int], list[int], int]]:
    """Tier -> the arguments of its `VersionPool`. On SSD, where a run without content takes no space, each state has a
    spare run, and another one if its weights may lag."""
    homes: dict[str, list[int]] = {}
    for unit in plan.units:
        for tier, pages in unit.states:
            homes.setdefault(tier, []).append(pages)
    pools = {tier: (sizes, [*plan.spares.get(tier, ())], plan.reserve.get(tier, 0)) for tier, sizes in homes.items()}
    if SSD in pools:
        pools[SSD] = homes[SSD], homes[SSD] * (1 + plan.asynchronous), 0
    return pools


def first_runs(plan: SchedulePlan, pools: dict[str, VersionPool] | None = None) -> list[tuple[PageRun, ...]]:
    """By unit, the first run of each state, from pools of which nothing is in use."""
    pools = pools or {tier: VersionPool(*sizes) for tier, sizes in version_pools(plan).items()}
    first: list[tuple[PageRun, ...]] = []
    for unit in plan.units:
        runs = [pools[tier].alloc(pages) for tier, pages in unit.states]
        assert None not in runs, "each state has a run"
        first.append(tuple(run for run in runs if run is not None))
    return first
