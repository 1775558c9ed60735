"""What a coordinator does with very many workers: its share of a core, and how soon it answers.

    python benchmarks/coordinator_load.py [--workers 256 --workers 1000] [--json PATH]

The coordinator is the real process with its real sockets, encrypted, over TCP. Its peers are
simulated (``simulated_fleet.py``): they say all that the agents and workers of a run at 10 batches
a second would say, and ask for the batches. The time of a control message is that from a question
to its answer by the control loop, through all that waits there; the question is that of an agent
that the coordinator does not know. Such times count only if the loop was not kept from the cores.

First comes a quiet window, in which everybody reports, then one with snapshot rounds, of which
each worker and each replica is told of, and which are committed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import psutil
from simulated_fleet import Line, Run, serve_fleet
from tables import print_table, write_json

from spectrain.protocol.bootstrap import CoordinatorBirth
from spectrain.protocol.keys import KeyPair
from spectrain.protocol.messages import Heartbeat, LauncherHello, RunEnded, StopRequested, View
from spectrain.protocol.settings import Settings

JOB = Path(__file__).with_name("long_chain.py")
SLOTS = 8  # workers on a host
BATCHES_PER_S = 10.0
ROUND_SPREAD_S = 5.0  # a round's snapshots come within this time; of a real pipeline, more slowly
PROBES_PER_S = 10
START_TIMEOUT_S = 120.0
TARGET_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Window:
    """What was seen in one stretch of time.

    Attributes:
        cpu_share: of one core.
        starved_share: of the time, in which the control loop could have run but other programs had
            the cores.
        messages: to and from the coordinator.
        answers_s: times of control messages, ascending.
        commits: rounds that were committed in it.
    """

    seconds: float
    cpu_share: float
    starved_share: float
    messages: int
    answers_s: list[float]
    commits: int

    def row(self) -> dict[str, Any]:
        return {
            "share of a core": round(self.cpu_share, 2),
            "kept from it": round(self.starved_share, 2),
            "messages/s": round(self.messages / self.seconds),
            "messages/batch": round(self.messages / self.seconds / BATCHES_PER_S, 1),
            "answer ms, median": round(1000 * statistics.median(self.answers_s), 2),
            "99 %": round(1000 * self.answers_s[int(0.99 * len(self.answers_s))], 2),
            "worst": round(1000 * self.answers_s[-1], 2),
            "rounds committed": self.commits,
        }


class Coordinator:
    """The process, and the two who speak with it from here: the launcher and the stranger."""

    def __init__(self, process: subprocess.Popen[str], run: Run, keys: dict[str, KeyPair]) -> None:
        self._process = process
        self._psutil = psutil.Process(process.pid)
        self._launcher = Line(run, "launcher", keys["launcher"])
        self._stranger = Line(run, "agent/9999", keys["agent/9999"])
        self._launcher.send(LauncherHello(pid=os.getpid()))

    def wait_until_training(self) -> float:
        """Return the seconds until all workers were told to train."""
        started = time.monotonic()
        while time.monotonic() - started < START_TIMEOUT_S:
            message = self._launcher.next(1.0)
            if isinstance(message, View) and message.state == "training":
                return time.monotonic() - started
            if isinstance(message, RunEnded):
                raise SystemExit(f"the run ended: {message.cause}")
        raise SystemExit(f"no training after {START_TIMEOUT_S:g} s")

    def watch(self, seconds: float, fleet: Connection) -> Window:
        """Measure for so long."""
        messages, commits = _ask(fleet)
        cpu_s, starved_s, started = self._cpu_s(), self._starved_s(), time.monotonic()
        answers_s: list[float] = []
        while time.monotonic() - started < seconds:
            answers_s.append(self._probe())
            while self._launcher.next() is not None:
                pass
            time.sleep(1 / PROBES_PER_S)
        spent_s = time.monotonic() - started
        messages_after, commits_after = _ask(fleet)
        return Window(
            seconds=spent_s,
            cpu_share=(self._cpu_s() - cpu_s) / spent_s,
            starved_share=(self._starved_s() - starved_s) / spent_s,
            messages=messages_after - messages,
            answers_s=sorted(answers_s),
            commits=len(commits_after) - len(commits),
        )

    def end(self) -> None:
        """Abort the run and wait for the process."""
        self._launcher.send(StopRequested(reason="Ctrl-C", abort=True))
        while not isinstance(self._launcher.next(60.0), RunEnded):
            pass
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _cpu_s(self) -> float:
        times = self._psutil.cpu_times()
        return times.user + times.system

    def _starved_s(self) -> float:
        """Return how long the main thread has waited for a core that others had."""
        _, waited_ns, _ = Path(f"/proc/{self._process.pid}/schedstat").read_text().split()
        return int(waited_ns) / 1e9

    def _probe(self) -> float:
        asked = time.monotonic()
        self._stranger.send(Heartbeat())
        if self._stranger.next(60.0) is None:
            raise SystemExit("the coordinator did not answer for 60 s")
        return time.monotonic() - asked


@contextmanager
def _started(workers: int, every: int, folder: Path) -> Generator[tuple[Coordinator, Connection]]:
    """Start a coordinator and the peers of its run."""
    hosts = -(-workers // SLOTS)
    keys = [[KeyPair.new() for _ in range(1 + SLOTS)] for _ in range(hosts)]
    ours = {name: KeyPair.new() for name in ("launcher", "agent/9999")}
    allowed = {own[0].public: f"agent/{index}" for index, own in enumerate(keys)}
    allowed |= {pair.public: "worker/" for own in keys for pair in own[1:]}
    allowed |= {pair.public: name for name, pair in ours.items()}
    settings = Settings(
        job=str(JOB), run_dir=str(folder / "run"), stages=workers, hyper={"layers": workers},
        batch_size=8, epochs=1_000_000, partition="equal", snapshot_every=every,
    )  # fmt: skip
    birth = CoordinatorBirth(
        run_id=secrets.token_hex(16),
        settings=settings,
        hosts=tuple(f"node{index}" for index in range(hosts)),
        ipc_dir=str(folder),
        tcp_address="127.0.0.1",
        ports=(0, 0),
        resumes=False,
        is_restarted=False,
        keys=KeyPair.new(),
        allowed=allowed,
    )
    with (folder / "coordinator.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "spectrain.coordinator"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(birth.to_json() + "\n")
    process.stdin.flush()
    endpoints = json.loads(process.stdout.readline())
    run = Run(
        run_id=bytes.fromhex(birth.run_id),
        control=endpoints["control_tcp"],
        data=endpoints["data_tcp"],
        server_key=birth.keys.public,
        stages=workers,
        batches_per_s=BATCHES_PER_S,
        round_spread_s=ROUND_SPREAD_S,
        heartbeat_s=settings.heartbeat_s,
    )
    ours_end, theirs = multiprocessing.get_context("spawn").Pipe()
    fleet = multiprocessing.get_context("spawn").Process(
        target=serve_fleet, args=(theirs, run, keys), daemon=True
    )
    fleet.start()
    theirs.close()
    try:
        yield Coordinator(process, run, ours), ours_end
    finally:
        ours_end.close()
        process.kill()
        process.wait()
        fleet.join(60)


def _ask(fleet: Connection) -> tuple[int, dict[int, float]]:
    fleet.send("how much?")
    return fleet.recv()


def measure(workers: int, seconds: float) -> list[dict[str, Any]]:
    """Return the rows of one number of workers."""
    # The first round is due when the quiet window is over.
    every = int(BATCHES_PER_S * (seconds + 2))
    with (
        tempfile.TemporaryDirectory(prefix="spectrain-load-") as folder,
        _started(workers, every, Path(folder)) as (coordinator, fleet),
    ):
        start_s = coordinator.wait_until_training()
        windows = {name: coordinator.watch(seconds, fleet) for name in ("quiet", "rounds")}
        coordinator.end()
    common = {"workers": workers, "start s": round(start_s, 1)}
    return [{**common, "window": name, **window.row()} for name, window in windows.items()]


@click.command()
@click.option("--workers", "counts", multiple=True, default=(256, 1000), show_default=True)
@click.option("--seconds", default=15.0, show_default=True, help="Of each window.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(counts: tuple[int, ...], seconds: float, json_path: Path | None) -> None:
    """Print one row per number of workers and window."""
    rows = [row for workers in counts for row in measure(workers, seconds)]
    print(f"{BATCHES_PER_S:g} batches/s, {SLOTS} workers a host, {seconds:g} s a window\n")
    print_table(rows)
    print(f"\ntarget: 1,000 workers below {TARGET_SHARE:g} of a core")
    write_json(json_path, {"cores": os.cpu_count(), "batches_per_s": BATCHES_PER_S, "rows": rows})


if __name__ == "__main__":
    main()
