"""Workers that hang, raise or are slow: hangs become deaths, errors are retried, slow is slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.jobs import NOISY
from integration.surviving import Trial, wait_for_losses, worker_of


def test_hangs_of_every_kind_are_found_and_become_deaths(tmp_path: Path) -> None:
    """Rows 12 and 15: a stopped process, a loop without end, and one that keeps the GIL."""
    trial = Trial(folder=tmp_path, options=("--lease", "3", "--wait-timeout", "10"))
    run = trial.start(
        "stage=1 phase=backward op=B20 action=stop",
        "stage=2 phase=forward op=F31 action=hang",
        "stage=0 phase=forward op=F45 action=freeze",
    )
    told = trial.check(run, incarnations=(1, 1, 1, 0))
    assert told.count("on localhost hangs") == 3


@pytest.mark.chaos
def test_a_short_stop_has_no_consequence(tmp_path: Path) -> None:
    """Row 13."""
    trial = Trial(folder=tmp_path, epochs=40, options=("--lease", "20"))
    run = trial.start()
    for stage in range(4):
        wait_for_losses(run, 40 * (stage + 1))
        worker = worker_of(run, stage)
        worker.suspend()
        wait_for_losses(run, 40 * (stage + 1))  # reads files; the others stand still meanwhile
        worker.resume()
    trial.check(run, incarnations=(0, 0, 0, 0))


def test_an_exception_that_does_not_come_again_is_survived(tmp_path: Path) -> None:
    """Row 16, and a worker that ends by itself."""
    trial = Trial(folder=tmp_path)
    run = trial.start(
        "stage=2 phase=forward op=F20 action=raise",
        "stage=1 phase=update op=U33 action=exit",
    )
    told = trial.check(run, incarnations=(0, 1, 1, 0))
    assert "InjectedError" in told
    assert "exit code 3" in told


def test_an_exception_that_always_comes_ends_the_run_and_names_stage_and_op(
    tmp_path: Path,
) -> None:
    """Row 17: replayed, then all rolled back, then given up."""
    run = Trial(folder=tmp_path).start("stage=2 phase=backward op=B20 action=raise incarnation=any")
    code, out, err = run.end()
    told = out + err
    assert code == 1
    assert "all stages roll back" in told
    assert "B20 failed 4 times" in told
    assert "InjectedError" in told
    assert "stage 2" in told
    run.wait_for_nobody(15)


MISFIT = (
    NOISY
    + """
import os
from pathlib import Path
from spectrain.worker.stream_log import LoggedParcel

def put_short(parcel, number, put=LoggedParcel.of):
    logged = put(parcel, number)
    once = Path(__file__).with_name("once")
    if os.environ.get("SPECTRAIN_STAGE") == "1" and str(parcel.op) == "F29" and not once.exists():
        once.touch()
        logged.tensors = [tensor[1:] for tensor in logged.tensors]
    return logged

LoggedParcel.of = put_short
"""
)
"""A job that plants a mistake in the program: one parcel has fewer samples than it says."""


def test_a_parcel_that_is_not_as_large_as_it_says_does_not_leave(tmp_path: Path) -> None:
    """Row 32: its receiver would take what comes behind it for the rest."""
    trial = Trial(folder=tmp_path, job=MISFIT)
    told = trial.check(trial.start(), incarnations=(0, 1, 0, 0))
    assert "stage 1 on localhost died: ProtocolError" in told


SLOW = (
    NOISY.replace(
        "    return nn.Sequential(*layers, nn.Linear(width, 3))",
        "    return nn.Sequential(*layers, nn.Linear(width, 3), Slow())",
    )
    + """
import random, time

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.02 + random.Random(x.sum().item()).expovariate(1 / 0.02))
        return x
"""
)


@pytest.mark.chaos
def test_a_slow_and_jittery_stage_is_left_alone(tmp_path: Path) -> None:
    """Row 30: with logs that are full most of the time."""
    options = ("--lease", "2", "--wait-timeout", "5", "--log-memory", "10000")
    trial = Trial(folder=tmp_path, job=SLOW, epochs=5, options=options)
    trial.check(trial.start(), incarnations=(0, 0, 0, 0))
