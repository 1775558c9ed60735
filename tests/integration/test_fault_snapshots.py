"""Snapshots that are half written, lost or damaged: a whole one is found, no other is used."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from integration.launching import Launch
from integration.surviving import GONE_WITHIN_S, Trial, wait_for_losses, worker_of
from waiting import wait_until


def test_workers_die_at_every_point_of_a_round(tmp_path: Path) -> None:
    """Row 5: in the copy, before the file has its name, before the report, at the commit."""
    trial = Trial(folder=tmp_path)
    run = trial.start(
        "stage=1 phase=snapshot-capture nth=3 action=kill",
        "stage=2 phase=snapshot-write nth=4 action=kill",
        "stage=0 phase=snapshot-written nth=5 action=kill",
        "stage=3 phase=commit nth=6 action=kill",
    )
    trial.check(run, incarnations=(1, 1, 1, 1))


def shared_memory_of(run: Launch) -> Path:
    """Return the directory where this host's snapshots are."""
    agent = run.role("agent")

    def lock() -> Path | None:
        paths = (Path(file.path) for file in agent.open_files())
        return next((path for path in paths if path.is_relative_to("/dev/shm")), None)

    return wait_until(lock, what="the agent's directory", timeout_s=60).parent


def flip_a_byte(snapshot: Path) -> None:
    content = bytearray(snapshot.read_bytes())
    content[len(content) // 2] ^= 1
    snapshot.write_bytes(content)


def truncate(snapshot: Path) -> None:
    snapshot.write_bytes(snapshot.read_bytes()[:-100])


def replace_by_another_stages(snapshot: Path) -> None:
    other = next(snapshot.parent.glob("stage-3.update-*.safetensors"))
    snapshot.write_bytes(other.read_bytes())


def stop_and_damage(
    run: Launch, victim: psutil.Process, stage: int, damage: Callable[[Path], None]
) -> Path:
    """Stop a worker, wait until its committed snapshot is on disk, damage what is in memory.

    Returns:
        The copy on disk.
    """
    memory = shared_memory_of(run)
    victim.suspend()  # so that it writes no newer ones

    def committed_on_disk() -> Path | None:
        own = memory.glob(f"stage-{stage}.update-*.safetensors")
        newest = max(int(path.name.split(".")[1].removeprefix("update-")) for path in own)
        checkpoint = run.run_dir / "checkpoints" / f"update-{newest}"
        commit = json.loads((run.run_dir / "commit.json").read_text())
        is_committed = commit["catalogue"]["committed"] == newest
        is_whole = is_committed and (checkpoint / "host-0.json").exists()
        return checkpoint / f"stage-{stage}.safetensors" if is_whole else None

    on_disk = wait_until(committed_on_disk, what="a committed round on disk")
    for snapshot in memory.glob(f"stage-{stage}.update-*.safetensors"):
        damage(snapshot)
    return on_disk


def test_damaged_snapshots_are_never_loaded_and_the_disk_has_whole_ones(tmp_path: Path) -> None:
    """Rows 28 and 29."""
    trial = Trial(folder=tmp_path, epochs=80)
    run = trial.start()
    damages: list[Callable[[Path], None]] = [flip_a_byte, truncate, replace_by_another_stages]
    for stage, damage in enumerate(damages):
        wait_for_losses(run, 80 * (stage + 1))
        victim = worker_of(run, stage)
        stop_and_damage(run, victim, stage, damage)
        victim.kill()
        worker_of(run, stage, 1)
    trial.check(run, incarnations=(1, 1, 1, 0))


@pytest.mark.chaos
def test_a_round_that_is_damaged_everywhere_is_given_up_for_an_older_one(tmp_path: Path) -> None:
    """Row 28, the rung below: all stages go back to a checkpoint, and lose only time."""
    trial = Trial(folder=tmp_path, epochs=80)
    run = trial.start()
    wait_for_losses(run, 80)
    victim = worker_of(run, 1)
    flip_a_byte(stop_and_damage(run, victim, 1, truncate))
    victim.kill()
    told = trial.check(run, incarnations=(1, 2, 1, 1), restarts=2)
    assert "stage 1 on localhost died: SnapshotError" in told
    assert "all stages go back to update" in told


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 64 KiB where checkpoints go."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "spectrain-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_and_training_goes_on(small_disk: Path, tmp_path: Path) -> None:
    """Row 26: rounds stay in shared memory, and a worker comes back from there."""
    (small_disk / "filler").write_bytes(bytes(60_000))
    trial = Trial(folder=tmp_path)
    run = trial.start("stage=1 phase=backward op=B40 action=kill")
    told = trial.check(run, incarnations=(0, 1, 0, 0))
    assert "checkpoint on localhost failed" in told
    assert "No space left" in told


@pytest.fixture
def small_memory() -> Sequence[str]:
    """Return what gives the program after it 4 MiB of shared memory of its own."""
    mount = 'mount -t tmpfs -o size=4m spectrain-test /dev/shm; exec "$@"'
    within = ("unshare", "--mount", "sh", "-euc", mount, "sh")
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("a shared memory of its own needs root")
    return within


def test_too_little_shared_memory_is_refused_before_training(
    small_memory: Sequence[str], tmp_path: Path
) -> None:
    """Row 27: with the size that is needed, and no worker dies of it later."""
    run = Trial(folder=tmp_path, hyper={"width": "256"}).start(within=small_memory)
    code, out, err = run.end()
    told = out + err
    assert code == 7, told
    message = run.status()["cause"]["message"]
    assert re.search(r"/dev/shm/.* has 4 MiB free, and .* need up to \d+ MiB", message), message
    assert "--snapshot-every 0" in told
    assert "SIGBUS" not in told
    assert run.losses() == []
    run.wait_for_nobody(GONE_WITHIN_S)


def test_a_run_without_snapshots_needs_no_shared_memory(
    small_memory: Sequence[str], tmp_path: Path
) -> None:
    """Row 27: what the refusal advises."""
    options = ("--snapshot-every", "0")
    trial = Trial(folder=tmp_path, epochs=3, hyper={"width": "256"}, options=options)
    trial.check(trial.start(within=small_memory), incarnations=(0, 0, 0, 0))
