"""Which trainings there are, in which order, and which are left to do. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tasks import ORDER, TASKS, VARIANTS

from spectrain.protocol.settings import Settings

__all__ = ["Run", "plan", "settings_of", "unfinished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training, by all that its outcome depends on beside the code.

    Attributes:
        task: a key of ``TASKS``.
        stages: N.
        variant: a key of ``VARIANTS``.
        optimizer: of the task.
        lr: learning rate.
        seed: initial weights and order of the samples.
        epochs: passes over the training set.
        batch_size: samples per mini-batch.
        microbatches: parts of a mini-batch.
    """

    task: str
    stages: int
    variant: str
    optimizer: str
    lr: float
    seed: int
    epochs: int
    batch_size: int
    microbatches: int

    def __str__(self) -> str:
        return (
            f"{self.task}, {self.stages} stages, {self.variant}, lr {self.lr:g}, seed {self.seed}"
        )


def plan(tasks: Collection[str] = (), stages: Collection[int] = ()) -> list[Run]:
    """Return all runs in the order in which they are done.

    One seed of everything comes before the next seed of anything, so that what is there when time
    runs out can be compared.

    Args:
        tasks: names of those to do; empty: all.
        stages: numbers of stages to do; empty: all.
    """
    return [
        Run(
            task=name,
            stages=depth,
            variant=variant,
            optimizer=TASKS[name].optimizer,
            lr=lr,
            seed=seed,
            epochs=TASKS[name].epochs,
            batch_size=TASKS[name].batch_size,
            microbatches=VARIANTS[variant].parts(depth),
        )
        for name, depth in ORDER
        if (not tasks or name in tasks) and (not stages or depth in stages)
        for grid in [TASKS[name].depths[depth]]
        for seed in range(max(grid.seeds.values()))
        for variant, seeds in grid.seeds.items()
        if seed < seeds
        for lr in grid.lrs
    ]


def unfinished(runs: Iterable[Run], finished: Collection[Run]) -> list[Run]:
    """Return those of ``runs`` that are not among the finished ones, in order."""
    return [run for run in runs if run not in finished]


def settings_of(run: Run) -> Settings:
    """Return what the trainer is asked to do."""
    task, variant = TASKS[run.task], VARIANTS[run.variant]
    hyper = {"lr": run.lr, **task.depths[run.stages].hyper}
    if variant.method == "nesterov":
        hyper["rule"] = "nadam"  # the jobs' own name for what it needs
    return Settings(
        job=str(task.job),
        run_dir="",
        stages=run.stages,
        hyper=hyper,
        method=variant.method,
        predictor=variant.predictor,
        horizon=variant.horizon,
        predict_lr=variant.predict_lr,
        microbatches=run.microbatches,
        epochs=run.epochs,
        batch_size=run.batch_size,
        seed=run.seed,
    )
