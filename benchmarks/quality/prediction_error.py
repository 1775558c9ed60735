"""How far predicted weights are from those that really come, while digits are trained in 8 stages.

    python benchmarks/quality/prediction_error.py [--lr 0.004] [--seeds 3]

After each update t of a stage the real predictor makes Ŵ_t(s) for s = 1..7; when update t+s is
done, both Ŵ_t(s) and the stale W_t are compared with the W_{t+s} of the same run. The root of the
mean square error over all weights of the stage is averaged over the run after its first updates.
Each predictor looks at a run that it serves itself, with SpecTrain. The table goes into
docs/results.md, the numbers and figures into docs/results/.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))
from csv_file import write_csv
from figures import share_legend, subplots, write
from marks import between_marks
from tasks import TASKS

from spectrain.coordinator.plan import make_plan
from spectrain.protocol.job import load_job
from spectrain.protocol.settings import Settings
from spectrain.worker.build import build_stage
from spectrain.worker.pipeline import connect, drive
from spectrain.worker.weights import Weights

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "results.md"
RESULTS = DOCUMENT.with_suffix("")

STAGES = 8
PREDICTORS = ("velocity", "msnag")
COLOURS = {"velocity": "tab:blue", "msnag": "tab:cyan"}
HORIZONS = range(1, STAGES)  # as far as any stage of them looks ahead
FIRST_UPDATES = 50
"""Left out of means: the velocity has to build up first."""

SHOWN_STAGES = (0, 2, 4, 7)
SHOWN_HORIZONS = (1, 2, 4, 7)
CURVE_HORIZON = 4


@dataclass(frozen=True, slots=True)
class Errors:
    """Root mean square errors of one stage, by s, one for each update that they start from."""

    predicted: dict[int, list[float]] = field(default_factory=lambda: {s: [] for s in HORIZONS})
    stale: dict[int, list[float]] = field(default_factory=lambda: {s: [] for s in HORIZONS})


class Probe:
    """Looks at the weights of a stage after each update, and changes nothing about them."""

    def __init__(self, weights: Weights) -> None:
        self.errors = Errors()
        self._weights = weights
        self._really_step = weights.step
        # The newest last: clean weights, and what they were predicted to become.
        self._past: deque[tuple[Tensor, Mapping[int, Tensor]]] = deque(maxlen=max(HORIZONS))
        weights.step = self._step

    def _step(self) -> None:
        self._really_step()
        weights = self._weights
        actual = torch.cat(weights.clean)
        for s, (clean, predicted) in enumerate(reversed(self._past), start=1):
            self.errors.stale[s].append(rms_error(clean, actual))
            self.errors.predicted[s].append(rms_error(predicted[s], actual))
        predictions: dict[int, Tensor] = {}
        for s in HORIZONS:
            weights.predict(s)  # live weights are made anew for whatever reads them next
            predictions[s] = torch.cat(weights.live)
        self._past.append((actual, predictions))


def rms_error(one: Tensor, other: Tensor) -> float:
    return (one - other).square().mean().sqrt().item()


def watch(predictor: str, lr: float, seed: int) -> list[Errors]:
    """Train digits once with SpecTrain; return the errors of each stage."""
    task = TASKS["digits"]
    settings = Settings(
        job=str(task.job), run_dir="", stages=STAGES, method="spectrain", predictor=predictor,
        batch_size=task.batch_size, epochs=task.epochs, seed=seed, evaluate=False,
        hyper={"lr": lr},
    )  # fmt: skip
    job, plan = load_job(task.job), make_plan(settings)
    parts = [build_stage(job, settings, plan.layer_counts, stage) for stage in range(STAGES)]
    probes = [Probe(part.weights) for part in parts]
    drive(connect(parts, plan.feed, schedule=settings.schedule))
    return [probe.errors for probe in probes]


Watched = Mapping[str, Sequence[Sequence[Errors]]]
"""By predictor, the errors of each stage of each seed."""


def means(watched: Watched) -> list[dict[str, object]]:
    """Return the mean errors of each predictor, stage and s."""

    def mean(several: Sequence[Sequence[float]]) -> float:
        return statistics.fmean(statistics.fmean(errors[FIRST_UPDATES:]) for errors in several)

    rows: list[dict[str, object]] = []
    for predictor, seeds in watched.items():
        for stage, errors in enumerate(zip(*seeds, strict=True)):
            for s in HORIZONS:
                stale = mean([error.stale[s] for error in errors])
                predicted = mean([error.predicted[s] for error in errors])
                rows.append(
                    {
                        "predictor": predictor,
                        "stage": stage,
                        "updates_ahead": s,
                        "stale_rmse": stale,
                        "predicted_rmse": predicted,
                        "share_left": predicted / stale,
                    }
                )
    return rows


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the shown stages and s as Markdown."""
    by_place = {(row["predictor"], row["stage"], row["updates_ahead"]): row for row in rows}
    heads = ["stage", "s"]
    for predictor in PREDICTORS:
        heads += [f"{predictor}: stale", "predicted", "left"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for stage in SHOWN_STAGES:
        for s in SHOWN_HORIZONS:
            cells = [str(stage), str(s)]
            for predictor in PREDICTORS:
                row = by_place[predictor, stage, s]
                cells += [f"{row['stale_rmse']:.2e}", f"{row['predicted_rmse']:.2e}"]
                cells += [f"{row['share_left']:.0%}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_means(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Draw the mean errors against s, a panel for each shown stage."""
    figure, panels = subplots(len(SHOWN_STAGES))
    for stage, axes in zip(SHOWN_STAGES, panels, strict=True):
        for predictor, style in zip(PREDICTORS, ("-", "--"), strict=True):
            of = [row for row in rows if (row["predictor"], row["stage"]) == (predictor, stage)]
            stale, predicted = (
                [row[name] for row in of] for name in ("stale_rmse", "predicted_rmse")
            )
            axes.plot(HORIZONS, stale, style, color="gray", label=f"stale, run with {predictor}")
            axes.plot(
                HORIZONS, predicted, style, color=COLOURS[predictor], marker=".", label=predictor
            )
        axes.set(title=f"stage {stage}", xlabel="updates ahead, s", ylim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("RMSE of weights")
    share_legend(figure, panels[0])
    write(figure, path)


def draw_curves(watched: Watched, path: Path) -> None:
    """Draw the errors over the updates of the first seed for one s."""
    figure, panels = subplots(len(SHOWN_STAGES))
    for stage, axes in zip(SHOWN_STAGES, panels, strict=True):
        for predictor, style in zip(PREDICTORS, ("-", "--"), strict=True):
            errors = watched[predictor][0][stage]
            stale, predicted = errors.stale[CURVE_HORIZON], errors.predicted[CURVE_HORIZON]
            label = f"stale, run with {predictor}"
            axes.plot(stale, style, color="gray", linewidth=0.7, label=label)
            axes.plot(predicted, style, color=COLOURS[predictor], linewidth=0.7, label=predictor)
        axes.set(title=f"stage {stage}", xlabel="update", yscale="log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"RMSE of weights, s = {CURVE_HORIZON}")
    share_legend(figure, panels[0])
    write(figure, path)


@click.command()
@click.option("--lr", default=0.004, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
def main(lr: float, seeds: int) -> None:
    """Train, then write table and figures."""
    torch.set_num_threads(1)
    watched = {name: [watch(name, lr, seed) for seed in range(seeds)] for name in PREDICTORS}
    rows = means(watched)
    write_csv(RESULTS / "prediction-error.csv", rows)
    draw_means(rows, RESULTS / "prediction-error.png")
    draw_curves(watched, RESULTS / "prediction-error-curves.png")
    images = "\n".join(
        f"![{name}](results/{name}.png)" for name in ("prediction-error", "prediction-error-curves")
    )
    how = f"lr {lr:g}, {seeds} seeds, means from update {FIRST_UPDATES} on; the curves show seed 0"
    content = f"{images}\n\n{how}\n\n{table(rows)}"
    DOCUMENT.write_text(between_marks(DOCUMENT.read_text(), "prediction-error", content))
    print(table(rows))


if __name__ == "__main__":
    main()
