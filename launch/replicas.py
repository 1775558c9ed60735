"""Carries snapshots between the agents of two hosts, in pieces; decides neither which nor where.

A sender has a window of pieces under way and goes on as they are acknowledged. The receiver
writes them under a temporary name, compares the digest of the whole, and only then gives the file
its name and tells the coordinator. A transfer that breaks leaves nothing behind but an error.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import xxhash
import zmq

from ..protocol.codec import Buffer
from ..protocol.keys import KeyPair
from ..protocol.messages import (
    Message,
    ReplicaAck,
    ReplicaChunk,
    Replicate,
    Replicated,
    ReplicationFailed,
    SnapshotFile,
)
from ..protocol.sockets import Client, Server, Waker
from .snapshot_store import CHUNK_BYTES, snapshot_name

__all__ = ["ReplicaReceiver", "ReplicaSender"]

WINDOW_BYTES = 4 * CHUNK_BYTES
"""How much may be under way without an acknowledgement."""

Post = Callable[[Message], None]


@dataclass
class _Incoming:
    chunk: ReplicaChunk  # the newest
    partial: Path
    file: BinaryIO
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    received_bytes: int = 0

    def discard(self) -> None:
        self.file.close()
        self.partial.unlink(missing_ok=True)


class ReplicaReceiver:
    """Takes what other agents send; a thread of its own serves the socket.

    Args:
        server: bound, accepts frames of ``CHUNK_BYTES``; it belongs to the receiver from now on.
        directory: where the replicas go.
        host_index: of this host.
        post: takes each ``Replicated``, in the receiver's thread.
        idle_s: silence of all senders after which half-received files are thrown away.
    """

    def __init__(
        self, server: Server, directory: Path, host_index: int, *, post: Post, idle_s: float
    ) -> None:
        self._server = server
        self._directory = directory
        self._host_index = host_index
        self._post = post
        self._idle_s = idle_s
        self._incoming: dict[str, _Incoming] = {}
        self._waker = Waker()
        self._closed = False
        for partial in directory.glob(".*.partial"):
            partial.unlink()  # a former agent of this host was killed over it
        self._thread = threading.Thread(target=self._serve, name="replicas in", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and the socket; half-received files are thrown away."""
        self._closed = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def _serve(self) -> None:
        while not self._closed:
            received = self._server.receive(self._idle_s, self._waker.fd)
            if received is None:
                self._discard_all()
            elif isinstance(received.message, ReplicaChunk):
                ack = self._take(received.identity, received.message, received.payload)
                self._server.send(received.identity, ack)
        self._discard_all()
        self._server.close()

    def _take(self, sender: str, chunk: ReplicaChunk, payload: Sequence[Buffer]) -> ReplicaAck:
        error = ""
        try:
            error = self._write(sender, chunk, payload)
        except OSError as failure:
            error = str(failure)
        incoming = self._incoming.get(sender)
        received_bytes = 0 if incoming is None else incoming.received_bytes
        if incoming is not None and (error or received_bytes == chunk.size_bytes):
            del self._incoming[sender]
            incoming.discard()  # if it was whole, it has another name by now
        return ReplicaAck(
            stage=chunk.stage, update=chunk.update, received_bytes=received_bytes, error=error
        )

    def _write(self, sender: str, chunk: ReplicaChunk, payload: Sequence[Buffer]) -> str:
        """Write one piece, and with the last one give the file its name; return what is wrong."""
        name = snapshot_name(chunk.stage, chunk.update)
        if chunk.offset == 0:
            # Two senders may bring the same snapshot at once.
            partial = f".{name}.from-{sender.replace('/', '-')}.partial"
            self._begin(sender, chunk, self._directory / partial)
        incoming = self._incoming.get(sender)
        if incoming is None or incoming.received_bytes != chunk.offset:
            return f"{name}: a piece at {chunk.offset} does not follow what came before"
        for piece in payload:
            incoming.file.write(piece)
            incoming.digest.update(piece)
            incoming.received_bytes += len(piece)
        if incoming.received_bytes < chunk.size_bytes:
            return ""
        incoming.file.close()
        digest = incoming.digest.hexdigest()
        if digest != chunk.digest:
            return f"{name} arrived with digest {digest}, not {chunk.digest}"
        path = incoming.partial.rename(self._directory / name)
        file = SnapshotFile(
            stage=chunk.stage, update=chunk.update, digest=digest, path=str(path)
        )  # fmt: skip
        self._post(Replicated(host_index=self._host_index, file=file))
        return ""

    def _begin(self, sender: str, chunk: ReplicaChunk, partial: Path) -> None:
        former = self._incoming.pop(sender, None)
        if former is not None:
            former.discard()
        self._incoming[sender] = _Incoming(chunk, partial, partial.open("wb"))

    def _discard_all(self) -> None:
        for incoming in self._incoming.values():
            incoming.discard()
        self._incoming.clear()


class ReplicaSender:
    """Sends this host's snapshots to other agents, one after another, in a thread of its own.

    Args:
        context: the process's ZeroMQ context.
        run_id: 16 bytes.
        host_index: of this host.
        keys: this agent's own; None on ipc.
        find: returns where a stage's snapshot of an update lies on this host, or None.
        post: takes each ``ReplicationFailed``, in the sender's thread.
        silence_s: how long to wait for an acknowledgement.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        run_id: bytes,
        host_index: int,
        keys: KeyPair | None,
        find: Callable[[int, int], Path | None],
        post: Post,
        silence_s: float,
    ) -> None:
        self._context = context
        self._run_id = run_id
        self._identity = f"agent/{host_index}"
        self._keys = keys
        self._find = find
        self._post = post
        self._silence_s = silence_s
        self._requests: queue.SimpleQueue[Replicate | None] = queue.SimpleQueue()
        self._waker = Waker()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="replicas out", daemon=True)
        self._thread.start()

    def send(self, request: Replicate) -> None:
        """Send a copy as soon as those asked for before are sent."""
        self._requests.put(request)

    def close(self) -> None:
        """Abandon what is under way and end the thread."""
        self._closed = True
        self._requests.put(None)
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def _work(self) -> None:
        while (request := self._requests.get()) is not None and not self._closed:
            error = self._replicate(request)
            if error and not self._closed:
                self._post(
                    ReplicationFailed(
                        host_index=request.host_index,
                        stage=request.stage,
                        update=request.update,
                        error=error,
                    )
                )

    def _replicate(self, request: Replicate) -> str:
        """Send one file; return what went wrong."""
        path = self._find(request.stage, request.update)
        if path is None:
            return f"{snapshot_name(request.stage, request.update)} is not here any more"
        client = Client(
            self._context,
            run_id=self._run_id,
            identity=self._identity,
            endpoint=request.endpoint,
            server_key=request.public_key,
            keys=self._keys,
        )
        try:
            with path.open("rb", buffering=0) as file:
                return self._send_pieces(client, request, file, path.stat().st_size)
        except OSError as error:
            return str(error)
        finally:
            client.close()

    def _send_pieces(
        self, client: Client, request: Replicate, file: BinaryIO, size_bytes: int
    ) -> str:
        wanted = (request.stage, request.update)
        sent = acknowledged = 0
        while acknowledged < size_bytes:
            while sent < size_bytes and sent - acknowledged < WINDOW_BYTES:
                piece = file.read(CHUNK_BYTES)
                client.send(
                    ReplicaChunk(
                        stage=request.stage,
                        update=request.update,
                        digest=request.digest,
                        size_bytes=size_bytes,
                        offset=sent,
                    ),
                    [piece],
                )
                sent += len(piece)
            received = client.receive(self._silence_s, self._waker.fd)
            if received is None:
                return f"no answer from {request.endpoint} for {self._silence_s:g} s"
            ack = received[0]
            if isinstance(ack, ReplicaAck) and (ack.stage, ack.update) == wanted:
                if ack.error:
                    return ack.error
                acknowledged = max(acknowledged, ack.received_bytes)
        return ""
