"""Turns a job into a plan: the data to feed, the work there is, and which layers go to which stage.

This is where the coordinator meets the user's code; it happens once, before any worker builds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..protocol.errors import JobError, SettingsError, UserError
from ..protocol.job import TiedParameter, load_job, tied_parameters
from ..protocol.methods import refuse_microbatches
from ..protocol.schedule import Kind, Op, Work
from ..protocol.settings import Settings
from ..protocol.staleness import predicted
from .feed import Feed
from .partition import LayerCost, check_counts, cost, equal, partition
from .profile import measure_layers

__all__ = ["Plan", "make_plan", "stage_rows"]

_SAMPLE_OP = Op(Kind.FORWARD, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coordinator knows of a job once it is loaded.

    Attributes:
        feed: the batches.
        layers: every layer in order, with its cost.
        layer_counts: how many of them each stage has, in order.
        state_names: keys of the whole model's ``state_dict``.
    """

    feed: Feed
    layers: tuple[LayerCost, ...]
    layer_counts: tuple[int, ...]
    state_names: tuple[str, ...]

    @property
    def work(self) -> Work:
        """How much there is to do."""
        return self.feed.work


def make_plan(settings: Settings) -> Plan:
    """Load the job, build its model and data once, and cut it.

    Raises:
        JobError: the job's code fails or offers what cannot be run.
        SettingsError: the settings do not fit the job, e.g. more stages than layers.
    """
    job = load_job(Path(settings.job))
    hyper = job.check_hyper(settings.hyper)
    train, test = job.build_datasets(settings.seed, hyper)
    feed = Feed(
        train,
        test if settings.evaluate else None,
        batch_size=settings.batch_size,
        seed=settings.seed,
        epochs=settings.epochs,
        max_batches=settings.max_batches,
        microbatches=settings.microbatches,
        collate=job.collate,
    )
    _refuse_small_batches(settings, feed.work)
    model = job.build_model(settings.seed, hyper)
    layers = job.flatten(model)
    state_names = tuple(model.state_dict())
    costs = measure_layers(layers, feed.part("inputs", _SAMPLE_OP).value)
    counts = _cut(costs, settings)
    _refuse_ties(tied_parameters(layers), counts)
    return Plan(feed, tuple(costs), counts, state_names)


def stage_rows(plan: Plan, settings: Settings) -> list[dict[str, Any]]:
    """Return one record per stage: its layers, size, share of the cost, predicted staleness."""
    total = sum(map(cost, plan.layers)) or 1.0
    rows: list[dict[str, Any]] = []
    first = 0
    for stage, count in enumerate(plan.layer_counts):
        layers = plan.layers[first : first + count]
        first += count
        staleness = predicted(settings.schedule, stage, settings.stages, plan.work)
        rows.append(
            {
                "stage": stage,
                "layers": [layer.name for layer in layers],
                "parameters": sum(layer.parameters for layer in layers),
                "cost_share": round(sum(map(cost, layers)) / total, 4),
                "staleness": asdict(staleness),
            }
        )
    return rows


def main() -> int:
    """Print the stages of the settings on stdin as JSON: the launcher's dry run."""
    settings = Settings.from_json(sys.stdin.read())
    try:
        print(json.dumps(stage_rows(make_plan(settings), settings)))  # noqa: T201
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


def _cut(costs: list[LayerCost], settings: Settings) -> tuple[int, ...]:
    wanted = settings.partition
    if isinstance(wanted, tuple):
        check_counts(wanted, len(costs), settings.stages)
        return wanted
    if wanted == "equal":
        return equal(len(costs), settings.stages)
    return partition([cost(layer) for layer in costs], settings.stages)


def _refuse_small_batches(settings: Settings, work: Work) -> None:
    """Refuse a mini-batch with fewer samples than the method needs micro-batches."""
    for microbatches in (work.microbatches, work.last_microbatches):
        refusal = refuse_microbatches(settings.method, settings.stages, microbatches)
        if refusal is not None:
            raise SettingsError(
                f"{refusal}, and a mini-batch of an epoch has only so many samples: choose another "
                "batch size"
            )


def _refuse_ties(ties: list[TiedParameter], counts: tuple[int, ...]) -> None:
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    for tie in ties:
        stages = sorted({stage_of[index] for index in tie.layers})
        if len(stages) > 1:
            raise JobError(
                f"{' and '.join(tie.names)} are one parameter, but their layers fall on stages "
                f"{' and '.join(map(str, stages))}: each stage updates its own weights, so a "
                "parameter cannot live on two. Untie them in model(), or choose --stages or "
                "--partition so that both layers share a stage"
            )


if __name__ == "__main__":
    sys.exit(main())
