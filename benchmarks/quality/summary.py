"""From results to the numbers of the tables: means, spreads, best learning rates. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from records import Result
from tasks import Metric

__all__ = ["Cell", "best", "cells", "mean_curve", "telling_lr"]

REFERENCE = "sync"
UNAIDED = ("vanilla", "stash")
"""What the remedies are compared with: staleness as it is, and consistent but stale gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All seeds of one method at one learning rate.

    Attributes:
        task: a key of ``TASKS``.
        stages: N.
        variant: a key of ``VARIANTS``.
        lr: learning rate.
        runs: seeds that there are results of, at least 1.
        diverged: how many of them ended with a loss that was not finite.
        mean: of the final test metric.
        spread: its standard deviation over the seeds; None with one seed.
        best_mean: mean of each run's best epoch.
        train_loss: mean over the runs that did not diverge; None where all did.
    """

    task: str
    stages: int
    variant: str
    lr: float
    runs: int
    diverged: int
    mean: float
    spread: float | None
    best_mean: float
    train_loss: float | None


def cells(results: Iterable[Result]) -> list[Cell]:
    """Return one cell for each task, depth, method and learning rate, as they first occur."""
    groups: dict[tuple[str, int, str, float], list[Result]] = {}
    for result in results:
        run = result.run
        groups.setdefault((run.task, run.stages, run.variant, run.lr), []).append(result)
    return [_cell(group) for group in groups.values()]


def best(of: Sequence[Cell], metric: Metric) -> Cell:
    """Return the cell with the best mean; of equal ones that with the lowest learning rate."""
    sign = -1 if metric.higher_is_better else 1
    return min(of, key=lambda cell: (sign * cell.mean, cell.lr))


def telling_lr(of: Iterable[Cell], metric: Metric) -> float | None:
    """Return the learning rate at which vanilla and stash lose most against sync.

    Args:
        of: cells of one task and depth.
        metric: theirs.

    Returns:
        None where no learning rate has results of all three; the lowest of equal ones.
    """
    means: dict[float, dict[str, float]] = {}
    for cell in of:
        means.setdefault(cell.lr, {})[cell.variant] = cell.mean
    losses = {
        lr: (by_variant[REFERENCE] - statistics.fmean(by_variant[name] for name in UNAIDED))
        * (1 if metric.higher_is_better else -1)
        for lr, by_variant in sorted(means.items())
        if by_variant.keys() >= {REFERENCE, *UNAIDED}
    }
    return max(losses, key=lambda lr: losses[lr], default=None)


def mean_curve(results: Sequence[Result], metric: Metric) -> list[float]:
    """Return the mean test metric after each epoch; a run that diverged stays at chance."""
    epochs = results[0].run.epochs
    padded = [
        (*result.metric_curve, *[metric.chance] * (epochs - len(result.metric_curve)))
        for result in results
    ]
    return [statistics.fmean(column) for column in zip(*padded, strict=True)]


def _cell(group: Sequence[Result]) -> Cell:
    run = group[0].run
    finals = [result.final for result in group]
    losses = [
        result.train_loss
        for result in group
        if result.train_loss is not None and not result.diverged
    ]
    return Cell(
        task=run.task,
        stages=run.stages,
        variant=run.variant,
        lr=run.lr,
        runs=len(group),
        diverged=sum(result.diverged for result in group),
        mean=statistics.fmean(finals),
        spread=statistics.stdev(finals) if len(group) > 1 else None,
        best_mean=statistics.fmean(result.best for result in group),
        train_loss=statistics.fmean(losses) if losses else None,
    )
