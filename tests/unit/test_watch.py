"""Who has been silent, stuck or late; and that slow is not dead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.test_run_state import agent_hello, done, fault, progress, ready

from spectrain.coordinator.first_cause import Silent, Stuck
from spectrain.coordinator.fleet import Agent, Fleet, Worker
from spectrain.coordinator.watch import is_fatal, late_start, silent_hosts, silent_workers
from spectrain.protocol.errors import ExitCode
from spectrain.protocol.settings import Settings

SETTINGS = Settings(
    job="job.py", run_dir="/run", stages=1, lease_s=10, wait_timeout_s=30, start_timeout_s=60
)
NOW = 100.0


def a_worker(*, heard: float | None = NOW, moved: float = NOW) -> Worker:
    return Worker(
        0, (0, 0), "left", incarnation=2, heard=heard, moved=moved, connected=True,
        progress=progress(0, "U3"),
    )  # fmt: skip


def suspects(worker: Worker, *, training: bool = True) -> list[object]:
    fleet = Fleet(("left",), workers=[worker])
    found = list(silent_workers(fleet, SETTINGS, NOW, training=training))
    assert all(suspect is worker for suspect, _ in found)
    return [each.event for _, each in found]


@pytest.mark.parametrize("silent_s", [0.0, 10.0])
def test_nobody_is_suspected_within_the_lease(silent_s: float) -> None:
    assert suspects(a_worker(heard=NOW - silent_s)) == []


def test_a_worker_silent_for_longer_than_the_lease_is_found() -> None:
    assert suspects(a_worker(heard=NOW - 11)) == [Silent(stage=0, incarnation=2, silent_s=11)]


def test_a_fault_says_where_and_what_the_worker_was_doing() -> None:
    fleet = Fleet(("left",), workers=[a_worker(heard=NOW - 11)])
    ((_, found),) = silent_workers(fleet, SETTINGS, NOW, training=True)
    assert (found.at_s, found.host, found.op) == (NOW, "left", "after U3")


def test_a_loop_is_stuck_before_its_neighbours_would_give_up_waiting_for_it() -> None:
    assert suspects(a_worker(moved=NOW - 15)) == []
    assert suspects(a_worker(moved=NOW - 16)) == [Stuck(stage=0, incarnation=2, stuck_s=16)]


def test_a_silent_worker_is_silent_and_not_also_stuck() -> None:
    (event,) = suspects(a_worker(heard=NOW - 31, moved=NOW - 31))
    assert isinstance(event, Silent)


def test_nobody_is_stuck_before_training() -> None:
    assert suspects(a_worker(moved=0), training=False) == []


def test_a_worker_that_builds_its_links_or_is_done_is_not_stuck() -> None:
    connecting = a_worker(moved=0)
    connecting.connected = False
    connecting.ready = ready(0)
    assert suspects(connecting) == []
    finished = a_worker(moved=0)
    finished.done = done(0)
    assert suspects(finished) == []


@pytest.mark.parametrize("heard", [NOW, None], ids=["building", "without a word"])
def test_a_restarted_worker_may_take_as_long_as_a_start_until_it_is_ready(
    heard: float | None,
) -> None:
    starting = a_worker(heard=heard, moved=NOW - 60)
    starting.connected = False
    assert suspects(starting) == []
    starting.moved = NOW - 61
    assert suspects(starting) == [Stuck(stage=0, incarnation=2, stuck_s=61)]
    assert suspects(starting, training=False) == []


def test_who_is_gone_or_has_never_spoken_is_not_silent() -> None:
    gone = a_worker(heard=0)
    gone.exited = True
    assert suspects(gone) == suspects(a_worker(heard=None)) == []


def test_hosts_whose_agents_are_silent_are_found_unless_known_to_be_lost() -> None:
    agents = {
        0: Agent(agent_hello(0), heard=NOW - 10),
        1: Agent(agent_hello(1), heard=NOW - 11),
        2: Agent(agent_hello(2), heard=0, lost=True),
    }
    ((index, found),) = silent_hosts(Fleet(("left", "middle", "right"), agents), SETTINGS, NOW)
    assert (index, found.host) == (1, "middle")
    assert found.event == Silent(stage=None, incarnation=1, silent_s=11)


@pytest.mark.parametrize(
    ("code", "fatal"), [(2, True), (4, True), (6, True), (1, False), (5, False)]
)
def test_what_a_replay_would_only_repeat_is_fatal(code: int, *, fatal: bool) -> None:
    assert is_fatal(replace(fault(0, "ValueError"), exit_code=code)) is fatal


def test_a_users_error_is_fatal() -> None:
    assert is_fatal(replace(fault(0, "JobError"), user_error=True))


def test_a_late_start_tells_the_limit_who_is_missing_and_what_to_do() -> None:
    cause = late_start(60, ("host left: asleep", "host right: asleep"))
    assert cause.message == (
        "after 60 s the run still waited for:\nhost left: asleep\nhost right: asleep"
    )
    assert cause.exit_code == ExitCode.DEADLINE
    assert "--start-timeout" in cause.advice
