"""Peak memory of each stage of a real run, against what its parts add up to.

    python benchmarks/memory.py [--stages 4] [--batches 10] [--json PATH]

What is measured is the high-water mark of the resident memory (``VmHWM``) of each worker, less that
of a worker of the same job with layers too small to count, which is what Python, torch and the
threads take. The mark is reset once every stage trains, so that two peaks are known: of building,
where every worker makes the whole model to take its own layers of it, and of training.

What it is held against, for stage k of N with weights W and activations A of one batch (its input
and what each layer puts out)::

    weights      2 W       clean and live
    gradients    W
    optimizer    W         SGD: momentum; Adam: 2 W, two moments
    scratch                Adam: two tensors as large as a parameter, while it is updated
    activations  (N - k) A
    log          what was sent since the committed round; with snapshots only
    snapshot     W + momentum or moments, and W for each of N - 1 - k batches in flight; likewise

What a stage sends is part of both its activations and its log, and counted once.

The C library keeps freed blocks of up to 32 MiB for later, once it has seen one freed, and what is
left of the whole model after building is full of holes. So each run is done a second time with
every block above 1 MiB mapped alone, and given back when freed: that is what the parts need.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from live_run import LiveRun
from tables import print_table, write_json

JOB = Path(__file__).with_name("wide_layers.py")
WIDTH, LAYERS, BATCH_SAMPLES = 2048, 4, 256  # 64 MiB of weights a stage, 2 MiB an activation
IDLE_WIDTH = 8
SNAPSHOT_EVERY = 6  # updates
MIB = 1 << 20
TARGET = 0.10
RESET_PEAK = "5"  # see proc(5), clear_refs
MAPPED_ALONE = ("-x", f"MALLOC_MMAP_THRESHOLD_={MIB}")


@dataclass(frozen=True, slots=True)
class Peak:
    """The most resident memory of one worker, in bytes, while it was built and while it trained."""

    build_bytes: int
    train_bytes: int


def model_of(stage: int, stages: int, kind: str, every: int) -> dict[str, float]:
    """Return the bytes of each part of one stage by the formula."""
    weights = LAYERS * WIDTH * WIDTH * 4
    activation = BATCH_SAMPLES * WIDTH * 4
    state = weights if kind == "sgd" else 2 * weights
    parts = {
        "weights": 2 * weights,
        "gradients": weights,
        "optimizer": state,
        "scratch": 0 if kind == "sgd" else 2 * WIDTH * WIDTH * 4,
        "activations": (stages - stage) * (LAYERS + 1) * activation,
        "log": 0,
        "snapshot": 0,
    }
    if every:
        behind = stages - 1 - stage
        # One round's distance and, until the commit of the next is heard of, about one batch.
        logged = every + 1
        sent_on = max(0, logged - (stages - stage)) if behind else 0
        sent_back = logged if stage else 0
        parts["log"] = (sent_on + sent_back) * activation
        parts["snapshot"] = weights + state + behind * weights
    return {name: float(size_bytes) for name, size_bytes in parts.items()}


def peaks_of(stages: int, batches: int, *options: str, **hyper: object) -> list[Peak]:
    """Run the job for so many batches and return each stage's peaks."""
    texts = {name: str(value) for name, value in {**hyper, "stages": stages}.items()}
    with tempfile.TemporaryDirectory(prefix="spectrain-memory-") as folder:
        run = LiveRun(Path(folder, "run"), JOB, f"--stages={stages}", *options, hyper=texts)
        try:
            return _watch(run, stages, batches)
        finally:
            run.stop()


def _watch(run: LiveRun, stages: int, batches: int) -> list[Peak]:

    def training() -> list[dict[str, Any]]:
        workers = sorted(run.status().get("workers", []), key=lambda each: each["stage"])
        all_train = len(workers) == stages and all(each["last_batch"] >= 0 for each in workers)
        return workers if all_train else []

    files = [Path("/proc", str(worker["pid"])) for worker in run.wait_for(training, "training")]
    build = list(map(_peak_bytes, files))
    for file in files:
        (file / "clear_refs").write_text(RESET_PEAK)
    run.wait_for_batch(run.status()["batch"] + batches)
    return [Peak(*pair) for pair in zip(build, map(_peak_bytes, files), strict=True)]


def _peak_bytes(process: Path) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", (process / "status").read_text())
    assert found is not None, f"{process} is no process of this kernel"
    return int(found[1]) * 1024


@click.command()
@click.option("--stages", default=4, show_default=True)
@click.option("--batches", default=10, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(stages: int, batches: int, json_path: Path | None) -> None:
    """Print one table per optimizer, and one with snapshots, in MiB."""
    measured: list[dict[str, Any]] = []
    for every in (0, SNAPSHOT_EVERY):
        option = f"--snapshot-every={every}"
        idle = peaks_of(stages, batches, option, width=IDLE_WIDTH)
        for kind in ("sgd", "adam") if not every else ("adam",):
            name = f"{kind}, {f'a snapshot every {every} updates' if every else 'no snapshots'}"
            real = peaks_of(stages, batches, option, width=WIDTH, kind=kind)
            alone = peaks_of(stages, batches, option, *MAPPED_ALONE, width=WIDTH, kind=kind)
            rows = [
                _row(stage, model_of(stage, stages, kind, every), *peaks)
                for stage, peaks in enumerate(zip(idle, real, alone, strict=True))
            ]
            print(f"\n{name}; MiB\n")
            print_table(rows)
            measured += [{"run": name, **row} for row in rows]
    for what in ("of model", "alone, of model"):
        worst = max(abs(row[what] - 1) for row in measured)
        print(f"\n{what}: at worst {worst:.0%} off (target: at most {TARGET:.0%})")
    write_json(json_path, {"stages": stages, "rows": measured})


def _row(
    stage: int, model: dict[str, float], idle: Peak, real: Peak, alone: Peak
) -> dict[str, Any]:
    total = sum(model.values())
    used, needed = (peak.train_bytes - idle.train_bytes for peak in (real, alone))
    return {
        "stage": stage,
        **{name: round(size_bytes / MIB) for name, size_bytes in model.items()},
        "model": round(total / MIB),
        "measured": round(used / MIB),
        "of model": round(used / total, 2),
        "mapped alone": round(needed / MIB),
        "alone, of model": round(needed / total, 2),
        "building": round((real.build_bytes - idle.build_bytes) / MIB),
        "idle worker": round(idle.train_bytes / MIB),
    }


if __name__ == "__main__":
    main()
