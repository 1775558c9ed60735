"""``spectrain status``: a run as its directory tells it, alive, ended, lost or unreadable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from spectrain.launch.status import read_status, render_status
from spectrain.protocol.errors import UserError

WORKER = {
    "stage": 0, "host": "node1", "pid": 42, "incarnation": 0, "last_batch": 7, "state": "training",
}  # fmt: skip


def status(**changes: Any) -> dict[str, Any]:
    return {
        "state": "training", "workers": [WORKER],
        "coordinator": {"pid": 40, "host": "here", "started": 100.0},
        "updated": 1000.0, "batch": 8, "train_batches": 20, "metrics": {}, "cause": None,
        **changes,
    }  # fmt: skip


def write(run_dir: Path, **changes: Any) -> Path:
    (run_dir / "status.json").write_text(json.dumps(status(**changes)))
    return run_dir


def read(run_dir: Path, *, alive: bool, now: float = 1001.0, host: str = "here") -> dict[str, Any]:
    return read_status(run_dir, now=now, host=host, is_alive=lambda _pid, _started: alive)


def test_a_running_run_is_told_as_it_stands(tmp_path: Path) -> None:
    told = read(write(tmp_path), alive=True)
    assert told == status()
    assert told["workers"] == [WORKER]


def test_a_run_whose_coordinator_died_is_lost(tmp_path: Path) -> None:
    told = read(write(tmp_path), alive=False, now=1007.0)
    assert told["state"] == "lost"
    assert "process 40 on here, ended without a word 0:07 ago" in told["explanation"]
    assert str(tmp_path / "logs") in told["explanation"]


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_a_run_that_ended_stays_ended_though_its_coordinator_is_gone(
    tmp_path: Path, state: str
) -> None:
    assert read(write(tmp_path, state=state), alive=False)["state"] == state


def test_a_run_that_ended_comes_with_its_summary(tmp_path: Path) -> None:
    write(tmp_path, state="done")
    (tmp_path / "summary.json").write_text('{"updates": 20}')
    assert read(tmp_path, alive=False)["summary"] == {"updates": 20}


def test_a_run_of_another_host_is_believed_while_it_is_fresh(tmp_path: Path) -> None:
    assert read(write(tmp_path), alive=False, host="there") == status()


def test_a_run_of_another_host_that_is_not_fresh_is_doubted(tmp_path: Path) -> None:
    told = read(write(tmp_path), alive=False, host="there", now=1090.0)
    assert told["state"] == "training"
    assert "1:30 ago by process 40 on here" in told["explanation"]


# -- which process ------------------------------------------------------------------------------


def own_coordinator(started: float) -> dict[str, Any]:
    return {"pid": os.getpid(), "host": "here", "started": started}


def test_the_process_is_looked_up_on_this_host(tmp_path: Path) -> None:
    write(tmp_path, coordinator=own_coordinator(psutil.Process().create_time()))
    assert read_status(tmp_path, host="here")["state"] == "training"


def test_another_process_with_the_same_pid_is_not_the_coordinator(tmp_path: Path) -> None:
    write(tmp_path, coordinator=own_coordinator(psutil.Process().create_time() - 3600))
    assert read_status(tmp_path, host="here")["state"] == "lost"


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        started = psutil.Process(child.pid).create_time()
        assert child.stdout.read() == b""
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
        write(tmp_path, coordinator={"pid": child.pid, "host": "here", "started": started})
        assert read_status(tmp_path, host="here")["state"] == "lost"


def test_a_pid_that_nobody_has_is_dead(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        started = psutil.Process(child.pid).create_time()
        child.wait()
        write(tmp_path, coordinator={"pid": child.pid, "host": "here", "started": started})
        assert read_status(tmp_path, host="here")["state"] == "lost"


def test_this_hosts_name_is_asked_of_the_system(tmp_path: Path) -> None:
    write(tmp_path, coordinator={"pid": 1, "host": "no host's name", "started": 0.0})
    assert "explanation" in read_status(tmp_path)


# -- mistakes -----------------------------------------------------------------------------------


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"runs/none is not a directory"):
        read_status(tmp_path / "runs" / "none")


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"status\.json does not exist") as raised:
        read_status(tmp_path)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"state": "done"}', '"done"'])
def test_a_file_that_is_no_status_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(UserError, match=r"status\.json cannot be read as the status of a run"):
        read_status(tmp_path)


# -- for people ---------------------------------------------------------------------------------


def test_the_text_shows_state_progress_and_workers() -> None:
    assert render_status(status(metrics={"accuracy": 0.5})).splitlines() == [
        "state: training",
        "batch 8/20",
        "test: accuracy 0.5",
        "stage  host   pid  incarnation  last batch  state",
        "    0  node1   42            0           7  training",
    ]


def test_the_text_of_a_start_up_shows_who_is_missing() -> None:
    text = render_status(
        status(state="starting", workers=[], batch=0, waiting_for=["stage 0: starting"])
    )
    assert text.splitlines() == ["state: starting", "waiting for stage 0: starting"]


def test_the_text_of_a_failed_or_lost_run_says_why() -> None:
    cause = {"what": "ValueError", "message": "shapes differ"}
    assert "first cause: ValueError: shapes differ" in render_status(status(cause=cause))
    assert "it vanished" in render_status(status(state="lost", explanation="it vanished"))
