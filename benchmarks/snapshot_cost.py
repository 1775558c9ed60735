"""What snapshots and logs cost where nothing fails: throughput with them over without, and memory.

    python benchmarks/snapshot_cost.py [--rounds 5] [--batches 600]

Runs of the Fashion-MNIST example with default settings and with ``--snapshot-every 0`` take turns,
so that a busy machine disturbs both alike. What the last run with snapshots kept is held against
what it should be, for N stages:

- a snapshot: ``W (1 + w) + O + B (1 + w)``, weights, their older versions in flight (w = N - 1 - k
  at stage k), optimizer state, buffers;
- a log, by stream: at its fullest at most ``(M + L + N) A``. M updates lie between two rounds, L
  pass until a round is durable everywhere, up to N batches are in flight, and a parcel has A bytes.
  The table leaves L out, which rounds keep below M: so the ratio is at most 2.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path

import click
import torch
from live_run import LiveRun

import spectrain
from spectrain.coordinator.plan import make_plan
from spectrain.protocol.job import load_job
from spectrain.protocol.schedule import Op
from spectrain.protocol.settings import Settings

JOB = Path(spectrain.__file__).parent / "examples" / "fashion_cnn.py"


def finished(folder: Path, batches: int, *options: str) -> LiveRun:
    """Run once, to the end."""
    run = LiveRun(folder, JOB, "--max-batches", str(batches), "--no-evaluate", *options)
    if run.launcher.wait(600) != 0:
        raise SystemExit(run.output.read_text())
    return run


def throughput(run: LiveRun) -> float:
    """Return samples per second."""
    return run.summary()["samples_per_s"]


def parts_of(snapshot: Path) -> Counter[str]:
    """Return the bytes of each kind of tensor in a snapshot, and of the whole file."""
    with snapshot.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__")
    sizes: Counter[str] = Counter()
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        first, _, rest = name.partition(".")
        sizes[first if first in ("clean", "buffer", "optimizer") else rest[:4]] += end - begin
    sizes["file"] = snapshot.stat().st_size
    return sizes


def show_snapshots(run_dir: Path, stages: int) -> None:
    """Print what the newest checkpoint holds, by stage, and what the formula says."""
    newest = max(
        (run_dir / "checkpoints").glob("update-*"), key=lambda path: int(path.name.split("-")[1])
    )
    print("\n| stage | weights KiB | formula KiB | file KiB |\n|---|---|---|---|")
    for stage in range(stages):
        sizes = parts_of(newest / f"stage-{stage}.safetensors")
        versions = 1 + stages - 1 - stage
        formula = versions * (sizes["clean"] + sizes["buffer"]) + sizes["optimizer"]
        cells = (sizes["clean"], formula, sizes["file"])
        print(f"| {stage} | " + " | ".join(f"{cell / 1024:.1f}" for cell in cells) + " |")


def parcel_bytes(run: LiveRun) -> list[int]:
    """Return the bytes of one batch between each stage and the next, the same both ways."""
    settings = Settings.from_dict(json.loads((run.run_dir / "settings.json").read_text()))
    plan, job = make_plan(settings), load_job(JOB)
    layers = [layer for _, layer in job.flatten(job.build_model(settings.seed, {}))]
    value = plan.feed.part("inputs", Op.parse("F0")).value
    sizes: list[int] = []
    with torch.no_grad():
        for begin, end in pairwise((0, *accumulate(plan.layer_counts))):
            value = torch.nn.Sequential(*layers[begin:end])(value)
            sizes.append(value.nbytes)
    return sizes[:-1]


def updates_between_rounds(run: LiveRun, stages: int) -> int:
    """Return M: as it was chosen last, or what a run begins with if it ended before that."""
    chosen = re.findall(r"a snapshot every (\d+) updates", run.output.read_text())
    return int(chosen[-1]) if chosen else 4 * stages


def show_logs(run: LiveRun) -> None:
    """Print the most that each stage kept of what it sent, and what the formula says."""
    records = run.summary()["stages"]
    stages = len(records)
    between = updates_between_rounds(run, stages)
    sizes = parcel_bytes(run)
    print(f"\nM = {between}, N = {stages}\n")
    print("| stage | log of | A KiB | (M + N) A KiB | peak KiB | ratio |")
    print("|---|---|---|---|---|---|")
    for record in records:
        stage = record["stage"]
        for name, boundary in (("activations", stage), ("gradients", stage - 1)):
            if not 0 <= boundary < len(sizes):
                continue
            size, peak = sizes[boundary], record[f"peak_{name}_log_bytes"]
            formula = (between + stages) * size
            numbers = " | ".join(f"{cell / 1024:.0f}" for cell in (size, formula, peak))
            print(f"| {stage} | {name} | {numbers} | {peak / formula:.2f} |")


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--batches", default=600, show_default=True)
def main(rounds: int, batches: int) -> None:
    """Print each round's ratio, the median, and the memory tables."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="spectrain-cost-") as folder:
        ratios: list[float] = []
        print("| round | on, samples/s | off, samples/s | on / off |\n|---|---|---|---|")
        for number in range(rounds):
            run = finished(Path(folder, f"on-{number}"), batches)
            on = throughput(run)
            off = throughput(
                finished(Path(folder, f"off-{number}"), batches, "--snapshot-every", "0")
            )
            ratios.append(on / off)
            print(f"| {number} | {on:.0f} | {off:.0f} | {on / off:.3f} |", flush=True)
        print(f"\nmedian {statistics.median(ratios):.3f} (target: at least 0.97)")
        show_snapshots(run.run_dir, stages=4)
        show_logs(run)


if __name__ == "__main__":
    main()
