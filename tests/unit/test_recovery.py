"""How often and how hard a failing stage is tried."""

from __future__ import annotations

from spectrain.coordinator.recovery import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SAME_OP_LIMIT,
    STALLED_LIMIT,
    Decision,
    FailureCounter,
    Repair,
    Rung,
)

MANY = 1000


def decisions(counter: FailureCounter, failures: int, *, op: str = "") -> list[Decision]:
    """Let a stage fail so often without any update in between."""
    return [counter.failed(3, op, MANY) for _ in range(failures)]


def test_a_first_failure_is_replayed_at_once() -> None:
    assert FailureCounter().failed(3, "F4", MANY) == Decision(Rung.REPLAY)


def test_a_stage_that_gets_on_may_fail_any_number_of_times() -> None:
    counter = FailureCounter()
    found = {counter.failed(version, "", MANY) for version in range(500)}
    assert found == {Decision(Rung.REPLAY)}
    assert counter.restarts == 500


def test_a_version_reached_before_is_no_progress() -> None:
    counter = FailureCounter()
    counter.failed(9, "", MANY)
    assert counter.failed(9, "", MANY).pause_s == FIRST_PAUSE_S
    assert counter.failed(5, "", MANY).pause_s == 2 * FIRST_PAUSE_S
    assert counter.failed(10, "", MANY).pause_s == 0


def test_pauses_double_up_to_the_longest() -> None:
    pauses = [each.pause_s for each in decisions(FailureCounter(), 2 * STALLED_LIMIT)]
    assert pauses[:5] == [0, 0.5, 1, 2, 4]
    assert max(pauses) == pauses[-1] == LONGEST_PAUSE_S


def test_all_roll_back_once_when_a_stage_stalls_and_then_it_is_given_up() -> None:
    found = [each.rung for each in decisions(FailureCounter(), 2 * STALLED_LIMIT + 1)]
    expected = [Rung.REPLAY] * (2 * STALLED_LIMIT + 1)
    expected[STALLED_LIMIT - 1] = Rung.ROLL_BACK
    expected[-1] = Rung.GIVE_UP
    assert found == expected


def test_an_exception_at_one_op_is_replayed_then_rolled_back_then_given_up() -> None:
    found = decisions(FailureCounter(), SAME_OP_LIMIT + 1, op="F4")
    rungs = [each.rung for each in found]
    assert rungs == [Rung.REPLAY] * (SAME_OP_LIMIT - 1) + [Rung.ROLL_BACK, Rung.GIVE_UP]
    assert found[-1].why == f"F4 failed {SAME_OP_LIMIT + 1} times"


def test_exceptions_at_other_ops_or_other_deaths_begin_the_count_again() -> None:
    counter = FailureCounter()
    ops = ["F4", "F4", "B4", "F4", "F4", "", "F4", "F4"]
    rungs = {counter.failed(version, op, MANY).rung for version, op in enumerate(ops)}
    assert rungs == {Rung.REPLAY}


def test_the_users_limit_ends_it_and_counts_no_further_restart() -> None:
    counter = FailureCounter(restarts=2)
    assert counter.failed(1, "", 3).rung is Rung.REPLAY
    last = counter.failed(2, "", 3)
    assert (last.rung, counter.restarts) == (Rung.GIVE_UP, 3)
    assert last.why == "it was restarted 3 times (--max-restarts)"


def test_a_stalled_stage_is_given_up_with_the_number_of_its_failures() -> None:
    why = decisions(FailureCounter(), 2 * STALLED_LIMIT + 1)[-1].why
    assert why == f"it failed {2 * STALLED_LIMIT + 1} times without an update"


def test_a_repair_tells_how_long_each_part_took() -> None:
    repair = Repair(
        1, "SIGKILL", 10.0, started_at=10.5, hello_at=11.5, ready_at=13.5, connected_at=14.0,
        caught_up_at=18.0,
    )  # fmt: skip
    assert repair.split_s() == {"detect": 0.5, "spawn": 1, "load": 2, "link": 0.5, "replay": 4}


def test_a_repair_leaves_out_what_it_has_not_reached() -> None:
    assert Repair(1, "SIGKILL", 10.0).split_s() == {}
    skipped = Repair(1, "SIGKILL", 10.0, started_at=11.0, ready_at=14.0)
    assert skipped.split_s() == {"detect": 1, "load": 3}


def test_parts_of_a_repair_are_never_negative() -> None:
    assert Repair(1, "SIGKILL", 10.0, started_at=9.0, hello_at=10.0).split_s()["detect"] == 0


def test_the_record_of_a_repair_is_what_the_summary_says() -> None:
    repair = Repair(1, "SIGKILL", 10.0, from_update=5, replayed=3, started_at=10.5)
    assert repair.record() == {
        "stage": 1, "cause": "SIGKILL", "from_update": 5, "replayed": 3,
        "seconds": {"detect": 0.5},
    }  # fmt: skip
