"""A coordinator that takes another's place: it finds the run, goes on, replaces who is missing."""

from __future__ import annotations

import pytest
from unit.test_repairs import die, say, snapshot, started
from unit.test_run_state import WORK, Run, agent_hello, done, hello, links, progress, ready, sent

from spectrain.coordinator.events import (
    End,
    Export,
    Exported,
    Instruction,
    Persist,
    Planned,
    StopFeeding,
    StopNow,
    StoppedFeeding,
    StopWanted,
    Tell,
    WeightsArrived,
)
from spectrain.coordinator.memory import Memory
from spectrain.coordinator.rejoin import GENERATIONS_PER_LIFE
from spectrain.coordinator.run_state import Phase, RunState
from spectrain.protocol.messages import (
    AgentLost,
    AgentSnapshots,
    Assign,
    Connect,
    Go,
    Heartbeat,
    KillWorker,
    SnapshotFile,
    SnapshotPlan,
    StartAgent,
    StopBefore,
    WhoAreYou,
    WorkerConnected,
)

FOUND = Tell("warning", "the coordinator was restarted and has found the run again")


def remembered(run: Run) -> Memory:
    """Return what the coordinator of this run would leave to the next one."""
    persist = run.state._persist()
    return Memory.from_json(persist.text)


def training(stages: int = 2, hosts: tuple[str, ...] = ("left", "right")) -> Run:
    run = Run(stages, hosts, max_restarts=50)
    run.up_to_training()
    return run


def restarted(before: Run) -> Run:
    """Let the coordinator die; return the run as its successor finds it, with the job loaded."""
    settings, hosts = before.state.settings, before.state.fleet.hosts
    run = Run(settings.stages, hosts, max_restarts=50)
    run.state = RunState(settings, hosts, run.now, memory=remembered(before))
    run.handle(Planned((1,) * settings.stages, WORK))
    return run


def introduce_agent(run: Run, index: int, *snapshots: SnapshotFile) -> list[Instruction]:
    told = run.hear(f"agent/{index}", agent_hello(index))
    survey = AgentSnapshots(host_index=index, snapshots=snapshots, checkpoints=())
    return told + run.hear(f"agent/{index}", survey)


def introduce(run: Run, stage: int, incarnation: int = 0) -> list[Instruction]:
    """Let a worker say again what it said when it came."""
    joined = WorkerConnected(stage=stage, incarnation=incarnation, generation=0)
    told = say(run, stage, incarnation, hello(stage))
    told += say(run, stage, incarnation, ready(stage))
    return told + say(run, stage, incarnation, joined)


def rejoined(before: Run) -> tuple[Run, list[Instruction]]:
    """Return the run after everybody has introduced himself, and what the last one brought."""
    run = restarted(before)
    for index in range(len(run.state.fleet.hosts)):
        introduce_agent(run, index)
    told: list[Instruction] = []
    for worker in list(run.state.fleet.workers):
        told = introduce(run, worker.stage, worker.incarnation)
    return run, told


def test_whoever_speaks_without_an_introduction_is_asked_who_he_is() -> None:
    run = restarted(training())
    assert sent(run.hear("agent/1", Heartbeat()), WhoAreYou) == [("agent/1", WhoAreYou())]
    assert sent(run.worker(1, progress(1)), WhoAreYou) == [("worker/1/0", WhoAreYou())]
    assert run.state.phase is Phase.REJOINING


def test_strangers_of_other_incarnations_are_not_asked() -> None:
    run = restarted(training())
    assert say(run, 1, 5, progress(1)) == []


def test_the_run_goes_on_when_the_last_worker_has_introduced_itself() -> None:
    run = restarted(training())
    introduce_agent(run, 0)
    introduce_agent(run, 1)
    assert FOUND not in introduce(run, 0)
    assert run.state.phase is Phase.REJOINING
    told = introduce(run, 1)
    assert run.state.phase is Phase.TRAINING
    assert FOUND in told
    assert [to for to, _ in sent(told, Go)] == ["worker/0/0", "worker/1/0"]


def test_the_run_goes_on_only_once_the_job_is_loaded_again() -> None:
    before = training()
    run = restarted(before)
    run.state = RunState(run.state.settings, ("left", "right"), run.now, memory=remembered(before))
    introduce_agent(run, 0)
    introduce_agent(run, 1)
    introduce(run, 0)
    assert introduce(run, 1) == []
    assert FOUND in run.handle(Planned((1, 1), WORK))
    assert run.state.phase is Phase.TRAINING


def test_nothing_is_started_or_connected_when_all_are_there() -> None:
    _, told = rejoined(training())
    assert started(told) == links(told) == sent(told, KillWorker) == []


def test_a_worker_that_only_says_hello_again_is_not_known_yet() -> None:
    run = restarted(training(stages=1, hosts=("only",)))
    introduce_agent(run, 0)
    say(run, 0, 0, hello(0))
    say(run, 0, 0, ready(0))
    assert run.state.phase is Phase.REJOINING


def test_what_is_known_is_written_down_before_anybody_goes_on() -> None:
    _, told = rejoined(training())
    (at,) = [index for index, each in enumerate(told) if isinstance(each, Persist)]
    (persist, *rest) = told[at:]
    assert isinstance(persist, Persist)
    assert Memory.from_json(persist.text).life == 2
    assert sent(told[:at], Go) == []
    assert sent(rest, Go)


def test_workers_hear_of_rounds_anew() -> None:
    _, told = rejoined(training())
    assert [to for to, _ in sent(told, SnapshotPlan)] == ["worker/0/0", "worker/1/0"]


def test_the_committed_round_is_remembered() -> None:
    before = training(hosts=("only",), stages=2)
    before.agent(0)
    for stage in range(2):
        snapshot(before, stage, 5)
    run = restarted(before)
    introduce_agent(run, 0)
    for stage in range(2):
        told = introduce(run, stage)
    ((_, plan), *_) = sent(told, SnapshotPlan)
    assert isinstance(plan, SnapshotPlan)
    assert plan.first > 5


def test_a_worker_that_stays_silent_for_a_lease_is_replaced_and_the_others_go_on() -> None:
    run = restarted(training())
    introduce_agent(run, 0)
    introduce_agent(run, 1)
    introduce(run, 0)
    assert started(run.wait(9)) == []
    for index in range(2):
        run.hear(f"agent/{index}", Heartbeat())
    told = run.wait(2)
    assert run.state.phase is Phase.TRAINING
    assert [to for to, _ in sent(told, Go)] == ["worker/0/0"]
    assert [to for to, _ in sent(told, KillWorker)] == ["agent/0"]
    assert started(told) == [("agent/0", 1, 1, 1)]


def test_a_worker_that_was_not_heard_from_does_not_count_as_failed() -> None:
    run = restarted(training())
    introduce_agent(run, 0)
    introduce_agent(run, 1)
    introduce(run, 0)
    run.wait(11)
    assert run.state.repairs.restarts == (0, 0)


def test_a_host_that_stays_silent_for_a_lease_gets_a_new_agent_and_then_its_workers() -> None:
    run = restarted(training(stages=3))
    introduce_agent(run, 0)
    introduce(run, 0)
    introduce(run, 1)
    told = run.wait(11)
    assert sent(told, StartAgent) == [("launcher", StartAgent(host_index=1))]
    assert started(told) == []
    assert started(introduce_agent(run, 1)) == [("agent/1", 2, 1, 0)]


def test_an_agent_that_is_lost_meanwhile_counts_as_never_heard_from() -> None:
    run = restarted(training(stages=3))
    introduce_agent(run, 0)
    introduce_agent(run, 1)
    for stage in range(2):
        introduce(run, stage)
    assert run.hear("launcher", AgentLost(host_index=1, reason="killed")) == []
    assert sent(run.wait(11), StartAgent) == [("launcher", StartAgent(host_index=1))]


def test_a_worker_that_was_ready_but_not_connected_is_joined_again() -> None:
    run = restarted(training())
    introduce_agent(run, 0)
    introduce_agent(run, 1)
    introduce(run, 0)
    say(run, 1, 0, hello(1))
    say(run, 1, 0, ready(1))
    told = run.wait(11)
    assert started(told) == []
    assert [to for to, *_ in links(told)] == ["worker/0/0", "worker/1/0"]


def test_generations_of_links_are_never_given_out_twice() -> None:
    run, _ = rejoined(training())
    die(run, 1)
    say(run, 1, 1, hello(1))
    told = say(run, 1, 1, ready(1))
    generations = {m.generation for _, m in sent(told, Connect) if isinstance(m, Connect)}
    assert min(generations) > GENERATIONS_PER_LIFE


def test_incarnations_and_restarts_go_on_counting() -> None:
    before = training()
    die(before, 1)
    introduce(before, 1, incarnation=1)
    run, _ = rejoined(before)
    assert started(die(run, 1, 1)) == [("agent/0", 1, 2, 1)]
    assert run.state.repairs.restarts == (0, 2)


def test_a_stop_is_kept_and_told_to_whoever_is_restarted() -> None:
    before = training()
    before.handle(StoppedFeeding(7, "SIGTERM", 75))
    run, _ = rejoined(before)
    assert run.state.stopping == StoppedFeeding(7, "SIGTERM", 75)
    die(run, 1)
    say(run, 1, 1, hello(1))
    told = say(run, 1, 1, ready(1))
    assert sent(told, StopBefore) == [("worker/1/1", StopBefore(batch=7))]


def test_a_stop_that_was_written_down_is_told_to_those_who_may_not_have_heard_of_it() -> None:
    before = training()
    before.handle(StoppedFeeding(7, "SIGTERM", 75))
    _, told = rejoined(before)
    assert sent(told, StopBefore) == [
        ("worker/0/0", StopBefore(batch=7)), ("worker/1/0", StopBefore(batch=7)),
    ]  # fmt: skip


def feeds_stopped(instructions: list[Instruction]) -> list[StopFeeding]:
    return [each for each in instructions if isinstance(each, StopFeeding)]


def test_a_stop_while_the_run_is_found_again_waits_until_all_have_told_how_far_they_are() -> None:
    run = restarted(training())
    introduce_agent(run, 0)
    introduce_agent(run, 1)
    introduce(run, 0)
    assert run.handle(StopWanted("Ctrl-C", 130)) == [
        Tell("warning", "Ctrl-C: stopping when every stage has told how far it is")
    ]
    introduce(run, 1)
    assert run.state.phase is Phase.TRAINING
    run.worker(0, progress(0))
    assert feeds_stopped(run.wait(1)) == []
    run.worker(1, progress(1))
    ((stop),) = feeds_stopped(run.wait(1))
    assert (stop.reason, stop.exit_code) == ("Ctrl-C", 130)
    assert feeds_stopped(run.wait(1)) == []


def test_a_run_that_was_stopped_while_it_was_found_again_ends_with_its_weights() -> None:
    run = restarted(training())
    introduce_agent(run, 0)
    introduce_agent(run, 1)
    run.handle(StopWanted("Ctrl-C", 130))
    for stage in range(2):
        introduce(run, stage)
        run.worker(stage, progress(stage))
    ((stop),) = feeds_stopped(run.wait(1))
    told = run.handle(StoppedFeeding(stop.at_least, stop.reason, stop.exit_code))
    assert len(sent(told, StopBefore)) == 2
    for stage in range(2):
        run.worker(stage, done(stage))
    assert run.handle(WeightsArrived()) == [Export()]
    assert run.handle(Exported()) == [End("stopped", 130)]


def test_a_second_wish_to_stop_a_run_that_is_being_found_again_ends_it_at_once() -> None:
    run = restarted(training())
    run.handle(StopWanted("Ctrl-C", 130))
    assert run.handle(StopNow("Ctrl-C", 130)) == [End("stopped", 130)]


def test_a_run_that_was_not_stopped_remembers_no_stop() -> None:
    assert restarted(training()).state.stopping is None


def test_a_coordinator_that_has_loaded_no_job_assigns_nothing() -> None:
    before = training()
    run = restarted(before)
    run.state = RunState(run.state.settings, ("left", "right"), run.now, memory=remembered(before))
    assert sent(run.worker(0, hello(0)), Assign) == []


def test_a_stage_that_is_done_may_say_so_again() -> None:
    run, _ = rejoined(training())
    run.worker(0, done(0))
    run.worker(1, done(1))
    assert all(worker.done is not None for worker in run.state.fleet.workers)


@pytest.mark.parametrize("deaths", [1, 3])
def test_every_life_counts_its_own_generations(deaths: int) -> None:
    run = training()
    for _ in range(deaths):
        run, _ = rejoined(run)
    assert remembered(run).life == deaths + 1
    assert run.state.repairs.generation == deaths * GENERATIONS_PER_LIFE


def test_a_worker_whose_hello_nobody_answered_gets_its_assignment() -> None:
    run = restarted(training(hosts=("only",)))
    run.state.repairs.plan = None  # the job is not loaded yet
    introduce_agent(run, 0)
    introduce(run, 0)
    assert sent(say(run, 1, 0, hello(1)), Assign) == []
    run.handle(Planned((1, 1), WORK))
    run.agent(0)
    told = run.wait(11)
    assert [to for to, _ in sent(told, Assign)] == ["worker/1/0"]
    assert started(told) == []


def test_repairs_that_were_over_stay_in_the_summary() -> None:
    before = training()
    die(before, 1)
    introduce(before, 1, incarnation=1)
    say(before, 1, 1, progress(1))
    (record,) = before.state.repairs.records
    run, _ = rejoined(before)
    assert [dict(each) for each in run.state.repairs.records] == [record]
