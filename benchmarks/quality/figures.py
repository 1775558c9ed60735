"""Draws the results: curves over epochs, and how much learning rate each method bears."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from records import Result
from summary import Cell, mean_curve
from tasks import TASKS, VARIANTS

__all__ = ["draw_curves", "draw_stability", "share_legend", "subplot_rows", "subplots", "write"]

COLOURS = {
    "sync": "black",
    "vanilla": "tab:red",
    "stash": "tab:orange",
    "pipeoptim": "tab:purple",
    "spectrain": "tab:blue",
    "spectrain+msnag": "tab:cyan",
    "spectrain-v2-damped+msnag": "tab:green",
    "spectrain+msnag+split-4": "tab:brown",
    "nesterov": "tab:pink",
}
"""Methods that are drawn; more lines than these nobody can tell apart."""


def subplots(panels: int) -> tuple[Any, Sequence[Any]]:
    """Return a figure and its panels, side by side."""
    figure, rows = subplot_rows(1, panels)
    return figure, rows[0]


def subplot_rows(rows: int, panels: int) -> tuple[Any, Sequence[Sequence[Any]]]:
    """Return a figure and its rows of as many panels."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    size = (1.5 + 3.2 * panels, 0.8 + 3.0 * rows)
    return plt.subplots(rows, panels, figsize=size, squeeze=False, layout="constrained")


def share_legend(figure: Any, axes: Any) -> None:
    """Put one legend for all panels below them, with the lines of ``axes``."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(5, len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")


def write(figure: Any, path: Path) -> None:
    """Write a figure as PNG, the same bytes for the same picture, and let go of it."""
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw_curves(results: Sequence[Result], path: Path) -> None:
    """Draw test metric and training loss by epoch.

    Args:
        results: of one task, one depth and one learning rate.
        path: of the figure.
    """
    task = TASKS[results[0].run.task]
    figure, (metrics, losses) = subplots(2)
    for variant in _drawn({result.run.variant for result in results}):
        of = [result for result in results if result.run.variant == variant]
        curve = mean_curve(of, task.metric)
        epochs = range(1, len(curve) + 1)
        style = {"color": COLOURS[variant], "label": variant, "marker": ".", "markersize": 4}
        metrics.plot(epochs, curve, **style)
        whole = [result.loss_curve for result in of if not result.diverged]
        if whole:
            means = [sum(column) / len(column) for column in zip(*whole, strict=True)]
            losses.plot(range(1, len(means) + 1), means, **style)
    metrics.set(xlabel="epoch", ylabel=task.metric.label)
    losses.set(xlabel="epoch", ylabel="training loss", yscale="log")
    for axes in (metrics, losses):
        axes.grid(alpha=0.3)
    share_legend(figure, metrics)
    first = results[0].run
    figure.suptitle(f"{task.name}, {first.stages} stages, lr {first.lr:g}", fontsize="medium")
    write(figure, path)


def draw_stability(cells: Sequence[Cell], path: Path) -> None:
    """Draw the final test metric against the learning rate, a panel for each depth.

    Args:
        cells: of one task.
        path: of the figure.
    """
    task = TASKS[cells[0].task]
    depths = sorted({cell.stages for cell in cells})
    figure, panels = subplots(len(depths))
    for stages, axes in zip(depths, panels, strict=True):
        of = [cell for cell in cells if cell.stages == stages]
        for variant in _drawn({cell.variant for cell in of}):
            line = sorted((cell for cell in of if cell.variant == variant), key=lambda c: c.lr)
            axes.errorbar(
                [cell.lr for cell in line],
                [cell.mean for cell in line],
                yerr=[cell.spread or 0.0 for cell in line],
                color=COLOURS[variant],
                label=variant,
                marker=".",
                capsize=2,
                elinewidth=0.7,
            )
        lrs = sorted({cell.lr for cell in of})
        axes.set(title=f"{stages} stages", xlabel="learning rate", xscale="log")
        axes.set_xticks(lrs, [f"{lr:g}" for lr in lrs])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(task.metric.label)
    share_legend(figure, panels[-1])
    figure.suptitle(task.name, fontsize="medium")
    write(figure, path)


def _drawn(variants: set[str]) -> list[str]:
    return [name for name in VARIANTS if name in COLOURS and name in variants]
