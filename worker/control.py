"""A worker's line to the coordinator: one thread that listens, reports and keeps the lease.

It never touches tensors. The training loop runs in another thread and meets it in three places:
``send``, ``wait_for`` and the progress it reads.
"""

from __future__ import annotations

import os
import queue
import resource
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from ..protocol.bootstrap import WorkerBirth
from ..protocol.errors import DeadlineError, ExitCode
from ..protocol.messages import (
    Heartbeat,
    Message,
    Progress,
    Quit,
    StageDone,
    WhoAreYou,
    WorkerConnected,
    WorkerHello,
    WorkerReady,
)
from ..protocol.sockets import Client, Waker

__all__ = ["Control", "peak_memory_bytes"]

_M = TypeVar("_M")

_FLUSH_S = 2.0
"""How long last words may take to leave this process."""

_FRESH_S = 10.0
_FRESH_REPORT_S = 0.05

LEASE_ENDED_STATUS = 75
"""Exit status of a worker that has not heard from the coordinator for its lease."""


class Control:
    """The control thread of one worker.

    Args:
        birth: who we are and whom to call.
        torch_version: told to the coordinator in the hello.
    """

    def __init__(self, birth: WorkerBirth, torch_version: str) -> None:
        self._birth = birth
        self._hello = WorkerHello(
            stage=birth.stage,
            incarnation=birth.incarnation,
            host=birth.host,
            pid=os.getpid(),
            torch=torch_version,
        )
        self._born = time.monotonic()
        self._waker = Waker()
        self._outgoing: deque[Message] = deque()
        self._incoming: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._handlers: dict[type[Message], Callable[[Any], None]] = {}
        self._told: dict[type[Message], Message] = {}  # what a restarted coordinator must hear
        self.progress: Callable[[int, int], Progress] | None = None
        """Set by the worker once there is something to report; called with (sent, dropped)."""
        self.on_restarted_coordinator: Callable[[], None] = lambda: None
        """Called in this thread after we have introduced ourselves again."""
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Say this to the coordinator; from any thread, never blocks."""
        if isinstance(message, WorkerReady | WorkerConnected | StageDone):
            self._told[type(message)] = message
        self._outgoing.append(message)
        self._waker.wake()

    def handle(self, kind: type[_M], handler: Callable[[_M], None]) -> None:
        """Let ``handler`` take every message of this kind, in the control thread, at once."""
        self._handlers[kind] = handler  # pyright: ignore[reportArgumentType]

    def wait_for(self, kind: type[_M], timeout_s: float, what: str) -> _M:
        """Return the next message of this kind; others that come before it are not expected.

        Raises:
            DeadlineError: it did not come within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                message = self._incoming.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DeadlineError(
                    f"stage {self._birth.stage} waited {timeout_s:g} s for {what} "
                    "from the coordinator"
                ) from None
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        """Send what is still to be sent and end the thread."""
        self._closing.set()
        self._waker.wake()
        self._thread.join(timeout=2 * _FLUSH_S)
        self._waker.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # noqa: BLE001  a worker that cannot be reached must not live on
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(ExitCode.WORKER_FAILED)

    def _serve(self) -> None:
        birth = self._birth
        # A context of its own, so that ending it waits for last words and nothing else.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        client = Client(
            context,
            run_id=bytes.fromhex(birth.run_id),
            identity=birth.identity,
            endpoint=birth.control,
            server_key=birth.server_key,
            keys=birth.keys if birth.server_key else None,
            heartbeat_s=birth.heartbeat_s,
            lease_s=birth.lease_s,
        )
        client.send(self._hello)
        heard = spoke = time.monotonic()
        while True:
            received = client.receive(self._report_every_s(time.monotonic()) / 2, self._waker.fd)
            self._waker.clear()
            now = time.monotonic()
            if received is not None:
                heard = now
                self._take(received[0])
            while self._outgoing:
                message = self._outgoing.popleft()
                if isinstance(message, StageDone):
                    self._report(client)  # the times of the whole run
                client.send(message)
            if now - spoke >= self._report_every_s(now):
                self._report(client)
                spoke = now
            if self._closing.is_set() and not self._outgoing:
                client.close(flush_s=_FLUSH_S)
                context.term()
                return
            if now - heard > birth.lease_s:
                print(  # noqa: T201  the worker's log
                    f"no word from the coordinator for {birth.lease_s:g} s: ending",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(LEASE_ENDED_STATUS)

    def _report_every_s(self, now: float) -> float:
        """A restarted worker is watched more closely until it has caught up."""
        fresh = self._birth.incarnation > 0 and now - self._born < _FRESH_S
        return _FRESH_REPORT_S if fresh else self._birth.heartbeat_s

    def _report(self, client: Client) -> None:
        report = self.progress
        dropped = sum(client.dropped.values())
        client.send(Heartbeat() if report is None else report(client.sent, dropped))

    def _take(self, message: Message) -> None:
        if isinstance(message, Quit):
            # All that matters is delivered or given up; the training thread may be in a wait that
            # only ends with the process.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        handler = self._handlers.get(type(message))
        if isinstance(message, WhoAreYou):
            self._outgoing.extend((self._hello, *self._told.values()))
            self.on_restarted_coordinator()
        elif handler is not None:
            handler(message)
        elif not isinstance(message, Heartbeat):
            self._incoming.put(message)


def peak_memory_bytes() -> int:
    """Return the most memory this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
