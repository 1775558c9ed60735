"""A run that ended before its time goes on in another launch, and loses nothing by it."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integration.launching import LAUNCH, Launch
from integration.surviving import GONE_WITHIN_S, Trial, losses_of
from waiting import wait_until

from spectrain.coordinator.export import weights_sha256

STOPPED_BY_HAND = 130
REFUSED = 2


def started(folder: Path, method: str = "spectrain") -> tuple[Trial, Launch]:
    """Start a run and wait for a checkpoint, in the middle of its training."""
    trial = Trial(folder=folder, stages=3, method=method, epochs=100)
    run = trial.start()
    wait_until(lambda: committed(run) > 0, what="a committed round", timeout_s=90)
    checkpoints = run.run_dir / "checkpoints"
    wait_until(lambda: any(checkpoints.glob("*/host-*.json")), what="a checkpoint", timeout_s=60)
    return trial, run


def committed(run: Launch) -> int:
    """Return the newest round that is written down; 0 before there is one."""
    run.processes()
    path = run.run_dir / "commit.json"
    return json.loads(path.read_text())["catalogue"]["committed"] if path.exists() else 0


def stop_by_hand(run: Launch) -> None:
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.end()
    assert code == STOPPED_BY_HAND, f"exit code {code}\n{out}\n{err}"
    run.wait_for_nobody(GONE_WITHIN_S)


def resume(run: Launch, *options: str) -> subprocess.CompletedProcess[str]:
    """Go on with a run, to its end."""
    return subprocess.run(
        [LAUNCH, "--resume", str(run.run_dir), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def evaluations(run: Launch) -> list[tuple[int, float, dict[str, float]]]:
    """Return round, loss and metrics of every evaluation that is written down."""
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [
        (record["round"], record["loss"], record["metrics"])
        for record in records
        if record["kind"] == "evaluation"
    ]


def check(trial: Trial, run: Launch, done: subprocess.CompletedProcess[str]) -> None:
    """Hold the run, after it was resumed, against one that nothing happened to."""
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    assert "going on from the checkpoint after update " in told
    outcome = trial.quiet()
    assert run.summary()["weights_sha256"] == weights_sha256(outcome.state)
    assert run.losses() == losses_of(outcome)
    assert evaluations(run) == [(e.round, e.loss, e.metrics) for e in outcome.evaluations]


@pytest.mark.parametrize("method", ["spectrain", "sync"])
def test_a_run_stopped_by_hand_goes_on_and_ends_as_if_it_had_not_been(
    method: str, tmp_path: Path
) -> None:
    trial, run = started(tmp_path, method)
    stop_by_hand(run)
    assert run.summary()["stopped_early"]
    assert 0 < run.summary()["updates"] < trial.epochs * 7
    check(trial, run, resume(run))
    assert not run.summary()["stopped_early"]


def test_a_run_whose_launcher_was_killed_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    trial, run = started(tmp_path)
    run.process.kill()
    run.end()
    run.wait_for_nobody(GONE_WITHIN_S)
    assert not (run.run_dir / "summary.json").exists()
    check(trial, run, resume(run))


def test_a_run_is_not_resumed_as_another_one(tmp_path: Path) -> None:
    _, run = started(tmp_path)
    stop_by_hand(run)
    before = (run.run_dir / "metrics.jsonl").read_bytes()
    refused = resume(run, "--seed", "7")
    assert refused.returncode == REFUSED
    assert "--seed would make another run of it" in refused.stderr
    assert (run.run_dir / "metrics.jsonl").read_bytes() == before
    no_run = subprocess.run(
        [LAUNCH, "--resume", str(tmp_path / "nothing")], capture_output=True, text=True, check=False
    )
    assert no_run.returncode == REFUSED
    assert "name the run directory of an earlier launch" in no_run.stderr


def test_a_finished_run_can_only_be_made_longer(tmp_path: Path) -> None:
    trial = Trial(folder=tmp_path, stages=2, epochs=6)
    run = trial.start()
    assert run.end()[0] == 0
    again = resume(run)
    assert again.returncode == REFUSED
    assert "that run is done; with --epochs it can be made longer" in again.stderr
    longer = Trial(folder=tmp_path, stages=2, epochs=8)
    check(longer, run, resume(run, "--epochs", "8"))
