"""What the scheduler decides in small cases. Random worlds drive it in `tests/worlds`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pagoda.memory.page import PageRun
from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.schedule.operations import (
    Adopt,
    Ask,
    Evict,
    Fetch,
    Free,
    Offload,
    Operation,
    Outdate,
    Reload,
    Save,
    SchedulePlan,
    Share,
    Spill,
    UnitPlan,
    Update,
)
from pagoda.schedule.scheduler import Scheduler

from .at_once import end, end_all, units_of


def plan(frames: int, **unit: Any) -> SchedulePlan:
    units = range(4)
    uses = [Access(u, Phase.FORWARD) for u in units] + [Access(u, Phase.BACKWARD) for u in reversed(units)]
    return SchedulePlan([UnitPlan(lease_frames=1, **unit) for _ in units], Trace((*uses, STEP)), frame_pool=frames)


def a_step(scheduler: Scheduler, units: Sequence[int] = range(4), experts: Sequence[int] = ()) -> list[Operation]:
    """Units are used in this order and back, and `experts` are announced with the first."""
    for phase, order in ((Phase.FORWARD, units), (Phase.BACKWARD, units[::-1])):
        for unit in order:
            scheduler.access(Access(unit, phase))
            end_all(scheduler)
            if phase is Phase.BACKWARD:
                scheduler.gradient(unit, complete=True, last=True)
            elif unit == 0:
                scheduler.expect(experts)
            scheduler.release(unit)
            end_all(scheduler)
    scheduler.end_step()
    return end_all(scheduler)


def test_after_speculative_updates_that_stand_the_next_forward_is_fetched_ahead() -> None:
    scheduler = Scheduler(plan(frames=4, speculated=True))
    assert units_of(Fetch, a_step(scheduler)) == [0, 1, 2, 3]


def test_a_prefetch_that_fails_is_not_tried_until_compute_waits_for_it() -> None:
    scheduler = Scheduler(plan(frames=4))
    failing, second = scheduler.take() or run_first(scheduler)
    scheduler.failed(second)
    scheduler.ended(failing)
    assert second.unit not in units_of(Fetch, end_all(scheduler))
    scheduler.release(0)
    scheduler.access(Access(second.unit, Phase.FORWARD))
    assert second.unit in units_of(Fetch, end_all(scheduler))
    assert scheduler.ready(second.unit)


def test_no_fetch_starts_when_another_rank_has_a_gradient_since_each_rank_hears_of_it_at_another_point() -> None:
    scheduler = Scheduler(replace(plan(frames=4), ranks_fetch_alike=True))
    scheduler.reduce(0, here=False)
    assert [type(op) for op in scheduler.take()] == [Offload]


def test_gradients_that_ranks_have_yet_to_add_up_leave_room_for_those_of_other_ranks_that_come_before() -> None:
    units = [UnitPlan(buffer_pages=1) for _ in range(4)]
    scheduler = Scheduler(SchedulePlan(units, plan(frames=0).trace, buffer_pool=2, ranks_fetch_alike=True))
    scheduler.gradient(3, complete=True, last=True, reduced=True)
    scheduler.gradient(2, complete=True, last=True, reduced=True)
    offloaded = []
    for unit, here in ((1, False), (0, False), (3, True), (2, True)):
        scheduler.reduce(unit, here)
        assert not scheduler.buffers_exhausted
        offloaded += units_of(Offload, end_all(scheduler))
    assert offloaded == [1, 0, 3, 2]
    scheduler.end_step()
    assert units_of(Update, end_all(scheduler)) == [0, 1, 2, 3]


def test_a_gradient_that_compute_reads_is_brought_back_and_keeps_its_buffer_until_it_has_read_it() -> None:
    units = [UnitPlan(buffer_pages=1) for _ in range(4)]
    scheduler = Scheduler(SchedulePlan(units, plan(frames=0).trace, buffer_pool=1))
    for unit in (0, 1):  # the second takes the buffer of the first, which is on SSD
        scheduler.gradient(unit, complete=True, last=False)
        end_all(scheduler)
    scheduler.lend_gradient(0, True)
    assert not scheduler.gradient_is_here(0)
    assert units_of(Reload, end_all(scheduler)) == [0]
    assert scheduler.gradient_is_here(0)
    for unit in (0, 2):  # one is added to it, one needs its buffer
        scheduler.gradient(unit, complete=True, last=False)
        assert units_of(Offload, end_all(scheduler)) == []
    scheduler.lend_gradient(0, False)
    assert units_of(Offload, end_all(scheduler)) == [0, 2]


def test_reading_a_gradient_keeps_a_speculative_update_and_writing_one_calls_it_off() -> None:
    for writes in (False, True):
        scheduler = Scheduler(plan(frames=4, speculated=True))
        scheduler.gradient(0, complete=True, last=True)
        end_all(scheduler)
        scheduler.lend_gradient(0, True)
        scheduler.lend_gradient(0, False)
        assert scheduler.weights(0).speculative is not None
        if writes:
            scheduler.gradient(0, complete=True, last=False)
            assert scheduler.weights(0).speculative is None
        end_all(scheduler)
        scheduler.end_step()
        assert units_of(Update, end_all(scheduler)) == ([0] if writes else [])


def test_a_gradient_to_which_nothing_has_come_updates_nothing() -> None:
    scheduler = Scheduler(plan(frames=4))
    scheduler.begin_gradient(0)  # before an error in backward
    scheduler.gradient(1, complete=True, last=True)
    scheduler.end_step()
    assert units_of(Update, end_all(scheduler)) == [1]
    assert scheduler.drained


def run_first(scheduler: Scheduler) -> list[Operation]:
    scheduler.access(Access(0, Phase.FORWARD))
    return scheduler.take()


def with_experts() -> Scheduler:
    """Unit 0 is followed by two of the experts 1 to 3. Frames are for four units."""
    units = [UnitPlan(lease_frames=1, routed=unit > 0) for unit in range(4)]
    return Scheduler(SchedulePlan(units, plan(frames=4).trace, frame_pool=4))


def test_experts_are_fetched_when_a_router_has_chosen_them() -> None:
    scheduler = with_experts()
    scheduler.access(Access(0, Phase.FORWARD))
    (first,) = scheduler.take()
    scheduler.ended(first)
    assert scheduler.take() == []
    scheduler.expect([3, 1])
    assert units_of(Fetch, scheduler.take()) == [3, 1]


def test_experts_that_every_step_uses_alike_are_fetched_ahead_of_their_router() -> None:
    scheduler = with_experts()
    for _ in range(4):
        ahead = units_of(Fetch, a_step(scheduler, units=(0, 1, 2), experts=(1, 2)))
    assert ahead == [0, 1, 2]


def test_nothing_is_speculated_on_while_updates_are_drained() -> None:
    scheduler = Scheduler(plan(frames=4, speculated=True))
    (first, _) = run_first(scheduler)
    scheduler.ended(first)
    scheduler.gradient(0, complete=True, last=True)
    scheduler.release(0)
    scheduler.drain(True)
    assert Update not in {type(op) for op in end_all(scheduler)}
    assert scheduler.updates.drained


def test_an_update_that_is_called_off_and_then_refused_counts_once() -> None:
    scheduler = Scheduler(plan(frames=4, speculated=True))
    scheduler.gradient(0, complete=True, last=True)
    end_all(scheduler, updates=False)
    update = scheduler.weights(0).update
    scheduler.drop_gradients()
    assert update is not None
    scheduler.refused(Update(0, update, 1))
    assert scheduler.usage.called_off == 1


ON_HOST = (("host", 1),)
"""The states of a unit: one, on one page."""


def begun_checkpoint(room: int = 1) -> tuple[Scheduler, list[Save], Update]:
    """Of four units that are updated during backward. Two SAVEs are under way, and an UPDATE of another unit, which
    writes to the room for other versions."""
    units = [UnitPlan(states=ON_HOST) for _ in range(4)]
    scheduler = Scheduler(replace(plan(frames=0), units=units, reserve={"host": room}, during_backward=True))
    scheduler.prepare_checkpoint()
    assert scheduler.updates.prepared
    scheduler.begin_checkpoint()
    saves = [op for op in scheduler.take() if isinstance(op, Save)]
    update = updated(scheduler, min({*range(4)} - {op.unit for op in saves}))
    assert update.update.runs != scheduler.weights(update.unit).runs
    return scheduler, saves, update


def saved(scheduler: Scheduler, saves: list[Save]) -> list[tuple[int, PageRun]]:
    """What is saved once these SAVEs have ended: units, and where their states are."""
    for op in saves:
        scheduler.ended(op)
    return [(op.unit, op.runs[0]) for op in scheduler.take() if isinstance(op, Save)]


def updated(scheduler: Scheduler, unit: int) -> Update:
    """The UPDATE of a unit, once its gradient has come and nothing refers to it."""
    scheduler.gradient(unit, complete=True, last=True)
    (update,) = (op for op in end_all(scheduler, updates=False) if isinstance(op, Update) and op.unit == unit)
    return update


def test_states_of_which_ssd_has_room_for_one_version_are_updated_only_when_they_have_been_saved() -> None:
    units = [UnitPlan(states=ON_HOST) for _ in range(4)]
    scheduler = Scheduler(replace(plan(frames=0), units=units, reserve={"host": 4}, during_backward=True))
    scheduler.prepare_checkpoint()
    scheduler.begin_checkpoint(one_version=range(4))
    saves = scheduler.take()
    for unit in range(4):
        assert Update not in {kind for kind, _ in made(scheduler, unit, last=True)}
    while saves:
        op = saves.pop()
        scheduler.ended(op)
        later = end_all(scheduler, but=Save)
        assert op.unit in units_of(Update, later)
        saves += [other for other in later if isinstance(other, Save)]


def test_a_version_that_is_read_stays_while_the_next_one_is_written_elsewhere() -> None:
    scheduler, (save, _), _ = begun_checkpoint(room=2)
    assert updated(scheduler, save.unit).update.runs != save.runs[:1]


def test_what_a_checkpoint_has_read_is_free_once_the_next_version_is_there() -> None:
    scheduler, saves, update = begun_checkpoint()
    before = scheduler.weights(update.unit).runs[0]
    end(scheduler, update)
    assert Free not in {type(op) for op in scheduler.take()}
    assert (update.unit, before) in saved(scheduler, saves)
    scheduler.ended(Save(update.unit, 0, ()))
    assert [op.run for op in scheduler.take() if isinstance(op, Free)] == [before]
    assert scheduler.weights(update.unit).runs == update.update.runs


def test_an_update_waits_for_room_until_a_version_is_free() -> None:
    scheduler, saves, update = begun_checkpoint()
    (second,) = {*range(4)} - {op.unit for op in saves} - {update.unit}
    assert Update not in {kind for kind, _ in made(scheduler, second, last=True)}
    scheduler.refused(update)  # it gives its room back
    assert second in units_of(Update, end_all(scheduler, but=Save))


def test_a_checkpoint_begins_once_states_are_where_it_will_find_them() -> None:
    """Which pages it keeps is said before it begins."""
    scheduler = Scheduler(
        replace(plan(frames=0), units=[UnitPlan(speculated=True, states=ON_HOST)] * 4, spares={"host": (1,) * 4})
    )
    scheduler.gradient(0, complete=True, last=True)
    (update,) = (op for op in end_all(scheduler, updates=False) if isinstance(op, Update))
    scheduler.end_step()
    scheduler.prepare_checkpoint()
    assert not scheduler.checkpoint_prepared
    end(scheduler, update)
    assert scheduler.checkpoint_prepared
    runs = scheduler.weights(0).runs
    scheduler.begin_checkpoint()
    assert [op.runs[:1] for op in scheduler.take() if isinstance(op, Save) and op.unit == 0] == [runs]


def test_accesses_never_refer_to_a_run_that_is_free() -> None:
    """A second update is requested before the first has written what accesses wait for."""
    scheduler, saves, update = begun_checkpoint()
    scheduler.end_step()
    made(scheduler, update.unit)
    scheduler.end_step()
    for op in saves:
        scheduler.ended(op)
    end(scheduler, update)
    end_all(scheduler, updates=False)
    weights = scheduler.weights(update.unit)
    assert weights.newest < weights.version
    assert weights.read == weights.runs[0] == update.update.runs[0]


def test_an_update_begins_to_write_only_while_nobody_reads() -> None:
    """Its gradient comes back from SSD while another rank begins to read."""
    scheduler = with_buffers(1)
    for unit in (0, 1):
        made(scheduler, unit)
    scheduler.end_step()
    reload = next(op for op in end_all(scheduler, but=Reload) if isinstance(op, Reload))
    scheduler.others_read(reload.unit, begin=True)
    scheduler.ended(reload)
    assert reload.unit not in units_of(Update, end_all(scheduler))
    scheduler.others_read(reload.unit, begin=False)
    assert reload.unit in units_of(Update, end_all(scheduler))


def test_weights_that_something_refers_to_do_not_move() -> None:
    units = [UnitPlan(states=ON_HOST) for _ in range(4)]
    scheduler = Scheduler(replace(plan(frames=0), units=units, reserve={"host": 4}))
    for unit in range(4):
        made(scheduler, unit)
    scheduler.prepare_checkpoint()
    scheduler.begin_checkpoint()
    saves = [op for op in scheduler.take() if isinstance(op, Save)]
    scheduler.end_step()
    questions = scheduler.take()
    assert {type(op) for op in questions} == {Ask}
    for op in questions:
        scheduler.reclaimed(op, freed=op.unit == 1)
    assert units_of(Update, end_all(scheduler, but=Save)) == [1]
    scheduler.let_go(questions[0])
    assert units_of(Update, end_all(scheduler, but=Save)) == [questions[0].unit]
    assert saves


def test_a_checkpoint_does_not_wait_for_an_update_that_is_refused() -> None:
    scheduler = Scheduler(replace(plan(frames=0), during_backward=True))
    update = updated(scheduler, 0)
    scheduler.begin_checkpoint()
    assert 0 not in units_of(Save, end_all(scheduler))
    scheduler.refused(update)
    assert [(type(op), op.unit, op.version) for op in scheduler.take()] == [(Save, 0, 0)]


def test_states_that_were_not_overwritten_after_all_are_where_they_were() -> None:
    scheduler, saves, update = begun_checkpoint()
    before = scheduler.weights(update.unit).runs
    scheduler.refused(update)
    assert scheduler.weights(update.unit).runs == before
    assert (update.unit, before[0]) in saved(scheduler, saves)


def test_a_checkpoint_is_lost_with_an_update_that_it_needs_and_that_fails() -> None:
    scheduler = Scheduler(replace(plan(frames=0), units=[UnitPlan(states=ON_HOST) for _ in range(4)]))
    made(scheduler, 0)
    scheduler.end_step()
    (update,) = (op for op in scheduler.take() if isinstance(op, Update))
    scheduler.begin_checkpoint()
    assert not scheduler.checkpoint.lost
    scheduler.failed(update)
    assert scheduler.checkpoint.lost


def test_a_checkpoint_keeps_what_it_needs_if_a_later_update_fails() -> None:
    scheduler, saves, update = begun_checkpoint()
    scheduler.failed(update)
    assert not scheduler.checkpoint.lost
    assert update.unit in dict(saved(scheduler, saves))


def test_no_later_update_overtakes_one_that_a_checkpoint_lacks() -> None:
    """It might wait, in the same lane, for room that only the complete checkpoint gives back."""
    scheduler = Scheduler(replace(plan(frames=0), units=[UnitPlan() for _ in range(4)]))

    def step_of(*units: int) -> list[int]:
        for unit in units:
            scheduler.gradient(unit, complete=True, last=True)
            end_all(scheduler)
        scheduler.end_step()
        return units_of(Update, end_all(scheduler))

    scheduler.access(Access(1, Phase.FORWARD))
    assert step_of(0, 1) == [0]  # compute still uses the other one
    scheduler.prepare_checkpoint()
    scheduler.begin_checkpoint()
    end_all(scheduler)
    assert step_of(0) == []
    scheduler.release(1)
    assert units_of(Update, end_all(scheduler)) == [1, 0]


def test_an_update_does_not_write_over_what_other_ranks_still_collect() -> None:
    scheduler = Scheduler(replace(plan(frames=0), units=[UnitPlan(shared=True)]))

    def request_update() -> list[Operation]:
        """With a gradient that only other ranks have made."""
        scheduler.reduce(0, here=False)
        (offload,) = scheduler.take()
        scheduler.ended(offload)
        scheduler.end_step()
        return scheduler.take()

    first = {type(operation): operation for operation in request_update()}
    assert first.keys() == {Share, Update}
    scheduler.gradient_used(first[Update])
    scheduler.weights_written(first[Update])
    scheduler.ended(first[Update])
    assert [type(operation) for operation in request_update()] == [Share]
    scheduler.ended(first[Share])
    assert [type(operation) for operation in scheduler.take()] == [Update]


def with_buffers(count: int, **more: Any) -> Scheduler:
    """Four units whose gradients share so many buffers."""
    units = [UnitPlan(buffer_pages=1, speculated=True, states=ON_HOST) for _ in range(4)]
    room = {} if "reserve" in more else {"spares": {"host": (1,) * 4}}
    return Scheduler(SchedulePlan(units, plan(frames=0).trace, buffer_pool=count, **room, **more))


def made(
    scheduler: Scheduler, unit: int, complete: bool = True, last: bool = False
) -> list[tuple[type[Operation], int]]:
    """What a gradient leads to. All of it has ended but updates."""
    scheduler.gradient(unit, complete=complete, last=last)
    return [(type(op), op.unit) for op in end_all(scheduler, updates=False)]


def test_what_ssd_has_of_a_gradient_does_not_count_when_more_of_it_has_come() -> None:
    scheduler = with_buffers(1)
    assert made(scheduler, 0) == [(Offload, 0), (Spill, 0)]
    assert made(scheduler, 0, complete=False) == [(Offload, 0)]
    assert made(scheduler, 1) == [(Spill, 0), (Offload, 1), (Spill, 1)]


def test_no_gradient_is_written_to_ssd_where_that_has_no_room() -> None:
    scheduler = with_buffers(1, spills=False)
    made(scheduler, 0)
    assert made(scheduler, 1) == []
    assert scheduler.buffers_exhausted


def test_a_gradient_keeps_its_buffer_when_it_could_not_be_written_to_ssd() -> None:
    scheduler = with_buffers(1)
    scheduler.gradient(0, complete=True, last=False)
    (spill,) = end_all(scheduler, but=Spill)[1:]
    scheduler.failed(spill)
    assert made(scheduler, 1) == [(Spill, 0), (Offload, 1), (Spill, 1)]


def test_updates_that_need_the_buffer_of_what_could_not_be_written_begin_once_compute_was_told() -> None:
    scheduler = with_buffers(1)
    for unit in (0, 1):
        made(scheduler, unit)
    scheduler.gradient(2, complete=True, last=False)
    (spill,) = end_all(scheduler, but=Spill)[1:]
    scheduler.failed(spill)
    scheduler.end_step(clipped=False)
    assert units_of(Update, end_all(scheduler)) == []
    assert scheduler.idle
    scheduler.prepare_checkpoint()
    scheduler.begin_checkpoint()
    end_all(scheduler)
    assert scheduler.checkpoint_lost
    scheduler.end_checkpoint()
    scheduler.try_again()
    assert units_of(Update, end_all(scheduler)) == [0, 1, 2]
    assert not scheduler.checkpoint_lost


def test_a_gradient_that_could_not_be_read_back_is_read_again_once_compute_was_told() -> None:
    scheduler = with_buffers(1)
    for unit in (0, 1, 2):
        made(scheduler, unit)
    scheduler.end_step(clipped=False)
    reload = next(op for op in end_all(scheduler, but=Reload) if isinstance(op, Reload))
    scheduler.failed(reload)
    scheduler.access(Access(reload.unit, Phase.FORWARD))
    assert reload.unit not in units_of(Reload, end_all(scheduler))
    scheduler.try_again()
    assert reload.unit in units_of(Update, end_all(scheduler))


def test_a_gradient_that_is_dropped_while_it_is_read_back_may_fail_to_come() -> None:
    scheduler = with_buffers(1)
    for unit in (0, 1):
        made(scheduler, unit)
    scheduler.lend_gradient(0, lent=True)
    (reload,) = (op for op in end_all(scheduler, but=Reload) if isinstance(op, Reload))
    scheduler.lend_gradient(0, lent=False)
    scheduler.drop_gradients()
    scheduler.failed(reload)
    scheduler.try_again()
    assert end_all(scheduler) == []
    assert made(scheduler, 0) == [(Offload, 0), (Spill, 0)]


def test_a_gradient_does_not_arrive_in_a_buffer_that_an_update_reads() -> None:
    scheduler = with_buffers(2)
    scheduler.gradient(0, complete=True, last=True)
    (update,) = (op for op in end_all(scheduler, updates=False) if isinstance(op, Update))
    assert made(scheduler, 0) == []
    scheduler.gradient_used(update)
    assert units_of(Offload, scheduler.take()) == [0]


def test_a_gradient_waits_for_the_update_with_an_earlier_one_because_ssd_has_one_place_for_both() -> None:
    scheduler = with_buffers(4)
    for unit in (0, 1, 2):
        made(scheduler, unit)
    scheduler.end_step(clipped=False)
    (waiting,) = {0, 1, 2} - {*units_of(Update, begun := end_all(scheduler, updates=False))}
    assert made(scheduler, waiting) == []
    assert scheduler.buffer_awaited
    scheduler.drop_gradients()  # as after an interrupt of this wait
    assert made(scheduler, waiting) == []
    for update in begun:
        end(scheduler, update)
    followed = [type(op) for op in end_all(scheduler) if op.unit == waiting]
    assert followed == [Update, Offload, Spill]


def test_a_unit_in_use_makes_no_room_though_its_neighbour_would() -> None:
    units = [UnitPlan(lease_frames=frames) for frames in (1, 1, 2, 2)]
    uses = [Access(unit, Phase.FORWARD) for unit in (0, 1, 2, 3, 2)]
    scheduler = Scheduler(SchedulePlan(units, Trace((*uses, STEP)), frame_pool=4))
    for access in uses[:3]:
        scheduler.access(access)
        assert 0 not in units_of(Evict, end_all(scheduler))
        if access.unit:
            scheduler.release(access.unit)
            assert 0 not in units_of(Evict, end_all(scheduler))


def test_updaters_do_not_wait_for_each_other() -> None:
    units = [UnitPlan(updater=updater) for updater in (0, 0, 0, 1)]
    scheduler = Scheduler(SchedulePlan(units, plan(frames=0).trace))
    for unit in range(4):
        made(scheduler, unit)
    scheduler.end_step()
    assert sorted(units_of(Update, scheduler.take())) == [0, 1, 3]


def speculated(ended: bool) -> tuple[Scheduler, Update]:
    """An update of unit 0 before `step()`."""
    scheduler = Scheduler(plan(frames=0, speculated=True))
    scheduler.gradient(0, complete=True, last=True)
    (update,) = (op for op in end_all(scheduler, updates=ended) if isinstance(op, Update))
    return scheduler, update


def test_a_speculative_update_that_was_refused_is_requested_again_by_step() -> None:
    scheduler, update = speculated(ended=False)
    scheduler.refused(update)
    scheduler.end_step()
    assert [(type(op), op.update.speculative) for op in scheduler.take()] == [(Update, False)]


def test_a_clipped_step_calls_a_speculative_update_off_and_makes_it_again() -> None:
    scheduler, _ = speculated(ended=True)
    scheduler.end_step(clipped=True)
    assert units_of(Update, end_all(scheduler)) == [0]
    assert scheduler.usage.called_off == 1


def test_a_further_gradient_calls_a_speculative_update_off() -> None:
    scheduler, _ = speculated(ended=True)
    made(scheduler, 0)
    assert scheduler.usage.called_off == 1


def test_an_access_calls_a_speculative_update_off_and_reads_the_old_weights_at_once() -> None:
    scheduler = Scheduler(replace(plan(frames=0), units=[UnitPlan(speculated=True)] * 4))
    scheduler.gradient(0, complete=True, last=True)
    (update,) = (op for op in end_all(scheduler, updates=False) if isinstance(op, Update))
    scheduler.access(Access(0, Phase.BACKWARD))
    assert scheduler.usage.called_off == 1
    assert scheduler.ready(0)
    end(scheduler, update)
    assert scheduler.weights(0).newest == 0


def test_a_speculative_update_that_fails_is_called_off() -> None:
    scheduler, update = speculated(ended=False)
    scheduler.failed(update)
    assert scheduler.usage.called_off == 1
    assert not scheduler.broken
    scheduler.end_step()
    assert units_of(Update, scheduler.take()) == [0], "the step asks for it again"


def test_what_a_speculative_update_has_written_is_free_once_it_is_called_off() -> None:
    unit = UnitPlan(speculated=True, states=ON_HOST)
    for ends_first in (False, True):
        scheduler = Scheduler(replace(plan(frames=0), units=[unit] * 4, spares={"host": (1,)}))
        scheduler.gradient(0, complete=True, last=True)
        (update,) = (op for op in end_all(scheduler, updates=ends_first) if isinstance(op, Update))
        assert update.update.runs != scheduler.weights(0).runs
        scheduler.drop_gradients()
        if not ends_first:
            assert Free not in {type(op) for op in scheduler.take()}
            end(scheduler, update)
        assert [op.run for op in scheduler.take() if isinstance(op, Free)] == [update.update.runs[0]]


def test_after_updates_have_failed_and_states_are_loaded_others_begin() -> None:
    scheduler = Scheduler(plan(frames=0))

    def request_all() -> list[Operation]:
        for unit in range(4):
            made(scheduler, unit)
        scheduler.end_step()
        return [op for op in scheduler.take() if isinstance(op, Update)]

    for update in request_all():
        scheduler.failed(update)
    assert scheduler.broken
    scheduler.restored()
    assert len(request_all()) == 2


def test_an_update_that_has_failed_keeps_no_buffer_once_states_are_loaded() -> None:
    scheduler = with_buffers(2)
    made(scheduler, 0)
    scheduler.end_step()
    (update,) = (op for op in scheduler.take() if isinstance(op, Update))
    scheduler.failed(update)
    scheduler.restored()
    assert scheduler.usage.pages == 0


def asynchronous_step(scheduler: Scheduler) -> list[Operation]:
    """A step with a gradient of unit 0, in which all ends but FETCHes."""
    made(scheduler, 0)
    scheduler.end_step()
    return end_all(scheduler, but=Fetch)


def test_an_asynchronous_update_does_not_write_what_is_still_fetched() -> None:
    unit = UnitPlan(lease_frames=1, states=ON_HOST)
    scheduler = Scheduler(replace(plan(frames=4), units=[unit] * 4, spares={"host": (1,) * 4}, asynchronous=True))
    fetch, *_ = run_first(scheduler)
    read = scheduler.weights(0).read
    scheduler.release(0)
    for _ in range(2):
        asynchronous_step(scheduler)
        assert read not in {op.run for op in scheduler.take() if isinstance(op, Free)}
    assert scheduler.weights(0).read != read
    scheduler.ended(fetch)
    assert read in {op.run for op in scheduler.take() if isinstance(op, Free)}


def test_an_asynchronous_update_waits_until_a_run_that_was_left_is_free() -> None:
    """Also where there is a run for it, since SSD has no room for three versions."""
    unit = UnitPlan(lease_frames=1, states=ON_HOST)
    scheduler = Scheduler(replace(plan(frames=4), units=[unit] * 4, spares={"host": (1,) * 8}, asynchronous=True))
    fetch, *_ = run_first(scheduler)
    read = scheduler.weights(0).read
    scheduler.release(0)
    assert [units_of(Update, asynchronous_step(scheduler)) for _ in range(2)] == [[0], []]
    scheduler.ended(fetch)
    followed = [op for op in scheduler.take() if isinstance(op, Free | Update)]
    assert [type(op) for op in followed] == [Free, Update]
    assert [op.run for op in followed if isinstance(op, Free)] == [read]


def test_updates_that_wait_for_compute_to_leave_their_units_hold_up_no_others() -> None:
    """As those of outer modules do, during a whole forward."""
    units = [UnitPlan(states=ON_HOST)] * 4
    scheduler = Scheduler(replace(plan(frames=0), units=units, spares={"host": (1,) * 4}, asynchronous=True))
    for unit in (1, 2, 3):
        made(scheduler, unit)
    for unit in (2, 3):  # backward uses them next
        scheduler.access(Access(unit, Phase.FORWARD))
    scheduler.end_step()
    assert units_of(Update, end_all(scheduler)) == [1]
    scheduler.release(3)
    scheduler.release(2)
    assert units_of(Update, end_all(scheduler)) == [3, 2]


def test_a_step_sees_the_updates_of_the_step_before_the_last() -> None:
    units = [UnitPlan(states=ON_HOST)] * 4
    scheduler = Scheduler(replace(plan(frames=0), units=units, spares={"host": (1,) * 4}, asynchronous=True))
    assert units_of(Adopt, asynchronous_step(scheduler)) == []
    assert [units_of(Adopt, asynchronous_step(scheduler)) for _ in range(2)] == [[0], [0]]
    scheduler.drain(True)
    assert units_of(Adopt, end_all(scheduler)) == [0]


def test_what_two_steps_have_used_is_expected_next_without_what_evaluations_have() -> None:
    scheduler = Scheduler(plan(frames=0))
    uses = [Access(unit, Phase.FORWARD) for unit in (3, 1)]
    for _ in range(2):
        assert scheduler.trace.accesses != (*uses, STEP)
        for access in uses:
            scheduler.access(Access(2, Phase.FORWARD), recorded=False)
            scheduler.access(access)
        scheduler.end_step()
    assert scheduler.trace.accesses == (*uses, STEP)


def test_a_gradient_that_is_lost_with_a_final_update_breaks_the_state_at_once() -> None:
    """Also if its update waits for others, so that whoever hears of the failure hears of what it has broken."""
    scheduler = Scheduler(replace(plan(frames=0), during_backward=True))
    for unit in (3, 2):
        updated(scheduler, unit)
    scheduler.gradient(1, complete=True, last=True)
    (offload,) = (op for op in end_all(scheduler, but=Offload) if isinstance(op, Offload))
    scheduler.failed(offload)
    assert scheduler.broken


def test_a_gradient_that_is_lost_before_its_update_is_final_breaks_nothing() -> None:
    scheduler = Scheduler(replace(plan(frames=0), during_backward=True))
    scheduler.gradient(1, complete=True, last=True)
    question, offload = sorted(scheduler.take(), key=lambda op: isinstance(op, Offload))
    scheduler.failed(offload)
    scheduler.reclaimed(question, freed=True)
    assert scheduler.take() == []
    scheduler.drop_gradients()
    assert not scheduler.broken


def test_updates_that_were_refused_make_room_for_others() -> None:
    scheduler = Scheduler(replace(plan(frames=0), during_backward=True))
    for unit in (3, 2):
        scheduler.refused(updated(scheduler, unit))
    assert updated(scheduler, 1).unit == 1


def test_an_update_takes_no_room_while_it_waits_for_its_gradient() -> None:
    """The room may be enough for another update, whose gradient is there."""
    scheduler = with_buffers(1, reserve={"host": 1})
    scheduler.prepare_checkpoint()
    scheduler.begin_checkpoint()
    first, second = sorted({*range(4)} - {*units_of(Save, scheduler.take())})
    made(scheduler, first)
    made(scheduler, second)  # takes the buffer
    scheduler.end_step()
    for op in reversed(scheduler.take()):
        if isinstance(op, Ask):
            end(scheduler, op)
    (update,) = (op for op in scheduler.take() if isinstance(op, Update))
    assert update.unit == second
    assert update.update.runs != scheduler.weights(second).runs


def test_a_lease_ends_when_its_weights_are_written_or_loaded() -> None:
    scheduler = Scheduler(plan(frames=4))
    scheduler.access(Access(0, Phase.FORWARD))
    end_all(scheduler)
    scheduler.overwritten(0)
    assert units_of(Outdate, end_all(scheduler)) == [0]
    scheduler.restored()
    assert units_of(Outdate, end_all(scheduler)) == [0, 1, 2, 3]
