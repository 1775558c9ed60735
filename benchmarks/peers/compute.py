"""Samples per second where stages compute for real: 2 stages on the cores of this machine.

    python benchmarks/peers/compute.py [--works mlp,transformer] [--rounds 5] [--json FILE]

Everybody does the same work per update. Shares are of the twins of the same round: two processes
that train the whole model each, share nothing, and are what the machine can do at most.
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
import ddp
import deepspeed_pipeline
import single
import torch_pipelining
from measure import Contestant, Peer, Spread, one_thread, play
from ours import SpecTrain
from work import WORKS

JOB = Path(__file__).with_name("compute_job.py")
STAGES = 2
MICROBATCHES = 4
TWINS = "two independent processes"
DEEPSPEED = f"DeepSpeed pipeline, {MICROBATCHES} micro-batches"


def contestants(folder: Path, name: str) -> Iterator[Contestant]:
    """Start everybody for one of ``WORKS``."""
    work = WORKS[name]

    def place(name: str) -> Path:
        (folder / name).mkdir()
        return folder / name

    for method in ("spectrain", "vanilla"):
        options = ("--method", method, "--batch-size", str(work.batch_size))
        yield SpecTrain(
            f"SpecTrain, method {method}",
            place(method),
            JOB,
            *options,
            stages=STAGES,
            hyper={"work": name},
        )
    alone = partial(single.train, work=work)
    yield Peer("one process", alone, 1, place("alone"))
    yield Peer(TWINS, alone, STAGES, place("twins"), copies=STAGES)
    yield Peer("DDP", partial(ddp.train, work=work), STAGES, place("ddp"))
    split = {"work": work, "microbatches": MICROBATCHES}
    one = partial(torch_pipelining.train_1f1b, **split)
    zero = partial(torch_pipelining.train_zbv, **split)
    yield Peer(f"torch 1F1B, {MICROBATCHES} micro-batches", one, STAGES, place("1F1B"))
    yield Peer(f"torch ZBV, {MICROBATCHES} micro-batches", zero, STAGES, place("ZBV"))
    if deepspeed_pipeline.is_installed:
        deep = partial(deepspeed_pipeline.train, **split)
        yield Peer(DEEPSPEED, deep, STAGES, place("deepspeed"))


def measure(name: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Return a record of every turn."""
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="spectrain-peers-") as folder, ExitStack() as stack:
        players: list[Contestant] = []
        for contestant in contestants(Path(folder), name):
            stack.callback(contestant.close)
            players.append(contestant)
        for number, paces in play(players, rounds, seconds):
            for system, pace in paces.items():
                records.append(
                    {
                        "work": name,
                        "round": number,
                        "system": system,
                        "samples_per_s": WORKS[name].batch_size / pace.batch_s,
                        "share_of_twins": paces[TWINS].batch_s / pace.batch_s,
                        "cpu_ms_per_batch": 1000 * pace.cpu_s,
                    }
                )
    return records


def show(records: list[dict[str, Any]]) -> None:
    """Print one work's table."""
    print(f"\n| {records[0]['work']} | samples/s | share of twins | CPU ms per batch |")
    print("|---|---|---|---|")
    for system in dict.fromkeys(each["system"] for each in records):
        of = [each for each in records if each["system"] == system]

        def cell(field: str, spec: str, of: list[dict[str, Any]] = of) -> str:
            return format(Spread.of([each[field] for each in of]), spec)

        cells = (
            cell("samples_per_s", ".0f"),
            cell("share_of_twins", ".2f"),
            cell("cpu_ms_per_batch", ".0f"),
        )
        print(f"| {system} | " + " | ".join(cells) + " |", flush=True)
    if not deepspeed_pipeline.is_installed:
        print(f"| {DEEPSPEED} | not installed | | |", flush=True)


@click.command()
@click.option("--works", default="mlp,transformer", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=1.5, show_default=True, help="timed, of each turn")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(works: str, rounds: int, seconds: float, json_path: Path | None) -> None:
    """Print throughput as Markdown."""
    one_thread()
    records: list[dict[str, Any]] = []
    for name in works.split(","):
        measured = measure(name, rounds, seconds)
        show(measured)
        records += measured
        if json_path:
            json_path.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
