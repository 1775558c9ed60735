"""How early a run may stop: exactly where its own feed knows, late enough where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.test_run_state import progress

from spectrain.coordinator.events import StopFeeding, StopWanted
from spectrain.coordinator.fleet import Fleet, Worker
from spectrain.coordinator.stopping import ASKED_AHEAD, Stopping
from spectrain.worker.feed_inbox import LOOK_AHEAD

STAGES = 3
HELD = STAGES + 2 + LOOK_AHEAD
LONG = 1000


def a_worker(stage: int, version: int, in_flight: int) -> Worker:
    report = replace(progress(stage), version=version, in_flight=in_flight)
    return Worker(stage, (0, stage), "only", heard=1.0, connected=True, progress=report)


def a_fleet() -> Fleet:
    return Fleet(("only",), workers=[a_worker(0, 20, 3), a_worker(1, 21, 2), a_worker(2, 22, 1)])


def at_least(
    fleet: Fleet, *, committed: int = 10, train_batches: int = LONG, has_fed_all: bool = False
) -> int | None:
    """Return the earliest stop; None if it is not known yet."""
    stopping = Stopping(fleet, has_fed_all=has_fed_all)
    stopping.want(StopWanted("Ctrl-C", 130))
    (stop,) = stopping.begin(committed, train_batches) or (None,)
    return None if stop is None else stop.at_least


def test_nothing_is_stopped_that_nobody_wants_to_stop() -> None:
    assert Stopping(a_fleet(), has_fed_all=True).begin(10, LONG) == []


def test_whoever_has_fed_everything_may_stop_right_behind_it() -> None:
    assert at_least(a_fleet(), has_fed_all=True) == 0


def test_a_wish_is_fulfilled_once() -> None:
    stopping = Stopping(a_fleet(), has_fed_all=True)
    stopping.want(StopWanted("SIGTERM", 75))
    assert stopping.begin(10, LONG) == [StopFeeding(0, "SIGTERM", 75)]
    assert stopping.begin(10, LONG) == []


def test_the_look_ahead_is_that_of_the_workers() -> None:
    assert ASKED_AHEAD == LOOK_AHEAD


def test_a_run_stops_behind_all_that_its_first_stage_has_begun_and_may_hold() -> None:
    assert at_least(a_fleet()) == 23 + HELD


def test_if_the_first_stage_is_gone_those_behind_it_tell_how_far_it_was() -> None:
    fleet = a_fleet()
    fleet.workers[0].begin_again(now=2.0)
    fleet.workers[2].progress = replace(progress(2), version=25, in_flight=0)
    assert at_least(fleet) == 25 + HELD


def test_stages_that_begin_again_are_at_the_committed_round_or_behind() -> None:
    fleet = a_fleet()
    for worker in fleet.workers:
        worker.begin_again(now=2.0)
    assert at_least(fleet, committed=10) == 10 + HELD


def test_a_stage_that_is_there_and_has_not_told_is_waited_for() -> None:
    fleet = a_fleet()
    fleet.workers[1].progress = None
    assert at_least(fleet) is None
    fleet.workers[1].exited = True
    assert at_least(fleet) == 23 + HELD


@pytest.mark.parametrize("train_batches", [5, 23, 24])
def test_no_run_stops_behind_its_end(train_batches: int) -> None:
    assert at_least(a_fleet(), train_batches=train_batches) == train_batches
