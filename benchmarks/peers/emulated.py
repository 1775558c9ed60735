"""How busy pipelines keep devices: stages sleep as their workers do while a GPU computes.

    python benchmarks/peers/emulated.py [--sizes 2x1,4x1,8x1,2x8] [--rounds 5] [--json FILE]

Efficiency is the time that one process alone takes for the sleeps of one stage, in the same round,
over the time from one batch to the next. Real tensors cross between the stages: a size is the
number of stages and the MiB per batch and way. 16x8 is no default: logs then fill 16 GB of memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
import single
import torch_pipelining
from device import emulated
from measure import Contestant, Peer, Spread, one_thread, play
from ours import SpecTrain

JOB = Path(__file__).with_name("emulated_job.py")
MICROBATCHES = (4, 8, 32)
ALONE = "one device alone"


def contestants(folder: Path, stages: int, **sizes: float) -> Iterator[Contestant]:
    """Start everybody for one size of pipeline and tensor.

    Args:
        folder: an empty one.
        stages: N.
        sizes: for ``emulated``.
    """

    def place(name: str) -> Path:
        (folder / name).mkdir()
        return folder / name

    hyper = {"devices": stages, **sizes}
    yield SpecTrain("SpecTrain", place("spectrain"), JOB, stages=stages, hyper=hyper)
    alone = emulated(1, **sizes)
    yield Peer(ALONE, partial(single.train, work=alone), 1, place("alone"))
    whole, halved = emulated(stages, **sizes), emulated(stages, parts=2 * stages, **sizes)
    for microbatches in MICROBATCHES:
        if microbatches < stages:
            continue  # 1F1B refuses so few, and neither schedule would ever fill the pipeline
        split = {"microbatches": microbatches}
        one = partial(torch_pipelining.train_1f1b, work=whole, **split)
        name = f"torch 1F1B, {microbatches} micro-batches"
        yield Peer(name, one, stages, place(f"1F1B-{microbatches}"))
        if microbatches > max(8, 2 * stages):
            continue  # each costs ZBV twice the CPU time that it costs 1F1B: slower and slower
        zero = partial(torch_pipelining.train_zbv, work=halved, **split)
        name = f"torch ZBV, {microbatches} micro-batches"
        yield Peer(name, zero, stages, place(f"ZBV-{microbatches}"))


def measure(stages: int, rounds: int, seconds: float, **sizes: float) -> list[dict[str, Any]]:
    """Return a record of every turn."""
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="spectrain-peers-") as folder, ExitStack() as stack:
        players: list[Contestant] = []
        for contestant in contestants(Path(folder), stages, **sizes):
            stack.callback(contestant.close)
            players.append(contestant)
        for number, paces in play(players, rounds, seconds):
            for system, pace in paces.items():
                records.append(
                    {
                        "stages": stages,
                        **sizes,
                        "round": number,
                        "system": system,
                        "batch_s": pace.batch_s,
                        "cpu_ms": 1000 * pace.cpu_s,
                        "efficiency": paces[ALONE].batch_s / pace.batch_s,
                    }
                )
    return records


def show(records: list[dict[str, Any]], field: str, title: str, spec: str) -> None:
    """Print the medians, least and most of one field: a row per system, a column per size."""
    columns = list(dict.fromkeys((each["stages"], each["megabytes"]) for each in records))
    print(f"\n| {title} | " + " | ".join(f"N = {n}, {mb:g} MB" for n, mb in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for system in dict.fromkeys(each["system"] for each in records):
        cells: list[str] = []
        for column in columns:
            values = [
                each[field]
                for each in records
                if (each["system"], each["stages"], each["megabytes"]) == (system, *column)
            ]
            cells.append(format(Spread.of(values), spec) if values else "")
        print(f"| {system} | " + " | ".join(cells) + " |", flush=True)


@click.command()
@click.option("--sizes", default="2x1,4x1,8x1,16x1,2x8,4x8,8x8", show_default=True)
@click.option("--forward-ms", default=10.0, show_default=True)
@click.option("--backward-ms", default=20.0, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=0.4, show_default=True, help="timed, of each turn")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    *,
    sizes: str,
    forward_ms: float,
    backward_ms: float,
    rounds: int,
    seconds: float,
    json_path: Path | None,
) -> None:
    """Print efficiencies as Markdown."""
    one_thread()
    times = {"forward_ms": forward_ms, "backward_ms": backward_ms}
    records: list[dict[str, Any]] = []
    for size in sizes.split(","):
        stages, megabytes = size.split("x")
        records += measure(int(stages), rounds, seconds, megabytes=float(megabytes), **times)
        if json_path:
            json_path.write_text(json.dumps(records, indent=1))
    show(records, "efficiency", "efficiency", ".2f")
    show(records, "cpu_ms", "CPU ms per batch", ".1f")


if __name__ == "__main__":
    main()
