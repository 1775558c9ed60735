"""Loss curves of the authors' own code beside ours, on the same seeded work.

    python benchmarks/quality/author_curves.py

Where that code departs from its paper, ours is also trained as that code does it. Two runs that
differ in nothing but rounding part too, after some time: so the last one is trained again from
initial weights that are rounded otherwise. The table goes into docs/results.md, the figure and the
numbers into docs/results/.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from author_methods import AS_CODED
from author_work import Case, author_losses, losses
from csv_file import write_csv
from figures import share_legend, subplot_rows, write
from marks import between_marks

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "results.md"
RESULTS = DOCUMENT.with_suffix("")

ROUNDINGS = (1, 2, 3)
APART = 1e-3
LAST = 50
SMOOTHED = 10
DRAWN_LR = 0.02
HIGHEST_LOSS = 3.0
"""In the figure; ten classes that are guessed have 2.3."""

METHODS = ("sync", "vanilla", "stash", "spectrain", "spectrain-v2", "pipeoptim")
HEADS = (
    "method", "stages", "lr",
    "last 50: theirs", "ours", "as coded", "rounded otherwise",
    "greatest difference: ours", "as coded",
    "apart from: ours", "as coded", "rounded otherwise",
)  # fmt: skip

Curve = Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Losses of one case.

    Attributes:
        theirs: of the authors' code.
        ours: of the method by its paper.
        as_coded: of ours with the departures of that code; None where it has none.
        rounded: the latter again, or ``ours``, rounded otherwise.
    """

    theirs: Curve
    ours: Curve
    as_coded: Curve | None
    rounded: Sequence[Curve]

    @classmethod
    def of(cls, case: Case, theirs: Curve) -> Curves:
        """Train the case in all ways."""
        coded = case.method in AS_CODED
        return cls(
            theirs=theirs,
            ours=losses(case),
            as_coded=losses(case, as_coded=True) if coded else None,
            rounded=[losses(case, as_coded=coded, rounding=seed) for seed in ROUNDINGS],
        )

    @property
    def explained(self) -> Curve:
        """Ours, as near to theirs as we can explain it."""
        return self.as_coded or self.ours


def last_mean(curve: Curve) -> float:
    """Return the mean loss of the last mini-batches; NaN if it diverged."""
    return statistics.fmean(curve[-LAST:])


def greatest_difference(one: Curve, other: Curve) -> float:
    """Return it over all mini-batches for which both are finite."""
    differences = (abs(left - right) for left, right in zip(one, other, strict=True))
    return max(difference for difference in differences if math.isfinite(difference))


def apart_from(one: Curve, other: Curve) -> int | None:
    """Return the first mini-batch, from 0, whose losses differ by more than 1e-3, if one does."""
    for batch, (left, right) in enumerate(zip(one, other, strict=True)):
        if not abs(left - right) <= APART:  # true of NaN, too
            return batch
    return None


def numbers(case: Case, curves: Curves) -> dict[str, object]:
    """Return a row of the CSV file; None where there is nothing to compare."""
    coded = curves.as_coded
    rounded = [last_mean(curve) for curve in curves.rounded]
    finite = [mean for mean in rounded if math.isfinite(mean)]
    partings = [apart_from(curves.explained, curve) for curve in curves.rounded]
    return {
        "method": case.method,
        "stages": case.stages,
        "lr": case.lr,
        "last_theirs": last_mean(curves.theirs),
        "last_ours": last_mean(curves.ours),
        "last_as_coded": last_mean(coded) if coded else None,
        "last_rounded_least": min(finite, default=math.nan),
        "last_rounded_most": max(finite, default=math.nan),
        "rounded_diverged": len(rounded) - len(finite),
        "difference_ours": greatest_difference(curves.theirs, curves.ours),
        "difference_as_coded": greatest_difference(curves.theirs, coded) if coded else None,
        "apart_ours": apart_from(curves.theirs, curves.ours),
        "apart_as_coded": apart_from(curves.theirs, coded) if coded else None,
        "apart_rounded": min((batch for batch in partings if batch is not None), default=None),
    }


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the numbers as Markdown."""
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    for row in rows:
        least, most = cell(row["last_rounded_least"]), cell(row["last_rounded_most"])
        cells = [f"`{row['method']}`", str(row["stages"]), f"{row['lr']:g}"]
        cells += [cell(row[f"last_{name}"]) for name in ("theirs", "ours", "as_coded")]
        diverged = f" ({row['rounded_diverged']}✗)" if row["rounded_diverged"] else ""
        cells += [(f"{least} to {most}" if least != most else least) + diverged]
        cells += [cell(row[f"difference_{name}"]) for name in ("ours", "as_coded")]
        cells += [cell(row[f"apart_{name}"]) for name in ("ours", "as_coded", "rounded")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:#.3g}" if math.isfinite(value) else "✗"
    return "—" if value is None else str(value)


def smoothed(curve: Curve) -> list[float]:
    """Return the means of each mini-batch and those before it."""
    return [
        statistics.fmean(curve[end - SMOOTHED : end]) for end in range(SMOOTHED, len(curve) + 1)
    ]


def draw(compared: Mapping[Case, Curves], path: Path) -> None:
    """Draw one learning rate: a row for each depth, a panel for each method."""
    depths = sorted({case.stages for case in compared})
    figure, rows = subplot_rows(len(depths), len(METHODS))
    for stages, panels in zip(depths, rows, strict=True):
        for method, axes in zip(METHODS, panels, strict=True):
            curves = compared[Case(stages, DRAWN_LR, method)]
            batches = range(SMOOTHED - 1, len(curves.theirs))
            near = list(zip(*map(smoothed, [curves.explained, *curves.rounded]), strict=True))
            axes.fill_between(
                batches, [*map(min, near)], [*map(max, near)],
                color="tab:gray", alpha=0.35, linewidth=0, label="ours, rounded otherwise",
            )  # fmt: skip
            theirs, ours = smoothed(curves.theirs), smoothed(curves.ours)
            axes.plot(batches, theirs, color="black", linewidth=2.5, label="their code")
            axes.plot(batches, ours, color="tab:blue", linewidth=1, label="ours")
            if curves.as_coded:
                line = smoothed(curves.as_coded)
                axes.plot(batches, line, color="tab:orange", linewidth=1, label="ours, as coded")
            axes.set(title=f"{method}, {stages} stages", ylim=(0, HIGHEST_LOSS))
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("training loss")
    for axes in rows[-1]:
        axes.set_xlabel("mini-batch")
    share_legend(figure, rows[0][-1])
    write(figure, path)


@click.command()
def main() -> None:
    """Train, then write table and figure."""
    torch.set_num_threads(1)
    theirs = author_losses()
    cases = sorted(theirs, key=lambda case: (case.lr, case.stages, METHODS.index(case.method)))
    compared = {case: Curves.of(case, theirs[case]) for case in cases}
    rows = [numbers(case, curves) for case, curves in compared.items()]
    write_csv(RESULTS / "author-curves.csv", rows)
    draw(compared, RESULTS / "author-curves.png")
    how = f"The figure has lr {DRAWN_LR:g}, as running means of {SMOOTHED} mini-batches."
    content = f"![author-curves](results/author-curves.png)\n\n{how}\n\n{table(rows)}"
    DOCUMENT.write_text(between_marks(DOCUMENT.read_text(), "author-curves", content))
    print(table(rows))


if __name__ == "__main__":
    main()
