"""CPU time of a worker per mini-batch that is neither layers nor optimizer, and its messages.

    python benchmarks/overhead.py [--stages 2,4,8,16] [--rounds 5] [--json PATH]

Stages sleep 10 and 20 ms, as a worker does while a GPU computes, and hand on 4 KiB: what a stage
takes of a CPU is then its runtime. The forward, the backward and the update of one such stage alone
in a process, with the same sleeps between them, are taken off. Each size runs
alone; its rounds take turns with that stage.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import click
import torch
from idle_stages import CPU_S, KIBIBYTES, cpu_file, idle, score
from live_run import LiveRun
from tables import print_table, write_json
from work import sgd

JOB = Path(__file__).with_name("idle_stages.py")
SETTLE_BATCHES = 60


class Pipeline:
    """A launch of so many idle stages."""

    def __init__(self, folder: Path, stages: int) -> None:
        self.stages = stages
        options = ("--stages", str(stages), "--max-batches", "1000000")
        self._run = LiveRun(folder, JOB, *options, hyper={"devices": str(stages)})
        self.cpu_us: list[list[float]] = []

    def settle(self) -> None:
        self._run.wait_for_batch(SETTLE_BATCHES)

    def measure(self, batches: int) -> None:
        """Note the CPU time per mini-batch of each stage over the next so many of them."""
        first = self._run.status()["batch"]
        self._run.wait_for(lambda: self._run.status()["batch"] > first + batches, "more batches")
        spans: list[float] = []
        for stage in range(self.stages):
            content = cpu_file(self._run.run_dir, stage).read_bytes()
            times = [cpu_s for (cpu_s,) in CPU_S.iter_unpack(content)]
            spans.append(1e6 * (times[-1] - times[-1 - batches]) / batches)
        self.cpu_us.append(spans)

    def close(self) -> float:
        """End the run; return control messages per mini-batch, of all workers together."""
        self._run.stop()
        return self._run.summary()["messages_per_batch"]


def bare_stage(pipe: Connection) -> None:
    """Answer each number of mini-batches with the CPU time of one stage alone, in us per batch."""
    torch.set_num_threads(1)
    stage = idle(2)[1]
    optimizer = sgd(list(stage.parameters()))
    value = torch.ones(32, KIBIBYTES * 1024 // 4 // 32)
    while (batches := pipe.recv()) is not None:
        start_s = time.process_time()
        for _ in range(batches):
            outputs = stage(value.detach().requires_grad_())
            score(outputs, value).backward()
            optimizer.step()
            optimizer.zero_grad()
        pipe.send(1e6 * (time.process_time() - start_s) / batches)


def row_of(pipeline: Pipeline, bare_us: Sequence[float], messages: float) -> dict[str, object]:
    """Return what was measured; the middle stages have all four streams."""
    pairs = list(zip(pipeline.cpu_us, bare_us, strict=True))
    over = [statistics.median(spans) - bare for spans, bare in pairs]
    return {
        "stages": pipeline.stages,
        "worker us": statistics.median(statistics.median(spans) for spans, _ in pairs),
        "layers and optimizer us": statistics.median(bare_us),
        "overhead us": statistics.median(over),
        "least": min(over),
        "most": max(over),
        "busiest stage us": statistics.median(max(spans) - bare for spans, bare in pairs),
        "messages per batch": messages,
    }


@click.command()
@click.option("--stages", default="2,4,8,16", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--batches", default=60, show_default=True, help="Per size and round.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the rows there.")
def main(stages: str, rounds: int, batches: int, json_path: Path | None) -> None:
    """Print the table as Markdown."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    alone = context.Process(target=bare_stage, args=(theirs,), daemon=True)
    alone.start()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="spectrain-overhead-") as folder, ExitStack() as stack:
        stack.callback(ours.send, None)
        for count in map(int, stages.split(",")):
            pipeline = Pipeline(Path(folder) / str(count), count)
            pipeline.settle()
            bare_us: list[float] = []
            for _ in range(rounds):
                pipeline.measure(batches)
                ours.send(batches)
                bare_us.append(ours.recv())
            rows.append(row_of(pipeline, bare_us, pipeline.close()))
    print_table(rows)
    write_json(json_path, {"rows": json.loads(json.dumps(rows))})


if __name__ == "__main__":
    main()
