"""Imports torch and what the job needs once per host, then forks one worker per request.

It never runs the job, trains or connects.

Forking from a process that has torch in memory takes some 20 ms where a new interpreter takes
seconds, which makes both the start of a run and the rebirth of a worker quick. The nursery starts
no threads and touches no device, so that its children begin clean.

Requests come as JSON lines on stdin, events leave as JSON lines on stdout::

    {"start": {"birth": {...}, "log_path": "...", "environment": {...}}}
    {"kill": pid}
    {"ready": true}      once torch is imported
    {"started": pid, "stage": k, "incarnation": c}
    {"exited": pid, "status": code or minus the signal}

It dies with its agent (parent-death signal, and end of file on stdin), and its workers with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ..protocol.bootstrap import WorkerBirth
from ..protocol.job_file import imported_modules
from .heap import keep_freed_memory

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1

_IMPORTED_BY_OPTIMIZERS = "torch._dynamo"
"""torch imports it with the first optimizer it makes, which takes longer than all else there."""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent`` dies; end now if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


@dataclass
class _Nursery:
    requests: int = 0  # file descriptor of the agent's requests
    events: int = 1
    children: dict[int, int] = field(default_factory=dict[int, int])  # pidfd by pid
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    unread: bytes = b""

    def serve(self) -> None:
        """Answer requests until stdin ends, then end every worker."""
        self.selector.register(self.requests, selectors.EVENT_READ)
        self.say({"ready": True})
        while True:
            for key, _ in self.selector.select():
                if key.fd != self.requests:
                    self.reap(key.data)
                elif not self.read_requests():
                    self.end_all()
                    return

    def say(self, event: dict[str, Any]) -> None:
        os.write(self.events, json.dumps(event).encode() + b"\n")

    def read_requests(self) -> bool:
        """Handle what has come; tell whether more can come."""
        chunk = os.read(self.requests, 1 << 16)
        *lines, self.unread = (self.unread + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "start" in request:
                self.start(request["start"])
            else:
                self.kill(request["kill"])
        return bool(chunk)

    def start(self, request: dict[str, Any]) -> None:
        birth = WorkerBirth.from_dict(request["birth"])
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.become_worker(birth, request, parent)
        pidfd = os.pidfd_open(pid)
        self.children[pid] = pidfd
        self.selector.register(pidfd, selectors.EVENT_READ, pid)
        self.say(
            {"started": pid, "stage": birth.stage, "incarnation": birth.incarnation}
        )  # fmt: skip

    def become_worker(
        self, birth: WorkerBirth, request: dict[str, Any], parent: int
    ) -> NoReturn:  # fmt: skip
        """Turn this fork into the worker; only its exit code comes back."""
        code = 1
        try:
            die_with_parent(parent)
            os.setsid()
            self.selector.close()
            for pidfd in self.children.values():
                os.close(pidfd)
            _redirect_output(Path(request["log_path"]))
            os.environ.update(request["environment"])
            from .process import run_worker

            code = run_worker(birth)
        except BaseException:  # noqa: BLE001  a fork must never fall back into the parent's loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def kill(self, pid: int) -> None:
        """End a worker and its own children; they share its process group."""
        if pid in self.children:
            os.kill(pid, signal.SIGKILL)
            self.kill_group(pid)

    def kill_group(self, pid: int) -> None:
        # Safe while the worker is not reaped: its pid, and so the group's number, is still its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def reap(self, pid: int) -> None:
        self.kill_group(pid)
        _, wait_status = os.waitpid(pid, 0)
        pidfd = self.children.pop(pid)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        self.say({"exited": pid, "status": os.waitstatus_to_exitcode(wait_status)})

    def end_all(self) -> None:
        for pid in list(self.children):
            self.kill(pid)
        for pid, pidfd in self.children.items():
            os.waitpid(pid, 0)
            os.close(pidfd)


def _redirect_output(log_path: Path) -> None:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)
    # Buffers of the parent's stdout belong to its pipe; start with fresh, line-buffered ones.
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace")
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace")


def main() -> None:
    """Run the nursery; its parent is the agent."""
    die_with_parent(int(sys.argv[1]))
    # The agent decides when it ends; a Ctrl-C on the terminal is the launcher's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    # All that a worker needs is imported here, once for every fork to come.
    importlib.import_module(".process", __package__)
    for name in (_IMPORTED_BY_OPTIMIZERS, *imported_modules(Path(sys.argv[2]))):
        # What goes wrong here goes wrong in the worker again, with the user's own line.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    _Nursery().serve()


if __name__ == "__main__":
    main()
