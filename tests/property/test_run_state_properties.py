"""Whatever happens in whatever order, the coordinator's decisions keep to a few laws."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spectrain.coordinator.events import (
    End,
    Event,
    Export,
    Exported,
    LauncherGone,
    Planned,
    Received,
    Send,
    StopNow,
    StoppedFeeding,
    StopWanted,
    Ticked,
    WeightsArrived,
)
from spectrain.coordinator.run_state import Phase, RunState
from spectrain.protocol.messages import (
    AgentHello,
    AgentLost,
    Go,
    Message,
    StageDone,
    StartWorker,
    Versions,
    WorkerConnected,
    WorkerExited,
    WorkerFault,
    WorkerHello,
    WorkerReady,
)
from spectrain.protocol.schedule import Work
from spectrain.protocol.settings import Settings

STAGES = 2
HOSTS = ("left", "right")
VERSIONS = Versions(package="1", package_digest="p", job_digest="j", python="3.11", torch="2")

stages = st.integers(0, STAGES - 1)
incarnations = st.integers(0, 1)
hosts = st.integers(0, len(HOSTS) - 1)


def from_agents() -> st.SearchStrategy[Event]:
    def hello(index: int) -> Event:
        message = AgentHello(
            host_index=index, host="h", pid=1, slots=1, devices=("cpu",), versions=VERSIONS
        )
        return Received(f"agent/{index}", message)

    def exit_of(index: int, stage: int, incarnation: int, status: int) -> Event:
        message = WorkerExited(
            host_index=index, stage=stage, incarnation=incarnation, pid=1, status=status,
            log_path="", log_tail=(), free_memory_bytes=1,
        )  # fmt: skip
        return Received(f"agent/{index}", message)

    return st.builds(hello, hosts) | st.builds(
        exit_of, hosts, stages, incarnations, st.sampled_from([0, 1, -9])
    )


def from_workers() -> st.SearchStrategy[Event]:
    def message(kind: str, stage: int, incarnation: int) -> Message:
        who = {"stage": stage, "incarnation": incarnation}
        if kind == "hello":
            return WorkerHello(**who, host="h", pid=1, torch="2")
        if kind == "ready":
            return WorkerReady(
                **who, parameters=1, activations_endpoint="", gradients_endpoint="", public_key=""
            )
        if kind == "connected":
            return WorkerConnected(**who, generation=0)
        if kind == "done":
            return StageDone(
                **who, updates=1, forward_staleness=0, forward_staleness_max=0,
                backward_staleness=0, backward_staleness_max=0, tensors=1,
            )  # fmt: skip
        return WorkerFault(
            **who, what="ValueError", message="", op="", traceback="", exit_code=1,
            is_consequence=False, user_error=False,
        )  # fmt: skip

    def event(kind: str, stage: int, incarnation: int) -> Event:
        return Received(f"worker/{stage}/{incarnation}", message(kind, stage, incarnation))

    kinds = st.sampled_from(["hello", "ready", "connected", "done", "fault"])
    return st.builds(event, kinds, stages, incarnations)


others = st.sampled_from(
    [
        Planned((1, 1), Work(train_batches=3, epoch_batches=3)),
        StopWanted("Ctrl-C", 130),
        StoppedFeeding(0, "Ctrl-C", 130),
        StoppedFeeding(2, "SIGTERM", 75),
        StopNow("Ctrl-C", 130),
        LauncherGone(),
        WeightsArrived(),
        Exported(),
        Received("launcher", AgentLost(host_index=0, reason="gone")),
    ]
)
events = st.lists(
    st.tuples(from_agents() | from_workers() | others | st.just(Ticked()), st.floats(0, 5)),
    max_size=60,
)


@given(events)
def test_laws_of_a_run(history: list[tuple[Event, float]]) -> None:
    settings = Settings(job="job.py", run_dir="/run", stages=STAGES, max_restarts=0)
    state = RunState(settings, HOSTS, 0.0)
    now = 0.0
    ends = goes = exports = 0
    started: list[int] = []
    for event, pause in history:
        now += pause
        was_over = state.phase is Phase.ENDED
        instructions = state.handle(event, now)
        ends += sum(isinstance(each, End) for each in instructions)
        exports += sum(isinstance(each, Export) for each in instructions)
        messages = [each.message for each in instructions if isinstance(each, Send)]
        goes += sum(isinstance(message, Go) for message in messages)
        started += [message.stage for message in messages if isinstance(message, StartWorker)]
        assert not (was_over and instructions), "nothing follows the end"
        assert (state.phase is Phase.ENDED) == (ends == 1), "the run ends once, and says so"
        if goes:
            assert goes == STAGES, "all stages go together"
            assert all(worker.connected for worker in state.fleet.workers)
        if exports:
            assert exports == 1
            assert all(worker.done for worker in state.fleet.workers)
    assert started in ([], list(range(STAGES))), "each stage has one worker"
