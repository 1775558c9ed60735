"""The coordinator's decisions: what follows from what peers say and from the passing of time."""

from __future__ import annotations

from typing import Any

from spectrain.coordinator.events import (
    End,
    Event,
    Export,
    Exported,
    Instruction,
    LauncherGone,
    Planned,
    PlanRefused,
    Received,
    Send,
    StopFeeding,
    StopNow,
    StoppedFeeding,
    StopWanted,
    Tell,
    Ticked,
    WeightsArrived,
)
from spectrain.coordinator.run_state import Phase, RunState
from spectrain.protocol.errors import ExitCode
from spectrain.protocol.messages import (
    AgentHello,
    AgentLost,
    AgentSnapshots,
    Assign,
    Cause,
    Connect,
    Go,
    Heartbeat,
    Message,
    Progress,
    SnapshotFile,
    StageDone,
    StartWorker,
    StopBefore,
    Versions,
    WorkerConnected,
    WorkerExited,
    WorkerFault,
    WorkerHello,
    WorkerReady,
    WorkerStarted,
)
from spectrain.protocol.schedule import Work
from spectrain.protocol.settings import Settings

WORK = Work(train_batches=10, epoch_batches=10)
VERSIONS = Versions(package="1", package_digest="p", job_digest="j", python="3.11", torch="2")


class Run:
    """A state machine with a hand on its clock."""

    def __init__(
        self, stages: int = 3, hosts: tuple[str, ...] = ("left", "right"), *, max_restarts: int = 0
    ) -> None:
        settings = Settings(
            job="job.py", run_dir="/run", stages=stages, lease_s=10, start_timeout_s=60,
            wait_timeout_s=30, max_restarts=max_restarts,
        )  # fmt: skip
        self.now = 100.0
        self.state = RunState(settings, hosts, self.now)

    def handle(self, event: Event) -> list[Instruction]:
        return self.state.handle(event, self.now)

    def hear(self, sender: str, message: Message) -> list[Instruction]:
        return self.handle(Received(sender, message))

    def wait(self, seconds: float) -> list[Instruction]:
        self.now += seconds
        return self.handle(Ticked())

    def agent(
        self, index: int, slots: int = 2, snapshots: tuple[SnapshotFile, ...] = ()
    ) -> list[Instruction]:
        """Let an agent introduce itself and tell what it has found on its host."""
        told = self.hear(f"agent/{index}", agent_hello(index, slots))
        survey = AgentSnapshots(host_index=index, snapshots=snapshots, checkpoints=())
        return told + self.hear(f"agent/{index}", survey)

    def worker(self, stage: int, message: Message) -> list[Instruction]:
        return self.hear(f"worker/{stage}/0", message)

    def up_to_starting(self) -> list[Instruction]:
        instructions = self.handle(Planned((1,) * self.state.settings.stages, WORK))
        for index in range(len(self.state.fleet.hosts)):
            instructions += self.agent(index)
        return instructions

    def up_to_training(self) -> list[Instruction]:
        self.up_to_starting()
        stages = range(self.state.settings.stages)
        for stage in stages:
            self.worker(stage, hello(stage))
        for stage in stages:
            self.worker(stage, ready(stage))
        return [each for stage in stages for each in self.worker(stage, connected(stage))]


def agent_hello(index: int, slots: int = 2) -> AgentHello:
    return AgentHello(
        host_index=index, host="any", pid=1, slots=slots, devices=("cpu",) * slots,
        versions=VERSIONS,
    )  # fmt: skip


def hello(stage: int) -> WorkerHello:
    return WorkerHello(stage=stage, incarnation=0, host="any", pid=stage + 50, torch="2")


def ready(stage: int) -> WorkerReady:
    return WorkerReady(
        stage=stage, incarnation=0, parameters=1, activations_endpoint=f"a{stage}",
        gradients_endpoint=f"g{stage}", public_key=f"k{stage}",
    )  # fmt: skip


def connected(stage: int) -> WorkerConnected:
    return WorkerConnected(stage=stage, incarnation=0, generation=0)


def done(stage: int) -> StageDone:
    return StageDone(
        stage=stage, incarnation=0, updates=10, forward_staleness=0, forward_staleness_max=0,
        backward_staleness=0, backward_staleness_max=0, tensors=2,
    )  # fmt: skip


def progress(stage: int, last_op: str = "U3", waiting_for: str = "") -> Progress:
    zero: dict[str, Any] = dict.fromkeys(
        ("forward_s", "backward_s", "predict_s", "update_s", "evaluate_s", "wait_upstream_s",
         "wait_downstream_s", "wait_feed_s"), 0.0
    )  # fmt: skip
    return Progress(
        stage=stage, incarnation=0, state="training", last_op=last_op, waiting_for=waiting_for,
        version=3, in_flight=1, peak_memory_bytes=1, messages=1, dropped=0, **zero,
    )  # fmt: skip


def exited(stage: int, status: int) -> WorkerExited:
    return WorkerExited(
        host_index=0, stage=stage, incarnation=0, pid=7, status=status, log_path="log",
        log_tail=("last words",), free_memory_bytes=8 << 30,
    )  # fmt: skip


def fault(stage: int, what: str, *, is_consequence: bool = False) -> WorkerFault:
    return WorkerFault(
        stage=stage, incarnation=0, what=what, message=f"{what} it was", op="F4", traceback="tb",
        exit_code=1, is_consequence=is_consequence, user_error=False,
    )  # fmt: skip


def sent(instructions: list[Instruction], kind: type[Message]) -> list[tuple[str, Message]]:
    return [
        (each.to, each.message)
        for each in instructions
        if isinstance(each, Send) and isinstance(each.message, kind)
    ]


def links(instructions: list[Instruction]) -> list[tuple[str, int, str, str]]:
    """Return who is told of which generation, and the endpoints upstream and downstream."""
    return [
        (to, m.generation, m.upstream.endpoint if m.upstream else "-",
         m.downstream.endpoint if m.downstream else "-")
        for to, m in sent(instructions, Connect)
        if isinstance(m, Connect)
    ]  # fmt: skip


def end_of(instructions: list[Instruction]) -> End:
    (end,) = [each for each in instructions if isinstance(each, End)]
    return end


def test_workers_start_once_the_plan_and_every_agent_are_there() -> None:
    run = Run()
    assert run.handle(Planned((1, 1, 1), WORK)) == []
    assert run.agent(1) == []
    assert len(sent(run.agent(0), StartWorker)) == 3
    assert run.state.phase is Phase.STARTING


def test_stages_take_slots_in_the_order_of_the_hosts() -> None:
    started = sent(Run(stages=3).up_to_starting(), StartWorker)
    places = [(to, m.stage, m.slot) for to, m in started if isinstance(m, StartWorker)]
    assert places == [("agent/0", 0, 0), ("agent/0", 1, 1), ("agent/1", 2, 0)]


def test_slots_beyond_the_stages_are_spares() -> None:
    assert Tell("info", "1 spare slot") in Run(stages=3).up_to_starting()


def test_a_worker_gets_its_assignment_when_it_says_hello() -> None:
    run = Run()
    run.up_to_starting()
    ((to, assign),) = sent(run.worker(1, hello(1)), Assign)
    assert to == "worker/1/0"
    assert isinstance(assign, Assign)
    assert Settings.from_json(assign.settings_json) == run.state.settings
    assert (assign.work, assign.layer_counts) == (WORK, (1, 1, 1))


def test_neighbours_learn_of_one_another_when_the_last_worker_is_ready() -> None:
    run = Run()
    run.up_to_starting()
    for stage in range(3):
        run.worker(stage, hello(stage))
    assert run.worker(0, ready(0)) == run.worker(2, ready(2)) == []
    assert links(run.worker(1, ready(1))) == [
        ("worker/0/0", 1, "-", "a1"), ("worker/1/0", 1, "g0", "-"),
        ("worker/1/0", 2, "-", "a2"), ("worker/2/0", 2, "g1", "-"),
    ]  # fmt: skip


def test_training_begins_when_every_link_stands() -> None:
    run = Run()
    assert len(sent(run.up_to_training(), Go)) == 3
    assert run.state.phase is Phase.TRAINING


def test_the_model_is_exported_when_all_stages_are_done_and_all_weights_are_here() -> None:
    run = Run(stages=1, hosts=("only",))
    run.up_to_training()
    assert run.worker(0, done(0)) == []
    assert run.handle(WeightsArrived()) == [Export()]
    assert run.handle(Exported()) == [End("done", ExitCode.DONE)]


def test_weights_may_arrive_before_the_last_stage_says_done() -> None:
    run = Run(stages=1, hosts=("only",))
    run.up_to_training()
    assert run.handle(WeightsArrived()) == []
    assert run.worker(0, done(0)) == [Export()]


def test_a_refused_plan_ends_the_run_with_its_cause() -> None:
    cause = Cause(stage=None, host="here", what="JobError", message="no model()", exit_code=2)
    assert Run().handle(PlanRefused(cause)) == [End("failed", 2, cause)]


def test_a_stop_that_is_wanted_begins_with_the_end_of_the_feed() -> None:
    run = Run()
    run.up_to_training()
    assert run.handle(StopWanted("Ctrl-C", 130)) == [StopFeeding(0, "Ctrl-C", 130)]
    assert run.wait(1)
    assert not any(isinstance(each, StopFeeding) for each in run.wait(1))


def test_a_stop_request_lets_every_stage_finish_the_same_batches() -> None:
    run = Run()
    run.up_to_training()
    instructions = run.handle(StoppedFeeding(5, "Ctrl-C", ExitCode.INTERRUPTED))
    assert sent(instructions, StopBefore) == [
        (f"worker/{stage}/0", StopBefore(batch=5)) for stage in range(3)
    ]
    assert Tell("warning", "Ctrl-C: stopping after batch 4") in instructions


def test_a_second_stop_request_of_the_same_kind_changes_nothing() -> None:
    run = Run()
    run.up_to_training()
    run.handle(StoppedFeeding(5, "Ctrl-C", ExitCode.INTERRUPTED))
    assert run.handle(StoppedFeeding(6, "SIGTERM", ExitCode.STOPPED)) == []


def test_a_stopped_run_ends_with_the_code_of_its_reason() -> None:
    run = Run(stages=1, hosts=("only",))
    run.up_to_training()
    run.handle(StoppedFeeding(5, "SIGTERM", ExitCode.STOPPED))
    run.worker(0, done(0))
    run.handle(WeightsArrived())
    assert run.handle(Exported()) == [End("stopped", ExitCode.STOPPED)]


def test_stopping_before_training_began_ends_at_once() -> None:
    run = Run()
    run.up_to_starting()
    assert end_of(run.handle(StopWanted("Ctrl-C", 130))).exit_code == 130


def test_a_feed_that_ends_when_the_run_fails_already_changes_nothing() -> None:
    run = Run()
    run.up_to_training()
    run.handle(StopWanted("Ctrl-C", 130))
    run.hear("agent/0", exited(1, -9))
    assert run.handle(StoppedFeeding(5, "Ctrl-C", 130)) == []
    assert end_of(run.wait(2)).exit_code == 137


def test_stopping_before_the_first_batch_was_fed_ends_at_once() -> None:
    run = Run()
    run.up_to_training()
    assert end_of(run.handle(StoppedFeeding(0, "Ctrl-C", 130))).state == "stopped"


def test_abort_ends_at_once() -> None:
    run = Run()
    run.up_to_training()
    assert run.handle(StopNow("Ctrl-C", 130)) == [End("stopped", 130)]


def test_the_run_ends_when_the_launcher_is_gone() -> None:
    assert end_of(Run().handle(LauncherGone())).state == "failed"


def test_the_first_cause_is_named_after_others_had_time_to_speak() -> None:
    run = Run()
    run.up_to_training()
    assert run.worker(1, fault(1, "LinkError", is_consequence=True)) == []
    assert run.wait(0.5) == []
    run.worker(2, fault(2, "ValueError"))
    cause = end_of(run.wait(0.6)).cause
    assert cause is not None
    assert (cause.stage, cause.what) == (2, "ValueError")


def test_a_killed_worker_fails_the_run_with_its_signal() -> None:
    run = Run()
    run.up_to_training()
    run.hear("agent/0", exited(1, -9))
    assert end_of(run.wait(2)).exit_code == 137


def test_a_worker_that_ends_before_its_work_is_done_fails_the_run() -> None:
    run = Run()
    run.up_to_training()
    run.hear("agent/0", exited(1, 0))
    assert end_of(run.wait(2)).state == "failed"


def test_a_lost_agent_fails_the_run_and_names_its_host() -> None:
    run = Run()
    run.up_to_training()
    run.hear("launcher", AgentLost(host_index=1, reason="ssh broke"))
    cause = end_of(run.wait(2)).cause
    assert cause is not None
    assert (cause.host, cause.what) == ("right", "agent lost")


def test_a_worker_silent_for_its_lease_fails_the_run() -> None:
    run = Run()
    run.up_to_training()
    for second in range(12):
        for index in range(2):
            run.hear(f"agent/{index}", Heartbeat())
        for stage in (0, 2):
            run.worker(stage, progress(stage, f"U{second}"))
        instructions = run.wait(1)
        if run.state.phase is not Phase.TRAINING:
            break
    instructions = run.wait(2)
    end = end_of(instructions)
    assert end.exit_code == ExitCode.DEADLINE
    assert end.cause is not None
    assert (end.cause.stage, end.cause.what) == (1, "silent")


def test_a_loop_that_neither_moves_nor_waits_is_found() -> None:
    run = Run(stages=1, hosts=("only",))
    run.up_to_training()
    for _ in range(40):
        run.hear("agent/0", Heartbeat())
        run.worker(0, progress(0, "U3"))
        run.wait(1)
    end = run.state
    assert end.phase is Phase.ENDED


def test_a_loop_that_waits_for_its_neighbour_is_not_blamed() -> None:
    run = Run(stages=1, hosts=("only",))
    run.up_to_training()
    for _ in range(40):
        run.hear("agent/0", Heartbeat())
        run.worker(0, progress(0, "U3", waiting_for="F4 from stage 0"))
        run.wait(1)
    assert run.state.phase is Phase.TRAINING


def test_start_up_that_takes_too_long_names_who_is_missing() -> None:
    run = Run()
    run.agent(0)
    for _ in range(61):
        run.hear("agent/0", Heartbeat())
        instructions = run.wait(1)
    end = end_of(instructions)
    assert end.exit_code == ExitCode.DEADLINE
    assert end.cause is not None
    assert "host right: its agent has not reported yet" in end.cause.message


def test_everybody_who_has_spoken_is_told_that_the_coordinator_lives() -> None:
    run = Run()
    run.up_to_training()
    told = [to for to, _ in sent(run.wait(1), Heartbeat)]
    assert told == ["agent/0", "agent/1", "worker/0/0", "worker/1/0", "worker/2/0"]


def test_messages_of_an_older_incarnation_are_ignored() -> None:
    run = Run()
    run.up_to_training()
    assert run.hear("worker/1/7", fault(1, "ValueError")) == []
    assert run.state.phase is Phase.TRAINING


def test_the_pid_of_a_worker_is_known_when_its_agent_has_forked_it() -> None:
    run = Run()
    run.up_to_starting()
    run.hear("agent/0", WorkerStarted(host_index=0, stage=1, incarnation=0, pid=4242))
    assert run.state.fleet.workers[1].pid == 4242


def test_nothing_follows_the_end() -> None:
    run = Run()
    run.handle(StopNow("Ctrl-C", 130))
    for event in (Ticked(), Exported(), LauncherGone(), Received("worker/0/0", hello(0))):
        assert run.handle(event) == []
