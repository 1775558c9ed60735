"""CPU time of a worker per mini-batch that is neither layers nor optimizer, and its messages.

    python benchmarks/overhead.py [--stages 2,4,8,16] [--rounds 5] [--json PATH]

Stages sleep, as a worker does while a GPU computes, and hand on 4 KiB: what a stage takes of a CPU
is then its runtime. The forward, the backward and the update of one such stage alone in a process,
with the same sleeps between them, are taken off. Each size runs alone; its rounds take turns with
that stage. A CPU that wakes from sleep has forgotten everything: the same work costs several times
as much as without sleep (0 ms), where two cores are busy all the time.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
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

    def __init__(self, folder: Path, stages: int, forward_ms: float) -> None:
        self.stages = stages
        self.forward_ms = forward_ms
        folder.mkdir()
        hyper = {"devices": str(stages), "forward_ms": str(forward_ms)}
        self._run = LiveRun(folder, JOB, "--stages", str(stages), hyper=hyper)
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


def bare_stage(pipe: Connection, forward_ms: float) -> None:
    """Answer each number of mini-batches with the CPU time of one stage alone, in us per batch."""
    torch.set_num_threads(1)
    stage = idle(2, forward_ms)[1]
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
        "forward ms": pipeline.forward_ms,
        "worker us": statistics.median(statistics.median(spans) for spans, _ in pairs),
        "layers and optimizer us": statistics.median(bare_us),
        "overhead us": statistics.median(over),
        "least": min(over),
        "most": max(over),
        "busiest stage us": statistics.median(max(spans) - bare for spans, bare in pairs),
        "messages per batch": messages,
    }


def measure(
    folder: Path, counts: Sequence[int], forward_ms: float, rounds: int, batches: int
) -> Iterator[dict[str, object]]:
    """Yield a row for each number of stages."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    alone = context.Process(target=bare_stage, args=(theirs, forward_ms), daemon=True)
    alone.start()
    for count in counts:
        pipeline = Pipeline(folder / f"{count}-{forward_ms:g}", count, forward_ms)
        pipeline.settle()
        bare_us: list[float] = []
        for _ in range(rounds):
            pipeline.measure(batches)
            ours.send(batches)
            bare_us.append(ours.recv())
        yield row_of(pipeline, bare_us, pipeline.close())
    ours.send(None)
    alone.join()


@click.command()
@click.option("--stages", default="2,4,8,16", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the rows there.")
def main(stages: str, rounds: int, json_path: Path | None) -> None:
    """Print the table as Markdown."""
    torch.set_num_threads(1)
    counts = [int(count) for count in stages.split(",")]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="spectrain-overhead-") as folder:
        for forward_ms, batches in ((10.0, 24), (0.0, 180)):
            rows += measure(Path(folder), counts, forward_ms, rounds, batches)
    print_table(rows)
    write_json(json_path, {"rows": rows})


if __name__ == "__main__":
    main()
