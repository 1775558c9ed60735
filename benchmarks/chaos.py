"""Kills random processes of a run for some minutes, then compares it with its quiet twin.

    python benchmarks/chaos.py [--minutes 10] [--mean-s 5] [--seed 0]

Anybody but the launcher may be killed at any time, mostly by SIGKILL; workers are sometimes
stopped instead (SIGSTOP), which only their silence tells. Exit code 0: not a bit differs.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
import torch
from live_run import NOISY_DIGITS, LiveRun, Process, first_difference

SHARES = {"worker": 4, "agent": 1, "nursery": 1, "coordinator": 1}
"""How often each role is struck; none is if nobody plays it at that moment."""

STOPPED_SHARE = 0.15
"""Of the workers' share of faults: stopped instead of killed."""

SETTLED_AFTER_S = 5.0
"""Age from which a process's memory is watched: before, it is still being born."""


@dataclass
class Vitals:
    """What one process used when it had settled, and last."""

    role: str
    first: tuple[float, int, int, int] | None = None
    last: tuple[float, int, int, int] | None = None

    def look(self, process: psutil.Process) -> None:
        age_s = time.time() - process.create_time()
        if age_s < SETTLED_AFTER_S:
            return
        now = (age_s, process.memory_info().rss, process.num_fds(), process.num_threads())
        self.first = self.first or now
        self.last = now

    @property
    def watched_s(self) -> float:
        return self.last[0] - self.first[0] if self.first and self.last else 0.0

    def __str__(self) -> str:
        assert self.first is not None
        assert self.last is not None
        return (
            f"| {self.role} | {self.watched_s:.0f} | {self.first[1] >> 20} → {self.last[1] >> 20} "
            f"| {self.first[2]} → {self.last[2]} | {self.first[3]} → {self.last[3]} |"
        )


def disturb(run: LiveRun, minutes: float, mean_s: float, chance: random.Random) -> Counter[str]:
    """Kill and watch until the time is up; return how often who died of what."""
    kills: Counter[str] = Counter()
    vitals: dict[tuple[int, float], Vitals] = {}
    end = time.monotonic() + 60 * minutes
    due = time.monotonic() + chance.expovariate(1 / mean_s)
    while not run.is_over and time.monotonic() < end:
        processes = run.processes()
        for each in processes:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                key = (each.psutil.pid, each.psutil.create_time())
                vitals.setdefault(key, Vitals(each.role)).look(each.psutil)
        if time.monotonic() >= due:
            due = time.monotonic() + chance.expovariate(1 / mean_s)
            role = chance.choices(list(SHARES), list(SHARES.values()))[0]
            victims = [each for each in processes if each.role == role]
            if victims:
                kills[strike(chance.choice(victims), chance)] += 1
        time.sleep(min(0.2, max(0.0, due - time.monotonic())))
    show_vitals(list(vitals.values()))
    return kills


def strike(victim: Process, chance: random.Random) -> str:
    """Kill or stop a process; return what was done to whom."""
    stops = victim.role == "worker" and chance.random() < STOPPED_SHARE
    number = signal.SIGSTOP if stops else signal.SIGKILL
    print(
        f"{time.strftime('%H:%M:%S')} {number.name} {victim.role} {victim.psutil.pid}", flush=True
    )
    with suppress(psutil.NoSuchProcess):
        victim.psutil.send_signal(number)
    return f"{victim.role} {number.name}"


def show_vitals(vitals: list[Vitals]) -> None:
    """Print the growth of the longest survivor of each role."""
    print("\n| survivor | watched s | RSS MiB | descriptors | threads |\n|---|---|---|---|---|")
    for role in ("launcher", "coordinator", "agent", "nursery", "worker"):
        ofs = [each for each in vitals if each.role == role and each.watched_s > 0]
        if ofs:
            print(max(ofs, key=lambda each: each.watched_s))


@click.command()
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--mean-s", default=5.0, show_default=True, help="Between two kills.")
@click.option("--seed", default=0, show_default=True, help="Of the kills.")
@click.option("--method", default="spectrain", show_default=True)
@click.option("--pause-s", default=0.01, show_default=True, help="Per batch: slows the run.")
def main(minutes: float, mean_s: float, seed: int, method: str, pause_s: float) -> None:
    """Run, kill, stop, compare, report."""
    torch.set_num_threads(1)
    run_dir = Path(tempfile.mkdtemp(prefix="spectrain-chaos-"))
    options = ("--method", method, "--lease", "8", "--max-restarts", "10000")
    run = LiveRun(run_dir, NOISY_DIGITS, *options, hyper={"pause_s": str(pause_s)})
    print(f"run directory {run_dir}", flush=True)
    try:
        run.wait_for_batch(1)
        kills = disturb(run, minutes, mean_s, random.Random(seed))
        ended_early = run.is_over
        if not ended_early:  # what is under repair has to come back before it can end in order
            run.wait_for_batch(len(run.losses()) + 1)
        code = run.stop()
    finally:
        run.launcher.terminate()
        run.launcher.wait()
    print(f"\nkills: {sum(kills.values())} ({', '.join(f'{n} {k}' for k, n in kills.items())})")
    if ended_early or code != 128 + signal.SIGINT:
        print(f"the run gave up with exit code {code}:\n{run.output.read_text()[-3000:]}")
        sys.exit(1)
    summary = run.summary()
    digest, losses = run.quiet_twin()
    difference = first_difference(run.losses(), losses)
    print(f"updates {summary['updates']}, restarts of stages {summary['restarts']}")
    print(f"losses: {difference or 'identical'}")
    same = digest == summary["weights_sha256"]
    print(f"weights_sha256: {'identical' if same else 'DIFFERENT'} {digest}")
    sys.exit(0 if same and not difference else 1)


if __name__ == "__main__":
    main()
