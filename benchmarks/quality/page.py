"""The tables of docs/results.md as Markdown, made of cells. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from records import Result
from summary import Cell, best, telling_lr
from tasks import ORDER, SUMMARY, TASKS, VARIANTS, Metric

__all__ = ["made", "summary_tables", "task_tables"]


def made(results: Sequence[Result], missing: int) -> str:
    """Say what the tables rest on.

    Args:
        results: all of the plan that there are.
        missing: runs of the plan that there are no results of.
    """
    hours = sum(result.seconds for result in results) / 3600
    versions = ", ".join(sorted({result.torch for result in results}))
    left = f"; {missing} of the plan are not done yet" if missing else ", the whole plan"
    return f"{len(results)} trainings{left}; {hours:.1f} hours of one core, torch {versions}."


def task_tables(cells: Sequence[Cell], name: str) -> str:
    """Return a table of methods against learning rates for each depth of a task."""
    metric, tables = TASKS[name].metric, list[str]()
    for stages in TASKS[name].depths:
        of = [cell for cell in cells if (cell.task, cell.stages) == (name, stages)]
        if of:
            seeds = f"mean ± standard deviation, {_seeds(of)}"
            tables.append(f"{stages} stages, {metric.label}, {seeds}\n\n{_lr_table(of, metric)}")
    return "\n\n".join(tables) or "Not measured yet."


def summary_tables(cells: Sequence[Cell]) -> str:
    """Return the main methods over all tasks, at their best learning rates and at a shared one."""
    at_best = [_row("task", "stages", *SUMMARY), _rule(2 + len(SUMMARY))]
    shared = [_row("task", "stages", "lr", *SUMMARY), _rule(3 + len(SUMMARY))]
    for name, stages in ORDER:
        of = [cell for cell in cells if (cell.task, cell.stages) == (name, stages)]
        if not of:
            continue
        metric = TASKS[name].metric
        label = name if metric.higher_is_better else f"{name} ↓"
        by_variant = {
            variant: [cell for cell in of if cell.variant == variant] for variant in SUMMARY
        }
        winners = [best(found, metric) if found else None for found in by_variant.values()]
        at_best.append(_row(label, stages, *map(_mean_at, winners)))
        lr = telling_lr(of, metric)
        if lr is not None:
            there = [
                next((cell for cell in found if cell.lr == lr), None)
                for found in by_variant.values()
            ]
            shared.append(_row(label, stages, f"{lr:g}", *map(_mean, there)))
    if len(at_best) == 2:
        return "Not measured yet."
    return (
        "Each method at its best learning rate (@)\n\n"
        + "\n".join(at_best)
        + "\n\nAll at the learning rate at which vanilla and stash lose most against sync\n\n"
        + "\n".join(shared)
    )


def _lr_table(of: Sequence[Cell], metric: Metric) -> str:
    lrs = sorted({cell.lr for cell in of})
    lines = [_row("method", *(f"lr {lr:g}" for lr in lrs), "best"), _rule(len(lrs) + 2)]
    for variant in VARIANTS:
        found = {cell.lr: cell for cell in of if cell.variant == variant}
        if found:
            winner = best(list(found.values()), metric)
            lines.append(
                _row(f"`{variant}`", *(_spread(found.get(lr)) for lr in lrs), _mean_at(winner))
            )
    return "\n".join(lines)


def _seeds(of: Sequence[Cell]) -> str:
    """Tell how many seeds the cells have."""
    least, most = min(cell.runs for cell in of), max(cell.runs for cell in of)
    count = f"{most}" if least == most else f"{least} to {most}"
    return f"{count} seed" if most == 1 else f"{count} seeds"


def _row(*values: object) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def _rule(columns: int) -> str:
    return "|---" * columns + "|"


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _mean(cell: Cell | None) -> str:
    return "—" if cell is None else _number(cell.mean) + _lost(cell)


def _mean_at(cell: Cell | None) -> str:
    return "—" if cell is None else f"{_number(cell.mean)} @{cell.lr:g}"


def _spread(cell: Cell | None) -> str:
    if cell is None:
        return "—"
    spread = "" if cell.spread is None else f" ± {_number(cell.spread)}"
    return _number(cell.mean) + spread + _lost(cell)


def _lost(cell: Cell) -> str:
    return f" ({cell.diverged}✗)" if cell.diverged else ""
