"""Workers die at every point of their work; the run ends as if nothing had happened.

The rows of the fault matrix that kill one or more workers; snapshots, hangs and other processes
have files of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.surviving import Trial, wait_for_losses, worker_of


@pytest.mark.parametrize(
    ("method", "hyper"),
    [
        ("spectrain", {}),
        ("spectrain", {"adamw": "true"}),
        pytest.param("vanilla", {}, marks=pytest.mark.chaos),
        pytest.param("stash", {}, marks=pytest.mark.chaos),
        pytest.param("xpipe", {}, marks=pytest.mark.chaos),
        pytest.param("vertical-sync", {}, marks=pytest.mark.chaos),
        ("sync", {}),
    ],
    ids=["spectrain", "adamw", "vanilla", "stash", "xpipe", "vertical-sync", "sync"],
)
def test_each_stage_is_killed_in_turn(method: str, hyper: dict[str, str], tmp_path: Path) -> None:
    """Rows 1 and 11."""
    trial = Trial(folder=tmp_path, method=method, hyper=hyper, epochs=80)
    run = trial.start()
    before = [worker_of(run, stage).pid for stage in range(4)]
    for stage in range(4):
        wait_for_losses(run, 60 * (stage + 1))
        others = [worker_of(run, other, int(other < stage)).pid for other in range(4)]
        worker_of(run, stage).kill()
        reborn = worker_of(run, stage, 1)
        now = [worker_of(run, other, int(other <= stage)).pid for other in range(4)]
        assert now == [*others[:stage], reborn.pid, *others[stage + 1 :]]
        assert reborn.pid != before[stage]
    trial.check(run, incarnations=(1, 1, 1, 1))


def test_workers_die_at_every_point_of_their_loop(tmp_path: Path) -> None:
    """Rows 2 to 4: in the warm-up, between and within ops, and in the middle of a parcel."""
    trial = Trial(folder=tmp_path)
    run = trial.start(
        "stage=0 phase=sent op=F2 action=kill",
        "stage=3 phase=forward op=F0 action=kill",
        "stage=1 phase=take op=B12 action=kill",
        "stage=2 phase=backward op=B18 action=kill",
        "stage=3 phase=update op=U24 action=kill incarnation=1",
        "stage=2 phase=sent op=B30 action=kill incarnation=1",
        "stage=1 phase=updated op=U36 action=kill incarnation=1",
        "stage=0 phase=transmit op=F44 action=kill incarnation=1",
        "stage=3 phase=receive op=F50 action=kill incarnation=2",
        "stage=1 phase=transmit op=B56 action=kill incarnation=2",
        "stage=0 phase=receive op=B62 action=kill incarnation=2",
        "stage=2 phase=take op=E6.0 action=kill incarnation=2",
    )
    trial.check(run, incarnations=(3, 3, 3, 3))


def test_a_worker_dies_again_while_it_comes_back(tmp_path: Path) -> None:
    """Rows 6 and 31: during restore, link building and replay of the same stage."""
    trial = Trial(folder=tmp_path)
    run = trial.start(
        "stage=1 phase=backward op=B23 action=kill",
        "stage=1 phase=restore action=kill incarnation=1",
        "stage=1 phase=link action=kill incarnation=2",
        "stage=2 phase=backward op=B43 action=kill",
        "stage=2 phase=linked action=kill incarnation=1",
        "stage=2 phase=replay action=kill incarnation=2",
        "stage=0 phase=backward op=B58 action=kill",
        "stage=0 phase=forward op=F57 action=kill incarnation=1",
    )
    trial.check(run, incarnations=(2, 3, 3, 0))


def test_a_neighbour_dies_while_a_stage_replays(tmp_path: Path) -> None:
    """Row 7: what breaks every protocol that restores a stage from its own newest snapshot."""
    trial = Trial(folder=tmp_path)
    run = trial.start(
        "stage=1 phase=backward op=B29 action=kill",
        "stage=2 phase=transmit op=B27 nth=2 action=kill",
        "stage=2 phase=backward op=B49 action=kill incarnation=1",
        "stage=1 phase=transmit op=F47 nth=2 action=kill incarnation=1",
    )
    trial.check(run, incarnations=(0, 2, 2, 0))


def test_several_stages_die_at_once(tmp_path: Path) -> None:
    """Rows 8 to 10: two apart, two and three in a row, all."""
    trial = Trial(folder=tmp_path, epochs=80)
    run = trial.start()
    lives = [0, 0, 0, 0]
    for number, group in enumerate([(0, 2), (1, 2), (1, 2, 3), (0, 1, 2, 3)], start=1):
        wait_for_losses(run, 60 * number)
        victims = [worker_of(run, stage, lives[stage]) for stage in group]
        for victim in victims:
            victim.kill()
        for stage in group:
            lives[stage] += 1
    trial.check(run, incarnations=lives)
