"""The process that forks workers, with the test in its agent's place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from waiting import wait_until
from worker_birth import RUN_ID, worker_birth

from spectrain.protocol.messages import Quit, WorkerHello
from spectrain.protocol.sockets import Server

LONG_S = 60.0


class Nursery:
    """A nursery, and the coordinator that its workers call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = zmq.Context()
        self.server = Server(self.context, run_id=bytes.fromhex(RUN_ID), ipc=folder / "c")
        job = folder / "job.py"
        job.write_text("import colorsys\nimport no_such_module\n")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spectrain.worker.nursery", str(os.getpid()), str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def say(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def start(self, stage: int = 0, *, environment: dict[str, str] | None = None) -> int:
        """Start a worker and return its pid."""
        birth = worker_birth(stage=stage, incarnation=2, control=self.server.ipc_endpoint)
        log_path = str(self.log(stage))
        request = {"birth": birth.to_dict(), "log_path": log_path, "environment": environment or {}}
        self.say({"start": request})
        started = self.hear()
        assert (started["stage"], started["incarnation"]) == (stage, 2)
        return started["started"]

    def wait_for_hello(self, stage: int) -> WorkerHello:
        def hello() -> WorkerHello | None:
            received = self.server.receive(LONG_S)
            assert received is not None
            is_it = isinstance(received.message, WorkerHello) and received.message.stage == stage
            return received.message if is_it else None

        return wait_until(hello, what="a hello", timeout_s=LONG_S, interval_s=0)

    def log(self, stage: int) -> Path:
        return self.folder / "logs" / f"{stage}.log"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.server.close()
        self.context.term()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Return a nursery that is ready; it takes seconds to become so."""
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    assert nursery.hear() == {"ready": True}
    yield nursery
    nursery.close()


def test_a_worker_is_forked_with_torch_in_memory_and_calls_the_coordinator(
    nursery: Nursery,
) -> None:
    pid = nursery.start(1)
    hello = nursery.wait_for_hello(1)
    assert (hello.pid, hello.incarnation) == (pid, 2)
    assert psutil.Process(pid).ppid() == nursery.process.pid
    assert nursery.server.send("worker/1/2", Quit())
    assert nursery.hear() == {"exited": pid, "status": 0}


def test_a_worker_is_a_session_of_its_own(nursery: Nursery) -> None:
    pid = nursery.start(2)
    nursery.wait_for_hello(2)
    assert os.getsid(pid) == os.getpgid(pid) == pid
    nursery.say({"kill": pid})
    assert nursery.hear() == {"exited": pid, "status": -signal.SIGKILL}


def test_a_worker_that_dies_by_itself_is_told_with_its_signal(nursery: Nursery) -> None:
    pid = nursery.start(3)
    nursery.wait_for_hello(3)
    os.kill(pid, signal.SIGTERM)
    assert nursery.hear() == {"exited": pid, "status": -signal.SIGTERM}


def test_what_a_worker_gets_into_its_environment_and_says_is_its_own(nursery: Nursery) -> None:
    pid = nursery.start(4, environment={"SPECTRAIN_FAULTS": "no such fault"})
    assert nursery.hear() == {"exited": pid, "status": 1}
    log = nursery.log(4).read_text()
    assert "Traceback" in log
    assert "no such fault" in log


def test_the_next_worker_of_a_stage_adds_to_its_log(nursery: Nursery) -> None:
    nursery.log(5).write_text("what was before\n")
    pid = nursery.start(5, environment={"SPECTRAIN_FAULTS": "no such fault"})
    assert nursery.hear()["exited"] == pid
    assert nursery.log(5).read_text().startswith("what was before\nTraceback")


def test_a_process_that_is_none_of_its_workers_is_not_killed(nursery: Nursery) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        nursery.say({"kill": bystander.pid})
        pid = nursery.start(6)  # the request before was read by now
        assert bystander.poll() is None
    nursery.say({"kill": pid})
    assert nursery.hear()["exited"] == pid


def test_ctrl_c_is_not_its_business(nursery: Nursery) -> None:
    os.kill(nursery.process.pid, signal.SIGINT)
    pid = nursery.start(7)
    nursery.say({"kill": pid})
    assert nursery.hear()["exited"] == pid
    assert nursery.process.poll() is None


def test_the_end_of_its_requests_is_the_end_of_all_workers(nursery: Nursery) -> None:
    """The last of this file: nothing can be asked of that nursery after it."""
    workers = [psutil.Process(nursery.start(stage)) for stage in (8, 9)]
    assert nursery.process.stdin is not None
    nursery.process.stdin.close()
    assert nursery.process.wait(LONG_S) == 0
    assert not any(worker.is_running() for worker in workers)


def test_a_nursery_whose_agent_is_already_dead_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spectrain.worker.nursery", "1", "job.py"],
        stdin=subprocess.DEVNULL,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == 1
