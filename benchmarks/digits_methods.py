"""Test accuracy of the methods on digits at one learning rate: the table of docs/algorithm.md.

    python benchmarks/digits_methods.py [--stages 4] [--lr 0.04] [--seeds 3] [--epochs 30]

All stages run in one process, which gives the same bits as real workers (a test holds the two
together) and takes seconds.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import click
import torch

import spectrain
from spectrain.coordinator.plan import make_plan
from spectrain.protocol.errors import NonFiniteError
from spectrain.protocol.job import load_job
from spectrain.protocol.settings import Settings
from spectrain.worker.pipeline import run_in_one_process

JOB = Path(spectrain.__file__).parent / "examples" / "digits.py"
METHODS = ("sync", "vanilla", "spectrain")


def accuracy(method: str, stages: int, lr: float, seed: int, epochs: int) -> float:
    """Train once and return the test accuracy in percent; a run that diverged scores 0."""
    settings = Settings(
        job=str(JOB), run_dir="", stages=stages, method=method, batch_size=64, epochs=epochs,
        seed=seed, hyper={"lr": lr},
    )  # fmt: skip
    plan = make_plan(settings)
    try:
        outcome = run_in_one_process(load_job(JOB), settings, plan.feed, plan.layer_counts)
    except NonFiniteError:
        return 0.0
    return 100 * outcome.evaluations[-1].metrics["accuracy"]


@click.command()
@click.option("--stages", default=4, show_default=True)
@click.option("--lr", default=0.04, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--epochs", default=30, show_default=True)
def main(stages: int, lr: float, seeds: int, epochs: int) -> None:
    """Print the table as Markdown, and how much of the gap SpecTrain closes."""
    torch.set_num_threads(1)
    print(f"digits, {stages} stages, lr {lr:g}, {epochs} epochs, test accuracy in %\n")
    print("| method | " + " | ".join(f"seed {seed}" for seed in range(seeds)) + " | mean |")
    print("|---" * (seeds + 2) + "|")
    means: dict[str, float] = {}
    for method in METHODS:
        scores = [accuracy(method, stages, lr, seed, epochs) for seed in range(seeds)]
        means[method] = statistics.mean(scores)
        cells = " | ".join(f"{score:.1f}" for score in scores)
        print(f"| {method} | {cells} | {means[method]:.1f} |", flush=True)
    gap = means["sync"] - means["vanilla"]
    closed = (means["spectrain"] - means["vanilla"]) / gap if gap > 0 else float("nan")
    print(f"\nspectrain closes {closed:.0%} of the {gap:.1f} points between vanilla and sync")


if __name__ == "__main__":
    main()
