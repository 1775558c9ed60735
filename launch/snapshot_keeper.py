"""Joins what keeps a host's snapshots: shared memory, disk, other hosts. Decides nothing.

The agent's own thread calls everything here and is never kept waiting: reading, copying and
sending happen in the parts' threads, which post what they have to say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import zmq

from ..protocol.bootstrap import AgentBirth
from ..protocol.keys import Authority
from ..protocol.messages import (
    AgentSnapshots,
    Committed,
    Message,
    Replicate,
    ReserveSnapshots,
    SnapshotFile,
    SnapshotsReserved,
)
from ..protocol.sockets import Server
from .address import bracketed
from .checkpoints import CheckpointWriter, read_checkpoints
from .replicas import ReplicaReceiver, ReplicaSender
from .snapshot_store import CHUNK_BYTES, SnapshotStore

__all__ = ["SnapshotKeeper"]


class SnapshotKeeper:
    """One host's snapshots: in shared memory, on disk, and on the way to other hosts.

    Args:
        birth: the agent's.
        store: this host's; closed by whoever made it.
        context: the process's ZeroMQ context.
        address: other hosts reach this one by it; None where all of the run is on one host.
        post: takes what the coordinator shall hear, in any thread.

    Raises:
        HostError: it cannot listen for other hosts' snapshots.
    """

    def __init__(
        self,
        birth: AgentBirth,
        store: SnapshotStore,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str | None,
        post: Callable[[Message], None],
    ) -> None:
        self._birth = birth
        self._store = store
        self._post = post
        self._parts = ExitStack()
        self.replica_endpoint = ""
        with ExitStack() as parts:
            if len(birth.agent_keys) > 1:
                server = self._listen(context, address, parts)
                self.replica_endpoint = server.tcp_endpoint or server.ipc_endpoint
            self._replicas = ReplicaSender(
                context,
                run_id=bytes.fromhex(birth.run_id),
                host_index=birth.host_index,
                keys=None if address is None else birth.keys,
                find=store.find,
                post=post,
                silence_s=birth.lease_s,
            )
            parts.enter_context(closing(self._replicas))
            self._checkpoints = CheckpointWriter(
                Path(birth.run_dir),
                birth.run_id,
                birth.host_index,
                goes_on=birth.resume,
                on_end=post,
            )
            parts.enter_context(closing(self._checkpoints))
            self._parts = parts.pop_all()

    def reserve(self, request: ReserveSnapshots) -> SnapshotsReserved:
        """Return how much room there is."""
        return SnapshotsReserved(
            host_index=self._birth.host_index,
            bytes_needed=request.bytes_needed,
            free_bytes=self._store.free_bytes(),
            directory=str(self._store.directory),
        )

    def commit(self, committed: Committed) -> None:
        """Copy this host's part of the round to disk, and let go of what is older."""
        own = self._store.own(committed.update)
        files = [
            SnapshotFile(stage=stage, update=committed.update, digest=digest, path=str(own[stage]))
            for stage, digest in enumerate(committed.digests)
            if stage in own
        ]
        if files:
            self._checkpoints.write(committed.update, files)
        self._store.prune(committed.update)

    def replicate(self, request: Replicate) -> None:
        """Send a copy to another host."""
        self._replicas.send(request)

    def worker_ended(self, stage: int) -> None:
        """Remove what a dead worker has left half done."""
        self._store.discard_unfinished(stage)

    def survey(self) -> None:
        """Look at all there is, which takes seconds where it is large, and post it."""
        threading.Thread(target=self._survey, name="survey", daemon=True).start()

    def close(self) -> None:
        """Abandon what is under way and end all threads."""
        self._parts.close()

    def _survey(self) -> None:
        birth = self._birth
        counted = None if birth.resume else birth.run_id
        self._post(
            AgentSnapshots(
                host_index=birth.host_index,
                snapshots=self._store.survey(),
                checkpoints=read_checkpoints(Path(birth.run_dir), counted),
            )
        )

    def _listen(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str | None, parts: ExitStack
    ) -> Server:
        birth = self._birth
        authority = None
        if address is not None:
            identities = {key: f"agent/{index}" for index, key in enumerate(birth.agent_keys)}
            authority = parts.enter_context(closing(Authority(context, identities)))
        server = Server(
            context,
            run_id=bytes.fromhex(birth.run_id),
            ipc=self._store.ipc / "replicas.sock" if address is None else None,
            tcp=None if address is None else bracketed(address),
            keys=birth.keys,
            authority=authority,
            max_frame_bytes=CHUNK_BYTES,
        )
        receiver = ReplicaReceiver(
            server,
            self._store.replicas,
            birth.host_index,
            post=self._post,
            idle_s=birth.lease_s,
        )
        parts.enter_context(closing(receiver))
        return server
