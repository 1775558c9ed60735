"""Trains every task with every method, and writes tables and figures of how well they learn.

    python benchmarks/quality/compare.py [--task NAME ...] [--stages N ...] [--minutes M]
        [--jobs 2] [--report-only]

Results are kept in docs/results/runs.jsonl, one line for each training, and what is there already
is not trained again: stop it whenever you like, and call it again to go on. Tables go into
docs/results.md between their marks, numbers and figures into docs/results/.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))
from csv_file import write_csv
from figures import draw_curves, draw_stability
from grid import plan, unfinished
from machine import machine
from marks import between_marks
from page import made, summary_tables, task_tables
from records import BusyError, Journal, Result
from summary import Cell, best, cells, telling_lr
from tasks import TASKS
from trainers import train_all

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "results.md"
RESULTS = DOCUMENT.with_suffix("")
JOURNAL = Journal(RESULTS / "runs.jsonl")


def measure(tasks: Sequence[str], stages: Sequence[int], minutes: float | None, jobs: int) -> bool:
    """Do what is left of the grid; return whether no task had to be left out."""
    todo = unfinished(plan(tasks, stages), {result.run for result in JOURNAL.read()})
    started_s = time.monotonic()
    done = 0

    def may_start() -> bool:
        return minutes is None or time.monotonic() - started_s < 60 * minutes

    def keep(result: Result) -> None:
        nonlocal done
        JOURNAL.add(result)
        done += 1
        end = "diverged" if result.diverged else f"{result.final:.4g}"
        print(f"{done}/{len(todo)} {result.run}: {end} ({result.seconds:.1f} s)", flush=True)

    missing = train_all(todo, jobs=jobs, may_start=may_start, on_result=keep)
    for task, reason in missing.items():
        print(f"{task} was left out: {reason}", file=sys.stderr)
    return not missing


def report(where: str | None = None) -> None:
    """Write tables and figures of all results that belong to the plan.

    Args:
        where: on which machine the newest were trained; None: what is written there stays.
    """
    planned = plan()
    by_run = {result.run: result for result in JOURNAL.read()}
    results = [by_run[run] for run in planned if run in by_run]
    if not results:
        print("no results yet", file=sys.stderr)
        return
    of = cells(results)
    text = DOCUMENT.read_text()
    if where is not None:
        text = between_marks(text, "machine", where)
    text = between_marks(text, "made", made(results, len(planned) - len(results)))
    text = between_marks(text, "summary", summary_tables(of))
    for name in TASKS:
        drawn = draw(name, of, results)
        images = "\n".join(f"![{name}: {path.stem}](results/{path.name})" for path in drawn)
        tables = task_tables(of, name)
        text = between_marks(text, name, f"{images}\n\n{tables}" if images else tables)
    DOCUMENT.write_text(text)
    write_csv(RESULTS / "means.csv", [asdict(cell) for cell in of])
    write_csv(RESULTS / "best.csv", best_rows(of))


def draw(name: str, of: Sequence[Cell], results: Sequence[Result]) -> list[Path]:
    """Draw the figures of one task; return them."""
    of = [cell for cell in of if cell.task == name]
    if not of:
        return []
    stability = RESULTS / f"{name}-learning-rates.png"
    draw_stability(of, stability)
    measured = {cell.stages for cell in of}
    stages = 8 if 8 in measured else max(measured)
    lr = telling_lr([cell for cell in of if cell.stages == stages], TASKS[name].metric)
    if lr is None:
        return [stability]
    curves = RESULTS / f"{name}-curves.png"
    draw_curves(
        [r for r in results if (r.run.task, r.run.stages, r.run.lr) == (name, stages, lr)], curves
    )
    return [stability, curves]


def best_rows(of: Sequence[Cell]) -> list[dict[str, object]]:
    """Return each method at its best learning rate, and at the one that tells methods apart."""
    by_depth: dict[tuple[str, int], dict[str, list[Cell]]] = {}
    for cell in of:
        by_depth.setdefault((cell.task, cell.stages), {}).setdefault(cell.variant, []).append(cell)
    rows: list[dict[str, object]] = []
    for (task, stages), by_variant in by_depth.items():
        metric = TASKS[task].metric
        lr = telling_lr([cell for found in by_variant.values() for cell in found], metric)
        for variant, found in by_variant.items():
            winner = best(found, metric)
            shared = next((cell for cell in found if cell.lr == lr), None)
            rows.append(
                {
                    "task": task,
                    "stages": stages,
                    "variant": variant,
                    "best_lr": winner.lr,
                    "best_mean": winner.mean,
                    "best_spread": winner.spread,
                    "shared_lr": lr,
                    "shared_mean": None if shared is None else shared.mean,
                    "shared_spread": None if shared is None else shared.spread,
                    "shared_diverged": None if shared is None else shared.diverged,
                }
            )
    return rows


@click.command()
@click.option("--task", "tasks", multiple=True, type=click.Choice(list(TASKS)))
@click.option("--stages", multiple=True, type=click.Choice([4, 8, 16]))
@click.option("--minutes", type=float, help="Start no training after so long.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default="all cores")
@click.option("--report-only", is_flag=True, help="Of the results that there are.")
def main(
    tasks: tuple[str, ...],
    stages: tuple[int, ...],
    minutes: float | None,
    jobs: int,
    *,
    report_only: bool,
) -> None:
    """Train what is left, then write the report."""
    if report_only:
        report()
        return
    try:
        with JOURNAL.alone():
            try:
                whole = measure(tasks, stages, minutes, jobs)
            finally:
                report(machine())
    except BusyError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(not whole)


if __name__ == "__main__":
    main()
