"""Puts what happens in a run into words; pure: events in, lines of text out, no terminal.

A number that is not known yet is left out of a line; no placeholder ever stands for it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ..protocol.messages import Cause, RunEnded, StageView, View

__all__ = [
    "cause_box",
    "duration",
    "end_lines",
    "live_lines",
    "metrics_text",
    "progress_line",
    "table",
    "waiting_line",
]

BOX_WIDTH = 78
LOG_TAIL_LINES = 20
NAMES_SHOWN = 6
"""How many of those who are missing at start-up are named; the rest are counted."""

STARVED_SHARE = 0.2
"""A stage that waits for data for a larger share of its time than this is worth a line."""


def duration(seconds: float) -> str:
    """Return ``seconds`` as ``0:07``, ``12:40`` or ``3:05:09``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def metrics_text(metrics: Mapping[str, float | None]) -> str:
    """Return ``accuracy 0.9722  loss 0.1021``; None stands for NaN, as it does in our JSON."""
    return "  ".join(
        f"{name} nan" if value is None else f"{name} {value:.4g}" for name, value in metrics.items()
    )


def progress_line(view: View) -> str:
    """Return one line on how far training is; empty before the first batch is trained."""
    if not view.batch:
        return ""
    parts = [f"epoch {view.epoch + 1}/{view.epochs}", f"batch {view.batch}/{view.train_batches}"]
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4g}")
    if view.lr is not None:
        parts.append(f"lr {view.lr:.3g}")
    if view.samples_per_s is not None:
        parts.append(_rate(view.samples_per_s))
    if view.eta_s is not None:
        parts.append(f"ETA {duration(view.eta_s)}")
    return "  ".join(parts)


def waiting_line(view: View) -> str:
    """Return who is missing at start-up and what each does; empty when nobody is."""
    missing = view.waiting_for
    if not missing:
        return ""
    count = f"{len(missing)} of {len(view.stages)}" if view.stages else f"{len(missing)}"
    named = "; ".join(missing[:NAMES_SHOWN])
    more = f"; and {len(missing) - NAMES_SHOWN} more" if len(missing) > NAMES_SHOWN else ""
    return f"waiting for {count}: {named}{more}"


def live_lines(view: View, width: int) -> list[str]:
    """Return the whole live view, ``width`` columns wide: progress, evaluation, stages."""
    waiting = [f"waiting for {who}" for who in view.waiting_for]
    if waiting:
        return [view.state, *waiting]
    lines = [progress_line(view) or view.state]
    if view.batch:
        lines.append(_bar(view.batch / view.train_batches, width))
    if view.metrics:
        lines.append(f"test: {metrics_text(view.metrics)}")
    return [*lines, *_stage_lines(view.stages)]


def cause_box(cause: Cause) -> str:
    """Return the box that ends a failed run: the first cause, all that explains it, the rest.

    A mistake of the user's is one sentence; for everything else the traceback and the end of the
    log are shown.
    """
    where = " ".join(
        [
            *([f"stage {cause.stage}"] if cause.stage is not None else []),
            *([f"on {cause.host}"] if cause.host else []),
            *([f"({cause.op})"] if cause.op else []),
        ]
    )
    lines = [f"{where}: {cause.what}" if where else cause.what]
    lines += _indented(_wrapped(cause.message))
    if cause.traceback and not cause.user_error:
        lines += ["", *cause.traceback.rstrip().splitlines()]
    if cause.log_tail and not cause.user_error:
        lines += ["", "the end of its log:", *_indented(cause.log_tail[-LOG_TAIL_LINES:])]
    if cause.log_path:
        lines += ["", f"its whole log: {cause.log_path}"]
    if cause.advice:
        lines += ["", *_wrapped(f"what to do: {cause.advice}")]
    if cause.consequences:
        lines += ["", "ended as a result:", *_indented(cause.consequences)]
    title = "+-- first cause "
    body = [f"| {_printable(line)}".rstrip() for line in lines]
    return "\n".join([title.ljust(BOX_WIDTH, "-"), *body, "+".ljust(BOX_WIDTH, "-")])


def end_lines(ended: RunEnded, run_dir: str) -> list[str]:
    """Return the last lines of a run: how it ended, what came out, where it lies."""
    summary: dict[str, Any] = json.loads(ended.summary_json) if ended.summary_json else {}
    lines = [_outcome(ended, summary)]
    if summary:
        lines.append(f"{summary['final_metrics_of']}: {metrics_text(summary['final_metrics'])}")
        lines += _time_lines(summary)
    what = "results" if ended.state == "done" else "what there is"
    return [*lines, f"{what}: {run_dir}"]


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return lines with aligned columns: numbers to the right, words to the left."""
    cells = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    is_number = [bool(rows) and isinstance(value, int) for value in (rows[0] if rows else titles)]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in [list(titles), *cells]
    ]


def _stage_lines(stages: Sequence[StageView]) -> list[str]:
    if not stages:
        return []
    titles = ("stage", "host", "state", "version", "in flight", "waits %", "restarts")
    return table(
        titles,
        [
            (
                stage.stage,
                stage.host,
                stage.state,
                stage.version,
                stage.in_flight,
                round(100 * stage.wait_share),
                stage.incarnation,
            )
            for stage in stages
        ],
    )


def _outcome(ended: RunEnded, summary: Mapping[str, Any]) -> str:
    if not summary:
        return f"{ended.state} (exit code {ended.exit_code})"
    text = f"{ended.state}: {summary['updates']} updates, {summary['epochs']} epochs"
    if summary["samples_per_s"] is not None:
        text += f" in {duration(summary['wall_s'])}, {_rate(summary['samples_per_s'])}"
    return text


def _time_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return where the time went, as far as the user can do something about it."""
    stages = {stage["stage"]: stage for stage in summary["stages"]}
    slowest = summary["slowest_stage"]
    lines: list[str] = []
    if slowest is not None and len(stages) > 1:
        lines.append(
            f"slowest: stage {slowest}, at work {1 - stages[slowest]['idle']:.0%} of the time"
        )
    lines += [
        f"stage {number} waited {stage['wait_feed']:.0%} of the time for data"
        for number, stage in stages.items()
        if stage["wait_feed"] > STARVED_SHARE
    ]
    return lines


def _rate(samples_per_s: float) -> str:
    digits = 0 if samples_per_s >= 10 else 1  # noqa: PLR2004  # two digits tell enough
    return f"{samples_per_s:,.{digits}f} samples/s"


def _bar(share: float, width: int) -> str:
    inside = max(min(width, BOX_WIDTH) - len("[] 100%"), 1)
    filled = round(share * inside)
    return f"[{'#' * filled}{'.' * (inside - filled)}] {share:4.0%}"


def _wrapped(text: str) -> list[str]:
    width = BOX_WIDTH - len("|   ")
    return [part for line in text.splitlines() for part in textwrap.wrap(line, width) or [""]]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _printable(line: str) -> str:
    """Drop what would steer the terminal: logs may hold colours and progress bars."""
    return "".join(char for char in line.expandtabs() if char.isprintable())
