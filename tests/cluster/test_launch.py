"""The real command over real ssh: the right weights, and no process left whatever dies."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path

import pytest
from cluster.hosts import Cluster, cluster_of
from cluster.namespaces import program_of
from cluster.runs import END_S, START_S, Run, launch_command

NODES = ("node1", "node2", "node3")
PLACES = ["node1", "node1", "node2", "node2", "node3"]  # of five stages; the sixth slot is spare
SHORT = ("--epochs", "1", "--max-batches", "20")
ENDLESS = ("--epochs", "1000000")
FRAGILE = ("--max-restarts", "0")  # the first death is the end


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_of("launch", *NODES, directory=tmp_path / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def local_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights after the short run with all five workers on this computer."""
    run_dir = tmp_path_factory.mktemp("local") / "run"
    command = launch_command(run_dir, "--stages", "5", *SHORT)
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=150)
    return json.loads((run_dir / "summary.json").read_text())["weights_sha256"]


def test_three_hosts_train_to_the_weights_of_five_local_workers(
    cluster: Cluster, tmp_path: Path, local_digest: str
) -> None:
    run = Run.start(cluster, tmp_path, *SHORT)
    assert run.exit_code(timeout_s=START_S) == 0, run.output()
    run.wait_until_nothing_is_left()
    workers = sorted(run.status()["workers"], key=itemgetter("stage"))
    assert [worker["host"] for worker in workers] == PLACES
    assert run.summary()["updates"] == 20
    assert run.summary()["weights_sha256"] == local_digest


def test_a_slow_cable_changes_no_weight(
    cluster: Cluster, tmp_path: Path, local_digest: str
) -> None:
    cluster["node2"].throttle(rate_bytes_per_s=1_000_000)
    run = Run.start(cluster, tmp_path, *SHORT)
    assert run.exit_code(timeout_s=START_S) == 0, run.output()
    assert run.summary()["weights_sha256"] == local_digest


def test_no_shared_file_system_is_needed_for_the_run_directory(
    tmp_path: Path, local_digest: str
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    names = ("launch", *NODES)
    with cluster_of(*names, directory=tmp_path / "cluster", private=private) as cluster:
        run = Run.start(cluster, tmp_path, *SHORT, run_dir=private / "run")
        assert run.exit_code(timeout_s=START_S) == 0, run.output()
        assert run.summary()["weights_sha256"] == local_digest
        run_dir = cluster.seen_by("launch", run.run_dir)
        assert (run_dir / "model.safetensors").is_file()


def test_hosts_out_of_reach_are_all_named_before_anything_starts(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster["node2"].cut()
    cluster["node3"].cut()
    run = Run.start(cluster, tmp_path, *SHORT)
    assert run.exit_code(timeout_s=60) == 3
    assert "node2" in run.output()
    assert "node3" in run.output()
    run.wait_until_nothing_is_left()
    assert not (run.run_dir / "summary.json").exists()


VICTIMS: dict[str, tuple[Callable[[Run], object], set[int], tuple[str, ...]]] = {
    # what is killed with SIGKILL: how, the exit codes that are right, what the cause names
    "launcher": (lambda run: program_of(run.door_keeper).kill(), {-9}, ()),
    "coordinator": (lambda run: run.find("launch", "spectrain.coordinator").kill(), {137}, ()),
    "agent": (lambda run: run.find("node2", "spectrain.launch.agent").kill(), {1}, ("node2",)),
    "ssh": (lambda run: run.ssh_connection("node2").kill(), {1}, ("node2",)),
    "worker": (lambda run: run.kill_worker(stage=3), {137}, ("stage 3", "node2", "SIGKILL")),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_whatever_is_killed_no_process_is_left_anywhere(
    victim: str, cluster: Cluster, tmp_path: Path
) -> None:
    kill, exit_codes, named = VICTIMS[victim]
    run = Run.start(cluster, tmp_path, *ENDLESS, *FRAGILE)
    run.wait_until_all_train()
    kill(run)
    run.wait_until_nothing_is_left()
    assert run.exit_code(timeout_s=1) in exit_codes, run.output()
    for word in named:
        assert word in run.output()


def test_a_host_that_falls_silent_ends_the_run_on_both_sides(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = Run.start(cluster, tmp_path, *ENDLESS, *FRAGILE)
    run.wait_until_all_train()
    cluster["node2"].cut()
    # The lease of 10 s has to run out first, here as there.
    assert run.exit_code(timeout_s=10 + END_S) in {1, 4}, run.output()
    assert "node2" in run.output()
    run.wait_until_nothing_is_left()


def test_ctrl_c_stops_the_run_everywhere(cluster: Cluster, tmp_path: Path) -> None:
    run = Run.start(cluster, tmp_path, *ENDLESS)
    run.wait_until_all_train()
    program_of(run.door_keeper).send_signal(2)
    assert run.exit_code(timeout_s=30) == 130, run.output()
    run.wait_until_nothing_is_left()
    assert (run.run_dir / "model.safetensors").is_file()
