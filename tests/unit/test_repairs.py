"""What the coordinator does when workers, agents and hosts die while the run goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.test_run_state import Run, exited, fault, hello, links, progress, ready, sent

from spectrain.coordinator.events import End, Instruction, Persist, StoppedFeeding, Tell
from spectrain.coordinator.recovery import SAME_OP_LIMIT
from spectrain.coordinator.run_state import Phase
from spectrain.protocol.messages import (
    AgentLost,
    Assign,
    Committed,
    Go,
    Heartbeat,
    KillWorker,
    Message,
    SnapshotPlan,
    SnapshotWritten,
    StartAgent,
    StartWorker,
    StopBefore,
    WorkerConnected,
)


def training(stages: int = 3, hosts: tuple[str, ...] = ("left", "right")) -> Run:
    run = Run(stages, hosts, max_restarts=50)
    run.up_to_training()
    return run


def changed(message: Message, **fields: Any) -> Message:
    """Return the same message with some fields changed."""
    return replace(message, **fields)


def reborn(message: Message, incarnation: int) -> Message:
    """Return a worker's message as its later incarnation would say it."""
    return changed(message, incarnation=incarnation)


def say(run: Run, stage: int, incarnation: int, message: Message) -> list[Instruction]:
    return run.hear(f"worker/{stage}/{incarnation}", reborn(message, incarnation))


def die(run: Run, stage: int, incarnation: int = 0, status: int = -9) -> list[Instruction]:
    host = run.state.fleet.workers[stage].slot[0]
    return run.hear(f"agent/{host}", reborn(exited(stage, status), incarnation))


def come_back(run: Run, stage: int, incarnation: int) -> list[Instruction]:
    """Let a new incarnation go through its whole start; return what was told meanwhile."""
    instructions = say(run, stage, incarnation, hello(stage))
    instructions += say(run, stage, incarnation, ready(stage))
    connected = WorkerConnected(stage=stage, incarnation=incarnation, generation=9)
    return instructions + say(run, stage, incarnation, connected)


def snapshot(run: Run, stage: int, update: int, incarnation: int = 0) -> list[Instruction]:
    message = SnapshotWritten(
        stage=stage, incarnation=incarnation, update=update, path=f"/shm/{stage}.{update}",
        size_bytes=10, digest=f"d{stage}.{update}", capture_s=0.001, write_s=0.01,
    )  # fmt: skip
    return run.hear(f"worker/{stage}/{incarnation}", message)


def started(instructions: list[Instruction]) -> list[tuple[str, int, int, int]]:
    return [
        (to, m.stage, m.incarnation, m.slot)
        for to, m in sent(instructions, StartWorker)
        if isinstance(m, StartWorker)
    ]


def test_a_dead_worker_alone_is_started_again_as_the_next_incarnation() -> None:
    run = training()
    assert started(die(run, 1)) == [("agent/0", 1, 1, 1)]
    assert run.state.phase is Phase.TRAINING


def test_a_restarted_worker_is_joined_to_the_neighbours_that_live() -> None:
    run = training()
    die(run, 1)
    say(run, 1, 1, hello(1))
    assert links(say(run, 1, 1, ready(1))) == [
        ("worker/0/0", 3, "-", "a1"), ("worker/1/1", 3, "g0", "-"),
        ("worker/1/1", 4, "-", "a2"), ("worker/2/0", 4, "g1", "-"),
    ]  # fmt: skip


def test_adjacent_dead_workers_are_joined_when_the_second_is_ready() -> None:
    run = training()
    die(run, 1)
    die(run, 2)
    say(run, 1, 1, hello(1))
    first = links(say(run, 1, 1, ready(1)))
    assert {to for to, *_ in first} == {"worker/0/0", "worker/1/1"}
    say(run, 2, 1, hello(2))
    second = links(say(run, 2, 1, ready(2)))
    assert {to for to, *_ in second} == {"worker/1/1", "worker/2/1"}


def test_a_restarted_worker_goes_when_its_links_stand() -> None:
    run = training()
    die(run, 1)
    assert [to for to, _ in sent(come_back(run, 1, 1), Go)] == ["worker/1/1"]


def test_a_restarted_worker_hears_of_rounds_and_of_a_stop() -> None:
    run = training()
    run.handle(StoppedFeeding(7, "Ctrl-C", 130))
    die(run, 1)
    told = come_back(run, 1, 1)
    assert sent(told, StopBefore) == [("worker/1/1", StopBefore(batch=7))]
    assert [to for to, _ in sent(told, SnapshotPlan)] == ["worker/1/1"]


def test_a_worker_begins_from_the_committed_round_never_from_its_own_newest() -> None:
    run = training(stages=2, hosts=("only",))
    for stage in (0, 1):
        snapshot(run, stage, 5)
    snapshot(run, 1, 10)
    die(run, 1)
    ((_, assign),) = sent(say(run, 1, 1, hello(1)), Assign)
    assert isinstance(assign, Assign)
    assert assign.restore is not None
    assert (assign.restore.update, assign.restore.digest) == (5, "d1.5")


def test_a_worker_that_dies_before_the_first_round_begins_at_the_initial_state() -> None:
    run = training()
    die(run, 0)
    ((_, assign),) = sent(say(run, 0, 1, hello(0)), Assign)
    assert isinstance(assign, Assign)
    assert assign.restore is None


def test_a_round_is_written_down_before_anybody_hears_of_it() -> None:
    run = training(stages=2, hosts=("only",))
    assert snapshot(run, 0, 5) == []
    persist, *told = snapshot(run, 1, 5)
    assert isinstance(persist, Persist)
    assert [to for to, _ in sent(told, Committed)] == ["worker/0/0", "worker/1/0", "agent/0"]


def test_newer_marks_of_a_dead_stage_do_not_commit() -> None:
    run = training(stages=2, hosts=("only",))
    snapshot(run, 0, 5)
    die(run, 0)
    assert sent(snapshot(run, 1, 5), Committed) == []


def test_late_words_of_the_dead_are_ignored() -> None:
    run = training(stages=2, hosts=("only",))
    die(run, 0)
    assert snapshot(run, 0, 5, incarnation=0) == []
    assert run.hear("worker/0/0", fault(0, "ValueError")) == []


def test_the_user_is_told_when_a_stage_is_as_far_as_it_was() -> None:
    run = training()
    run.worker(1, progress(1))
    die(run, 1)
    come_back(run, 1, 1)
    run.now += 0.8
    (told,) = say(run, 1, 1, changed(progress(1), replayed=3))
    assert told == Tell(
        "info", "stage 1 on left restarted as incarnation 1, replayed 3 batches, back in 0.8 s"
    )
    assert run.state.repairs.restarts == (0, 1, 0)


def test_a_stage_that_replays_is_not_yet_back() -> None:
    run = training()
    run.worker(1, progress(1))
    die(run, 1)
    come_back(run, 1, 1)
    assert say(run, 1, 1, changed(progress(1), state="replaying")) == []


def raise_again(run: Run, stage: int, incarnation: int) -> list[Instruction]:
    say(run, stage, incarnation, fault(stage, "ValueError"))
    instructions = die(run, stage, incarnation, status=1)
    for _ in range(70):
        for index in range(len(run.state.fleet.hosts)):
            run.hear(f"agent/{index}", Heartbeat())
        for worker in run.state.fleet.workers:
            if worker.stage != stage and not worker.exited:
                run.hear(worker.identity, progress(worker.stage, waiting_for="something"))
        instructions += run.wait(0.5)
        if run.state.fleet.workers[stage].incarnation > incarnation:
            break
    return instructions


def test_an_exception_at_one_op_is_tried_then_all_roll_back_then_the_run_ends() -> None:
    run = training()
    for incarnation in range(SAME_OP_LIMIT - 1):
        assert sent(raise_again(run, 1, incarnation), KillWorker) == []
        come_back(run, 1, incarnation + 1)
    rolled_back = raise_again(run, 1, SAME_OP_LIMIT - 1)
    assert {to for to, _ in sent(rolled_back, KillWorker)} == {"agent/0", "agent/1"}
    come_back(run, 1, SAME_OP_LIMIT)
    say(run, 1, SAME_OP_LIMIT, fault(1, "ValueError"))
    die(run, 1, SAME_OP_LIMIT, status=1)
    (end,) = [each for each in run.wait(2) if isinstance(each, End)]
    assert end.cause is not None
    assert (end.cause.stage, end.cause.what, end.cause.op) == (1, "ValueError", "F4")
    assert "given up" in end.cause.advice


def test_restarts_without_progress_come_with_growing_pauses() -> None:
    run = training()
    die(run, 1)
    come_back(run, 1, 1)
    assert started(die(run, 1, 1)) == []
    assert started(run.wait(0.4)) == []
    assert started(run.wait(0.2)) == [("agent/0", 1, 2, 1)]


@pytest.mark.parametrize("code", [2, 4, 6])
def test_what_replay_would_only_repeat_ends_the_run_at_once(code: int) -> None:
    run = training()
    run.worker(1, changed(fault(1, "NonFiniteError"), exit_code=code))
    assert run.state.phase is Phase.FAILING


def test_a_lost_agent_is_started_again_and_its_stages_follow_it() -> None:
    run = training()
    lost = run.hear("launcher", AgentLost(host_index=0, reason="killed"))
    assert sent(lost, StartAgent) == [("launcher", StartAgent(host_index=0))]
    assert started(lost) == []
    assert started(run.agent(0)) == [("agent/0", 0, 1, 0), ("agent/0", 1, 1, 1)]


def test_a_host_that_stays_lost_gives_its_stages_to_spare_slots_after_two_leases() -> None:
    run = training(stages=3, hosts=("left", "right", "spare"))
    for stage in range(3):
        snapshot(run, stage, 5)
    moved: list[Instruction] = []
    for _ in range(3):
        run.hear("launcher", AgentLost(host_index=0, reason="no route"))
    for _ in range(25):
        for index in (1, 2):
            run.hear(f"agent/{index}", Heartbeat())
        run.worker(2, progress(2, waiting_for="F9 from stage 1"))
        moved += run.wait(1)
    assert started(moved) == [("agent/1", 0, 1, 1), ("agent/2", 1, 1, 0)]


def test_a_short_silence_of_a_host_has_no_consequence() -> None:
    run = training()
    for _ in range(15):
        run.hear("agent/0", Heartbeat())
        run.worker(0, progress(0, waiting_for="x"))
        run.worker(1, progress(1, waiting_for="x"))
        instructions = run.wait(1)
        assert started(instructions) == []
    run.hear("agent/1", Heartbeat())
    for _ in range(9):
        run.hear("agent/0", Heartbeat())
        run.hear("agent/1", Heartbeat())
        for stage in range(3):
            run.worker(stage, progress(stage, waiting_for="x"))
        assert started(run.wait(1)) == []
    assert run.state.phase is Phase.TRAINING


def test_a_hanging_worker_is_killed_once_by_its_agent() -> None:
    run = training()
    kills: list[tuple[str, Message]] = []
    for _ in range(14):
        for index in (0, 1):
            run.hear(f"agent/{index}", Heartbeat())
        for stage in (0, 2):
            run.worker(stage, progress(stage, waiting_for="x"))
        kills += sent(run.wait(1), KillWorker)
    assert [to for to, _ in kills] == ["agent/0"]
    assert started(die(run, 1)) == [("agent/0", 1, 1, 1)]
