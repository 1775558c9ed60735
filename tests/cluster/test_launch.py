"""The real command over real ssh: the right weights, and no process left whatever dies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster.hosts import Cluster, cluster_of
from cluster.namespaces import program_of
from waiting import wait_until

BIN = Path(sys.executable).parent
JOB = Path(__file__).parents[2] / "examples" / "digits.py"
NODES = ("node1", "node2", "node3")
HOST_FILE = "".join(f"{name} slots=2\n" for name in NODES)
PLACES = ["node1", "node1", "node2", "node2", "node3"]  # of five stages; the sixth slot is spare
START_S = 90.0
END_S = 15.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_of("launch", *NODES, directory=tmp_path / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def local_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights after the short run with all five workers on this computer."""
    run_dir = tmp_path_factory.mktemp("local") / "run"
    command = launch_command(run_dir, *SHORT)
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=150)
    return summary(run_dir)["weights_sha256"]


SHORT = ("--epochs", "1", "--max-batches", "20")
ENDLESS = ("--epochs", "1000000")


def launch_command(run_dir: Path, *options: str) -> list[str]:
    every_run = ["--device", "cpu", "--stages", "5", "--seed", "0"]
    return [str(BIN / "spectrain-launch"), *every_run, f"--run-dir={run_dir}", *options, str(JOB)]


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


@dataclass(frozen=True)
class Run:
    """A run on the cluster that its test has started."""

    cluster: Cluster
    run_dir: Path
    log: Path
    door_keeper: subprocess.Popen[bytes]

    @classmethod
    def start(cls, cluster: Cluster, directory: Path, *options: str) -> Run:
        hosts, run_dir, log = directory / "hosts.txt", directory / "run", directory / "log"
        hosts.write_text(HOST_FILE)
        command = launch_command(run_dir, f"--nodes={hosts}", *options)
        return cls(cluster, run_dir, log, cluster["launch"].start(command, output=log))

    def exit_code(self, *, timeout_s: float) -> int:
        try:
            return self.door_keeper.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.left()}\n{self.output()}") from None

    def output(self) -> str:
        return self.log.read_text()

    def status(self) -> dict[str, Any]:
        command = [str(BIN / "spectrain"), "status", str(self.run_dir), "--json"]
        answer = self.cluster["launch"].run(command, check=False)
        return json.loads(answer.stdout) if answer.returncode == 0 else {"workers": []}

    def wait_until_all_train(self) -> None:
        def all_train() -> bool:
            assert self.door_keeper.poll() is None, self.output()
            workers = self.status()["workers"]
            return len(workers) == len(PLACES) and all(w["last_batch"] >= 1 for w in workers)

        wait_until(all_train, what="all stages to train", timeout_s=START_S, interval_s=0.5)

    def left(self) -> list[str]:
        """Return what still runs of it, on any host; a host's sshd is the host's."""
        lines: list[str] = []
        for name, host in self.cluster.items():
            for process in host.processes():
                with suppress(psutil.NoSuchProcess):
                    if process.name() != "sshd":
                        lines.append(f"{name}: {process.pid} {' '.join(process.cmdline())[:120]}")
        return lines

    def wait_until_nothing_is_left(self, timeout_s: float = END_S) -> None:
        try:
            wait_until(lambda: not self.left(), what="the run to end", timeout_s=timeout_s)
        except TimeoutError:
            pytest.fail(f"left after {timeout_s:g} s: {self.left()}\n{self.output()}")

    def find(self, host: str, part: str) -> psutil.Process:
        """Return the one process on ``host`` whose command line holds ``part``."""
        (found,) = (p for p in self.cluster[host].processes() if part in " ".join(p.cmdline()))
        return found

    def kill_worker(self, stage: int) -> None:
        (worker,) = (w for w in self.status()["workers"] if w["stage"] == stage)
        self.cluster[worker["host"]].run(["kill", "-KILL", str(worker["pid"])])


def test_three_hosts_train_to_the_weights_of_five_local_workers(
    cluster: Cluster, tmp_path: Path, local_digest: str
) -> None:
    run = Run.start(cluster, tmp_path, *SHORT)
    assert run.exit_code(timeout_s=START_S) == 0, run.output()
    run.wait_until_nothing_is_left()
    workers = sorted(run.status()["workers"], key=itemgetter("stage"))
    assert [worker["host"] for worker in workers] == PLACES
    assert summary(run.run_dir)["updates"] == 20
    assert summary(run.run_dir)["weights_sha256"] == local_digest


def test_a_slow_cable_changes_no_weight(
    cluster: Cluster, tmp_path: Path, local_digest: str
) -> None:
    cluster["node2"].throttle(rate_bytes_per_s=1_000_000)
    run = Run.start(cluster, tmp_path, *SHORT)
    assert run.exit_code(timeout_s=START_S) == 0, run.output()
    assert summary(run.run_dir)["weights_sha256"] == local_digest


def test_no_shared_file_system_is_needed_for_the_run_directory(
    tmp_path: Path, local_digest: str
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    names = ("launch", *NODES)
    with cluster_of(*names, directory=tmp_path / "cluster", private=private) as cluster:
        cluster["launch"].run(["sh", "-c", f"echo '{HOST_FILE}' > {private}/hosts.txt"])
        command = launch_command(private / "run", f"--nodes={private}/hosts.txt", *SHORT)
        cluster["launch"].run(command, timeout_s=START_S)
        run_dir = cluster.seen_by("launch", private / "run")
        assert summary(run_dir)["weights_sha256"] == local_digest
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
    "ssh": (lambda run: ssh_connection(run, "node2").kill(), {1}, ("node2",)),
    "worker": (lambda run: run.kill_worker(stage=3), {137}, ("stage 3", "node2", "SIGKILL")),
}


def ssh_connection(run: Run, host: str) -> psutil.Process:
    on_launch = run.cluster["launch"].processes()
    (found,) = (p for p in on_launch if p.name() == "ssh" and host in p.cmdline())
    return found


@pytest.mark.parametrize("victim", VICTIMS)
def test_whatever_is_killed_no_process_is_left_anywhere(
    victim: str, cluster: Cluster, tmp_path: Path
) -> None:
    kill, exit_codes, named = VICTIMS[victim]
    run = Run.start(cluster, tmp_path, *ENDLESS)
    run.wait_until_all_train()
    kill(run)
    run.wait_until_nothing_is_left()
    assert run.exit_code(timeout_s=1) in exit_codes, run.output()
    for word in named:
        assert word in run.output()


def test_a_host_that_falls_silent_ends_the_run_on_both_sides(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = Run.start(cluster, tmp_path, *ENDLESS)
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
