"""A real agent with real workers, and this test in the place of the coordinator and launcher."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import xxhash
import zmq
from waiting import wait_until

from spectrain.launch.checkpoints import read_checkpoints
from spectrain.launch.snapshot_store import SHARED_MEMORY, remove_run, snapshot_name
from spectrain.protocol.bootstrap import AgentBirth
from spectrain.protocol.keys import Authority, KeyPair
from spectrain.protocol.messages import (
    AgentHello,
    AgentSnapshots,
    CheckpointWritten,
    Committed,
    EndAgent,
    Heartbeat,
    KillWorker,
    Message,
    Replicate,
    Replicated,
    ReserveSnapshots,
    SnapshotFile,
    SnapshotsReserved,
    StartWorker,
    WhoAreYou,
    WorkerExited,
    WorkerHello,
    WorkerStarted,
)
from spectrain.protocol.sockets import Server

JOB = Path(__file__).parent.parent.parent / "examples" / "digits.py"
LONG_S = 60.0
HEARTBEAT_S = 0.2

M = TypeVar("M", bound=Message)


@dataclass
class Agent:
    """One agent process and its end of standard input, the lifeline."""

    birth: AgentBirth
    process: subprocess.Popen[bytes]

    @property
    def identity(self) -> str:
        return f"agent/{self.birth.host_index}"

    @property
    def directory(self) -> Path:
        name = f"spectrain-{os.getuid()}-{self.birth.run_id[:12]}-{self.birth.host_index}"
        return SHARED_MEMORY / name

    def let_go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def ended(self) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(LONG_S)

    def words(self) -> str:
        """Return what it has said on standard error; it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def put(self, stage: int, update: int, content: bytes = b"weights") -> SnapshotFile:
        """Write a snapshot as this host's worker would."""
        path = self.directory / snapshot_name(stage, update)
        path.write_bytes(content)
        digest = xxhash.xxh3_128_hexdigest(content)
        return SnapshotFile(stage=stage, update=update, digest=digest, path=str(path))


@dataclass
class Run:
    """The coordinator's side of one run."""

    root: Path
    run_id: str = field(default_factory=lambda: secrets.token_hex(16))
    context: zmq.Context[Any] = field(default_factory=zmq.Context)
    agents: list[Agent] = field(default_factory=list[Agent])
    heard: list[Message] = field(default_factory=list[Message])
    server: Server = field(init=False)

    def __post_init__(self) -> None:
        self.root.chmod(0o700)
        self.listen()

    def listen(self) -> None:
        """Bind the coordinator's socket, for the first time or again."""
        self.server = Server(
            self.context, run_id=bytes.fromhex(self.run_id), ipc=self.root / "control"
        )

    def start(self, host_index: int = 0, **changes: Any) -> Agent:
        """Start an agent of this run."""
        birth = replace(
            AgentBirth(
                run_id=self.run_id,
                host_index=host_index,
                host=f"node{host_index}",
                stages=2,
                devices=("cpu", "cpu"),
                job=str(JOB),
                run_dir=str(self.root),
                control=f"ipc://{self.root / 'control'}",
                data="ipc:///nowhere",
                server_key="",
                keys=KeyPair.new(),
                slot_keys=(KeyPair.new(), KeyPair.new()),
                peer_keys=(),
                same_host=True,
                environment={},
                heartbeat_s=HEARTBEAT_S,
                lease_s=LONG_S,
            ),
            **changes,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "spectrain.launch.agent"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(birth.to_json().encode() + b"\n")
        process.stdin.flush()
        self.agents.append(Agent(birth, process))
        return self.agents[-1]

    def started(self, host_index: int = 0, **changes: Any) -> Agent:
        """Start an agent and hear its introduction to the end."""
        agent = self.start(host_index, **changes)
        self.next(AgentSnapshots)
        return agent

    def say(self, agent: Agent, message: Message) -> None:
        assert self.server.send(agent.identity, message)

    def next(self, kind: type[M], is_wanted: Callable[[M], bool] = lambda _: True) -> M:
        """Return the next message of this kind; what comes before it goes to ``heard``."""
        deadline = time.monotonic() + LONG_S
        while (left_s := deadline - time.monotonic()) > 0:
            received = self.server.receive(left_s)
            if received is not None:
                self.heard.append(received.message)
                if isinstance(received.message, kind) and is_wanted(received.message):
                    return received.message
        raise TimeoutError(f"no {kind.__name__} within {LONG_S:g} s; heard {self.heard}")

    def start_worker(self, agent: Agent, stage: int = 0, incarnation: int = 0) -> WorkerStarted:
        """Start a worker and hear its hello, so that it is past its birth."""
        self.say(agent, StartWorker(stage=stage, incarnation=incarnation, slot=0))
        started = self.next(WorkerStarted)
        self.next(WorkerHello)
        return started

    def close(self) -> None:
        for agent in self.agents:
            agent.let_go()
            agent.ended()
            assert agent.process.stderr is not None
            agent.process.stderr.close()
        self.server.close()
        self.context.term()
        remove_run(self.run_id)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


# -- its life -----------------------------------------------------------------------------------


def test_an_agent_says_who_it_is_and_ends_on_request_leaving_nothing(run: Run) -> None:
    agent = run.start()
    hello = run.next(AgentHello)
    assert (hello.host, hello.pid, hello.slots) == ("node0", agent.process.pid, 2)
    assert (hello.replica_endpoint, hello.public_key) == ("", "")
    assert run.next(AgentSnapshots) == AgentSnapshots(host_index=0, snapshots=(), checkpoints=())
    assert agent.directory.is_dir()
    agent.put(0, 10)
    run.say(agent, EndAgent(grace_s=LONG_S))
    assert agent.ended() == 0
    assert not agent.directory.exists()


def test_it_ends_its_workers_and_itself_when_the_launcher_is_gone(run: Run) -> None:
    agent = run.started()
    worker = psutil.Process(run.start_worker(agent).pid)
    agent.let_go()
    assert agent.ended() == 0
    assert not worker.is_running()
    assert not agent.directory.exists()


def test_it_ends_when_the_coordinator_is_silent_for_a_lease(run: Run) -> None:
    agent = run.started(lease_s=1.0)
    assert agent.ended() == 1
    assert "no word from the coordinator for 1 s" in agent.words()
    assert not agent.directory.exists()


def test_a_second_agent_for_the_same_host_is_refused_in_one_sentence(run: Run) -> None:
    run.started()
    second = run.start(lease_s=0.2)
    assert second.ended() == 1
    (line,) = second.words().splitlines()
    assert line.startswith("agent: ")
    assert "there can be one agent of a run on a host" in line


def test_an_agent_without_a_birth_record_ends(run: Run) -> None:
    agent = subprocess.run(
        [sys.executable, "-m", "spectrain.launch.agent"],
        input=b"",
        capture_output=True,
        check=False,
        timeout=LONG_S,
    )
    assert agent.returncode == 1
    assert agent.stderr == b"agent: standard input ended before the birth record came\n"


# -- workers ------------------------------------------------------------------------------------


def test_a_killed_worker_is_reported_and_its_half_written_snapshot_removed(run: Run) -> None:
    agent = run.started()
    started = run.start_worker(agent, stage=1, incarnation=2)
    assert (started.host_index, started.stage, started.incarnation) == (0, 1, 2)
    half = agent.directory / ".stage-1.update-5.safetensors.partial"
    half.write_bytes(b"half")
    os.kill(started.pid, signal.SIGKILL)
    exited = run.next(WorkerExited)
    assert (exited.stage, exited.incarnation, exited.pid) == (1, 2, started.pid)
    assert exited.status == -signal.SIGKILL
    assert exited.log_path == str(run.root / "logs" / "stage-1.node0.restart-2.log")
    assert not half.exists()


def test_a_worker_that_hangs_is_ended_by_a_kill_and_reported(run: Run) -> None:
    agent = run.started()
    started = run.start_worker(agent)
    os.kill(started.pid, signal.SIGSTOP)
    run.say(agent, KillWorker(stage=0, incarnation=0, reason="it hangs"))
    assert run.next(WorkerExited).status == -signal.SIGKILL


def test_a_worker_may_be_killed_before_it_is_born(run: Run) -> None:
    agent = run.started()
    run.say(agent, StartWorker(stage=0, incarnation=0, slot=0))
    run.say(agent, KillWorker(stage=0, incarnation=0, reason="changed our mind"))
    exited = run.next(WorkerExited)
    assert (exited.stage, exited.status) == (0, -signal.SIGKILL)


def test_a_kill_of_a_former_incarnation_does_no_harm(run: Run) -> None:
    agent = run.started()
    started = run.start_worker(agent, incarnation=1)
    run.say(agent, KillWorker(stage=0, incarnation=0, reason="late"))
    run.say(agent, ReserveSnapshots(bytes_needed=1))
    run.next(SnapshotsReserved)
    assert psutil.Process(started.pid).is_running()
    assert not any(isinstance(message, WorkerExited) for message in run.heard)


def nursery_of(agent: Agent) -> psutil.Process:
    (nursery,) = psutil.Process(agent.process.pid).children()
    return nursery


def test_it_ends_when_its_nursery_dies_and_leaves_snapshots_to_the_next(run: Run) -> None:
    agent = run.started()
    agent.put(0, 10)
    nursery_of(agent).kill()
    assert agent.ended() == 1
    assert "nursery" in agent.words()
    assert list(agent.directory.glob("stage-0.update-10*"))
    shutil.rmtree(agent.directory)


def test_a_nursery_that_hangs_does_not_keep_workers_alive(run: Run) -> None:
    agent = run.started()
    worker = psutil.Process(run.start_worker(agent).pid)
    nursery_of(agent).suspend()
    agent.let_go()
    assert agent.ended() == 0
    wait_until(lambda: not worker.is_running(), what="the worker to die with its nursery")


# -- the coordinator comes back -----------------------------------------------------------------


def test_a_coordinator_that_comes_back_is_told_everything(run: Run) -> None:
    agent = run.started()
    started = run.start_worker(agent)
    file = agent.put(0, 10)
    run.server.close()
    run.listen()
    run.next(Heartbeat)
    run.heard.clear()
    run.say(agent, WhoAreYou())
    assert run.next(AgentHello).pid == agent.process.pid
    assert run.next(WorkerStarted) == started
    assert run.next(AgentSnapshots).snapshots == (file,)
    assert agent.process.poll() is None


# -- snapshots ----------------------------------------------------------------------------------


def test_it_tells_how_much_room_there_is(run: Run) -> None:
    agent = run.started()
    run.say(agent, ReserveSnapshots(bytes_needed=5))
    answer = run.next(SnapshotsReserved)
    assert (answer.host_index, answer.bytes_needed) == (0, 5)
    assert answer.free_bytes > 0
    assert answer.directory == str(agent.directory)


def test_a_committed_round_goes_to_disk_and_older_ones_go(run: Run) -> None:
    agent = run.started()
    old, new = agent.put(1, 10), agent.put(1, 20)
    run.say(agent, Committed(update=20, digests=("of another host", new.digest)))
    written = run.next(CheckpointWritten)
    path = run.root / "checkpoints" / "update-20" / "stage-1.safetensors"
    assert (written.update, written.error) == (20, "")
    assert written.files == (replace(new, path=str(path)),)
    assert path.read_bytes() == b"weights"
    assert (Path(old.path).exists(), Path(new.path).exists()) == (False, True)


def test_a_round_of_which_it_has_nothing_is_not_written(run: Run) -> None:
    agent = run.started()
    run.say(agent, Committed(update=10, digests=("a", "b")))
    file = agent.put(0, 20)
    run.say(agent, Committed(update=20, digests=(file.digest, "b")))
    assert run.next(CheckpointWritten).update == 20


def test_an_agent_that_is_killed_leaves_its_snapshots_to_its_successor(run: Run) -> None:
    former = run.started()
    worker = psutil.Process(run.start_worker(former).pid)
    file = former.put(0, 10)
    former.process.kill()
    former.ended()
    wait_until(lambda: not worker.is_running(), what="the worker to die with its agent")
    successor = run.start()
    assert run.next(AgentSnapshots).snapshots == (file,)
    successor.let_go()
    successor.ended()
    assert not successor.directory.exists()


def test_a_run_that_goes_on_is_told_what_an_earlier_one_left_on_disk(run: Run) -> None:
    earlier = run.started()
    file = earlier.put(0, 10)
    run.say(earlier, Committed(update=10, digests=(file.digest,)))
    run.next(CheckpointWritten)
    run.say(earlier, EndAgent(grace_s=LONG_S))
    earlier.ended()
    on_disk = read_checkpoints(run.root, None)
    assert len(on_disk) == 1
    run.server.close()
    run.run_id = secrets.token_hex(16)
    run.listen()
    run.start()
    assert run.next(AgentSnapshots).checkpoints == ()
    run.start(host_index=1, resume=True)
    assert run.next(AgentSnapshots).checkpoints == on_disk


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_snapshot_is_copied_to_another_hosts_agent(run: Run, *, encrypted: bool) -> None:
    keys = [KeyPair.new(), KeyPair.new()]
    changes: dict[str, Any] = {"agent_keys": tuple(pair.public for pair in keys)}
    authority = None
    if encrypted:
        run.server.close()
        ours = KeyPair.new()
        allowed = {pair.public: f"agent/{index}" for index, pair in enumerate(keys)}
        authority = Authority(run.context, allowed)
        run.server = Server(
            run.context,
            run_id=bytes.fromhex(run.run_id),
            tcp="127.0.0.1",
            keys=ours,
            authority=authority,
        )
        changes |= {
            "control": run.server.tcp_endpoint,
            "server_key": ours.public,
            "same_host": False,
        }
    sender = run.started(0, keys=keys[0], **changes)
    receiver = run.start(1, keys=keys[1], **changes)
    hello = run.next(AgentHello)
    assert hello.public_key == (keys[1].public if encrypted else "")
    file = sender.put(0, 10, os.urandom(10 << 20))
    run.say(
        sender,
        Replicate(
            stage=0,
            update=10,
            digest=file.digest,
            host_index=1,
            endpoint=hello.replica_endpoint,
            public_key=hello.public_key,
        ),
    )
    arrived = run.next(Replicated)
    path = receiver.directory / "replica" / snapshot_name(0, 10)
    assert arrived == Replicated(host_index=1, file=replace(file, path=str(path)))
    assert path.read_bytes() == Path(file.path).read_bytes()
    if authority is not None:
        authority.close()
