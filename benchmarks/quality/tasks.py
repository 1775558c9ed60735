"""What is compared: tasks, the methods on each of them, and the order of it all. No training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import spectrain
from spectrain.protocol.methods import Horizon, PredictLr

__all__ = ["ORDER", "SUMMARY", "TASKS", "VARIANTS", "Depth", "Metric", "Task", "Variant"]

EXAMPLES = Path(spectrain.__file__).parent / "examples"
JOBS = Path(__file__).resolve().with_name("jobs")


@dataclass(frozen=True, slots=True)
class Variant:
    """A method with all that it is run with; one row of a table.

    Attributes:
        method: of ``spectrain.protocol.methods.METHODS``.
        predictor: how it looks ahead, if it does.
        horizon: how long a slot of the pipeline is taken to be.
        predict_lr: which learning rates it assumes.
        microbatches: of a mini-batch; None: as few as suit the method.
    """

    method: str
    predictor: str = "velocity"
    horizon: Horizon = "paper"
    predict_lr: PredictLr = "current"
    microbatches: int | None = None

    @property
    def name(self) -> str:
        """What tables call it: the method, and what is not as by default."""
        parts = [self.method]
        parts += [self.predictor] if self.predictor != "velocity" else []
        parts += [self.horizon] if self.horizon != "paper" else []
        parts += [self.predict_lr] if self.predict_lr != "current" else []
        parts += [f"split-{self.microbatches}"] if self.microbatches is not None else []
        return "+".join(parts)

    def parts(self, stages: int) -> int:
        """Return into how many micro-batches a mini-batch is split on ``stages`` stages.

        2BW gets as many as its paper asks for. PACI and XPipe are made for several, and get four.
        """
        if self.microbatches is not None:
            return self.microbatches
        return {"2bw": stages, "paci": 4, "xpipe": 4}.get(self.method, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """How good a model is on the test set.

    Attributes:
        key: its name among the job's metrics.
        label: with its unit, for tables and axes.
        scale: from the job's number to the label's unit.
        chance: what a model that knows nothing has, in the label's unit; it stands for a run whose
            loss was not finite.
        higher_is_better: the direction.
    """

    key: str
    label: str
    chance: float
    scale: float = 1.0
    higher_is_better: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """A pipeline that a task is trained on.

    Attributes:
        stages: N.
        seeds: by name of ``VARIANTS``, how many; runs use 0 and up.
        lrs: learning rates, ascending.
        hyper: for the job's functions, beside the learning rate.
    """

    stages: int
    seeds: Mapping[str, int]
    lrs: tuple[float, ...]
    hyper: Mapping[str, bool | int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model and its data.

    Attributes:
        name: of the task.
        job: its job file.
        optimizer: what the job builds, for the reader.
        epochs: passes over the training set.
        batch_size: samples per mini-batch.
        metric: on the test set.
        depths: by number of stages.
    """

    name: str
    job: Path
    optimizer: str
    epochs: int
    batch_size: int
    metric: Metric
    depths: Mapping[int, Depth]


def accuracy(classes: int) -> Metric:
    return Metric(key="accuracy", label="test accuracy in %", chance=100 / classes, scale=100)


def depths(*several: Depth) -> dict[int, Depth]:
    return {depth.stages: depth for depth in several}


VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("sync"),
        Variant("vanilla"),
        Variant("stash"),
        Variant("stash-damped"),
        Variant("vertical-sync"),
        Variant("2bw"),
        Variant("paci"),
        Variant("pipemare"),
        Variant("nesterov"),
        Variant("xpipe"),
        Variant("pipeoptim"),
        Variant("pipeoptim", "msnag"),
        Variant("spectrain-v2"),
        Variant("spectrain-v2", "msnag"),
        Variant("spectrain"),
        Variant("spectrain", "msnag"),
        Variant("spectrain", predict_lr="scheduled"),
        Variant("spectrain", "msnag", predict_lr="scheduled"),
        Variant("spectrain", horizon="exact"),
        Variant("spectrain", "msnag", horizon="exact"),
        Variant("spectrain", "msnag", microbatches=4),
        Variant("spectrain-damped"),
        Variant("spectrain-damped", "msnag"),
        Variant("spectrain-v2-damped"),
        Variant("spectrain-v2-damped", "msnag"),
        Variant("spectrain-v2-damped", "msnag", predict_lr="scheduled"),
    )
}
"""Every row, by name, in the order of tables."""

MAIN = (
    "sync",
    "vanilla",
    "stash",
    "pipeoptim",
    "spectrain",
    "spectrain+msnag",
    "spectrain-v2-damped+msnag",
)
"""What is compared everywhere."""

SUMMARY = (*MAIN, "spectrain+msnag+split-4", "nesterov")
"""Columns of the tables over all tasks."""

ADAPTIVE = (*MAIN, "nesterov")
"""The same for jobs that have NAdam to offer."""


def seeds(*names: str, count: int) -> dict[str, int]:
    return dict.fromkeys(names, count)


MAIN_SEEDS = seeds(*MAIN, "spectrain-damped+msnag", "spectrain+msnag+split-4", count=5)

CONSTANT = tuple(name for name, variant in VARIANTS.items() if variant.predict_lr == "current")

ALL_SEEDS = {**seeds(*(name for name in CONSTANT if name != "nesterov"), count=3), **MAIN_SEEDS}
"""Seeds of all that works with SGD, where trainings are short."""

LETTER_SEEDS = {
    **MAIN_SEEDS,
    **seeds("stash-damped", "spectrain-v2", "spectrain-v2+msnag", count=3),
    **seeds("spectrain+exact", "spectrain+msnag+exact", count=3),
}
"""Seeds of the main ones, of those that tell which part of the best does it, and of horizons."""

SPLIT = ("paci", "spectrain+msnag+split-4")
"""Without and with prediction, what a mini-batch in four parts does where pipelines are deep."""

SCHEDULE_SEEDS = seeds(
    *(name for name in MAIN if name != "pipeoptim"),
    *(name for name, variant in VARIANTS.items() if variant.predict_lr == "scheduled"),
    count=5,
)
"""Seeds of the main ones, and of those that know the learning rates to come."""

TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="digits",
            job=EXAMPLES / "digits.py",
            optimizer="SGD, momentum 0.9",
            epochs=30,
            batch_size=64,
            metric=accuracy(10),
            depths=depths(
                Depth(stages=4, seeds=ALL_SEEDS, lrs=(0.002, 0.004, 0.01, 0.02, 0.04)),
                Depth(stages=8, seeds=ALL_SEEDS, lrs=(0.002, 0.004, 0.01, 0.02, 0.04)),
                Depth(
                    stages=16,
                    seeds=seeds(*MAIN, *SPLIT, count=3),
                    lrs=(0.0005, 0.001, 0.002, 0.004, 0.01, 0.02),
                    hyper={"depth": 16},
                ),
            ),
        ),
        Task(
            name="digits-schedule",
            job=JOBS / "digits_schedule.py",
            optimizer="SGD, momentum 0.9",
            epochs=30,
            batch_size=64,
            metric=accuracy(10),
            depths=depths(Depth(stages=8, seeds=SCHEDULE_SEEDS, lrs=(0.004, 0.01))),
        ),
        Task(
            name="letter",
            job=JOBS / "letter.py",
            optimizer="SGD, momentum 0.9",
            epochs=12,
            batch_size=64,
            metric=accuracy(26),
            depths=depths(
                Depth(stages=8, seeds=LETTER_SEEDS, lrs=(0.005, 0.01, 0.02, 0.03)),
            ),
        ),
        Task(
            name="fashion-mlp",
            job=JOBS / "fashion_mlp.py",
            optimizer="SGD, momentum 0.9",
            epochs=4,
            batch_size=64,
            metric=accuracy(10),
            depths=depths(
                Depth(stages=8, seeds=seeds(*MAIN, count=3), lrs=(0.0025, 0.005, 0.01)),
            ),
        ),
        Task(
            name="fashion-cnn",
            job=JOBS / "fashion_cnn.py",
            optimizer="SGD, momentum 0.9",
            epochs=3,
            batch_size=64,
            metric=accuracy(10),
            depths=depths(
                Depth(stages=8, seeds=seeds(*MAIN, count=3), lrs=(0.01, 0.04)),
            ),
        ),
        Task(
            name="sentiment-transformer",
            job=JOBS / "sentiment_transformer.py",
            optimizer="AdamW; nesterov NAdam",
            epochs=2,
            batch_size=64,
            metric=accuracy(2),
            depths=depths(
                Depth(stages=8, seeds=seeds(*ADAPTIVE, count=3), lrs=(0.0005, 0.002)),
            ),
        ),
        Task(
            name="sentiment-lstm",
            job=JOBS / "sentiment_lstm.py",
            optimizer="AdamW; nesterov NAdam",
            epochs=2,
            batch_size=64,
            metric=accuracy(2),
            depths=depths(
                Depth(stages=8, seeds=seeds(*ADAPTIVE, count=3), lrs=(0.0005, 0.002)),
            ),
        ),
        Task(
            name="char-lm",
            job=EXAMPLES / "char_lm.py",
            optimizer="AdamW",
            epochs=2,
            batch_size=16,
            metric=Metric(
                key="bits_per_byte",
                label="test loss in bits per byte",
                chance=8.0,
                higher_is_better=False,
            ),
            depths=depths(
                Depth(
                    stages=8,
                    seeds=seeds(*MAIN, count=3),
                    lrs=(0.0005, 0.002),
                    hyper={"width": 64, "depth": 6, "context": 64, "text_bytes": 200_000},
                )
            ),
        ),
    )
}
"""Every task, by name."""

ORDER: tuple[tuple[str, int], ...] = (
    ("digits", 8),
    ("letter", 8),
    ("digits", 4),
    ("digits", 16),
    ("digits-schedule", 8),
    ("sentiment-lstm", 8),
    ("fashion-mlp", 8),
    ("char-lm", 8),
    ("sentiment-transformer", 8),
    ("fashion-cnn", 8),
)
"""Task and stages: what is cheap and tells most comes first."""
