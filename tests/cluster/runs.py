"""Runs of the real command on test hosts: starts one, finds and kills its processes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster.hosts import Cluster
from waiting import wait_until

__all__ = ["DIGITS", "END_S", "START_S", "Run", "launch_command", "lives"]

BIN = Path(sys.executable).parent
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
START_S = 90.0
END_S = 15.0


def launch_command(run_dir: Path, *options: str, job: Path = DIGITS) -> list[str]:
    every_run = ["--device", "cpu", "--seed", "0"]
    return [str(BIN / "spectrain-launch"), *every_run, f"--run-dir={run_dir}", *options, str(job)]


def lives(process: psutil.Process) -> bool:
    """Tell whether a process runs: one that nobody has waited for yet does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@dataclass(frozen=True)
class Run:
    """A run on the cluster that its test has started."""

    cluster: Cluster
    run_dir: Path
    log: Path
    stages: int
    door_keeper: subprocess.Popen[bytes]

    @classmethod
    def start(
        cls,
        cluster: Cluster,
        directory: Path,
        *options: str,
        stages: int = 5,
        job: Path = DIGITS,
        run_dir: Path | None = None,
    ) -> Run:
        """Launch from the host called "launch" on all others, with two slots on each."""
        hosts, log = directory / "hosts.txt", directory / "log"
        hosts.write_text("".join(f"{name} slots=2\n" for name in cluster if name != "launch"))
        run_dir = run_dir or directory / "run"
        options = (f"--nodes={hosts}", f"--stages={stages}", *options)
        command = launch_command(run_dir, *options, job=job)
        return cls(cluster, run_dir, log, stages, cluster["launch"].start(command, output=log))

    def exit_code(self, *, timeout_s: float) -> int:
        try:
            return self.door_keeper.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.left()}\n{self.output()}") from None

    def output(self) -> str:
        return self.log.read_text()

    def summary(self) -> dict[str, Any]:
        return json.loads(self._read("summary.json"))

    def losses(self) -> list[float]:
        """Return the loss of every trained batch, in order."""
        records = map(json.loads, self._read("metrics.jsonl").splitlines())
        return [record["loss"] for record in records if record["kind"] == "train"]

    def status(self) -> dict[str, Any]:
        command = [str(BIN / "spectrain"), "status", str(self.run_dir), "--json"]
        answer = self.cluster["launch"].run(command, check=False)
        return json.loads(answer.stdout) if answer.returncode == 0 else {"workers": []}

    def wait_until_all_train(self) -> None:
        def all_train() -> bool:
            assert self.door_keeper.poll() is None, self.output()
            workers = self.status()["workers"]
            return len(workers) == self.stages and all(w["last_batch"] >= 1 for w in workers)

        wait_until(all_train, what="all stages to train", timeout_s=START_S, interval_s=0.5)

    def left(self, *names: str) -> list[str]:
        """Return what still runs of it on these hosts, or on any; a host's sshd is the host's."""
        lines: list[str] = []
        for name in names or self.cluster:
            for process in self.cluster[name].processes():
                with suppress(psutil.NoSuchProcess):
                    if lives(process) and not process.name().startswith("sshd"):
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

    def workers(self, host: str) -> list[psutil.Process]:
        """Return the workers on ``host``: a nursery's children, which look like itself."""
        alike = [p for p in self.cluster[host].processes() if "nursery" in " ".join(p.cmdline())]
        pids = {process.pid for process in alike}
        return [process for process in alike if process.ppid() in pids]

    def ssh_connection(self, host: str) -> psutil.Process:
        """Return the client on "launch" that holds the line to the agent of ``host``."""
        on_launch = self.cluster["launch"].processes()
        (found,) = (p for p in on_launch if p.name() == "ssh" and host in p.cmdline())
        return found

    def kill_worker(self, stage: int) -> None:
        (worker,) = (w for w in self.status()["workers"] if w["stage"] == stage)
        self.cluster[worker["host"]].run(["kill", "-KILL", str(worker["pid"])])

    def _read(self, name: str) -> str:
        """Return a file of the run directory as "launch" sees it."""
        return self.cluster["launch"].run(["cat", str(self.run_dir / name)]).stdout
