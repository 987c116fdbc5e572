"""Ranks that fail, leave or differ: the others say which and why, and none waits for ever."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from zoo import assert_equal

from pagoda.errors import RankError
from pagoda.ranks import transport
from pagoda.ranks.transport import Transport

from .ranks import RankServer


def errors_of(ranks: RankServer, scenario: str, count: int, out: Path, **settings: object) -> list[str]:
    """What each rank said when it failed; empty for those that did not."""
    status = ranks.ask(scenario, count, out, **settings)
    assert None not in status, "\n".join(path.read_text() for path in sorted(out.glob("hang-*.txt")))
    files = [out / f"error-{rank}.txt" for rank in range(count)]
    return [file.read_text().splitlines()[-1] if file.exists() else "" for file in files]


@pytest.mark.parametrize("how", ["is killed", "is killed behind open connections"])
def test_a_killed_rank_stops_the_others_which_name_it(how: str, ranks: RankServer, tmp_path: Path) -> None:
    first, *others = errors_of(ranks, "do_alone", 3, tmp_path, arguments={"what": how, "after": 3, "end": 1000})
    assert first == ""
    assert all("RankError: Rank 0 (process" in error for error in others), others


def test_a_rank_that_is_silent_is_named_once_the_others_give_up(ranks: RankServer, tmp_path: Path) -> None:
    settings = {"arguments": {"what": "is silent", "after": 3, "end": 5}, "environment": {"PAGODA_RANK_TIMEOUT": "2"}}
    errors = errors_of(ranks, "do_alone", 3, tmp_path, **settings)
    for rank in (0, 2):
        assert "Rank 1 (process" in errors[rank], errors
        assert f"or has not answered rank {rank} for 2 s" in errors[rank]


def test_a_rank_that_comes_too_early_to_a_collective_of_the_program_is_named(ranks: RankServer, tmp_path: Path) -> None:
    errors = errors_of(ranks, "meet_before_a_forward", 2, tmp_path, environment={"PAGODA_RANK_TIMEOUT": "2"})
    assert "RankError: Rank 1 (process" in errors[0], errors
    assert "let all ranks call the model (in stage 3, also to evaluate) and backward equally often" in errors[0]


@pytest.mark.parametrize("lane", [pytest.param("ssd_read", marks=pytest.mark.slow), "ssd_write"])
def test_a_rank_whose_drive_fails_while_weights_are_shared_stops_the_others(
    lane: str, ranks: RankServer, tmp_path: Path
) -> None:
    errors = errors_of(ranks, "fail_to_share", 2, tmp_path, arguments={"lane": lane})
    assert "the drive is gone" in errors[1]
    assert "Rank 1" in errors[0]


def test_a_rank_that_leaves_early_stops_the_others_which_name_it(ranks: RankServer, tmp_path: Path) -> None:
    errors = errors_of(ranks, "leave_early", 2, tmp_path)
    assert "Rank 1 has closed its optimizer" in errors[0]
    assert errors[1] == ""


def test_what_needs_every_rank_is_refused_where_one_asks_alone(ranks: RankServer, tmp_path: Path) -> None:
    for error in errors_of(ranks, "do_alone", 2, tmp_path, arguments={"what": "reads", "after": 1, "end": 2}):
        assert "UsageError: Ranks are at different points" in error
        assert "rank 0 is at reading weight" in error
        assert "rank 1 is at optimizer.step()" in error


def test_one_rank_may_evaluate_asynchronous_training_alone(ranks: RankServer, tmp_path: Path) -> None:
    """An evaluation reads the weights of the next step, on whichever ranks it runs."""
    together, alone = (
        ranks.run("evaluate_late_weights", 2, tmp_path / str(both), together=both) for both in (True, False)
    )
    assert together[0] == alone[0]
    assert alone[1] is None


def test_ranks_with_other_settings_are_refused_before_the_first_step(ranks: RankServer, tmp_path: Path) -> None:
    for error in errors_of(ranks, "different_settings", 2, tmp_path):
        assert "ConfigError: Ranks have different optimizer: rank 1" in error


@pytest.mark.parametrize("scenario", ["not_finite", "not_finite_at_first"])
def test_a_gradient_that_is_not_finite_on_one_rank_changes_no_weight_on_any(
    scenario: str, ranks: RankServer, tmp_path: Path
) -> None:
    for error in ranks.run(scenario, 2, tmp_path):
        assert "is not finite" in error
        assert "No weight was changed" in error


def test_a_refusal_of_one_rank_leaves_nothing_of_the_others_for_the_next_question(
    ranks: RankServer, tmp_path: Path
) -> None:
    first = ranks.run("ask_services", 3, tmp_path)[0]
    assert first["errors"] == [
        "RankError: this one has no such version",
        "RankError: ZeroDivisionError on rank 2: a fault",
    ]
    assert first["found"] == [[148.0], [248.0]]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_torchs_clipping_on_ranks_is_clipping_by_wrap(stage: int, ranks: RankServer, tmp_path: Path) -> None:
    first, second = ranks.run("clip_by_torch", 2, tmp_path, stage=stage)
    for result in (first, second):
        by_wrap, by_torch = result["wrap"], result["torch"]
        assert by_torch["norms"] == pytest.approx(by_wrap["norms"], rel=1e-12)
        assert by_torch["norms"] == first["torch"]["norms"]
        assert min(by_torch["norms"]) > 0.1
        assert_equal(by_torch["weights"], by_wrap["weights"])
        assert by_torch["norm"] > 0.1
        assert by_torch["clipped"] == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    ("how", "reason"), [("parameters", "gradients of different parameters"), ("numbers", "by different numbers")]
)
def test_ranks_that_clip_unalike_are_told(how: str, reason: str, ranks: RankServer, tmp_path: Path) -> None:
    for error in ranks.run("clip_unalike", 2, tmp_path, how=how):
        assert reason in error
        assert "optimizer.clip_grad_norm_(max_norm) on every rank" in error


def test_gathered_parameters_are_whole_on_every_rank_and_changes_stay(ranks: RankServer, tmp_path: Path) -> None:
    (before, after), (_, other) = ranks.run("gather_some", 2, tmp_path)
    assert torch.equal(after, other)
    assert torch.equal(before + 1, after)


def test_ranks_generate_apart_while_all_weights_are_resident(ranks: RankServer, tmp_path: Path) -> None:
    first, *others = [logits for of_rank in ranks.run("generate_apart", 2, tmp_path) for logits in of_rank]
    assert len(others) == 6
    assert all(torch.equal(first, other) for other in others)


def test_ranks_that_are_started_anew_do_not_look_for_those_before(ranks: RankServer, tmp_path: Path) -> None:
    """torchrun has one store for all attempts, in which the addresses of those before stay."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt in range(2):
        environment = {**shared, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        assert ranks.ask("meet", 2, tmp_path / str(attempt), environment=environment) == [0, 0]


class SlowWork:
    """A collective that ends while a rank looks whether the others live: the look runs out of time all the same."""

    def __init__(self, ends_at_look: int, error: str = "") -> None:
        self.looks, self.ends, self.error = 0, ends_at_look, error

    def wait(self, timeout: object = None) -> bool:
        self.looks += 1
        if timeout is not None and self.looks <= self.ends:
            raise RuntimeError("Timed out waiting")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.looks >= self.ends


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Transport:
    """A transport with another rank on this host that has ended, and of which the last message may still arrive."""
    it = object.__new__(Transport)
    it.rank, it.size, it.broken, it._processes = 0, 1, False, []
    monkeypatch.setattr(Transport, "lost", lambda _self, _rank, error: RankError(str(error)))
    return it


@pytest.mark.parametrize("dead", [[], [1]])
@pytest.mark.parametrize("looks", [1, 2])
def test_a_look_that_ends_with_its_collective_is_not_taken_for_a_rank_that_is_gone(
    looks: int, dead: list[int], alone: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transport, "_dead", lambda _: dead)
    alone.run(lambda: [SlowWork(looks)])
    with pytest.raises(RankError, match="connection reset"):
        alone.run(lambda: [SlowWork(looks, "connection reset")])


def test_a_collective_that_stays_away_after_a_rank_has_ended_is_given_up(
    alone: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transport, "_dead", lambda _: [1])
    with pytest.raises(RankError, match="Timed out"):
        alone.run(lambda: [SlowWork(100)])


def test_a_process_that_cannot_be_looked_up_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise OSError(24, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert transport.lives(1)
