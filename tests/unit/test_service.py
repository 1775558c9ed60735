"""The coordinator's loop with real sockets: launcher, agent and worker are played by the test."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import zmq
from unit.test_run_state import agent_hello, connected, done, exited, fault, hello, progress, ready
from waiting import wait_until
from zmq.utils.garbage import gc as zmq_collector

from spectrain.coordinator import plan as plan_module
from spectrain.coordinator.catalogue import Catalogue
from spectrain.coordinator.memory import Memory
from spectrain.coordinator.record import RunRecord
from spectrain.coordinator.service import Coordinator
from spectrain.coordinator.sinks import RunDirectory
from spectrain.protocol.bootstrap import CoordinatorBirth
from spectrain.protocol.codec import MAX_PAYLOAD_BYTES
from spectrain.protocol.keys import KeyPair
from spectrain.protocol.messages import (
    AgentSnapshots,
    Assign,
    BatchResult,
    EndAgent,
    FeedBatch,
    FeedRequest,
    Go,
    Heartbeat,
    LauncherHello,
    Message,
    Note,
    Quit,
    RunEnded,
    SnapshotPlan,
    StartWorker,
    StopBefore,
    StopRequested,
    TensorSpec,
    Trained,
    View,
    WeightsPart,
    WhoAreYou,
)
from spectrain.protocol.settings import Settings
from spectrain.protocol.sockets import Client, Server

M = TypeVar("M", bound=Message)

RUN_ID = "5a" * 16
LONG_S = 30.0
NOTHING_TO_KEEP = Catalogue(stages=1, hosts=range(1)).to_json()

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model():
    return nn.Sequential(nn.Linear(2, 2))

def datasets():
    return TensorDataset(torch.zeros(8, 2), torch.zeros(8, 2)), None

loss = nn.functional.mse_loss

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
"""
"""One layer; eight samples in batches of two."""


@pytest.fixture(scope="module", autouse=True)
def _collector_of_uncopied_frames() -> Iterator[None]:
    """Start pyzmq's own thread here, so that it is nobody's leak, and end it."""
    zmq.Frame(bytes(1 << 17), copy=False)
    yield
    zmq_collector.stop()


class Peer:
    """Somebody who talks to the coordinator."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, identity: str) -> None:
        self.client = Client(
            context, run_id=bytes.fromhex(RUN_ID), identity=identity, endpoint=endpoint
        )

    def say(self, message: Message, *payload: bytes) -> None:
        self.client.send(message, payload)

    def hear(self, kind: type[M]) -> M:
        """Return the next message of this kind; others are passed over."""

        def heard() -> M | None:
            received = self.client.receive(LONG_S)
            assert received is not None, f"no {kind.__name__}"
            return received[0] if isinstance(received[0], kind) else None

        return wait_until(heard, what=kind.__name__, timeout_s=LONG_S, interval_s=0)


class Run:
    """A coordinator in a thread, its lifeline, and everybody whom it talks to."""

    def __init__(self, folder: Path, *, job: str = JOB, **changes: Any) -> None:
        (folder / "job.py").write_text(job)
        self.folder = folder / "run"
        self.context = zmq.Context()
        self._peers: dict[str, Peer] = {}
        values = {"batch_size": 2, "heartbeat_s": 0.1, "lease_s": 60.0, "grace_s": LONG_S}
        settings = Settings(
            **values, job=str(folder / "job.py"), run_dir=str(self.folder), stages=1
        )
        births = {"is_restarted": False, "resumes": False, **changes}
        birth = CoordinatorBirth(
            run_id=RUN_ID, settings=settings, hosts=("here",), ipc_dir=str(folder),
            tcp_address=None, ports=(0, 0), keys=KeyPair.new(), allowed={}, **births,
        )  # fmt: skip
        control, data = (
            Server(
                self.context,
                run_id=bytes.fromhex(RUN_ID),
                ipc=folder / name,
                max_frame_bytes=MAX_PAYLOAD_BYTES,
            )
            for name in ("c", "d")
        )
        self._endpoints = {"control": control.ipc_endpoint, "data": data.ipc_endpoint}
        files = RunDirectory(self.folder, goes_on=any(births.values()))
        self.coordinator = Coordinator(birth, control, data, RunRecord(settings, files))
        self._stdin = os.dup(0)
        lifeline, self._lifeline = os.pipe()
        os.dup2(lifeline, 0)
        os.close(lifeline)
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator")
        self._thread.start()
        self.launcher = self.peer("launcher")
        self.launcher.say(LauncherHello(pid=os.getpid()))
        self.agent = self.peer("agent/0")

    def _run(self) -> None:
        self.exit_code = self.coordinator.run()

    def peer(self, identity: str, to: str = "control") -> Peer:
        if identity not in self._peers:
            self._peers[identity] = Peer(self.context, self._endpoints[to], identity)
        return self._peers[identity]

    @property
    def worker(self) -> Peer:
        return self.peer("worker/0/0")

    def up_to_training(self) -> None:
        self.agent.say(agent_hello(0, slots=1))
        self.agent.hear(StartWorker)
        self.worker.say(hello(0))
        self.worker.hear(Assign)
        self.worker.say(ready(0))
        self.worker.say(connected(0))
        self.worker.hear(Go)

    def train(self, *batches: int) -> None:
        results = tuple(BatchResult(batch=b, samples=2, loss=0.5, lr=0.1) for b in batches)
        self.worker.say(Trained(stage=0, incarnation=0, batches=results))

    def deliver(self) -> None:
        """Send the weights and say that all is done, as a finished stage does."""
        weights = self.peer("worker/0/0/weights", to="data")
        for name, shape in (("0.weight", (2, 2)), ("0.bias", (2,))):
            spec = TensorSpec(dtype="float32", shape=shape)
            part = WeightsPart(stage=0, incarnation=0, name=name, spec=spec)
            weights.say(part, torch.ones(shape).numpy().tobytes())
        self.worker.say(done(0))

    def lines(self) -> list[dict[str, Any]]:
        """Return what was written of trained batches."""
        text = (self.folder / "metrics.jsonl").read_text()
        records = [json.loads(line) for line in text.splitlines()]
        return [record for record in records if record["kind"] == "train"]

    def let_go(self) -> int | None:
        """Close the lifeline and return the exit code of the run."""
        os.close(self._lifeline)
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()
        return self.exit_code

    def close(self) -> None:
        if self._thread.is_alive():
            self.let_go()
        os.dup2(self._stdin, 0)
        os.close(self._stdin)
        for peer in self._peers.values():
            peer.client.close()
        self.context.term()


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start coordinators that end with the test."""
    runs: list[Run] = []

    def start_one(**changes: Any) -> Run:
        runs.append(Run(tmp_path, **changes))
        return runs[-1]

    yield start_one
    for run in runs:
        run.close()


@pytest.fixture
def run(start: Start) -> Run:
    return start()


def test_a_run_goes_from_the_first_hello_to_the_last_goodbye(run: Run) -> None:
    run.up_to_training()
    run.train(0, 1, 2, 3)
    run.deliver()
    ended = run.launcher.hear(RunEnded)
    assert (ended.exit_code, ended.state, ended.cause) == (0, "done", None)
    assert json.loads(ended.summary_json) == json.loads((run.folder / "summary.json").read_text())
    assert json.loads(ended.summary_json)["updates"] == 4
    run.worker.hear(Quit)
    assert run.agent.hear(EndAgent) == EndAgent(grace_s=LONG_S)
    assert (run.folder / "model.safetensors").exists()
    assert json.loads((run.folder / "status.json").read_text())["state"] == "done"
    assert run.let_go() == 0


def test_it_waits_until_the_launcher_lets_go(run: Run) -> None:
    run.launcher.say(StopRequested(reason="Ctrl-C", abort=True))
    run.launcher.hear(RunEnded)
    assert run.exit_code is None
    assert run.let_go() == 130


def test_the_id_of_the_run_is_written_for_those_who_resume_it(run: Run) -> None:
    assert json.loads((run.folder / "run.json").read_text()) == {"run_id": RUN_ID}


def test_the_launcher_gets_views_notes_and_heartbeats(run: Run) -> None:
    run.launcher.hear(Heartbeat)
    assert run.launcher.hear(View).waiting_for
    run.agent.say(agent_hello(0, slots=3))
    assert run.launcher.hear(Note) == Note(level="info", text="2 spare slots")


def test_the_status_file_follows_the_run(run: Run) -> None:
    run.up_to_training()
    run.train(0, 1)

    def batches() -> bool:
        return json.loads((run.folder / "status.json").read_text())["batch"] == 2

    wait_until(batches, what="the status of two batches", timeout_s=LONG_S)


def test_results_are_written_down(run: Run) -> None:
    run.up_to_training()
    run.train(0, 1)
    run.train(1, 2)
    wait_until(lambda: len(run.lines()) == 3, what="three lines", timeout_s=LONG_S)
    assert [line["update"] for line in run.lines()] == [0, 1, 2]


def test_a_result_that_is_not_of_this_run_is_dropped_and_the_run_goes_on(run: Run) -> None:
    run.up_to_training()
    run.train(99)
    run.train(0)
    wait_until(lambda: len(run.lines()) == 1, what="one line", timeout_s=LONG_S)


def test_the_rounds_of_snapshots_are_told_before_training(run: Run) -> None:
    run.agent.say(agent_hello(0, slots=1))
    run.agent.hear(StartWorker)
    run.worker.say(hello(0))
    run.worker.say(ready(0))
    run.worker.say(connected(0))
    assert run.worker.hear(SnapshotPlan).every > 0
    run.worker.hear(Go)


def test_ctrl_c_stops_after_the_batches_that_were_asked_for(run: Run) -> None:
    run.up_to_training()
    feed = run.peer("worker/0/0/inputs", to="data")
    feed.say(FeedRequest(part="inputs", ops=("F0", "F1")))
    feed.hear(FeedBatch)
    feed.hear(FeedBatch)
    run.launcher.say(StopRequested(reason="Ctrl-C", abort=False))
    assert run.worker.hear(StopBefore) == StopBefore(batch=2)
    run.train(0, 1)
    run.deliver()
    ended = run.launcher.hear(RunEnded)
    assert (ended.exit_code, ended.state) == (130, "stopped")
    assert json.loads(ended.summary_json)["stopped_early"]


@pytest.mark.parametrize(("reason", "code"), [("Ctrl-C", 130), ("SIGTERM", 75)])
def test_an_abort_ends_at_once_with_the_code_of_its_reason(
    run: Run, reason: str, code: int
) -> None:
    run.up_to_training()
    run.launcher.say(StopRequested(reason=reason, abort=True))
    assert run.launcher.hear(RunEnded).exit_code == code
    run.worker.hear(Quit)


def test_a_launcher_that_is_gone_ends_the_run(run: Run) -> None:
    run.up_to_training()
    assert run.let_go() == 1
    run.worker.hear(Quit)


def test_a_workers_own_account_of_its_end_is_kept(run: Run) -> None:
    run.up_to_training()
    run.worker.say(fault(0, "NonFiniteError"))
    report = run.folder / "faults" / "stage-0.incarnation-0.json"
    wait_until(report.exists, what="the report", timeout_s=LONG_S)
    assert json.loads(report.read_text())["host"] == "here"


def test_a_user_error_of_a_worker_ends_the_run_with_its_cause(run: Run) -> None:
    run.up_to_training()
    run.worker.say(replace(fault(0, "JobError"), user_error=True, exit_code=2))
    run.agent.say(exited(0, 2))
    cause = run.launcher.hear(RunEnded).cause
    assert cause is not None
    assert (cause.what, cause.stage, cause.log_path) == ("JobError", 0, "log")


def test_a_job_that_cannot_be_used_ends_the_run_in_one_sentence(start: Start) -> None:
    run = start(job=JOB.replace("def model", "def modal"))
    ended = run.launcher.hear(RunEnded)
    assert ended.exit_code == 2
    assert ended.cause is not None
    assert ended.cause.user_error
    assert ended.cause.traceback == ""


def test_a_fault_of_ours_while_planning_ends_the_run_with_its_traceback(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Settings) -> None:
        raise ArithmeticError("no")

    monkeypatch.setattr(plan_module, "make_plan", fail)
    run = start()
    cause = run.launcher.hear(RunEnded).cause
    assert cause is not None
    assert (cause.what, cause.message, cause.exit_code) == ("ArithmeticError", "no", 1)
    assert "in fail" in cause.traceback


# -- a coordinator that takes another's place ---------------------------------------------------


@pytest.fixture
def restart(start: Start, tmp_path: Path) -> Start:
    """Start the coordinator of a run that was training when the one before it died."""

    def restarted(**stop: Any) -> Run:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "commit.json").write_text(memory_of(**stop).to_json())
        return start(is_restarted=True)

    return restarted


def memory_of(**stop: Any) -> Memory:
    return Memory(
        life=1, catalogue=NOTHING_TO_KEEP, slots=((0, 0),), incarnations=(0,), restarts=(0,), **stop
    )


def rejoin(run: Run) -> None:
    run.agent.say(agent_hello(0, slots=1))
    run.agent.say(AgentSnapshots(host_index=0, snapshots=(), checkpoints=()))
    run.worker.say(progress(0))
    run.worker.hear(WhoAreYou)
    run.worker.say(hello(0))
    run.worker.say(ready(0))
    run.worker.say(connected(0))


def test_a_restarted_coordinator_finds_the_run_and_lets_it_go_on(restart: Start) -> None:
    run = restart()
    rejoin(run)
    run.worker.hear(Go)
    run.train(0, 1, 2, 3)
    run.deliver()
    ended = run.launcher.hear(RunEnded)
    assert (ended.exit_code, ended.state) == (0, "done")


def test_results_that_come_before_the_job_is_loaded_are_kept(
    restart: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan, may_plan = plan_module.make_plan, threading.Event()

    def make_plan_later(settings: Settings) -> Any:
        assert may_plan.wait(LONG_S)
        return make_plan(settings)

    monkeypatch.setattr(plan_module, "make_plan", make_plan_later)
    run = restart()
    rejoin(run)
    run.train(0, 1)
    run.worker.say(progress(0))
    run.launcher.hear(View)
    assert run.lines() == []
    may_plan.set()
    wait_until(lambda: len(run.lines()) == 2, what="two lines", timeout_s=LONG_S)


def test_a_stop_from_before_the_restart_holds(restart: Start) -> None:
    run = restart(stop_before=2, stop_reason="SIGTERM", stop_code=75)
    rejoin(run)
    run.worker.hear(Go)
    feed = run.peer("worker/0/0/inputs", to="data")
    feed.say(FeedRequest(part="inputs", ops=("F2", "F1")))
    assert feed.hear(FeedBatch).op == "F1"
    view = wait_until(lambda: training_view(run), what="a view of the training", timeout_s=LONG_S)
    assert view.train_batches == 2
    run.train(0, 1)
    run.deliver()
    ended = run.launcher.hear(RunEnded)
    assert (ended.exit_code, ended.state) == (75, "stopped")


def test_a_restarted_coordinator_that_has_fed_nothing_yet_still_stops_in_order(
    restart: Start,
) -> None:
    run = restart()
    rejoin(run)
    run.worker.hear(Go)
    run.train(0, 1, 2)
    run.launcher.say(StopRequested(reason="Ctrl-C", abort=False))
    run.worker.say(progress(0))
    assert run.worker.hear(StopBefore) == StopBefore(batch=4)  # the last of this job is 3
    run.train(3)
    run.deliver()
    ended = run.launcher.hear(RunEnded)
    assert (ended.exit_code, ended.state) == (130, "stopped")
    assert json.loads(ended.summary_json)["updates"] == 4


def training_view(run: Run) -> View | None:
    view = run.launcher.hear(View)
    return view if view.state == "training" else None
