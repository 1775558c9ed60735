"""How long a killed worker is missed: from the kill to the first new batch of its successor.

    python benchmarks/recovery.py [--kills 20]

The stages are killed in turn. The total and "detect" begin with this program's own clock at the
kill; spawn, load, link and replay are what the coordinator measured.
"""

from __future__ import annotations

import datetime as dt
import random
import statistics
import tempfile
import time
from pathlib import Path

import click
import psutil
from live_run import NOISY_DIGITS, LiveRun

TIME_LENGTH = len("2026-11-30 17:59:11,167")


def logged_at(run: LiveRun, words: str, after_s: float) -> float | None:
    """Return when the coordinator wrote a line with these words, in seconds since 1970."""
    for line in (run.run_dir / "logs" / "coordinator.log").read_text().splitlines():
        if words in line:
            text = line[:TIME_LENGTH].replace(",", ".")
            at_s = dt.datetime.fromisoformat(text).astimezone().timestamp()
            if at_s >= after_s:
                return at_s
    return None


def kill_once(run: LiveRun, stage: int) -> tuple[float, float]:
    """Kill a stage; return seconds until the coordinator knew, and until it was back."""
    workers = run.status()["workers"]
    # Whole milliseconds: the log has no finer ones.
    killed_s = int(time.time() * 1000) / 1000
    psutil.Process(workers[stage]["pid"]).kill()
    times: list[float] = []
    for words in (f"stage {stage} on localhost died", f"stage {stage} on localhost restarted"):
        at_s = run.wait_for(lambda words=words: logged_at(run, words, killed_s), f"'{words}'")
        times.append(at_s - killed_s)
    return times[0], times[1]


def wait_for_status(run: LiveRun, updates: int) -> None:
    """Let the run go on for some batches, and until the status knows every worker."""
    goal = run.status()["batch"] + updates
    run.wait_for_batch(goal)
    run.wait_for(lambda: all(each["pid"] for each in run.status()["workers"]), "status")


@click.command()
@click.option("--kills", default=20, show_default=True)
@click.option("--stages", default=4, show_default=True)
def main(kills: int, stages: int) -> None:
    """Print the medians as Markdown."""
    chance = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="spectrain-recovery-") as folder:
        options = ("--stages", str(stages), "--max-restarts", str(kills + 1))
        run = LiveRun(Path(folder), NOISY_DIGITS, *options, hyper={"pause_s": "0.005"})
        try:
            run.wait_for_batch(1)
            run.wait_for(lambda: "a snapshot every" in run.output.read_text(), "chosen distance")
            seen: list[tuple[float, float]] = []
            for number in range(kills):
                wait_for_status(run, chance.randrange(100, 300))
                seen.append(kill_once(run, number % stages))
            run.stop()
        finally:
            run.launcher.terminate()
            run.launcher.wait()
        repairs = run.summary()["repairs"]
    show(seen, repairs)


def show(seen: list[tuple[float, float]], repairs: list[dict[str, object]]) -> None:
    """Print one row per part."""
    print("| part | median s | worst s |\n|---|---|---|")

    def row(name: str, values: list[float]) -> None:
        print(f"| {name} | {statistics.median(values):.3f} | {max(values):.3f} |")

    row("detect: kill to coordinator", [detect for detect, _ in seen])
    for part in ("spawn", "load", "link", "replay"):
        splits = [repair["seconds"] for repair in repairs]
        row(part, [split[part] for split in splits if isinstance(split, dict) and part in split])
    row("total: kill to first new batch", [total for _, total in seen])
    replayed = statistics.median(int(str(repair["replayed"])) for repair in repairs)
    print(f"\n{len(seen)} kills, {replayed:.0f} batches replayed (median)")


if __name__ == "__main__":
    main()
