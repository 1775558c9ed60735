"""Builds one stage of a job: its layers, weights and method, from nothing but settings and plan.

Every worker builds the whole model, so that initial weights do not depend on the cut, and keeps
its own layers. No streams and no data here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..protocol.job import Job
from ..protocol.settings import Settings
from .methods import METHODS, Method
from .objective import Objective
from .precision import dtype_of
from .stage import Stage
from .weights import Weights

__all__ = ["Parts", "build_stage"]


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
    method = METHODS[settings.method](index, len(layer_counts))
    dtype = dtype_of(settings.precision)
    weights = Weights(
        layers,
        partial(job.build_optimizer, hyper=hyper),
        lr_schedule=job.lr_schedule,
        live_dtype=dtype,
        predicts=method.predicts,
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
