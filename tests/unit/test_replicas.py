"""A snapshot comes to another host whole and verified, or leaves nothing but an error."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zmq
from waiting import wait_until
from zmq.utils.garbage import gc as zmq_collector

from spectrain.launch import replicas
from spectrain.launch.replicas import ReplicaReceiver, ReplicaSender
from spectrain.launch.snapshot_store import snapshot_name
from spectrain.protocol.keys import Authority, KeyPair
from spectrain.protocol.messages import (
    Heartbeat,
    Message,
    ReplicaAck,
    ReplicaChunk,
    Replicate,
    Replicated,
    ReplicationFailed,
    SnapshotFile,
)
from spectrain.protocol.sockets import Client, Server

RUN = bytes(range(16))
LONG_S = 20.0
CHUNK = 1000
SENDER, RECEIVER, STRANGER = KeyPair.new(), KeyPair.new(), KeyPair.new()


@pytest.fixture(scope="module", autouse=True)
def _collector_of_uncopied_frames() -> Iterator[None]:
    """Start pyzmq's own thread here, so that it is nobody's leak, and end it."""
    zmq.Frame(bytes(1 << 17), copy=False)
    yield
    zmq_collector.stop()


class Hosts:
    """A sending host 0 and a receiving host 1; what their agents would tell is in ``posted``."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replicas, "CHUNK_BYTES", CHUNK)
        monkeypatch.setattr(replicas, "WINDOW_BYTES", 3 * CHUNK)
        root.chmod(0o700)
        self.socket = root / "replicas.sock"
        self.memory, self.replicas = root / "memory", root / "replica"
        for directory in (self.memory, self.replicas):
            directory.mkdir()
        self.context: zmq.Context[Any] = zmq.Context()
        self.posted: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.open: list[Any] = []

    def listen(self, *, tcp: bool = False) -> Server:
        if not tcp:
            return Server(self.context, run_id=RUN, ipc=self.socket, max_frame_bytes=CHUNK)
        self.open.append(Authority(self.context, {SENDER.public: "agent/0"}))
        return Server(
            self.context,
            run_id=RUN,
            tcp="127.0.0.1",
            keys=RECEIVER,
            authority=self.open[-1],
            max_frame_bytes=CHUNK,
        )

    def receive(self, server: Server | None = None, *, idle_s: float = LONG_S) -> ReplicaReceiver:
        self.open.append(
            ReplicaReceiver(
                server or self.listen(), self.replicas, 1, post=self.posted.put, idle_s=idle_s
            )
        )
        return self.open[-1]

    def sender(self, keys: KeyPair | None = None, *, silence_s: float = LONG_S) -> ReplicaSender:
        def find(stage: int, update: int) -> Path | None:
            path = self.memory / snapshot_name(stage, update)
            return path if path.exists() else None

        self.open.append(
            ReplicaSender(
                self.context,
                run_id=RUN,
                host_index=0,
                keys=keys,
                find=find,
                post=self.posted.put,
                silence_s=silence_s,
            )
        )
        return self.open[-1]

    def client(self, identity: str = "agent/0") -> Client:
        endpoint = f"ipc://{self.socket}"
        self.open.append(Client(self.context, run_id=RUN, identity=identity, endpoint=endpoint))
        return self.open[-1]

    def snapshot(self, content: bytes, stage: int = 0, update: int = 10) -> str:
        (self.memory / snapshot_name(stage, update)).write_bytes(content)
        return xxhash.xxh3_128_hexdigest(content)

    def request(
        self, digest: str, stage: int = 0, endpoint: str = "", public_key: str = ""
    ) -> Replicate:
        return Replicate(
            stage=stage,
            update=10,
            digest=digest,
            host_index=1,
            endpoint=endpoint or f"ipc://{self.socket}",
            public_key=public_key,
        )

    def next(self) -> Message:
        return self.posted.get(timeout=LONG_S)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.replicas.iterdir())

    def close(self) -> None:
        for thing in reversed(self.open):
            thing.close()
        self.context.term()


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path, monkeypatch)
    yield hosts
    hosts.close()


def chunk(offset: int = 0, size_bytes: int = 8, digest: str = "", stage: int = 0) -> ReplicaChunk:
    return ReplicaChunk(
        stage=stage, update=10, digest=digest, size_bytes=size_bytes, offset=offset
    )  # fmt: skip


def ask(client: Client, message: ReplicaChunk, payload: bytes) -> ReplicaAck:
    client.send(message, [payload])
    received = client.receive(LONG_S)
    assert received is not None
    assert isinstance(received[0], ReplicaAck)
    return received[0]


# -- whole --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [1, CHUNK, 3 * CHUNK, 25 * CHUNK + 1])
def test_a_copy_arrives_byte_for_byte(hosts: Hosts, size_bytes: int) -> None:
    content = os.urandom(size_bytes)
    digest = hosts.snapshot(content)
    hosts.receive()
    hosts.sender().send(hosts.request(digest))
    path = hosts.replicas / "stage-0.update-10.safetensors"
    file = SnapshotFile(stage=0, update=10, digest=digest, path=str(path))
    assert hosts.next() == Replicated(host_index=1, file=file)
    assert path.read_bytes() == content
    assert hosts.files() == [path.name]


def test_copies_are_sent_one_after_another(hosts: Hosts) -> None:
    hosts.receive()
    sender = hosts.sender()
    for stage in range(3):
        sender.send(hosts.request(hosts.snapshot(bytes([stage]) * 5000, stage), stage))
    arrived = [hosts.next() for _ in range(3)]
    assert [report.file.stage for report in arrived if isinstance(report, Replicated)] == [0, 1, 2]


def test_copies_travel_encrypted_between_agents_that_know_each_other(hosts: Hosts) -> None:
    digest = hosts.snapshot(b"weights")
    server = hosts.listen(tcp=True)
    hosts.receive(server)
    request = hosts.request(digest, endpoint=server.tcp_endpoint, public_key=RECEIVER.public)
    hosts.sender(SENDER).send(request)
    assert isinstance(hosts.next(), Replicated)


def test_an_agent_of_another_run_is_not_let_in(hosts: Hosts) -> None:
    digest = hosts.snapshot(b"weights")
    server = hosts.listen(tcp=True)
    hosts.receive(server)
    request = hosts.request(digest, endpoint=server.tcp_endpoint, public_key=RECEIVER.public)
    hosts.sender(STRANGER, silence_s=0.5).send(request)
    assert isinstance(hosts.next(), ReplicationFailed)
    assert hosts.files() == []


def test_a_copy_replaces_what_lay_there(hosts: Hosts) -> None:
    hosts.receive()
    sender = hosts.sender()
    for content in (b"former incarnation", b"present incarnation"):
        sender.send(hosts.request(hosts.snapshot(content)))
        assert isinstance(hosts.next(), Replicated)
    assert (hosts.replicas / snapshot_name(0, 10)).read_bytes() == b"present incarnation"


# -- flow control -------------------------------------------------------------------------------


def test_no_more_than_the_window_is_sent_without_an_answer(hosts: Hosts) -> None:
    server = hosts.listen()
    hosts.open.append(server)
    hosts.sender().send(hosts.request(hosts.snapshot(bytes(10 * CHUNK))))

    def offsets(timeout_s: float) -> Iterator[int]:
        while (received := server.receive(timeout_s)) is not None:
            assert isinstance(received.message, ReplicaChunk)
            yield received.message.offset
            if received.message.offset == 2 * CHUNK:
                timeout_s = 0.2

    assert list(offsets(LONG_S)) == [0, CHUNK, 2 * CHUNK]
    server.send("agent/0", Heartbeat())  # no answer at all
    server.send("agent/0", ReplicaAck(stage=5, update=10, received_bytes=9 * CHUNK))  # not to this
    assert list(offsets(0.2)) == []
    server.send("agent/0", ReplicaAck(stage=0, update=10, received_bytes=CHUNK))
    assert list(offsets(0.2)) == [3 * CHUNK]


# -- the sender's errors ------------------------------------------------------------------------


def failed(error: str) -> ReplicationFailed:
    return ReplicationFailed(host_index=1, stage=0, update=10, error=error)


def test_a_snapshot_that_was_pruned_meanwhile_is_told(hosts: Hosts) -> None:
    hosts.sender().send(hosts.request("digest"))
    assert hosts.next() == failed("stage-0.update-10.safetensors is not here any more")


def test_a_snapshot_that_cannot_be_read_is_told(hosts: Hosts) -> None:
    (hosts.memory / snapshot_name(0, 10)).mkdir()
    hosts.sender().send(hosts.request("digest"))
    report = hosts.next()
    assert isinstance(report, ReplicationFailed)
    assert "Is a directory" in report.error


def test_a_receiver_that_is_silent_is_told_and_the_next_copy_is_tried(hosts: Hosts) -> None:
    digest = hosts.snapshot(b"weights")
    sender = hosts.sender(silence_s=0.2)
    sender.send(hosts.request(digest))
    assert hosts.next() == failed(f"no answer from ipc://{hosts.socket} for 0.2 s")
    hosts.receive()
    sender._silence_s = LONG_S
    sender.send(hosts.request(digest))
    assert isinstance(hosts.next(), Replicated)


def test_a_receiver_that_refuses_ends_the_transfer(hosts: Hosts) -> None:
    hosts.snapshot(bytes(10 * CHUNK))
    hosts.receive()
    hosts.sender().send(hosts.request("another digest"))
    report = hosts.next()
    assert isinstance(report, ReplicationFailed)
    assert "not another digest" in report.error
    wait_until(lambda: hosts.files() == [], what="the half-received file to go")


def test_closing_abandons_a_transfer_without_a_word(hosts: Hosts) -> None:
    sender = hosts.sender()
    sender.send(hosts.request(hosts.snapshot(b"weights")))  # nobody listens
    sender.close()
    assert hosts.posted.empty()
    hosts.open.remove(sender)


# -- the receiver's errors ----------------------------------------------------------------------


def test_a_piece_that_does_not_follow_is_refused(hosts: Hosts) -> None:
    hosts.receive()
    client = hosts.client()
    assert "does not follow" in ask(client, chunk(offset=4), b"late").error
    assert ask(client, chunk(offset=0), b"abcd").received_bytes == 4
    assert "does not follow" in ask(client, chunk(offset=6), b"gh").error
    assert hosts.files() == []


def test_offset_zero_begins_anew(hosts: Hosts) -> None:
    hosts.receive()
    client = hosts.client()
    digest = xxhash.xxh3_128_hexdigest(b"abcdefgh")
    ask(client, chunk(), b"ABCD")
    ask(client, chunk(digest=digest), b"abcd")
    assert ask(client, chunk(4, digest=digest), b"efgh").error == ""
    assert (hosts.replicas / snapshot_name(0, 10)).read_bytes() == b"abcdefgh"


def test_two_senders_do_not_meet(hosts: Hosts) -> None:
    hosts.receive()
    digest = xxhash.xxh3_128_hexdigest(b"abcdefgh")
    clients = [hosts.client("agent/0"), hosts.client("agent/2")]
    for offset, piece in ((0, b"abcd"), (4, b"efgh")):
        for stage, client in enumerate(clients):
            assert ask(client, chunk(offset, digest=digest, stage=stage), piece).error == ""
    assert hosts.files() == [snapshot_name(0, 10), snapshot_name(1, 10)]


def test_two_senders_may_bring_the_same_snapshot_at_once(hosts: Hosts) -> None:
    hosts.receive()
    digest = xxhash.xxh3_128_hexdigest(b"abcdefgh")
    first, second = hosts.client("agent/0"), hosts.client("agent/2")
    ask(first, chunk(digest=digest), b"abcd")
    ask(second, chunk(digest=digest), b"ab")
    assert ask(first, chunk(4, digest=digest), b"efgh").error == ""
    assert (hosts.replicas / snapshot_name(0, 10)).read_bytes() == b"abcdefgh"
    assert ask(second, chunk(2, digest=digest), b"cdefgh").error == ""
    assert hosts.files() == [snapshot_name(0, 10)]


def test_what_a_killed_agent_has_half_received_is_removed(hosts: Hosts) -> None:
    (hosts.replicas / f".{snapshot_name(0, 10)}.from-agent-2.partial").write_bytes(b"ab")
    hosts.receive()
    assert hosts.files() == []


def test_more_than_was_announced_is_refused(hosts: Hosts) -> None:
    hosts.receive()
    assert "arrived with digest" in ask(hosts.client(), chunk(), b"123456789").error
    assert hosts.files() == []


def test_a_full_memory_is_answered_and_nothing_is_left(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = Path.open

    def open_full(path: Path, *arguments: Any, **options: Any) -> Any:
        file = real(path, *arguments, **options)
        if path.suffix == ".partial":
            file.close()
            return real(Path("/dev/full"), "wb", buffering=0)
        return file

    hosts.receive()
    monkeypatch.setattr(Path, "open", open_full)
    ack = ask(hosts.client(), chunk(), b"abcd")
    assert "No space left on device" in ack.error
    assert hosts.files() == []


def test_a_file_that_cannot_be_made_is_answered(hosts: Hosts) -> None:
    hosts.receive()
    hosts.replicas.rmdir()
    assert "No such file or directory" in ask(hosts.client(), chunk(), b"abcd").error
    hosts.replicas.mkdir()


def test_what_nobody_goes_on_with_is_thrown_away(hosts: Hosts) -> None:
    hosts.receive(idle_s=0.1)
    ask(hosts.client(), chunk(), b"abcd")
    wait_until(lambda: hosts.files() == [], what="the half-received file to go")


def test_other_messages_are_ignored(hosts: Hosts) -> None:
    hosts.receive()
    client = hosts.client()
    client.send(Heartbeat())
    assert ask(client, chunk(), b"abcd").error == ""


def test_closing_throws_half_received_files_away(hosts: Hosts) -> None:
    receiver = hosts.receive()
    ask(hosts.client(), chunk(), b"abcd")
    receiver.close()
    hosts.open.remove(receiver)
    assert hosts.files() == []
