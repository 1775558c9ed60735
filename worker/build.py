"""Builds one stage of a job: its layers, weights and method, from nothing but settings and plan.

Every worker builds the whole model, so that initial weights do not depend on the cut, and keeps
its own layers. No streams and no data here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from ..protocol import methods
from ..protocol.errors import JobError
from ..protocol.job import Job
from ..protocol.settings import Settings
from .drift import LastDelta
from .methods import METHODS, Method, Place
from .objective import Objective
from .precision import dtype_of
from .predictor import PredictorBuilder
from .stage import Stage
from .velocity import Velocity
from .weights import Weights

__all__ = ["PREDICTORS", "Parts", "build_stage"]

PREDICTORS: Mapping[str, PredictorBuilder] = {
    "velocity": Velocity,
    "msnag": partial(Velocity, fades=True),
    "last-delta": LastDelta,
}
"""Ways to look ahead, by their names in ``protocol.methods.PREDICTORS``."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a loop needs besides its streams."""

    stage: Stage
    weights: Weights
    method: Method


def build_stage(
    job: Job,
    settings: Settings,
    layer_counts: Sequence[int],
    index: int,
    *,
    device: torch.device | str = "cpu",
) -> Parts:
    """Build stage ``index`` of ``job``.

    Args:
        job: the user's.
        settings: of the run.
        layer_counts: layers per stage, in order; they sum to the layers of the model.
        index: k, ``0 <= index < len(layer_counts)``.
        device: where the layers are to be.

    Raises:
        JobError: the job's functions fail, or the method cannot work with the optimizer.
    """
    hyper = job.check_hyper(settings.hyper)
    layers = job.flatten(job.build_model(settings.seed, hyper))
    assert sum(layer_counts) == len(layers), f"{layer_counts} do not cut {len(layers)} layers"
    first = sum(layer_counts[:index])
    layers = layers[first : first + layer_counts[index]]
    for _, layer in layers:
        layer.to(device)
    place = Place(
        stage=index,
        stages=len(layer_counts),
        microbatches=settings.microbatches,
        horizon=settings.horizon,
    )
    method = METHODS[settings.method](place)
    dtype = dtype_of(settings.precision)

    def build_optimizer(params: list[nn.Parameter]) -> Optimizer:
        optimizer = job.build_optimizer(params, hyper)
        _check_optimizer(optimizer, settings.method)
        return optimizer

    weights = Weights(
        layers,
        build_optimizer,
        lr_schedule=_lr_schedule(job, method),
        live_dtype=dtype,
        predicts=method.predicts,
        keeps=method.keeps,
        older=method.older,
        predictor=method.predictor or PREDICTORS[settings.predictor],
        foresees_lr=settings.predict_lr == "scheduled",
    )
    is_last = index == len(layer_counts) - 1
    stage = Stage(
        layers,
        index=index,
        stages=len(layer_counts),
        first_layer=first,
        seed=settings.seed,
        objective=Objective(job.loss, job.metrics) if is_last else None,
        device=device,
        dtype=dtype,
    )
    return Parts(stage, weights, method)


def _check_optimizer(optimizer: Optimizer, method: str) -> None:
    needed = methods.METHODS[method].optimizers
    found = type(optimizer).__name__
    if needed and found not in needed:
        raise JobError(
            f"optimizer(...) returned {found}, and --method {method} works with torch's "
            f"{' or '.join(needed)} only: its formulas are that optimizer's own."
        )


def _lr_schedule(job: Job, method: Method) -> Callable[[int], float] | None:
    """Return the job's schedule with the method's factors, None if both leave the lr alone."""
    schedule = job.lr_schedule
    if type(method).lr_factor is Method.lr_factor:
        return schedule

    def damped(update: int) -> float:
        factor = 1.0 if schedule is None else float(schedule(update))
        return factor * method.lr_factor(update)

    return damped
