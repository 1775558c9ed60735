"""What snapshots and logs cost where nothing fails: throughput with them over without, and memory.

    python benchmarks/snapshot_cost.py [--rounds 5] [--batches 600]

Runs of the Fashion-MNIST example with default settings and with ``--snapshot-every 0`` take turns,
so that a busy machine disturbs both alike. The snapshots of the last run are held against
``W (1 + w) + O + B (1 + w)``: weights, their older versions in flight, optimizer state, buffers.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter
from pathlib import Path

import click
from live_run import LiveRun

import spectrain

JOB = Path(spectrain.__file__).parent / "examples" / "fashion_cnn.py"


def throughput(folder: Path, batches: int, *options: str) -> float:
    """Run once; return samples per second."""
    run = LiveRun(folder, JOB, "--max-batches", str(batches), "--no-evaluate", *options)
    if run.launcher.wait(600) != 0:
        raise SystemExit(run.output.read_text())
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


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--batches", default=600, show_default=True)
def main(rounds: int, batches: int) -> None:
    """Print each round's ratio, the median, and the memory table."""
    with tempfile.TemporaryDirectory(prefix="spectrain-cost-") as folder:
        ratios: list[float] = []
        print("| round | on, samples/s | off, samples/s | on / off |\n|---|---|---|---|")
        for number in range(rounds):
            on = throughput(Path(folder, f"on-{number}"), batches)
            off = throughput(Path(folder, f"off-{number}"), batches, "--snapshot-every", "0")
            ratios.append(on / off)
            print(f"| {number} | {on:.0f} | {off:.0f} | {on / off:.3f} |", flush=True)
        print(f"\nmedian {statistics.median(ratios):.3f} (target: at least 0.97)")
        show_snapshots(Path(folder, f"on-{rounds - 1}"), stages=4)


if __name__ == "__main__":
    main()
