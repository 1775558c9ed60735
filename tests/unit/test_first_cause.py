"""The first cause of a failed run: ranking, wording, exit codes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from spectrain.coordinator.first_cause import Fault, Silent, Stuck, first_cause
from spectrain.protocol.messages import AgentLost, WorkerExited, WorkerFault


def raised(stage: int, what: str = "ValueError", *, at_s: float = 1.0, **changes: Any) -> Fault:
    fields: dict[str, Any] = {
        "incarnation": 0, "message": "shapes differ", "op": "F17", "traceback": "Traceback ...",
        "exit_code": 1, "is_consequence": False, "user_error": False, **changes,
    }  # fmt: skip
    event = WorkerFault(stage=stage, what=what, **fields)
    return Fault(at_s=at_s, host=f"node{stage}", event=event, op="after B3")


def link_lost(stage: int, *, at_s: float = 1.0) -> Fault:
    return raised(stage, "LinkError", at_s=at_s, message="stage gone\nmore", is_consequence=True)


def exited(stage: int, status: int, *, at_s: float = 1.0, free_gib: float = 16.0) -> Fault:
    event = WorkerExited(
        host_index=0, stage=stage, incarnation=0, pid=9, status=status, log_path=f"/log{stage}",
        log_tail=("last words",), free_memory_bytes=int(free_gib * 2**30),
    )  # fmt: skip
    return Fault(at_s=at_s, host=f"node{stage}", event=event, op="after B3")


def agent_lost(host: str = "node0", *, at_s: float = 1.0) -> Fault:
    return Fault(at_s=at_s, host=host, event=AgentLost(host_index=0, reason="ssh ended"))


def silent(stage: int | None, *, at_s: float = 1.0) -> Fault:
    event = Silent(stage=stage, incarnation=0, silent_s=10.4)
    return Fault(at_s=at_s, host="node0", event=event, op="after B3")


def stuck(stage: int) -> Fault:
    event = Stuck(stage=stage, incarnation=0, stuck_s=120.0)
    return Fault(at_s=1.0, host="node0", event=event, op="after F4")


# -- which one ----------------------------------------------------------------------------------


def test_no_faults_have_no_cause() -> None:
    with pytest.raises(ValueError, match="at least one fault"):
        first_cause([])


@pytest.mark.parametrize("culprit", range(4))
def test_the_stage_that_raised_is_named_though_its_neighbours_reported_first(culprit: int) -> None:
    others = [stage for stage in range(4) if stage != culprit]
    faults = [link_lost(stage, at_s=0.1 * stage) for stage in others]
    cause = first_cause([*faults, raised(culprit, at_s=5.0)])
    assert (cause.stage, cause.host, cause.what) == (culprit, f"node{culprit}", "ValueError")
    assert len(cause.consequences) == 3


@pytest.mark.parametrize("culprit", range(4))
def test_the_stage_that_was_killed_is_named_though_its_neighbours_reported_first(
    culprit: int,
) -> None:
    others = [stage for stage in range(4) if stage != culprit]
    reports = [link_lost(stage, at_s=0.1) for stage in others]
    ends = [exited(stage, 1, at_s=0.2) for stage in others]
    cause = first_cause([*reports, *ends, exited(culprit, -9, at_s=0.3)])
    assert (cause.stage, cause.what) == (culprit, "SIGKILL")


def test_the_cause_does_not_depend_on_the_order_of_the_list() -> None:
    faults = [link_lost(0, at_s=0.1), exited(0, 1, at_s=0.2), exited(1, -9, at_s=0.3), silent(2)]
    causes = {repr(first_cause(order)) for order in itertools.permutations(faults)}
    assert len(causes) == 1


def test_of_two_exceptions_the_earlier_is_the_cause() -> None:
    cause = first_cause([raised(2, at_s=2.0), raised(1, at_s=1.0)])
    assert cause.stage == 1
    assert cause.consequences == ("stage 2 (node2): ValueError: shapes differ",)


def test_a_passed_deadline_ranks_below_a_silent_process() -> None:
    deadline = raised(1, "DeadlineError", at_s=1.0, exit_code=4)
    assert first_cause([deadline, silent(0, at_s=2.0)]).what == "silent"


def test_a_passed_deadline_ranks_above_a_lost_link() -> None:
    deadline = raised(1, "DeadlineError", at_s=2.0, exit_code=4)
    assert first_cause([link_lost(2), deadline]).what == "DeadlineError"


def test_a_lost_link_is_the_cause_when_nothing_better_is_known() -> None:
    assert first_cause([link_lost(2)]).what == "LinkError"


def test_a_lost_agent_comes_before_the_links_it_took_along() -> None:
    cause = first_cause([link_lost(1, at_s=0.5), agent_lost(at_s=1.0)])
    assert (cause.stage, cause.host, cause.what) == (None, "node0", "agent lost")
    assert cause.message == "ssh ended"


def test_a_silent_agent_that_is_then_lost_is_one_fault() -> None:
    cause = first_cause([silent(None, at_s=1.0), agent_lost(at_s=2.0)])
    assert cause.what == "silent"
    assert cause.consequences == ()


def test_incarnations_of_a_stage_are_different_processes() -> None:
    cause = first_cause([raised(1, at_s=1.0), raised(1, at_s=2.0, incarnation=1)])
    assert len(cause.consequences) == 1


# -- what is said of it -------------------------------------------------------------------------


def test_an_exception_keeps_its_traceback_and_gets_the_log_of_its_exit() -> None:
    cause = first_cause([raised(1), exited(1, 1, at_s=2.0)])
    assert (cause.message, cause.op, cause.traceback) == ("shapes differ", "F17", "Traceback ...")
    assert (cause.log_path, cause.log_tail) == ("/log1", ("last words",))
    assert cause.consequences == ()


def test_an_exit_that_overtakes_the_exception_does_not_hide_it() -> None:
    cause = first_cause([exited(1, 1, at_s=1.0), raised(1, at_s=2.0)])
    assert cause.what == "ValueError"
    assert cause.log_tail == ("last words",)


def test_a_users_mistake_needs_no_traceback() -> None:
    cause = first_cause([raised(1, "JobError", user_error=True, exit_code=2)])
    assert (cause.user_error, cause.traceback, cause.exit_code) == (True, "", 2)


def test_a_death_without_words_says_what_the_stage_did_last() -> None:
    assert first_cause([exited(1, -11)]).op == "after B3"


def test_a_consequence_is_one_line() -> None:
    cause = first_cause([exited(0, -11), link_lost(1)])
    assert cause.consequences == ("stage 1 (node1): LinkError: stage gone",)


def test_a_kill_with_little_memory_left_is_put_down_to_the_memory_killer() -> None:
    message = first_cause([exited(0, -9, free_gib=0.4)]).message
    assert message.startswith("killed by SIGKILL (137). Just after, the host had 0.4 GiB free; ")
    assert "likely the kernel's out-of-memory killer" in message


def test_a_kill_with_memory_left_is_not() -> None:
    message = first_cause([exited(0, -9, free_gib=12.0)]).message
    assert "12.0 GiB free; either somebody killed it" in message
    assert "likely" not in message


def test_other_signals_are_named_with_their_code_and_advice() -> None:
    cause = first_cause([exited(0, -11)])
    assert (cause.what, cause.message) == ("SIGSEGV", "killed by SIGSEGV (139)")
    assert cause.advice.startswith("Native code crashed")


def test_a_signal_without_a_name_is_given_by_number() -> None:
    assert first_cause([exited(0, -60)]).what == "signal 60"


def test_an_exit_of_its_own_is_not_taken_for_success() -> None:
    cause = first_cause([exited(0, 0)])
    assert (cause.what, cause.exit_code) == ("exit", 1)
    assert cause.message == "ended with exit code 0 before its work was done"


def test_silence_says_who_and_how_long() -> None:
    assert first_cause([silent(2)]).message == "the worker has said nothing for 10 s"
    assert first_cause([silent(None)]).message == "the agent has said nothing for 10 s"


def test_a_stuck_worker_is_told_from_a_waiting_one() -> None:
    cause = first_cause([stuck(1)])
    assert (cause.what, cause.op) == ("stuck", "after F4")
    assert cause.message == "finished no op for 120 s, though it waits for nobody"


# -- exit codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (raised(0), 1),
        (raised(0, exit_code=0), 1),
        (raised(0, "NonFiniteError", exit_code=6), 6),
        (raised(0, "DeadlineError", exit_code=4), 4),
        (raised(0, "OutOfMemoryError"), 5),
        (raised(0, "MemoryError"), 5),
        (exited(0, -9), 137),
        (exited(0, -15), 143),
        (exited(0, 3), 1),
        (silent(0), 4),
        (stuck(0), 4),
        (agent_lost(), 1),
    ],
)
def test_the_exit_code_tells_the_kind_of_failure(fault: Fault, code: int) -> None:
    assert first_cause([fault]).exit_code == code
