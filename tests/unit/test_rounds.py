"""When snapshots are taken, and what a committed round leads to."""

from __future__ import annotations

import pytest
from unit.test_run_state import agent_hello, progress, sent

from spectrain.coordinator.catalogue import Catalogue
from spectrain.coordinator.events import Instruction, Persist, Tell
from spectrain.coordinator.fleet import Agent, Fleet, Worker
from spectrain.coordinator.rounds import Rounds
from spectrain.coordinator.snapshot_interval import choose_interval
from spectrain.protocol.messages import (
    AgentSnapshots,
    CheckpointWritten,
    Committed,
    Replicate,
    Replicated,
    ReplicationFailed,
    SnapshotFile,
    SnapshotPlan,
    SnapshotSkipped,
    SnapshotWritten,
)
from spectrain.protocol.settings import Settings

PERSIST = Persist("all there is to know")


class Run:
    """Rounds of as many stages as hosts, one worker on each."""

    def __init__(self, hosts: int = 1, *, every: int | None = 5, stages: int = 2) -> None:
        settings = Settings(job="job.py", run_dir="/run", stages=stages, snapshot_every=every)
        names = tuple(f"host{index}" for index in range(hosts))
        agents = {index: Agent(agent_hello(index), 0.0) for index in range(hosts)}
        workers = [
            Worker(stage, (stage % hosts, 0), names[stage % hosts], heard=0.0)
            for stage in range(stages)
        ]
        self.fleet = Fleet(names, agents, workers)
        self.catalogue = Catalogue(stages=stages, hosts=range(hosts))
        self.rounds = Rounds(settings, self.fleet, self.catalogue, lambda: PERSIST)

    def writes(self, stage: int, update: int, capture_s: float = 0.001) -> list[Instruction]:
        message = SnapshotWritten(
            stage=stage, incarnation=0, update=update, path=f"/shm/{stage}.{update}",
            size_bytes=10, digest=f"d{stage}.{update}", capture_s=capture_s, write_s=0.01,
        )  # fmt: skip
        return self.rounds.hear(self.fleet.workers[stage].slot[0], message)

    def commit(self, update: int, capture_s: float = 0.001) -> None:
        """Commit a round; there must be one host."""
        for stage in range(len(self.fleet.workers)):
            self.writes(stage, update, capture_s)
        assert self.catalogue.committed == update

    def trains_to(self, *versions: int) -> None:
        for worker, version in zip(self.fleet.workers, versions, strict=True):
            worker.progress = progress(worker.stage)
            object.__setattr__(worker.progress, "version", version)


def file(stage: int, update: int) -> SnapshotFile:
    return SnapshotFile(
        stage=stage, update=update, digest=f"d{stage}.{update}", path=f"/shm/{stage}.{update}"
    )


def plans(instructions: list[Instruction]) -> list[tuple[int, int]]:
    """Return the first update and the distance of every plan that is told."""
    return [
        (m.first, m.every)
        for _, m in sent(instructions, SnapshotPlan)
        if isinstance(m, SnapshotPlan)
    ]


def requests(instructions: list[Instruction]) -> list[tuple[str, int, int]]:
    return [
        (to, m.stage, m.host_index)
        for to, m in sent(instructions, Replicate)
        if isinstance(m, Replicate)
    ]


# -- when to take them --------------------------------------------------------------------------


def test_the_users_distance_is_told_to_everybody_when_training_begins() -> None:
    run = Run(every=5)
    assert plans(run.rounds.begin()) == [(5, 5)] * 2


def test_without_one_a_first_guess_gives_something_to_measure() -> None:
    assert plans(Run(every=None, stages=2).rounds.begin())[0] == (8, 8)


def test_rounds_go_on_after_the_committed_one() -> None:
    run = Run(every=5)
    run.commit(20)
    assert plans(run.rounds.begin())[0] == (25, 5)


def test_no_snapshots_means_none() -> None:
    assert plans(Run(every=0).rounds.begin())[0] == (0, 0)


def test_a_restarted_worker_hears_the_plan_that_holds() -> None:
    run = Run(every=5)
    assert run.rounds.plan_for(run.fleet.workers[1]) == []
    run.rounds.begin()
    told = run.rounds.plan_for(run.fleet.workers[1])
    assert [to for to, _ in sent(told, SnapshotPlan)] == ["worker/1/0"]
    assert plans(told) == [(5, 5)]


def trained_for(
    run: Run, seconds: float, versions: tuple[int, int], *, before: tuple[int, int] = (5, 5)
) -> list[Instruction]:
    """Let the stages go from one update to another in so many seconds; return what follows."""
    run.trains_to(*before)
    assert plans(run.rounds.tick(10.0)) == []
    run.trains_to(*versions)
    return run.rounds.tick(10.0 + seconds)


def test_the_distance_is_chosen_from_what_was_measured() -> None:
    run = Run(every=None)
    run.rounds.begin()
    run.commit(8, capture_s=0.02)
    told, *rest = trained_for(run, 4.0, (410, 405))
    update_s = 4.0 / 400
    every = choose_interval(capture_s=0.02, update_s=update_s, workers=2)
    assert plans(rest) == [(410 + 2 + int(0.5 / update_s) + 1, every)] * 2
    assert isinstance(told, Tell)
    assert told.text.startswith(f"a snapshot every {every} updates (")


def test_the_distance_is_chosen_once() -> None:
    run = Run(every=None)
    run.rounds.begin()
    run.commit(8)
    assert plans(trained_for(run, 4.0, (400, 395)))
    assert run.rounds.tick(20.0) == []


@pytest.mark.parametrize(
    ("committed", "versions", "seconds"), [(0, (9, 9), 4.0), (8, (9, 9), 1.9), (8, (9, 5), 4.0)]
)
def test_nothing_is_chosen_before_there_is_enough_to_judge_by(
    committed: int, versions: tuple[int, int], seconds: float
) -> None:
    run = Run(every=None)
    run.rounds.begin()
    if committed:
        run.commit(committed)
    assert trained_for(run, seconds, versions) == []


@pytest.mark.parametrize("every", [0, 5])
def test_a_distance_that_the_user_chose_stays(every: int) -> None:
    run = Run(every=every)
    run.rounds.begin()
    run.commit(5)
    assert trained_for(run, 9.0, (400, 400)) == []


def test_nothing_is_chosen_before_training() -> None:
    run = Run(every=None)
    run.trains_to(9, 9)
    assert run.rounds.tick(9.0) == []


def test_a_stage_that_leaves_a_snapshot_out_is_told_of_once_for_each_reason() -> None:
    run = Run()
    worker = run.fleet.workers[1]

    def skip(update: int, reason: str) -> list[Instruction]:
        message = SnapshotSkipped(stage=1, incarnation=0, update=update, reason=reason)
        return run.rounds.skipped(worker, message)

    text = "stage 1 took no snapshot after update 5: disk full: 3 bytes"
    assert skip(5, "disk full: 3 bytes") == [Tell("warning", text)]
    assert skip(10, "disk full: 2 bytes") == []
    assert skip(10, "it was late") != []


# -- when they are committed --------------------------------------------------------------------


def test_a_round_is_committed_when_the_last_stage_has_written_it() -> None:
    run = Run()
    assert run.writes(0, 5) == []
    told = run.writes(1, 5)
    committed = Committed(update=5, digests=("d0.5", "d1.5"))
    assert [to for to, _ in sent(told, Committed)] == ["worker/0/0", "worker/1/0", "agent/0"]
    assert {message for _, message in sent(told, Committed)} == {committed}


def test_a_commit_is_written_down_before_anybody_hears_of_it() -> None:
    run = Run()
    run.writes(0, 5)
    assert run.writes(1, 5)[0] == PERSIST


def test_with_two_hosts_a_round_waits_for_its_copies() -> None:
    run = Run(hosts=2)
    assert requests(run.writes(0, 5)) == [("agent/0", 0, 1)]
    assert requests(run.writes(1, 5)) == [("agent/1", 1, 0)]
    assert run.rounds.hear(1, Replicated(host_index=1, file=file(0, 5))) == []
    told = run.rounds.hear(0, Replicated(host_index=0, file=file(1, 5)))
    assert sent(told, Committed)


def test_a_request_names_the_receivers_endpoint_and_key() -> None:
    run = Run(hosts=2)
    hello = agent_hello(1)
    object.__setattr__(hello, "replica_endpoint", "tcp://right:1")
    object.__setattr__(hello, "public_key", "key")
    run.fleet.agents[1].hello = hello
    ((_, request),) = sent(run.writes(0, 5), Replicate)
    assert request == Replicate(
        stage=0, update=5, digest="d0.5", host_index=1, endpoint="tcp://right:1", public_key="key"
    )


@pytest.mark.parametrize("lost", [0, 1])
def test_no_copy_is_asked_of_or_for_an_agent_that_is_lost(lost: int) -> None:
    run = Run(hosts=2)
    run.fleet.agents[lost].lost = True
    assert requests(run.writes(0, 5)) == []


def test_a_copy_that_failed_is_told() -> None:
    failed = ReplicationFailed(host_index=1, stage=0, update=5, error="no room")
    assert Run(hosts=2).rounds.hear(0, failed) == [
        Tell("warning", "no copy of a snapshot on host1: no room")
    ]


def test_a_checkpoint_that_failed_is_told_and_one_that_did_not_is_kept() -> None:
    run = Run()
    failed = CheckpointWritten(host_index=0, update=5, files=(), error="disk full")
    assert run.rounds.hear(0, failed) == [Tell("warning", "checkpoint on host0 failed: disk full")]
    files = (file(0, 5), file(1, 5))
    assert run.rounds.hear(0, CheckpointWritten(host_index=0, update=5, files=files)) == []
    assert run.catalogue.newest_checkpoint() == 5


# -- bringing a snapshot where it is needed -----------------------------------------------------


def moved(update: int = 5) -> Run:
    """Return three hosts of which the third holds nothing of the committed round."""
    run = Run(hosts=3, stages=2)
    for stage, copy in ((0, 1), (1, 0)):
        run.writes(stage, update)
        run.rounds.hear(copy, Replicated(host_index=copy, file=file(stage, update)))
    assert run.catalogue.committed == update
    return run


def test_a_snapshot_is_brought_once_to_the_host_that_needs_it() -> None:
    run = moved()
    first = run.rounds.bring(0, 2)
    assert first is not None
    assert requests(first) == [("agent/0", 0, 2)]
    assert run.rounds.bring(0, 2) == []


def test_nothing_is_brought_where_the_snapshot_lies() -> None:
    run = moved()
    assert run.rounds.bring(0, 0) is None
    run.rounds.bring(0, 2)
    run.rounds.hear(2, Replicated(host_index=2, file=file(0, 5)))
    assert run.rounds.bring(0, 2) is None


def test_a_copy_that_failed_is_asked_for_again() -> None:
    run = moved()
    run.rounds.bring(0, 2)
    run.rounds.hear(0, ReplicationFailed(host_index=2, stage=0, update=5, error="cut"))
    again = run.rounds.bring(0, 2)
    assert again is not None
    assert requests(again) == [("agent/0", 0, 2)]


@pytest.mark.parametrize("index", [0, 2])
def test_a_copy_under_way_is_asked_for_again_when_an_agent_comes_back(index: int) -> None:
    run = moved()
    run.rounds.bring(0, 2)
    held = (file(0, 5),) if index == 0 else ()
    run.rounds.hear(index, AgentSnapshots(host_index=index, snapshots=held, checkpoints=()))
    assert run.fleet.agents[index].surveyed
    again = run.rounds.bring(0, 2)
    assert again is not None
    assert len(requests(again)) == 1


def test_large_parcels_bring_the_rounds_nearer_together() -> None:
    run = Run(every=None)
    run.rounds.begin()
    run.commit(8, capture_s=0.0001)
    for worker in run.fleet.workers:
        worker.progress = progress(worker.stage)
    run.trains_to(5, 5)
    run.rounds.tick(10.0)
    run.trains_to(405, 405)
    # 10 MiB for each of the 8 updates between rounds, and for two in flight
    object.__setattr__(run.fleet.workers[0].progress, "peak_activations_log_bytes", 100 << 20)
    assert {every for _, every in plans(run.rounds.tick(14.0))} == {-(-(64 << 20) // (10 << 20))}


def test_a_first_capture_that_also_took_memory_does_not_count() -> None:
    run = Run(every=None)
    run.rounds.begin()
    run.commit(8, capture_s=0.02)
    run.commit(16, capture_s=0.001)
    (_, every), *_ = plans(trained_for(run, 4.0, (420, 415), before=(20, 20)))
    assert every == choose_interval(capture_s=0.001, update_s=4.0 / 395, workers=2)
