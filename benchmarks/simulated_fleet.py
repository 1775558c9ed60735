"""Agents and workers that say to a coordinator all that real ones would, and do nothing.

They are the peers of ``coordinator_load.py``: one thread for all, one socket for each, the real
protocol and the real encryption. Their pipeline is in steady state from the word to go: batch b is
updated at second ``b / batches_per_s`` by the last stage, and by the others one hop later each.
"""

from __future__ import annotations

import heapq
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import zmq

from spectrain.protocol.keys import KeyPair
from spectrain.protocol.messages import (
    AgentHello,
    AgentSnapshots,
    Assign,
    BatchResult,
    CheckpointWritten,
    Committed,
    Connect,
    FeedRequest,
    Go,
    Heartbeat,
    Message,
    Progress,
    Replicate,
    Replicated,
    ReserveSnapshots,
    SnapshotFile,
    SnapshotPlan,
    SnapshotsReserved,
    SnapshotWritten,
    StartWorker,
    Trained,
    Versions,
    WorkerConnected,
    WorkerHello,
    WorkerReady,
    WorkerStarted,
)
from spectrain.protocol.sockets import Client

__all__ = ["Line", "Run", "serve_fleet"]

RESULTS_EVERY_S = 0.2  # as worker/process.py
LOOK_AHEAD = 3  # batches, as worker/feed_inbox.py
QUICK_S, UNHURRIED_S = 0.05, 0.5  # from one look at a peer to the next
MOST_SOCKETS = 8192
VERSIONS = Versions(package="", package_digest="", job_digest="", python="", torch="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all peers of a run know.

    Attributes:
        stages: N.
        batches_per_s: pace of the pipeline.
        round_spread_s: from the last stage's update of a batch to the first stage's.
        heartbeat_s: as in the settings.
    """

    run_id: bytes
    control: str
    data: str
    server_key: str
    stages: int
    batches_per_s: float
    round_spread_s: float
    heartbeat_s: float


class Line:
    """A peer's connection, which counts what it carries both ways."""

    def __init__(self, run: Run, identity: str, keys: KeyPair, endpoint: str = "") -> None:
        self._client = Client(
            zmq.Context.instance(),
            run_id=run.run_id,
            identity=identity,
            endpoint=endpoint or run.control,
            server_key=run.server_key,
            keys=keys,
            heartbeat_s=run.heartbeat_s,
        )
        self.received = 0

    @property
    def sent(self) -> int:
        return self._client.sent

    def send(self, message: Message) -> None:
        self._client.send(message)

    def next(self, timeout_s: float = 0.0) -> Message | None:
        received = self._client.receive(timeout_s)
        if received is None:
            return None
        self.received += 1
        return received[0]

    def close(self) -> None:
        self._client.close()


class Worker:
    """One stage."""

    def __init__(self, run: Run, stage: int, keys: KeyPair) -> None:
        self._run = run
        self._stage = stage
        self._who = {"stage": stage, "incarnation": 0}
        self._state = "building"
        self.line = Line(run, f"worker/{stage}/0", keys)
        self._feed: Line | None = None
        self._part = {0: "inputs", run.stages - 1: "targets"}.get(stage, "")
        if self._part:
            self._feed = Line(run, f"worker/{stage}/0/{self._part}", keys, run.data)
        self._asked = self._told = 0  # batches
        self._went_s = self._spoke_s = self._told_s = 0.0
        self._plan: SnapshotPlan | None = None
        self._next_snapshot = 0
        self.line.send(WorkerHello(**self._who, host="", pid=1, torch=""))

    @property
    def is_quick(self) -> bool:
        """Whether it has something to do for every batch."""
        return self._feed is not None

    def serve(self, now: float) -> None:
        while (message := self.line.next()) is not None:
            self._take(message, now)
        if self._state == "training":
            self._train(now)
        if now - self._spoke_s >= self._run.heartbeat_s:
            self._spoke_s = now
            self.line.send(self._progress(now))

    def _take(self, message: Message, now: float) -> None:
        if isinstance(message, Assign):
            self.line.send(
                WorkerReady(
                    **self._who,
                    parameters=2,
                    activations_endpoint="tcp://10.0.0.1:50000" if self._stage else "",
                    gradients_endpoint="tcp://10.0.0.1:50001",
                    public_key="x" * 40,
                )
            )
            self._state = "ready"
        elif isinstance(message, Connect) and self._state == "ready":
            self.line.send(WorkerConnected(**self._who, generation=0))
            self._state = "connected"
        elif isinstance(message, Go):
            self._state, self._went_s = "training", now
        elif isinstance(message, SnapshotPlan):
            self._plan, self._next_snapshot = message, message.first

    def _version(self, now: float) -> int:
        """Return the updates done: of stage k, N - 1 - k hops after the last stage's."""
        behind = (self._run.stages - 1 - self._stage) / self._run.stages
        since_s = now - self._went_s - behind * self._run.round_spread_s
        return max(0, int(since_s * self._run.batches_per_s))

    def _train(self, now: float) -> None:
        version = self._version(now)
        plan = self._plan
        if plan is not None and plan.every and version >= self._next_snapshot:
            self.line.send(self._snapshot(self._next_snapshot))
            self._next_snapshot += plan.every
        if self._feed is not None:
            while self._feed.next() is not None:
                pass
            begun = int((now - self._went_s) * self._run.batches_per_s)
            ops = tuple(f"F{batch}" for batch in range(self._asked, begun + LOOK_AHEAD))
            if ops:
                self._feed.send(FeedRequest(part=self._part, ops=ops))
                self._asked += len(ops)
        results_due = version > self._told and now - self._told_s > RESULTS_EVERY_S
        if self._part == "targets" and results_due:
            batches = tuple(map(_result, range(self._told, version)))
            self.line.send(Trained(**self._who, batches=batches))
            self._told, self._told_s = version, now

    def _snapshot(self, update: int) -> SnapshotWritten:
        return SnapshotWritten(
            **self._who,
            update=update,
            path=f"/dev/shm/spectrain-0-0-0/stage-{self._stage}.update-{update}.safetensors",
            size_bytes=1 << 28,
            digest=_digest(self._stage, update),
            capture_s=0.05,
            write_s=0.2,
        )

    def _progress(self, now: float) -> Message:
        version = self._version(now) if self._state == "training" else 0
        work_s = max(0.0, now - self._went_s) / 5
        return Progress(
            **self._who,
            state=self._state,
            last_op=f"U{version - 1}" if version else "",
            waiting_for="" if version % 2 else f"F{version} from stage {self._stage - 1}",
            version=version,
            in_flight=self._run.stages - self._stage,
            log_bytes=1 << 26,
            forward_s=work_s,
            backward_s=2 * work_s,
            predict_s=work_s / 10,
            update_s=work_s / 10,
            evaluate_s=0.0,
            wait_upstream_s=work_s,
            wait_downstream_s=work_s / 2,
            wait_feed_s=0.0,
            peak_memory_bytes=1 << 33,
            messages=self.line.sent,
            dropped=0,
        )


class Agent:
    """One host.

    Args:
        run: whose.
        index: of the host.
        keys: its own, then one pair for each slot.
        fleet: the others.
    """

    is_quick = False

    def __init__(self, run: Run, index: int, keys: Sequence[KeyPair], fleet: Fleet) -> None:
        self._run = run
        self._index = index
        self._slot_keys = keys[1:]
        self._fleet = fleet
        self._spoke_s = 0.0
        self._stages: list[int] = []
        self.line = Line(run, f"agent/{index}", keys[0])
        self.line.send(
            AgentHello(
                host_index=index,
                host=f"node{index}",
                pid=1,
                slots=len(self._slot_keys),
                devices=("cuda:0",) * len(self._slot_keys),
                versions=VERSIONS,
                replica_endpoint="tcp://10.0.0.1:50002",
                public_key=keys[0].public,
            )
        )
        self.line.send(AgentSnapshots(host_index=index, snapshots=(), checkpoints=()))

    def serve(self, now: float) -> None:
        while (message := self.line.next()) is not None:
            self._take(message)
        if now - self._spoke_s >= self._run.heartbeat_s:
            self._spoke_s = now
            self.line.send(Heartbeat())

    def _take(self, message: Message) -> None:
        if isinstance(message, StartWorker):
            self._stages.append(message.stage)
            who = {"stage": message.stage, "incarnation": message.incarnation}
            self.line.send(WorkerStarted(host_index=self._index, **who, pid=1))
            self._fleet.start(message.stage, self._slot_keys[message.slot])
        elif isinstance(message, ReserveSnapshots):
            answer = SnapshotsReserved(
                host_index=self._index,
                bytes_needed=message.bytes_needed,
                free_bytes=1 << 40,
                directory="/dev/shm",
            )
            self.line.send(answer)
        elif isinstance(message, Replicate):
            path = f"/dev/shm/spectrain-0-0-{message.host_index}/replica/{message.stage}"
            file = _file(message.stage, message.update, f"{path}.{message.update}")
            self._fleet.replicated(message.host_index, file)
        elif isinstance(message, Committed):
            files = tuple(
                _file(stage, message.update, f"/runs/0/checkpoints/{message.update}/{stage}")
                for stage in self._stages
            )
            update = message.update
            self._fleet.committed(update)
            self.line.send(CheckpointWritten(host_index=self._index, update=update, files=files))


class Fleet:
    """All peers of a run but the launcher.

    Args:
        run: whose.
        keys: of each host, its agent's first, then those of its slots.

    Attributes:
        commits: when each committed round was first heard of, by its update; monotonic seconds.
    """

    def __init__(self, run: Run, keys: Sequence[Sequence[KeyPair]]) -> None:
        self._run = run
        self._order = itertools.count()
        self._due: list[tuple[float, int, Agent | Worker]] = []  # a heap
        self._agents: list[Agent] = []
        self.commits: dict[int, float] = {}
        for index, own in enumerate(keys):
            agent = Agent(run, index, own, self)
            self._agents.append(agent)
            self._queue(agent)

    def serve(self, seconds: float) -> None:
        """Let everybody listen and speak when it is their turn, for so long."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            due, _, peer = self._due[0]
            if due > now:
                time.sleep(min(due, end) - now)
                continue
            heapq.heappop(self._due)
            peer.serve(now)
            self._queue(peer)

    @property
    def messages(self) -> int:
        """Control messages sent and received so far, by all together."""
        return sum(peer.line.sent + peer.line.received for _, _, peer in self._due)

    def start(self, stage: int, keys: KeyPair) -> None:
        """Let there be a worker."""
        self._queue(Worker(self._run, stage, keys))

    def replicated(self, host_index: int, file: SnapshotFile) -> None:
        """Let a host have got a copy."""
        self._agents[host_index].line.send(Replicated(host_index=host_index, file=file))

    def committed(self, update: int) -> None:
        """Note that a round is committed."""
        self.commits.setdefault(update, time.monotonic())

    def _queue(self, peer: Agent | Worker) -> None:
        pause_s = QUICK_S if peer.is_quick else UNHURRIED_S
        heapq.heappush(self._due, (time.monotonic() + pause_s, next(self._order), peer))


def serve_fleet(connection: Connection, run: Run, keys: Sequence[Sequence[KeyPair]]) -> None:
    """Be all peers, in a process of its own, until the other end of ``connection`` closes.

    Whatever it is sent it answers with the number of control messages so far and ``Fleet.commits``.
    """
    # Before the first socket: ZeroMQ allows 1,023 of them, and a peer has two descriptors.
    zmq.Context.instance().set(zmq.MAX_SOCKETS, MOST_SOCKETS)
    fleet = Fleet(run, keys)
    try:
        while True:
            fleet.serve(0.1)
            while connection.poll():
                connection.recv()
                connection.send((fleet.messages, fleet.commits))
    except EOFError:
        os._exit(0)  # a thousand sockets with words for nobody


def _result(batch: int) -> BatchResult:
    return BatchResult(batch=batch, samples=8, loss=1.0, metrics={"accuracy": 0.5}, lr=0.01)


def _digest(stage: int, update: int) -> str:
    return f"{stage:016x}{update:016x}"


def _file(stage: int, update: int, path: str) -> SnapshotFile:
    return SnapshotFile(stage=stage, update=update, digest=_digest(stage, update), path=path)
