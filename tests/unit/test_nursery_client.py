"""What the agent knows of its workers, with a process that only listens in the nursery's place."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from spectrain.launch import nursery_client
from spectrain.launch.nursery_client import NurseryClient
from spectrain.protocol.bootstrap import WorkerBirth
from spectrain.protocol.keys import KeyPair
from spectrain.protocol.messages import WorkerExited, WorkerStarted

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
LISTENING = "import sys; sys.stdin.read()"


class Nursery:
    """A client, and what the process at its other end has said back."""

    def __init__(self, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = subprocess.Popen

        def start(_: list[str], **options: Any) -> Any:
            return real([sys.executable, "-c", program], **options)

        monkeypatch.setattr(nursery_client.subprocess, "Popen", start)
        self.said: list[dict[str, Any] | None] = []
        self.client = NurseryClient(3, "job.py", self.said.append)

    def start(self, stage: int, log_path: Path) -> None:
        birth = WorkerBirth(
            run_id="00" * 16,
            stage=stage,
            incarnation=1,
            host="node3",
            device="cpu",
            job="job.py",
            control="ipc:///control",
            data="ipc:///data",
            server_key="",
            keys=KeyPair.new(),
            peer_keys=(),
            ipc_dir="/ipc",
            snapshot_dir="/snapshots",
            address=None,
            heartbeat_s=1.0,
            lease_s=10.0,
        )
        self.client.start(birth, log_path, {"OMP_NUM_THREADS": "1"})

    def born(self, stage: int, pid: int) -> WorkerStarted | WorkerExited | None:
        return self.client.understand({"started": pid, "stage": stage, "incarnation": 1})

    def requests(self, count: int) -> list[Any]:
        wait_until(lambda: len(self.said) >= count, what="the requests to come back")
        return self.said


@pytest.fixture
def nursery(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    nursery = Nursery(ECHO, monkeypatch)
    yield nursery
    nursery.client.close()


def test_a_request_holds_all_that_a_worker_needs(nursery: Nursery, tmp_path: Path) -> None:
    nursery.start(2, tmp_path / "log")
    (request,) = nursery.requests(1)
    assert request["start"]["log_path"] == str(tmp_path / "log")
    assert request["start"]["environment"] == {"OMP_NUM_THREADS": "1"}
    birth = WorkerBirth.from_dict(request["start"]["birth"])
    assert (birth.stage, birth.snapshot_dir) == (2, "/snapshots")


def test_a_birth_is_told_and_can_be_told_again(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.client.is_empty
    nursery.start(2, tmp_path / "log")
    started = WorkerStarted(host_index=3, stage=2, incarnation=1, pid=77)
    assert nursery.born(2, 77) == started
    assert nursery.client.living() == [started]
    assert not nursery.client.is_empty


def test_an_exit_is_told_with_the_end_of_the_right_log(nursery: Nursery, tmp_path: Path) -> None:
    for stage in (0, 1):
        log_path = tmp_path / f"log-{stage}"
        lines = [f"stage {stage} line {n}" for n in range(30)]
        log_path.write_text("\n".join([*lines, "x" * 2000]))
        nursery.start(stage, log_path)
    nursery.born(0, 70)
    nursery.born(1, 71)
    exited = nursery.client.understand({"exited": 71, "status": -9})
    assert isinstance(exited, WorkerExited)
    assert (exited.host_index, exited.stage, exited.pid, exited.status) == (3, 1, 71, -9)
    assert exited.log_path == str(tmp_path / "log-1")
    assert exited.log_tail == (*(f"stage 1 line {n}" for n in range(11, 30)), "x" * 1000)
    assert exited.free_memory_bytes > 0
    assert [started.stage for started in nursery.client.living()] == [0]


def test_a_log_that_cannot_be_read_says_so(nursery: Nursery, tmp_path: Path) -> None:
    nursery.start(0, tmp_path / "missing")
    nursery.born(0, 70)
    exited = nursery.client.understand({"exited": 70, "status": 1})
    assert isinstance(exited, WorkerExited)
    (line,) = exited.log_tail
    assert line.startswith("(log cannot be read: ")


def test_a_kill_goes_to_the_worker_meant(nursery: Nursery, tmp_path: Path) -> None:
    for stage in (0, 1):
        nursery.start(stage, tmp_path / "log")
        nursery.born(stage, 70 + stage)
    nursery.client.kill(1, 1)
    nursery.client.kill(0, 0)  # a former incarnation
    assert nursery.requests(3)[2:] == [{"kill": 71}]


def test_a_worker_that_is_not_born_yet_is_killed_at_birth(nursery: Nursery, tmp_path: Path) -> None:
    nursery.start(0, tmp_path / "log")
    nursery.client.kill(0, 1)
    nursery.born(0, 70)
    assert nursery.requests(2)[1:] == [{"kill": 70}]


def test_that_torch_is_imported_is_nobodys_news(nursery: Nursery) -> None:
    assert nursery.client.understand({"ready": True}) is None


def test_the_end_of_the_nursery_is_told(nursery: Nursery, tmp_path: Path) -> None:
    nursery.client._process.kill()
    wait_until(lambda: nursery.said == [None], what="the end to be told")
    nursery.start(0, tmp_path / "log")  # comes too late and harms nobody


def test_a_nursery_with_workers_gets_time_to_end_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    orderly = Nursery(LISTENING, monkeypatch)
    orderly.start(0, tmp_path / "log")
    orderly.born(0, 70)
    orderly.client.close()
    assert orderly.client._process.returncode == 0


def test_a_nursery_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nursery_client, "_ENDING_TIME_S", 0.1)
    hanging = Nursery("import time; time.sleep(600)", monkeypatch)
    hanging.start(0, tmp_path / "log")
    hanging.born(0, 70)
    hanging.client.close()
    assert hanging.client._process.returncode == -9


def test_requests_are_lines_of_json(nursery: Nursery, tmp_path: Path) -> None:
    nursery.start(0, tmp_path / 'a "quoted"\nname')
    (request,) = nursery.requests(1)
    assert json.loads(json.dumps(request)) == request
    assert request["start"]["log_path"].endswith('a "quoted"\nname')
