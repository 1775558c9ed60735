"""The agent's end of the nursery's pipes: asks for workers, knows which live. Decides nothing.

One thread reads what the nursery says and hands it over untouched; everything else happens in the
agent's own thread, which gives each event back to ``understand``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..protocol.bootstrap import WorkerBirth
from ..protocol.messages import WorkerExited, WorkerStarted

__all__ = ["NurseryClient", "NurseryEvent"]

NurseryEvent = dict[str, Any]

_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 1 << 14
_LINE_LENGTH = 1000
_ENDING_TIME_S = 5.0


@dataclass(frozen=True, slots=True)
class _Worker:
    stage: int
    incarnation: int
    pid: int
    log_path: Path


class NurseryClient:
    """A nursery of its own, and the workers that it has.

    Args:
        host_index: of this host, for the messages.
        job: path of the job file, whose imports the nursery makes beforehand.
        on_event: takes what the nursery says, in the reading thread; None: the nursery is gone.
    """

    def __init__(
        self, host_index: int, job: str, on_event: Callable[[NurseryEvent | None], None]
    ) -> None:
        self._host_index = host_index
        self._on_event = on_event
        self._workers: dict[int, _Worker] = {}  # by pid
        self._starting: deque[Path] = deque()  # logs of forks under way; they end in order
        self._doomed: set[tuple[int, int]] = set()  # to be killed as soon as they are born
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spectrain.worker.nursery", str(os.getpid()), job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._read, name="nursery", daemon=True)
        self._thread.start()

    @property
    def is_empty(self) -> bool:
        """Whether no worker lives."""
        return not self._workers

    def start(self, birth: WorkerBirth, log_path: Path, environment: Mapping[str, str]) -> None:
        """Ask for a worker; its output goes to ``log_path``."""
        self._starting.append(log_path)
        request = {
            "birth": birth.to_dict(),
            "log_path": str(log_path),
            "environment": dict(environment),
        }
        self._ask({"start": request})

    def kill(self, stage: int, incarnation: int) -> None:
        """Ask for the end of a worker, stopped or not; its exit is told like any other."""
        if self._starting:
            self._doomed.add((stage, incarnation))  # it may be among these
        for worker in self._workers.values():
            if (worker.stage, worker.incarnation) == (stage, incarnation):
                self._ask({"kill": worker.pid})

    def understand(self, event: NurseryEvent) -> WorkerStarted | WorkerExited | None:
        """Take note of an event and return what the coordinator should hear of it."""
        if "started" in event:
            worker = _Worker(
                event["stage"], event["incarnation"], event["started"], self._starting.popleft()
            )
            self._workers[worker.pid] = worker
            if (worker.stage, worker.incarnation) in self._doomed:
                self._ask({"kill": worker.pid})
            return self._started(worker)
        if "exited" in event:
            worker = self._workers.pop(event["exited"])
            return WorkerExited(
                host_index=self._host_index,
                stage=worker.stage,
                incarnation=worker.incarnation,
                pid=worker.pid,
                status=event["status"],
                log_path=str(worker.log_path),
                log_tail=_tail(worker.log_path),
                free_memory_bytes=psutil.virtual_memory().available,
            )
        return None

    def living(self) -> list[WorkerStarted]:
        """Return the start of every living worker, to be told again."""
        return [self._started(worker) for worker in self._workers.values()]

    def close(self) -> None:
        """End the nursery and every worker of it."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        if not self.is_empty:
            # At the end of its input it kills its workers and sees them gone.
            with suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_TIME_S)
        process.kill()  # what is left then dies with it, by its parent-death signal
        process.wait()
        self._thread.join()
        process.stdout.close()

    def _started(self, worker: _Worker) -> WorkerStarted:
        return WorkerStarted(
            host_index=self._host_index,
            stage=worker.stage,
            incarnation=worker.incarnation,
            pid=worker.pid,
        )

    def _ask(self, request: dict[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            os.write(stdin.fileno(), json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            return  # the reading thread tells that the nursery is gone

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        for line in stdout:
            self._on_event(json.loads(line))
        self._on_event(None)


def _tail(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError as error:
        return (f"(log cannot be read: {error})",)
    return tuple(line[:_LINE_LENGTH] for line in text.splitlines()[-_LOG_TAIL_LINES:])
