"""Whoever of a run dies: nobody is left behind, and the user learns who died first and of what."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.jobs import ENDLESS, MLP, write_job
from integration.launching import LAUNCH, Launch, launch, run_to_end
from waiting import wait_until

GONE_WITHIN_S = 15


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Launch]:
    """Yield a run of three stages that trains, repairs nothing, and would not end by itself."""
    job = write_job(tmp_path, ENDLESS)
    options = ("--stages", "3", "--lease", "5", "--max-restarts", "0")
    started = launch(tmp_path / "run", *options, job=job)
    try:
        started.wait_for_batch(5)
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def test_a_killed_launcher_takes_the_run_with_it(running: Launch) -> None:
    running.process.kill()
    running.wait_for_nobody(GONE_WITHIN_S)
    running.end()


def test_a_killed_coordinator_ends_the_run_and_is_named(running: Launch) -> None:
    running.role("coordinator").kill()
    running.wait_for_nobody(GONE_WITHIN_S)
    code, _, err = running.end()
    assert code == 128 + signal.SIGKILL
    assert "coordinator died" in err


def test_a_killed_agent_ends_the_run_and_is_named(running: Launch) -> None:
    running.role("agent").kill()
    running.wait_for_nobody(GONE_WITHIN_S)
    code, _, err = running.end()
    assert code == 1
    assert "agent lost" in err
    assert "localhost" in err


def test_a_killed_nursery_ends_the_run(running: Launch) -> None:
    running.role("nursery").kill()
    running.wait_for_nobody(GONE_WITHIN_S)
    assert running.end()[0] != 0


def test_a_killed_worker_is_the_first_cause_whatever_its_neighbours_say(running: Launch) -> None:
    workers = running.status()["workers"]
    victim = next(p for p in running.processes() if p.pid == workers[1]["pid"])
    victim.kill()
    running.wait_for_nobody(GONE_WITHIN_S)
    code, _, err = running.end()
    assert code == 128 + signal.SIGKILL
    assert "stage 1" in err
    assert "SIGKILL" in err
    assert running.status()["state"] == "failed"


def test_a_stopped_worker_is_found_by_its_silence(running: Launch) -> None:
    workers = running.status()["workers"]
    victim = next(p for p in running.processes() if p.pid == workers[1]["pid"])
    victim.suspend()
    code, _, err = running.end()
    assert code == 4
    assert "stage 1" in err
    running.wait_for_nobody(GONE_WITHIN_S)


def test_ctrl_c_finishes_the_batches_under_way_and_keeps_the_weights(running: Launch) -> None:
    running.process.send_signal(signal.SIGINT)
    code, _, _ = running.end()
    assert code == 130
    running.wait_for_nobody(1)
    summary = running.summary()
    assert summary["stopped_early"] is True
    assert summary["updates"] == len(running.losses())
    assert (running.run_dir / "model.safetensors").exists()
    assert running.status()["state"] == "stopped"


def test_sigterm_stops_cleanly_and_asks_to_be_run_again(running: Launch) -> None:
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 75
    running.wait_for_nobody(1)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    slow = ENDLESS.replace(
        "loss = nn.functional.cross_entropy",
        "def loss(outputs, targets):\n    import time\n    time.sleep(5)\n"
        "    return nn.functional.cross_entropy(outputs, targets)",
    )
    run = launch(tmp_path / "run", "--stages", "2", job=write_job(tmp_path, slow))
    wait_until(lambda: run.status().get("state") == "training", what="training", timeout_s=60)
    run.processes()
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    run.wait_for_nobody(GONE_WITHIN_S)


def test_an_exception_in_the_model_is_shown_with_stage_and_traceback(tmp_path: Path) -> None:
    broken = (
        MLP.replace("nn.Linear(width, 3))", "nn.Linear(width, 3), Broken())")
        + """
class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls > 4:
            raise ValueError("five is too many")
        return x
"""
    )
    options = ("--stages", "3", "--max-restarts", "0")
    run = launch(tmp_path / "run", *options, job=write_job(tmp_path, broken))
    code, _, err = run.end()
    assert code == 1
    assert "stage 2" in err
    assert "ValueError" in err
    assert "five is too many" in err
    assert "job.py" in err
    run.wait_for_nobody(GONE_WITHIN_S)


def test_a_loss_that_is_not_a_number_stops_the_run_with_its_own_code(tmp_path: Path) -> None:
    wild = write_job(tmp_path)
    run = launch(tmp_path / "run", "--stages", "2", "--set", "lr=1e30", job=wild)
    code, _, err = run.end()
    assert code == 6
    assert "NonFiniteError" in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n", "has no model"),
        (MLP.replace("nn.Sequential(*layers", "nn.ModuleList([*layers"), "SyntaxError"),
        (MLP.replace("loss = nn.functional.cross_entropy", "loss = 3"), "loss"),
    ],
)
def test_a_mistake_in_the_job_is_one_sentence_without_our_traceback(
    text: str, expected: str, tmp_path: Path
) -> None:
    run = launch(tmp_path / "run", "--stages", "2", job=write_job(tmp_path, text))
    code, _, err = run.end()
    assert code == 2
    assert expected in err
    assert "Traceback" not in err


def test_an_unknown_hyper_parameter_names_the_nearest(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "--stages", "2", "--set", "widht=4", job=write_job(tmp_path))
    code, _, err = run.end()
    assert code == 2
    assert "width" in err


def test_a_host_file_with_twelve_mistakes_lists_all_and_starts_nothing(tmp_path: Path) -> None:
    mistakes = (
        "node1 slots=0", "node2 slots=x", "node3 slot=2", "node4 gpus=", "node5 gpus=1,1",
        "node6 slots=3 gpus=0,1", "node7:", "node8:70000", "[fe80::1:4", "no de9", "@node10",
        "node11 gpus=-1",
    )  # fmt: skip
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("\n".join(mistakes) + "\n")
    argv = [LAUNCH, "--nodes", str(hosts), str(write_job(tmp_path))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    for number, line in enumerate(mistakes, start=1):
        assert f"hosts.txt:{number}:" in done.stderr, line
    assert not (tmp_path / "runs").exists()


def test_help_answers_without_torch() -> None:
    code = (
        "import sys\nsys.argv = ['spectrain-launch', '--help']\n"
        "from spectrain.launch.cli import launch\n"
        "try:\n    launch()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--stages" in done.stdout


def test_status_tells_of_a_finished_run(tmp_path: Path) -> None:
    run_to_end(tmp_path / "run", "--stages", "2", "--max-batches", "3", job=write_job(tmp_path))
    spectrain = str(Path(LAUNCH).with_name("spectrain"))
    done = subprocess.run(
        [spectrain, "status", str(tmp_path / "run"), "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    status = json.loads(done.stdout)
    assert status["state"] == "done"
    assert {"stage", "host", "pid", "incarnation", "last_batch", "state"} <= set(
        status["workers"][0]
    )


def test_a_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    argv = [LAUNCH, "--device", "cpu", "--stages", "3", "--dry-run", str(write_job(tmp_path))]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert len(done.stdout.strip().splitlines()) == 4
    assert not (tmp_path / "runs").exists()
