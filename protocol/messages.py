"""Every control message: who says it to whom, when, and what is in it. No behaviour.

This file is the whole contract of the control plane. Records are frozen, all fields are named,
units stand in the names. A new field needs a default; a field never changes its type; bulk data
travels here only as raw frames, after a ``FeedBatch``, ``WeightsPart`` or ``ReplicaChunk``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from .schedule import Work

__all__ = [
    "MESSAGES",
    "AgentHello",
    "AgentLost",
    "AgentSnapshots",
    "Announce",
    "Assign",
    "BatchResult",
    "Boundary",
    "Cause",
    "CheckpointWritten",
    "Committed",
    "Connect",
    "EndAgent",
    "Evaluated",
    "FeedBatch",
    "FeedRequest",
    "Go",
    "Heartbeat",
    "KillWorker",
    "LauncherHello",
    "LinkLost",
    "Message",
    "Note",
    "ParcelDigest",
    "Peer",
    "Progress",
    "Quit",
    "ReplicaAck",
    "ReplicaChunk",
    "Replicate",
    "Replicated",
    "ReplicationFailed",
    "ReserveSnapshots",
    "Restore",
    "RunEnded",
    "SnapshotFile",
    "SnapshotPlan",
    "SnapshotSkipped",
    "SnapshotWritten",
    "SnapshotsReserved",
    "StageDone",
    "StageView",
    "StartAgent",
    "StartWorker",
    "StopBefore",
    "StopRequested",
    "StreamHello",
    "StreamProbe",
    "StreamRefused",
    "StreamWelcome",
    "TensorSpec",
    "Trained",
    "Versions",
    "View",
    "WeightsPart",
    "WhoAreYou",
    "WorkerConnected",
    "WorkerExited",
    "WorkerFault",
    "WorkerHello",
    "WorkerReady",
    "WorkerStarted",
]


# -- parts of messages --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a receiver must know of a tensor before it comes."""

    dtype: str  # torch's name without the prefix: "float32", "int64", "bool"
    shape: tuple[int, ...]
    needs_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The form of a value that crosses a stage boundary: one tensor, a tuple or a flat dict."""

    form: str  # "tensor", "tuple" or "dict"
    keys: tuple[str, ...] = ()  # of a dict, in order
    tensors: tuple[TensorSpec | None, ...]  # None stands for a None in the value


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What must agree between all hosts of a run."""

    package: str
    package_digest: str  # over the package's own source files
    job_digest: str  # over the job file
    python: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where a neighbour's stream socket listens."""

    stage: int
    incarnation: int
    endpoint: str  # tcp://address:port or ipc://path
    public_key: str  # CURVE, Z85; empty on ipc


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Which snapshot a restarted worker begins from, and where it may be found."""

    update: int  # state after so many updates, at least 1
    digest: str  # xxh3_128 of the file, hexadecimal
    paths: tuple[str, ...]  # to be tried in order


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """One copy of one stage's snapshot, on the host whose agent speaks of it."""

    stage: int
    update: int  # state after so many updates, at least 1
    digest: str  # xxh3_128 of the file, hexadecimal
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParcelDigest:
    """What a receiver remembers of a parcel, to be compared when it is made again."""

    number: int
    digest: int  # of the payload, see worker/stream_log.py


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What the last stage knows of one trained mini-batch."""

    batch: int
    samples: int
    loss: float  # mean over the samples
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    lr: float  # of the first parameter group, at this batch's update


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """One stage's line in the live view."""

    stage: int
    host: str
    pid: int
    incarnation: int
    state: str
    version: int  # updates its weights have seen
    last_batch: int  # newest batch whose update is done; -1 before the first
    in_flight: int
    wait_share: float  # of the time since the last view, 0..1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a run failed: the earliest fault, by the word of the process that had it."""

    stage: int | None
    host: str
    what: str  # exception type, signal name or "silent"
    message: str
    op: str = ""  # what the stage was doing, e.g. "F17"
    traceback: str = ""
    log_path: str = ""
    log_tail: tuple[str, ...] = ()
    advice: str = ""
    consequences: tuple[str, ...] = ()  # one line per process that died as a result
    exit_code: int = 1  # of the whole run
    user_error: bool = False  # the user can mend it: its message alone says all


# -- everybody ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """anyone ↔ coordinator, every ``heartbeat_s``: I live. Workers say ``Progress`` instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhoAreYou:
    """coordinator → anyone it does not know: it has been restarted, introduce yourself again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """coordinator → workers and agents: every stage can be restored to after this update.

    Senders forget what only older rounds need; agents drop older snapshots and copy this one to
    disk.
    """

    update: int
    digests: tuple[str, ...] = ()  # xxh3_128 of each stage's snapshot, in order of the stages


# -- launcher ↔ coordinator ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherHello:
    """launcher → coordinator, first of all."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """launcher → coordinator, when the user or the scheduler asks to stop."""

    reason: str  # "Ctrl-C", "SIGTERM", "SIGUSR1"
    abort: bool  # False: finish the batches in flight; True: end at once


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """launcher → coordinator, when the process or ssh connection that carries an agent ended."""

    host_index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgent:
    """coordinator → launcher: start the agent of this host again."""

    host_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """coordinator → launcher, twice a second: what the live view shows."""

    state: str
    waiting_for: tuple[str, ...] = ()  # in start-up: who is missing and what it does
    batch: int = 0  # trained so far
    train_batches: int = 0
    epoch: int = 0
    epochs: int = 0
    loss: float | None = None
    lr: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])  # latest evaluation
    stages: tuple[StageView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """coordinator → launcher, one line for the console."""

    level: str  # "info", "warning", "error"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """coordinator → launcher, last of all."""

    exit_code: int
    state: str  # "done", "stopped", "failed"
    cause: Cause | None = None
    summary_json: str = ""


# -- agent ↔ coordinator ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHello:
    """agent → coordinator, first of all."""

    host_index: int
    host: str
    pid: int
    slots: int
    devices: tuple[str, ...]  # one per slot: "cpu", "cuda:0"
    versions: Versions
    replica_endpoint: str = ""  # where it takes other hosts' snapshots; empty where it is alone
    public_key: str = ""  # CURVE, Z85, of that endpoint; empty on ipc


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """coordinator → agent: fork a worker for this stage on this slot."""

    stage: int
    incarnation: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """coordinator → agent: end this worker now; harmless when it is gone."""

    stage: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted:
    """agent → coordinator, when the fork is done."""

    host_index: int
    stage: int
    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """agent → coordinator, at once when a worker is gone."""

    host_index: int
    stage: int
    incarnation: int
    pid: int
    status: int  # exit code, or minus the signal
    log_path: str
    log_tail: tuple[str, ...]
    free_memory_bytes: int  # of the host, just after


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveSnapshots:
    """coordinator → agent, before training: how much room is there for snapshots?"""

    bytes_needed: int  # of this host's own and those it keeps for others


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsReserved:
    """agent → coordinator, the answer; whether it is enough the coordinator decides."""

    host_index: int
    bytes_needed: int  # as asked
    free_bytes: int
    directory: str  # where snapshots lie


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSnapshots:
    """agent → coordinator, after every ``AgentHello``: what this host keeps, found by looking."""

    host_index: int
    snapshots: tuple[SnapshotFile, ...]  # in shared memory: its own first, then replicas
    checkpoints: tuple[SnapshotFile, ...]  # on disk, by the word of their manifests


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten:
    """agent → coordinator, when a committed round is on disk, or why it is not.

    After an error the older checkpoints stand and the next committed round is tried.
    """

    host_index: int
    update: int
    files: tuple[SnapshotFile, ...]  # of this host's stages; empty after an error
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """coordinator → agent that holds a snapshot: send a copy to another host's agent."""

    stage: int
    update: int
    digest: str
    host_index: int  # of the receiver
    endpoint: str  # of the receiver, as its ``AgentHello`` said
    public_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """agent → coordinator, when another host's snapshot lies complete in its shared memory."""

    host_index: int
    file: SnapshotFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationFailed:
    """agent → coordinator, when it could not send what ``Replicate`` asked for."""

    host_index: int  # of the host that should have got the copy
    stage: int
    update: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAgent:
    """coordinator → agent, last of all: end your workers, then yourself."""

    grace_s: float


# -- worker ↔ coordinator -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """worker → coordinator, first of all."""

    stage: int
    incarnation: int
    host: str
    pid: int
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """coordinator → worker, after its hello: what to build."""

    settings_json: str
    work: Work
    layer_counts: tuple[int, ...]  # per stage, in order; they sum to the layers of the model
    restore: Restore | None = None  # None: the initial state


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """worker → coordinator, when its stage is built and its stream sockets listen."""

    stage: int
    incarnation: int
    parameters: int
    activations_endpoint: str  # where its upstream neighbour connects to; empty at stage 0
    gradients_endpoint: str  # where its downstream neighbour connects to; empty at the last stage
    public_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """coordinator → worker, when both ends of a link are ready: build this generation of it.

    May come more than once. A side that is None is left as it is.
    """

    generation: int
    upstream: Peer | None  # where its gradients go
    downstream: Peer | None  # where its activations go


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConnected:
    """worker → coordinator, when all links of this generation stand."""

    stage: int
    incarnation: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost:
    """worker → coordinator, when a link broke; the worker waits for the next ``Connect``."""

    stage: int
    incarnation: int
    stream: str  # "activations" or "gradients"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlan:
    """coordinator → worker: keep a snapshot after update ``first`` and each ``every`` from there.

    The newest one holds. A worker that is already past what ``first`` needs skips that round.
    """

    first: int
    every: int  # 0: none
    patient: bool = False  # wait for the file before this one rather than leave a round out


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWritten:
    """worker → coordinator, when a snapshot lies complete in its host's shared memory."""

    stage: int
    incarnation: int
    update: int
    path: str
    size_bytes: int
    digest: str  # xxh3_128 of the file, hexadecimal
    capture_s: float  # how long the training loop stood still for it
    write_s: float  # how long the writing took beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSkipped:
    """worker → coordinator, when it left out a planned snapshot."""

    stage: int
    incarnation: int
    update: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """coordinator → worker, when every worker is connected: train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """worker → coordinator, every ``heartbeat_s``: how far the training loop itself is.

    Counters and times are sums since the worker started.
    """

    stage: int
    incarnation: int
    state: str  # "building", "ready", "replaying", "training", "finishing", "done"
    last_op: str  # newest op that is finished; empty before the first
    waiting_for: str  # what the loop waits for right now; empty while it works
    version: int
    in_flight: int
    log_bytes: int = 0  # kept for restarted neighbours, of the stream that keeps more
    peak_activations_log_bytes: int = 0  # the most that was ever kept of activations
    peak_gradients_log_bytes: int = 0  # and of gradients
    replayed: int = 0  # parcels that a restarted worker has made again for neighbours that had them
    forward_s: float
    backward_s: float
    predict_s: float
    update_s: float
    evaluate_s: float
    wait_upstream_s: float
    wait_downstream_s: float
    wait_feed_s: float
    peak_memory_bytes: int
    messages: int  # control messages this worker has sent
    dropped: int  # messages it has refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """last worker → coordinator, a few times a second: mini-batches whose loss is known."""

    stage: int
    incarnation: int
    batches: tuple[BatchResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """last worker → coordinator, after an evaluation round with clean weights."""

    stage: int
    incarnation: int
    round: int
    samples: int
    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopBefore:
    """coordinator → worker: leave out ``batch`` and all later ones; they were never fed."""

    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDone:
    """worker → coordinator, when its op list is finished and its weights are delivered."""

    stage: int
    incarnation: int
    updates: int
    forward_staleness: float  # mean updates between reading weights in a forward and its update
    forward_staleness_max: int
    backward_staleness: float
    backward_staleness_max: int
    tensors: int  # how many WeightsPart messages it sent


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFault:
    """worker → coordinator, before it exits because of an exception."""

    stage: int
    incarnation: int
    what: str  # exception type
    message: str
    op: str
    traceback: str
    exit_code: int
    is_consequence: bool  # a link error: some neighbour probably died first
    user_error: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """coordinator → worker, last of all."""


# -- data channel: worker ↔ coordinator ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRequest:
    """first or last worker → coordinator's feed: send these, in this order."""

    part: str  # "inputs" or "targets"
    ops: tuple[str, ...]  # "F12", "F12.1" or "E0.3"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedBatch:
    """coordinator's feed → worker; one raw frame per tensor follows."""

    part: str
    op: str
    samples: int  # of this micro-batch
    batch_samples: int  # of the whole mini-batch
    ids_digest: str  # over the sample ids, equal for inputs and targets of one op
    boundary: Boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPart:
    """worker → coordinator, at the end: one clean tensor; its raw frame follows."""

    stage: int
    incarnation: int
    name: str  # the model's own
    spec: TensorSpec


# -- streams between neighbours -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHello:
    """sending worker → receiving worker: let us build this generation of the link."""

    stream: str  # "activations" or "gradients"
    stage: int  # of the sender
    incarnation: int
    generation: int
    attempt: int  # counts the sender's hellos, so that an answer to an old one is known as such
    backend: str  # "direct", "socket", "gloo", "nccl" or "strict"; both ends must use the same
    address: bytes  # the sender's rendezvous value
    number: int = 0  # of the first parcel that it has not sent yet in this incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWelcome:
    """receiving worker → sending worker: here is mine, and this is what I need."""

    generation: int
    attempt: int  # of the hello it answers
    position: int  # the receiver needs no parcel with a number below; the only truth
    address: bytes
    digests: tuple[ParcelDigest, ...] = ()  # of parcels it has, from the number in the hello on


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRefused:
    """receiving worker → sending worker: not this stage, incarnation or backend."""

    reason: str
    attempt: int = 0  # of the hello it answers


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamProbe:
    """receiving worker → sending worker, twice a second while it waits; no answer expected.

    A link that has nothing to carry does not tell when its other end dies; sending this fails.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """sending worker → receiving worker, before each payload: what comes next on the link."""

    op: str  # the op that will consume it: "F12" for activations, "B12" for gradients
    samples: int  # of this micro-batch
    batch_samples: int  # of the whole mini-batch
    boundary: Boundary
    generation: int  # of the link that carries the payload
    position: int  # the parcel's number in this stream, the same in every incarnation


# -- replicas between agents --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaChunk:
    """sending agent → receiving agent: a piece of a snapshot; its raw frame follows."""

    stage: int
    update: int
    digest: str  # of the whole file
    size_bytes: int  # of the whole file
    offset: int  # of this piece; 0 begins anew


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAck:
    """receiving agent → sending agent, after each piece; the whole file is safe at its end."""

    stage: int
    update: int
    received_bytes: int
    error: str = ""  # it gave up, and why


Message: TypeAlias = (
    Heartbeat | WhoAreYou | Committed
    | LauncherHello | StopRequested | AgentLost | StartAgent | View | Note | RunEnded
    | AgentHello | StartWorker | KillWorker | WorkerStarted | WorkerExited
    | ReserveSnapshots | SnapshotsReserved | AgentSnapshots | CheckpointWritten | Replicate
    | Replicated | ReplicationFailed | EndAgent
    | WorkerHello | Assign | WorkerReady | Connect | WorkerConnected | LinkLost | SnapshotPlan
    | SnapshotWritten | SnapshotSkipped | Go | Progress | Trained
    | Evaluated | StopBefore | StageDone | WorkerFault | Quit
    | FeedRequest | FeedBatch | WeightsPart
    | StreamHello | StreamWelcome | StreamRefused | StreamProbe | Announce
    | ReplicaChunk | ReplicaAck
)  # fmt: skip

MESSAGES: tuple[type[Message], ...] = (
    Heartbeat, WhoAreYou, Committed,
    LauncherHello, StopRequested, AgentLost, StartAgent, View, Note, RunEnded,
    AgentHello, StartWorker, KillWorker, WorkerStarted, WorkerExited,
    ReserveSnapshots, SnapshotsReserved, AgentSnapshots, CheckpointWritten, Replicate,
    Replicated, ReplicationFailed, EndAgent,
    WorkerHello, Assign, WorkerReady, Connect, WorkerConnected, LinkLost, SnapshotPlan,
    SnapshotWritten, SnapshotSkipped, Go, Progress, Trained,
    Evaluated, StopBefore, StageDone, WorkerFault, Quit,
    FeedRequest, FeedBatch, WeightsPart,
    StreamHello, StreamWelcome, StreamRefused, StreamProbe, Announce,
    ReplicaChunk, ReplicaAck,
)  # fmt: skip
"""Every message that may be sent, in the order of the documentation."""
