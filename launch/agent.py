"""One per host: obeys the coordinator, and ends everything it started with itself. Decides nothing.

It starts workers through a nursery and reports their deaths; it keeps their snapshots, copies
committed ones to disk and to other hosts. It ends, with every process it started, when the
coordinator says so, when its launcher's end of standard input closes (the launcher or the ssh
connection is gone), or when the coordinator has been silent for a lease. A coordinator that comes
back within the lease asks who is there, and is told all that it needs to go on.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from ..protocol.bootstrap import AgentBirth, WorkerBirth
from ..protocol.errors import UserError
from ..protocol.messages import (
    AgentHello,
    Committed,
    EndAgent,
    Heartbeat,
    KillWorker,
    Message,
    Replicate,
    ReserveSnapshots,
    StartWorker,
    WhoAreYou,
    WorkerExited,
)
from ..protocol.sockets import Client, Waker
from .address import address_towards
from .environment import worker_environment
from .nursery_client import NurseryClient, NurseryEvent
from .probe import versions
from .snapshot_keeper import SnapshotKeeper
from .snapshot_store import SnapshotStore

__all__ = ["main"]


class _Agent:
    """The agent's own thread; other threads hand it what they have by ``post``.

    Args:
        birth: what the launcher told us.
        store: this host's snapshots.
        parts: closes what is made here, in the reverse order.
    """

    def __init__(self, birth: AgentBirth, store: SnapshotStore, parts: ExitStack) -> None:
        self._birth = birth
        self._store = store
        self._inbox: deque[Message | NurseryEvent] = deque()
        self._waker = Waker()
        self._nursery_gone = self._lifeline_closed = False
        self._ending_at: float | None = None  # when to stop waiting for workers
        self._coordinator = None if birth.same_host else _host_and_port(birth.control)
        address = address_towards(self._coordinator[0]) if self._coordinator else None
        self._address = address
        context = zmq.Context.instance()
        client = Client(
            context,
            run_id=bytes.fromhex(birth.run_id),
            identity=f"agent/{birth.host_index}",
            endpoint=birth.control,
            server_key=birth.server_key,
            keys=birth.keys if birth.server_key else None,
            heartbeat_s=birth.heartbeat_s,
            lease_s=birth.lease_s,
        )
        self._client = parts.enter_context(closing(client))
        keeper = SnapshotKeeper(birth, store, context=context, address=address, post=self._post)
        self._keeper = parts.enter_context(closing(keeper))
        self._nursery = parts.enter_context(
            closing(NurseryClient(birth.host_index, birth.job, self._hear_nursery))
        )
        threading.Thread(target=self._watch_lifeline, name="lifeline", daemon=True).start()

    def serve(self) -> None:
        """Obey the coordinator until it, or the launcher, is done or gone.

        Raises:
            SystemExit: the coordinator has been silent for a lease, or the nursery died.
        """
        birth = self._birth
        self._introduce()
        heard = spoke = time.monotonic()
        while not (self._lifeline_closed or self._nursery_gone):
            received = self._client.receive(birth.heartbeat_s, self._waker.fd)
            now = time.monotonic()
            if received is not None:
                heard = now
                self._obey(received[0])
            self._waker.clear()
            while self._inbox:
                self._pass_on(self._inbox.popleft())
            if self._ending_at is not None and (self._nursery.is_empty or now > self._ending_at):
                return
            if now - spoke >= birth.heartbeat_s:
                self._client.send(Heartbeat())
                self._store.show_life()
                spoke = now
            if now - heard > birth.lease_s:
                raise SystemExit(
                    f"agent: no word from the coordinator for {birth.lease_s:g} s; "
                    "ending this host's workers"
                )
        if self._nursery_gone:
            self._store.keep()  # the agent that comes next needs the snapshots
            raise SystemExit("agent: the nursery, which forks the workers, is gone")

    # -- what the coordinator says --------------------------------------------------------------

    def _obey(self, message: Message) -> None:
        if isinstance(message, StartWorker):
            self._start(message)
        elif isinstance(message, KillWorker):
            self._nursery.kill(message.stage, message.incarnation)
        elif isinstance(message, Committed):
            self._keeper.commit(message)
        elif isinstance(message, Replicate):
            self._keeper.replicate(message)
        elif isinstance(message, ReserveSnapshots):
            self._client.send(self._keeper.reserve(message))
        elif isinstance(message, WhoAreYou):
            self._introduce()
        elif isinstance(message, EndAgent):
            self._ending_at = time.monotonic() + message.grace_s

    def _introduce(self) -> None:
        """Say who we are and what lives and lies here; the coordinator may be a new one."""
        birth = self._birth
        self._client.send(
            AgentHello(
                host_index=birth.host_index,
                host=birth.host,
                pid=os.getpid(),
                slots=len(birth.devices),
                devices=birth.devices,
                versions=versions(birth.job),
                replica_endpoint=self._keeper.replica_endpoint,
                public_key=birth.keys.public if birth.server_key else "",
            )
        )
        for started in self._nursery.living():
            self._client.send(started)
        self._keeper.survey()

    def _start(self, request: StartWorker) -> None:
        birth = self._birth
        worker = WorkerBirth(
            run_id=birth.run_id,
            stage=request.stage,
            incarnation=request.incarnation,
            host=birth.host,
            device=birth.devices[request.slot],
            job=birth.job,
            control=birth.control,
            data=birth.data,
            server_key=birth.server_key,
            keys=birth.slot_keys[request.slot],
            peer_keys=birth.peer_keys,
            ipc_dir=str(self._store.ipc),
            snapshot_dir=str(self._store.directory),
            address=self._address,
            heartbeat_s=birth.heartbeat_s,
            lease_s=birth.lease_s,
        )
        name = f"stage-{request.stage}.{birth.host}"
        if request.incarnation:
            name += f".restart-{request.incarnation}"
        environment = worker_environment(
            os.environ,
            birth.environment,
            stage=request.stage,
            stages=birth.stages,
            slot=request.slot,
            workers_on_host=len(birth.devices),
            host_index=birth.host_index,
            run_id=birth.run_id,
            run_dir=birth.run_dir,
            coordinator=self._coordinator,
        )
        self._nursery.start(worker, Path(birth.run_dir, "logs", f"{name}.log"), environment)

    # -- what other threads have to say ---------------------------------------------------------

    def _pass_on(self, item: Message | NurseryEvent) -> None:
        message = self._nursery.understand(item) if isinstance(item, dict) else item
        if isinstance(message, WorkerExited):
            self._keeper.worker_ended(message.stage)
        if message is not None:
            self._client.send(message)

    def _post(self, item: Message | NurseryEvent) -> None:
        """Hand something over to the agent's own thread, from any thread."""
        self._inbox.append(item)
        self._waker.wake()

    def _hear_nursery(self, event: NurseryEvent | None) -> None:
        if event is None:
            self._nursery_gone = True
            self._waker.wake()
        else:
            self._post(event)

    def _watch_lifeline(self) -> None:
        while os.read(0, 1 << 12):
            pass
        self._lifeline_closed = True
        self._waker.wake()


def _host_and_port(endpoint: str) -> tuple[str, int]:
    parts = urlsplit(endpoint)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def _read_line(descriptor: int) -> str:
    """Read one line and not a byte more: the rest of the stream is the lifeline."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise SystemExit("agent: standard input ended before the birth record came")
        line += byte
    return line.decode()


def main() -> None:
    """Run the agent of one host."""
    birth = AgentBirth.from_json(_read_line(0))
    with ExitStack() as parts:
        try:
            # A former agent that lost its coordinator lives on for a lease, and so may its workers.
            store = SnapshotStore(birth.run_id, birth.host_index, wait_s=2 * birth.lease_s)
            parts.enter_context(closing(store))
            agent = _Agent(birth, store, parts)
        except UserError as error:
            raise SystemExit(f"agent: {error}") from None
        agent.serve()


if __name__ == "__main__":
    main()
