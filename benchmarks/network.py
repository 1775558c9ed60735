"""The paper's case: a pipeline against data parallelism where the network is the bottleneck.

    python benchmarks/network.py [--json PATH]

Four hosts made of network namespaces, one worker each, joined by cables of 10, 1 and 0.1 Gbit/s
each way. Needs root and what the cluster tests need. The pipeline is a run of the real command over
ssh; data parallelism does what torch's DDP does (``data_parallel_rank.py``). Both get through the
same global batch per update.

There is no GPU here, so compute is emulated by sleeping: each layer for its share of the operations
of a batch, at the speed of one GPU of the paper's time (about 11 TFLOPS in fp32, such as a GTX 1080
Ti or a Tesla P40): VGG16 130 images/s, the transformer 140 texts/s. A rank of data parallelism
has a quarter of the batch and is taken to need a quarter of the time. What travels is real: all
gradients of the real models, all activations and their gradients at the cuts, in fp32. Left out on
both sides: the optimizer, and prediction, whose cost ``peers`` measures. The pipeline is cut by
stated layer counts: those with the least time a batch of the slowest stage or the busiest cable.

All hosts share this machine's cores, which copy, sum and checksum what travels. Where the cables
are busy for much less than all of the time, the cores are what limits the rate.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import click
from emulated_models import MODELS
from tables import print_table, write_json

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from cluster.hosts import Cluster, cluster_of
from cluster.namespaces import program_of, why_unavailable

HERE = Path(__file__).parent
JOB = HERE / "emulated_models.py"
NODES = ("node1", "node2", "node3", "node4")
BATCH_SAMPLES = 32
GBIT_BYTES = 125_000_000
RATES_GBIT = (10.0, 1.0, 0.1)
STEPS = {10.0: 4, 1.0: 2, 0.1: 1}  # of data parallelism, after one that is not counted at first
BATCHES = {10.0: 40, 1.0: 20, 0.1: 4}  # of the pipeline, after those that fill it
FILLING_BATCHES = 4
PAPER_RATIO = 8.91
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a system trained at one rate of the cables.

    Attributes:
        wire_bytes: sent by all hosts together.
        busiest_bytes: through the busiest cable in its busier direction.
    """

    samples: int
    seconds: float
    wire_bytes: int
    busiest_bytes: int

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    def busy_share(self, gbit: float) -> float:
        """Return the share of the time, 0..1, that the busiest cable was busy."""
        return self.busiest_bytes / (self.seconds * gbit * GBIT_BYTES)


class Wire:
    """Counts what the hosts send and receive from now on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._before = self._counters()

    def pace(self, samples: int, seconds: float) -> Pace:
        pairs = zip(self._counters(), self._before, strict=True)
        received, sent = zip(*((r - r0, s - s0) for (r, s), (r0, s0) in pairs), strict=True)
        return Pace(samples, seconds, sum(sent), max(*received, *sent))

    def _counters(self) -> list[tuple[int, int]]:
        """Return the bytes that each host has received and sent."""
        lines = [
            next(
                line
                for line in Path(f"/proc/{host.pid}/net/dev").read_text().splitlines()
                if "eth0:" in line
            )
            for host in self._cluster.values()
        ]
        return [(int(line.split()[1]), int(line.split()[9])) for line in lines]


def set_rate(cluster: Cluster, gbit: float) -> None:
    for host in cluster.values():
        host.throttle(int(gbit * GBIT_BYTES))


# -- data parallelism ---------------------------------------------------------------------------


def data_parallel(cluster: Cluster, name: str) -> dict[float, Pace]:
    """Return the pace at each rate."""
    set_rate(cluster, RATES_GBIT[0])
    with ExitStack() as closing:
        ranks = [closing.enter_context(_rank(cluster, index, name)) for index in range(len(NODES))]
        for rank in ranks:
            _answer(rank)
        _steps(ranks, 1)
        paces: dict[float, Pace] = {}
        for gbit in RATES_GBIT:
            set_rate(cluster, gbit)
            wire = Wire(cluster)
            seconds = sum(_steps(ranks, STEPS[gbit]))
            paces[gbit] = wire.pace(STEPS[gbit] * BATCH_SAMPLES, seconds)
        return paces


@contextmanager
def _rank(cluster: Cluster, index: int, name: str) -> Generator[subprocess.Popen[str]]:
    host = cluster[NODES[index]]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    process = subprocess.Popen(
        host.command([sys.executable, str(HERE / "data_parallel_rank.py")]),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    settings = {
        "meet_at": f"tcp://{cluster[NODES[0]].address}:29500",
        "rank": index,
        "ranks": len(NODES),
        "model": name,
        "samples": BATCH_SAMPLES // len(NODES),
    }
    _tell(process, json.dumps(settings))
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def _steps(ranks: list[subprocess.Popen[str]], count: int) -> list[float]:
    for rank in ranks:
        _tell(rank, str(count))
    return list(map(max, zip(*map(_answer, ranks), strict=True)))


def _tell(rank: subprocess.Popen[str], line: str) -> None:
    assert rank.stdin is not None
    rank.stdin.write(line + "\n")
    rank.stdin.flush()


def _answer(rank: subprocess.Popen[str]) -> Any:
    assert rank.stdout is not None
    return json.loads(rank.stdout.readline() or '"a rank has ended"')


# -- the pipeline -------------------------------------------------------------------------------


def layer_counts(name: str, gbit: float) -> tuple[int, ...]:
    """Cut the model so that neither a stage nor a cable takes longer for a batch than it must."""
    layers, forward_s = MODELS[name].layers, MODELS[name].forward_s(BATCH_SAMPLES)
    sizes = [FLOAT_BYTES * BATCH_SAMPLES * math.prod(layer.output) for layer in layers]

    def slowest_s(cuts: tuple[int, ...]) -> tuple[float, float]:
        stages = pairwise((0, *cuts, len(layers)))
        work_s = max(3 * sum(forward_s[first:end]) for first, end in stages)
        # By one cable a host sends activations on and gradients back.
        sent = pairwise((0, *(sizes[cut - 1] for cut in cuts), 0))
        cable_s = max((back + on) / (gbit * GBIT_BYTES) for back, on in sent)
        return max(work_s, cable_s), work_s

    cuts = min(combinations(range(1, len(layers)), len(NODES) - 1), key=slowest_s)
    return tuple(end - first for first, end in pairwise((0, *cuts, len(layers))))


def pipeline(cluster: Cluster, name: str, gbit: float, folder: Path) -> Pace:
    """Train with the real command and return the pace."""
    set_rate(cluster, gbit)
    hosts, run_dir, log = folder / "hosts.txt", folder / f"{name}-{gbit}", folder / "launcher.log"
    hosts.write_text("".join(f"{node} slots=1\n" for node in NODES))
    counts = ",".join(map(str, layer_counts(name, gbit)))
    command = [
        str(Path(sys.executable).with_name("spectrain-launch")), f"--nodes={hosts}",
        "--device=cpu", f"--run-dir={run_dir}", f"--stages={len(NODES)}", f"--partition={counts}",
        f"--batch-size={BATCH_SAMPLES}", "--snapshot-every=0", f"--set=name={name}", str(JOB),
    ]  # fmt: skip
    # The first stage is on the host of the launcher, so that what it is fed needs no cable.
    launcher = cluster[NODES[0]].start(command, output=log)
    trained = Trained(run_dir / "metrics.jsonl", launcher, log)
    try:
        first, began = trained.wait_for(FILLING_BATCHES)
        wire = Wire(cluster)
        last, ended = trained.wait_for(first + BATCHES[gbit])
        return wire.pace((last - first) * BATCH_SAMPLES, ended - began)
    finally:
        set_rate(cluster, RATES_GBIT[0])
        if launcher.poll() is None:
            program_of(launcher).send_signal(signal.SIGINT)
        launcher.wait(60)


class Trained:
    """Counts the batches that a run has trained, as its coordinator writes them down."""

    def __init__(self, metrics: Path, launcher: subprocess.Popen[bytes], log: Path) -> None:
        self._metrics, self._launcher, self._log = metrics, launcher, log
        self._offset = 0
        self.batches = 0

    def wait_for(self, batches: int, timeout_s: float = 180.0) -> tuple[int, float]:
        """Return how many there are, at least so many, and when the last of them was told of."""
        deadline = time.monotonic() + timeout_s
        while self.batches < batches:
            if self._launcher.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no batch {batches}; the run says:\n{self._log.read_text()}")
            time.sleep(0.01)
            self._read()
        return self.batches, time.monotonic()

    def _read(self) -> None:
        if self._metrics.exists():
            with self._metrics.open() as file:
                file.seek(self._offset)
                text = file.read()
                self._offset = file.tell()
            self.batches += text.count('"kind": "train"')


# -- the comparison -----------------------------------------------------------------------------


def rows_of(name: str, ranks: dict[float, Pace], stages: dict[float, Pace]) -> list[dict[str, Any]]:
    """Return one row per rate."""
    alone = MODELS[name].samples_per_s
    return [
        {
            "model": name,
            "Gbit/s": gbit,
            "layers per stage": ",".join(map(str, layer_counts(name, gbit))),
            "data parallel, samples/s": ranks[gbit].samples_per_s,
            "pipeline, samples/s": stages[gbit].samples_per_s,
            "ratio": round(stages[gbit].samples_per_s / ranks[gbit].samples_per_s, 2),
            "data parallel, of 1 GPU": round(ranks[gbit].samples_per_s / alone, 2),
            "pipeline, of 1 GPU": round(stages[gbit].samples_per_s / alone, 2),
            "data parallel, wire MB/sample": ranks[gbit].wire_bytes / ranks[gbit].samples / 1e6,
            "pipeline, wire MB/sample": stages[gbit].wire_bytes / stages[gbit].samples / 1e6,
            "data parallel, cable busy": round(ranks[gbit].busy_share(gbit), 2),
            "pipeline, cable busy": round(stages[gbit].busy_share(gbit), 2),
        }
        for gbit in RATES_GBIT
    ]


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(json_path: Path | None) -> None:
    """Print one row per model and rate."""
    if reason := why_unavailable():
        raise SystemExit(f"no hosts out of network namespaces: {reason}")
    assert __doc__ is not None
    print(__doc__.partition("\n\n")[2].partition("\n\n")[2])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="spectrain-network-") as folder:
        directory = Path(folder)
        with cluster_of(*NODES, directory=directory / "cluster") as cluster:
            for name in MODELS:
                ranks = data_parallel(cluster, name)
                stages = {gbit: pipeline(cluster, name, gbit, directory) for gbit in RATES_GBIT}
                rows += rows_of(name, ranks, stages)
    print_table(rows)
    print(f"\nthe paper: up to {PAPER_RATIO} times data parallelism, with 4 GPUs in one host")
    write_json(json_path, {"cores": os.cpu_count(), "rows": rows})


if __name__ == "__main__":
    main()
