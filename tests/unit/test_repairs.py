"""What the coordinator does when workers, agents and hosts die while the run goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.test_run_state import (
    Run,
    agent_hello,
    exited,
    fault,
    hello,
    links,
    progress,
    ready,
    sent,
)

from spectrain.coordinator.events import End, Instruction, Persist, StoppedFeeding, Tell
from spectrain.coordinator.recovery import SAME_OP_LIMIT
from spectrain.coordinator.run_state import Phase
from spectrain.protocol.messages import (
    AgentLost,
    AgentSnapshots,
    Assign,
    Committed,
    Go,
    Heartbeat,
    KillWorker,
    Message,
    Replicate,
    Replicated,
    ReplicationFailed,
    SnapshotFile,
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


def lose_agent(run: Run, index: int) -> list[Instruction]:
    return run.hear("launcher", AgentLost(host_index=index, reason="killed"))


def pass_time(run: Run, seconds: int, *, silent: tuple[int, ...] = ()) -> list[Instruction]:
    """Let time pass in which all hosts speak but some, and their workers with them."""
    told: list[Instruction] = []
    for _ in range(seconds):
        for index in range(len(run.state.fleet.hosts)):
            if index not in silent:
                run.hear(f"agent/{index}", Heartbeat())
        for worker in run.state.fleet.workers:
            if worker.slot[0] not in silent and worker.heard is not None:
                waits = progress(worker.stage, waiting_for="F9")
                say(run, worker.stage, worker.incarnation, waits)
        told += run.wait(1)
    return told


def committed(run: Run, holders: dict[int, tuple[int, int]], update: int = 5) -> None:
    """Commit a round whose snapshots lie on these two hosts each, the stage's own first."""
    for stage, (_, target) in holders.items():
        snapshot(run, stage, update)
        run.hear(f"agent/{target}", replicated(stage, target, update))
    assert run.state.repairs.catalogue.committed == update


def replicated(stage: int, host: int, update: int = 5) -> Replicated:
    return Replicated(host_index=host, file=file_of(stage, update, f"/shm/{host}/{stage}.{update}"))


def file_of(stage: int, update: int, path: str) -> SnapshotFile:
    return SnapshotFile(stage=stage, update=update, digest=f"d{stage}.{update}", path=path)


def copies_asked_for(instructions: list[Instruction]) -> list[tuple[str, int, int]]:
    """Return source, stage and target of each copy between hosts."""
    return [
        (to, m.stage, m.host_index)
        for to, m in sent(instructions, Replicate)
        if isinstance(m, Replicate)
    ]


def restored(instructions: list[Instruction]) -> list[tuple[str, ...]]:
    """Return the paths that restarted workers are to try."""
    return [
        m.restore.paths
        for _, m in sent(instructions, Assign)
        if isinstance(m, Assign) and m.restore is not None
    ]


def test_a_lost_agent_is_started_again_and_its_stages_follow_it() -> None:
    run = training()
    lost = lose_agent(run, 0)
    assert sent(lost, StartAgent) == [("launcher", StartAgent(host_index=0))]
    assert started(lost) == []
    assert started(run.agent(0)) == [("agent/0", 0, 1, 0), ("agent/0", 1, 1, 1)]


def test_an_agent_that_does_not_come_up_is_tried_again_with_growing_pauses() -> None:
    run = training()
    pauses: list[float] = []
    for _ in range(4):
        told, begun = lose_agent(run, 0), run.now
        while not sent(told, StartAgent):
            told = run.wait(0.5)
        pauses.append(run.now - begun)
    assert pauses == [0, 0.5, 1, 2]


def test_stages_of_a_lost_agent_wait_until_it_tells_what_it_has_found() -> None:
    run = training()
    committed(run, {0: (0, 1), 1: (0, 1), 2: (1, 0)})
    lose_agent(run, 0)
    assert started(run.hear("agent/0", agent_hello(0))) == []
    assert started(run.wait(1)) == []
    found = tuple(file_of(stage, 5, f"/shm/{stage}.5") for stage in (0, 1))
    told = run.hear("agent/0", AgentSnapshots(host_index=0, snapshots=found, checkpoints=()))
    assert started(told) == [("agent/0", 0, 1, 0), ("agent/0", 1, 1, 1)]
    assert restored(say(run, 0, 1, hello(0))) == [("/shm/0.5",)]


def test_a_snapshot_that_is_gone_from_a_host_is_brought_there_before_its_stage_starts() -> None:
    run = training()
    committed(run, {0: (0, 1), 1: (0, 1), 2: (1, 0)})
    lose_agent(run, 0)
    back = run.agent(0)  # with nothing
    assert started(back) == []
    assert ("agent/1", 0, 0) in copies_asked_for(back)
    assert ("agent/1", 1, 0) in copies_asked_for(back)
    assert copies_asked_for(run.wait(1)) == []
    assert started(run.hear("agent/0", replicated(1, 0))) == [("agent/0", 1, 1, 1)]
    assert started(run.hear("agent/0", replicated(0, 0))) == [("agent/0", 0, 1, 0)]
    assert restored(say(run, 0, 1, hello(0))) == [("/shm/0/0.5",)]


def test_a_copy_that_fails_is_asked_for_again_with_the_next_tick() -> None:
    run = training()
    committed(run, {0: (0, 1), 1: (0, 1), 2: (1, 0)})
    lose_agent(run, 0)
    run.agent(0)
    failed = ReplicationFailed(host_index=0, stage=1, update=5, error="no answer")
    told = run.hear("agent/1", failed) + run.wait(1)
    assert copies_asked_for(told) == [("agent/1", 1, 0)]


def test_words_that_a_lost_agent_said_before_its_end_are_ignored() -> None:
    run = training()
    committed(run, {0: (0, 1), 1: (0, 1), 2: (1, 0)})
    lose_agent(run, 0)
    late = AgentSnapshots(host_index=0, snapshots=(), checkpoints=())
    assert run.hear("agent/0", late) == []
    assert not run.state.fleet.agents[0].surveyed or run.state.fleet.agents[0].lost


def test_a_host_that_stays_lost_gives_its_stages_to_spare_slots_after_two_leases() -> None:
    run = training(stages=3, hosts=("left", "right", "spare"))
    assert run.state.fleet.workers[2].host == "right"
    for _ in range(3):
        lose_agent(run, 0)
    moved = pass_time(run, 25, silent=(0,))
    assert started(moved) == [("agent/1", 0, 1, 1), ("agent/2", 1, 1, 0)]


def test_a_host_that_is_cut_off_gives_its_stages_away_two_leases_after_its_last_word() -> None:
    run = training(stages=3, hosts=("left", "right", "spare"))
    committed(run, {0: (0, 1), 1: (0, 1), 2: (1, 2)})
    assert started(pass_time(run, 19, silent=(0,))) == []
    moved = pass_time(run, 1, silent=(0,))
    assert started(moved) == [("agent/1", 0, 1, 1)]  # its copy lies there
    assert copies_asked_for(moved) == [("agent/1", 1, 2)]
    assert started(run.hear("agent/2", replicated(1, 2))) == [("agent/2", 1, 1, 0)]
    assert restored(say(run, 1, 1, hello(1))) == [("/shm/2/1.5",)]


def test_an_ssh_connection_that_ends_late_does_not_delay_the_move() -> None:
    run = training(stages=3, hosts=("left", "right", "spare"))
    pass_time(run, 15, silent=(0,))
    lose_agent(run, 0)
    assert len(started(pass_time(run, 5, silent=(0,)))) == 2


def test_two_hosts_that_are_lost_at_once_both_give_their_stages_away() -> None:
    run = training(stages=4, hosts=("a", "b", "c"))
    moved = pass_time(run, 21, silent=(0, 1))
    assert started(moved) == [
        ("agent/2", 0, 1, 0), ("agent/2", 1, 1, 1), ("agent/2", 2, 1, 0), ("agent/2", 3, 1, 1)
    ]  # fmt: skip


def test_stages_do_not_move_to_a_host_that_is_silent_itself() -> None:
    run = training(stages=2, hosts=("a", "b", "c"))
    pass_time(run, 5, silent=(0,))
    moved = pass_time(run, 16, silent=(0, 1))
    assert [to for to, *_ in started(moved)] == ["agent/2", "agent/2"]


def test_a_host_that_comes_back_after_its_stages_have_moved_is_spare() -> None:
    run = training(stages=2, hosts=("a", "b"))
    pass_time(run, 21, silent=(0,))
    assert lose_agent(run, 0) == []
    run.agent(0)
    assert started(pass_time(run, 30)) == []
    assert run.state.fleet.workers[0].host == "b"


def test_a_run_whose_every_host_is_lost_ends() -> None:
    run = training(stages=2, hosts=("a", "b"))
    told = pass_time(run, 40, silent=(0, 1))
    (end,) = [each for each in told if isinstance(each, End)]
    assert end.cause is not None
    assert "no host is left" in end.cause.advice


def test_snapshots_that_a_lost_agent_may_still_have_are_waited_for() -> None:
    run = training(stages=1, hosts=("a",))
    snapshot(run, 0, 5)
    lose_agent(run, 0)
    assert started(run.wait(1)) == []
    assert started(run.agent(0, snapshots=(file_of(0, 5, "/shm/0.5"),))) == [("agent/0", 0, 1, 0)]
    assert restored(say(run, 0, 1, hello(0))) == [("/shm/0.5",)]


def test_snapshots_that_are_nowhere_send_all_stages_back_to_what_is_on_disk() -> None:
    run = training()
    committed(run, {0: (0, 1), 1: (0, 1), 2: (1, 0)})
    lose_agent(run, 0)
    lose_agent(run, 1)
    assert started(run.agent(0)) == []  # the other may bring them back
    assert {stage for _, stage, *_ in started(run.agent(1))} == {0, 1, 2}
    assert run.state.repairs.catalogue.committed == 0
    assert restored(say(run, 0, 1, hello(0))) == []


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


def test_a_restarted_worker_that_never_gets_ready_is_killed_and_started_again() -> None:
    run = training()
    die(run, 1)
    say(run, 1, 1, hello(1))
    told: list[Instruction] = []
    for second in range(1, 63):
        for index in (0, 1):
            run.hear(f"agent/{index}", Heartbeat())
        for stage in (0, 2):
            run.worker(stage, progress(stage, waiting_for="x"))
        say(run, 1, 1, changed(progress(1, last_op=""), state="building"))
        told += run.wait(1)
        assert bool(sent(told, KillWorker)) == (second > 60)
    assert Tell("warning", "stage 1 on left hangs, before its first op") in told
    assert started(die(run, 1, 1) + run.wait(1)) == [("agent/0", 1, 2, 1)]


def test_when_a_worker_could_not_read_its_snapshot_all_go_back_to_a_checkpoint() -> None:
    run = training(stages=2, hosts=("only",))
    for stage in range(2):
        snapshot(run, stage, 5)
    assert run.state.repairs.catalogue.committed == 5
    assert started(die(run, 1)) == [("agent/0", 1, 1, 1)]
    say(run, 1, 1, hello(1))
    say(run, 1, 1, fault(1, "SnapshotError"))
    told = die(run, 1, 1, status=1) + run.wait(1)
    assert Tell("warning", "snapshots are lost: all stages go back to update 0") in told
    killed = [(m.stage, m.incarnation) for _, m in sent(told, KillWorker)]
    assert killed == [(0, 0)]
