"""One per host: starts workers through a nursery, reports their deaths, ends them all with itself.

An agent decides nothing about the run. It does what the coordinator says, and it ends, with every
process it started, when the coordinator says so, when its launcher's end of standard input closes
(the launcher or the ssh connection is gone), or when the coordinator has been silent for a lease.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import zmq

from ..protocol.bootstrap import AgentBirth, WorkerBirth
from ..protocol.messages import (
    AgentHello,
    EndAgent,
    Heartbeat,
    KillWorker,
    StartWorker,
    WorkerExited,
    WorkerStarted,
)
from ..protocol.sockets import Client, Waker
from .address import address_towards
from .environment import worker_environment
from .probe import versions

__all__ = ["main"]

_LOG_TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class _Worker:
    stage: int
    incarnation: int
    pid: int
    log_path: Path


@dataclass
class _Agent:
    birth: AgentBirth
    client: Client
    waker: Waker
    nursery: subprocess.Popen[bytes]
    ipc_dir: str
    coordinator: tuple[str, int] | None  # address and port; None where all is on this host
    workers: dict[int, _Worker] = field(default_factory=dict[int, _Worker])  # by pid
    starting: deque[Path] = field(default_factory=deque[Path])  # logs of forks under way
    events: deque[dict[str, Any]] = field(default_factory=deque[dict[str, Any]])
    lifeline_closed: bool = False
    nursery_gone: bool = False
    ending_at: float | None = None  # when to stop waiting for workers to end by themselves

    def serve(self) -> None:
        """Obey the coordinator until it, or the launcher, is done or gone."""
        birth = self.birth
        self.client.send(
            AgentHello(
                host_index=birth.host_index,
                host=birth.host,
                pid=os.getpid(),
                slots=len(birth.devices),
                devices=birth.devices,
                versions=versions(birth.job),
            )
        )
        heard = spoke = time.monotonic()
        while not (self.lifeline_closed or self.nursery_gone):
            received = self.client.receive(birth.heartbeat_s, self.waker.fd)
            now = time.monotonic()
            if received is not None:
                heard = now
                self.obey(received[0])
            self.waker.clear()
            while self.events:
                self.report(self.events.popleft())
            if self.ending_at is not None and (not self.workers or now > self.ending_at):
                return
            if now - spoke >= birth.heartbeat_s:
                self.client.send(Heartbeat())
                spoke = now
            if now - heard > birth.lease_s:
                print(  # noqa: T201  stderr is forwarded to the launcher
                    f"agent: no word from the coordinator for {birth.lease_s:g} s; "
                    "ending this host's workers",
                    file=sys.stderr,
                )
                return

    def obey(self, message: object) -> None:
        if isinstance(message, EndAgent):
            self.ending_at = time.monotonic() + message.grace_s
        elif isinstance(message, StartWorker):
            self.start(message)
        elif isinstance(message, KillWorker):
            for worker in self.workers.values():
                if (worker.stage, worker.incarnation) == (message.stage, message.incarnation):
                    self.ask_nursery({"kill": worker.pid})

    def start(self, request: StartWorker) -> None:
        birth = self.birth
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
            ipc_dir=self.ipc_dir,
            address=None if self.coordinator is None else address_towards(self.coordinator[0]),
            heartbeat_s=birth.heartbeat_s,
            lease_s=birth.lease_s,
        )
        name = f"stage-{request.stage}.{birth.host}"
        if request.incarnation:
            name += f".restart-{request.incarnation}"
        log_path = Path(birth.run_dir, "logs", f"{name}.log")
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
            coordinator=self.coordinator,
        )
        self.starting.append(log_path)
        self.ask_nursery(
            {
                "start": {
                    "birth": worker.to_dict(),
                    "log_path": str(log_path),
                    "environment": environment,
                }
            }
        )

    def ask_nursery(self, request: dict[str, Any]) -> None:
        assert self.nursery.stdin is not None
        try:
            self.nursery.stdin.write(json.dumps(request).encode() + b"\n")
            self.nursery.stdin.flush()
        except BrokenPipeError:
            self.nursery_gone = True

    def report(self, event: dict[str, Any]) -> None:
        birth = self.birth
        if "started" in event:
            worker = _Worker(
                event["stage"], event["incarnation"], event["started"], self.starting.popleft()
            )
            self.workers[worker.pid] = worker
            self.client.send(
                WorkerStarted(
                    host_index=birth.host_index,
                    stage=worker.stage,
                    incarnation=worker.incarnation,
                    pid=worker.pid,
                )
            )
        elif "exited" in event:
            worker = self.workers.pop(event["exited"])
            self.client.send(
                WorkerExited(
                    host_index=birth.host_index,
                    stage=worker.stage,
                    incarnation=worker.incarnation,
                    pid=worker.pid,
                    status=event["status"],
                    log_path=str(worker.log_path),
                    log_tail=_tail(worker.log_path),
                    free_memory_bytes=psutil.virtual_memory().available,
                )
            )

    def read_nursery(self) -> None:
        """Pass on what the nursery says; runs in a thread of its own."""
        assert self.nursery.stdout is not None
        for line in self.nursery.stdout:
            self.events.append(json.loads(line))
            self.waker.wake()
        self.nursery_gone = True
        self.waker.wake()

    def watch_lifeline(self) -> None:
        """Notice that the launcher is gone; runs in a thread of its own."""
        while os.read(0, 1 << 12):
            pass
        self.lifeline_closed = True
        self.waker.wake()


def _tail(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - (1 << 14)))
            text = log.read().decode("utf-8", "replace")
    except OSError as error:
        return (f"(log cannot be read: {error})",)
    return tuple(line[:1000] for line in text.splitlines()[-_LOG_TAIL_LINES:])


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
    nursery = subprocess.Popen(
        [sys.executable, "-m", "spectrain.worker.nursery", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    waker = Waker()
    with tempfile.TemporaryDirectory(prefix="spectrain-") as ipc_dir:
        client = Client(
            zmq.Context.instance(),
            run_id=bytes.fromhex(birth.run_id),
            identity=f"agent/{birth.host_index}",
            endpoint=birth.control,
            server_key=birth.server_key,
            keys=birth.keys if birth.server_key else None,
        )
        coordinator = None
        if not birth.same_host:
            endpoint = urlsplit(birth.control)
            assert endpoint.hostname is not None
            assert endpoint.port is not None
            coordinator = (endpoint.hostname, endpoint.port)
        agent = _Agent(birth, client, waker, nursery, ipc_dir, coordinator)
        for name, work in (("nursery", agent.read_nursery), ("lifeline", agent.watch_lifeline)):
            threading.Thread(target=work, name=name, daemon=True).start()
        try:
            agent.serve()
        finally:
            # Its workers die with the nursery: their parent-death signal is its death.
            nursery.kill()
            nursery.wait()
            client.close()


if __name__ == "__main__":
    main()
