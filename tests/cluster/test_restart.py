"""Processes, cables and hosts fail while a run trains; it ends with the bits of a quiet one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from cluster.hosts import Cluster, cluster_of
from cluster.runs import Run, lives
from waiting import wait_until

from spectrain.coordinator.export import weights_sha256
from spectrain.coordinator.plan import make_plan
from spectrain.protocol.job import load_job
from spectrain.protocol.settings import Settings
from spectrain.worker.pipeline import run_in_one_process

JOB = """
import time
from torch import nn
from spectrain.examples import digits
from spectrain.examples.digits import datasets, loss, metrics, optimizer

class Pause(nn.Module):
    def __init__(self, pause_s):
        super().__init__()
        self.pause_s = pause_s

    def forward(self, x):
        time.sleep(self.pause_s)
        return x

def model(pause_s: float = 0.0):
    return nn.Sequential(nn.BatchNorm1d(64), nn.Dropout(0.1), *digits.model(32), Pause(pause_s))

settings = {"epochs": 10, "batch_size": 64}
"""
"""A pause in each forward of the last stage leaves time to break something; it changes no bit."""

STAGES = 4  # two each on the first and the second node
OPTIONS = ("--set", "pause_s=0.03", "--snapshot-every", "5")
LEASE_S = 4
SHORT_LEASE = ("--lease", str(LEASE_S))
END_S = 100.0
GONE_WITHIN_S = 15.0


class Quiet(NamedTuple):
    """What a run ends with if nothing happens to it."""

    sha256: str
    losses: list[float]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.py"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="module")
def quiet(job: Path) -> Quiet:
    torch.set_num_threads(1)  # like a worker; sums depend on it
    settings = Settings(job=str(job), run_dir="", stages=STAGES, epochs=10, batch_size=64)
    plan = make_plan(settings)
    outcome = run_in_one_process(load_job(job), settings, plan.feed, plan.layer_counts)
    return Quiet(weights_sha256(outcome.state), [batch.loss for batch in outcome.batches])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    names = ("launch", "node1", "node2", "node3")
    with cluster_of(*names, directory=tmp_path / "cluster") as cluster:
        yield cluster


def train(
    cluster: Cluster, directory: Path, job: Path, *options: str, run_dir: Path | None = None
) -> Run:
    """Start a run and return when all its stages train."""
    run = Run.start(
        cluster, directory, *OPTIONS, *options, stages=STAGES, job=job, run_dir=run_dir
    )  # fmt: skip
    run.wait_until_all_train()
    return run


def end(run: Run, quiet: Quiet) -> list[int]:
    """Let the run end as a quiet one does; return how often each stage was started again."""
    assert run.exit_code(timeout_s=END_S) == 0, run.output()
    run.wait_until_nothing_is_left()
    assert run.losses() == quiet.losses
    assert run.summary()["weights_sha256"] == quiet.sha256
    workers = sorted(run.status()["workers"], key=lambda worker: worker["stage"])
    return [worker["incarnation"] for worker in workers]


def hosts_of(run: Run) -> list[str]:
    workers = sorted(run.status()["workers"], key=lambda worker: worker["stage"])
    return [worker["host"] for worker in workers]


def wait_for_moves(run: Run, host: str, former: list[psutil.Process]) -> None:
    """Wait until node2's stages are given to ``host``; by then their former workers are dead."""

    def moved() -> bool:
        assert run.door_keeper.poll() is None, run.output()
        return f"moves from node2 to {host}" in run.output()

    wait_until(moved, what="stages to move", timeout_s=60)
    assert [process for process in former if lives(process)] == []


def test_a_killed_worker_is_started_again_on_its_host(
    cluster: Cluster, tmp_path: Path, job: Path, quiet: Quiet
) -> None:
    run = train(cluster, tmp_path, job)
    run.kill_worker(stage=2)
    assert end(run, quiet) == [0, 0, 1, 0]
    assert hosts_of(run) == ["node1", "node1", "node2", "node2"]


def test_a_killed_agent_is_started_again_over_ssh_with_its_workers(
    cluster: Cluster, tmp_path: Path, job: Path, quiet: Quiet
) -> None:
    run = train(cluster, tmp_path, job)
    run.find("node2", "spectrain.launch.agent").kill()
    assert end(run, quiet) == [0, 0, 1, 1]
    assert hosts_of(run) == ["node1", "node1", "node2", "node2"]


def test_an_agent_whose_ssh_client_is_killed_ends_and_is_started_again(
    cluster: Cluster, tmp_path: Path, job: Path, quiet: Quiet
) -> None:
    run = train(cluster, tmp_path, job)
    run.ssh_connection("node2").kill()
    assert end(run, quiet) == [0, 0, 1, 1]
    assert hosts_of(run) == ["node1", "node1", "node2", "node2"]


def test_a_host_that_is_cut_off_for_good_gives_its_stages_to_spare_slots(
    cluster: Cluster, tmp_path: Path, job: Path, quiet: Quiet
) -> None:
    run = train(cluster, tmp_path, job, *SHORT_LEASE)
    workers = run.workers("node2")
    assert len(workers) == 2
    cluster["node2"].cut()
    wait_for_moves(run, "node3", workers)
    assert end(run, quiet) == [0, 0, 1, 1]
    assert hosts_of(run) == ["node1", "node1", "node3", "node3"]


def test_a_host_that_freezes_and_wakes_after_its_stages_have_moved_has_no_say(
    cluster: Cluster, tmp_path: Path, job: Path, quiet: Quiet
) -> None:
    """Nobody can end its workers before others replace them, as if all signals were lost."""
    run = train(cluster, tmp_path, job, *SHORT_LEASE)
    frozen = [p for p in cluster["node2"].processes() if not p.name().startswith("sshd")]
    assert len(run.workers("node2")) == 2
    for process in frozen:
        process.suspend()
    before = run.status()["batch"]
    wait_until(lambda: run.status()["batch"] > before + 30, what="others to go on", timeout_s=60)
    for process in frozen:
        process.resume()
    assert run.status()["state"] == "training"
    psutil.wait_procs(frozen, timeout=2 * LEASE_S + GONE_WITHIN_S)
    assert [process for process in frozen if lives(process)] == []
    assert end(run, quiet) == [0, 0, 1, 1]
    assert hosts_of(run) == ["node1", "node1", "node3", "node3"]


def test_a_host_that_is_cut_off_for_three_seconds_changes_nothing(
    cluster: Cluster, tmp_path: Path, job: Path, quiet: Quiet
) -> None:
    run = train(cluster, tmp_path, job)
    before = run.status()["batch"]
    cluster["node2"].cut_for(seconds=3)
    wait_until(lambda: run.status()["batch"] > before + 10, what="training", timeout_s=30)
    assert end(run, quiet) == [0, 0, 0, 0]


def test_a_host_that_reaches_its_neighbours_only_gives_its_stages_away(
    cluster: Cluster, tmp_path: Path, job: Path, quiet: Quiet
) -> None:
    run = train(cluster, tmp_path, job, *SHORT_LEASE)
    workers = run.workers("node2")
    assert len(workers) == 2
    cluster["node2"].block(cluster["launch"])
    wait_for_moves(run, "node3", workers)
    assert end(run, quiet) == [0, 0, 1, 1]
    assert hosts_of(run) == ["node1", "node1", "node3", "node3"]


def test_two_hosts_that_cannot_reach_each_other_for_long_go_on_by_a_new_link(
    cluster: Cluster, tmp_path: Path, job: Path, quiet: Quiet
) -> None:
    run = train(cluster, tmp_path, job)
    node1, node2 = cluster["node1"], cluster["node2"]
    node1.block(node2)
    node2.block(node1)
    wait_until(lambda: "has lost a link" in run.output(), what="a link to break", timeout_s=40)
    node1.unblock(node2)
    node2.unblock(node1)
    assert end(run, quiet) == [0, 0, 0, 0]


def test_a_lost_host_is_replaced_from_copies_in_memory_without_a_shared_disk(
    tmp_path: Path, job: Path, quiet: Quiet
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    names = ("launch", "node1", "node2", "node3")
    with cluster_of(*names, directory=tmp_path / "cluster", private=private) as cluster:
        run = train(cluster, tmp_path, job, *SHORT_LEASE, run_dir=private / "run")
        workers = run.workers("node2")
        assert len(workers) == 2
        cluster["node2"].close()
        wait_for_moves(run, "node3", workers)
        assert end(run, quiet) == [0, 0, 1, 1]
        assert hosts_of(run) == ["node1", "node1", "node3", "node3"]


def test_without_spare_slots_stages_share_those_that_are_left(
    tmp_path: Path, job: Path, quiet: Quiet
) -> None:
    names = ("launch", "node1", "node2")
    with cluster_of(*names, directory=tmp_path / "cluster") as cluster:
        run = train(cluster, tmp_path, job, *SHORT_LEASE)
        workers = run.workers("node2")
        assert len(workers) == 2
        cluster["node2"].close()
        wait_for_moves(run, "node1", workers)
        assert end(run, quiet) == [0, 0, 1, 1]
        assert hosts_of(run) == ["node1"] * 4
