"""Every staleness method by name: all that has to be known of one without torch.

What its forwards and backwards read is in ``worker/methods``. The launcher and the settings need
what stands here: the schedule, how many micro-batches, which ways to predict, what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from .schedule import Schedule

__all__ = [
    "METHODS",
    "PREDICTORS",
    "Horizon",
    "MethodSpec",
    "PredictLr",
    "refuse_microbatches",
    "remembered_copies",
]

Horizon = Literal["paper", "exact"]
"""How long a slot of the pipeline is: a backward lasts as long as a forward, or twice as long."""

PredictLr = Literal["current", "scheduled"]
"""Which learning rates prediction assumes: that of the coming update, or the schedule's."""

PREDICTORS: Mapping[str, str] = {
    "velocity": "each update moves the weights as the optimizer's velocity says",
    "msnag": "gradients to come are zero: the velocity fades by the momentum",
    "last-delta": "each update moves the weights as the last one did",
}
"""Ways to look ahead, by name. Formulas are in ``worker/velocity.py`` and ``worker/drift.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSpec:
    """One method.

    Attributes:
        summary: what forwards and backwards read, in a few words.
        weight_copies: from stage, stages and micro-batches to how often the stage holds its
            weights at most: clean, live and older ones, and what else is of their size, but not
            gradients and optimizer state. The predictor "last-delta" adds one.
        remembered: from stage and stages to how many of these a snapshot holds beside the clean
            weights and what forwards in flight read.
        schedule: the order of ops.
        several: whether a mini-batch may be split into several micro-batches.
        least_microbatches: from the number of stages to the fewest micro-batches that it can
            work with.
        predictors: those of ``PREDICTORS`` that it can look ahead with; empty: it takes none.
        optimizers: names of torch's optimizers that it needs; empty: any, as far as the
            predictor knows them.
    """

    summary: str
    weight_copies: Callable[[int, int, int], int]
    remembered: Callable[[int, int], int] = lambda _stage, _stages: 0
    schedule: Schedule = Schedule.ASYNCHRONOUS
    several: bool = False
    least_microbatches: Callable[[int], int] = lambda _: 1
    predictors: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()


def remembered_copies(method: str, predictor: str, stage: int, stages: int) -> int:
    """Return how many copies a snapshot holds beside clean weights and what forwards read."""
    spec = METHODS[method]
    last_delta = predictor == "last-delta" and bool(spec.predictors)
    return spec.remembered(stage, stages) + last_delta


def refuse_microbatches(method: str, stages: int, microbatches: int) -> str | None:
    """Return why ``method`` cannot split a mini-batch into so many, or None if it can."""
    spec = METHODS[method]
    least = spec.least_microbatches(stages)
    if microbatches > 1 and not spec.several:
        others = ", ".join(name for name, other in METHODS.items() if other.several)
        return (
            f"microbatches = {microbatches}: {method} updates after every mini-batch; "
            f"methods that split it are {others}"
        )
    if microbatches < least:
        return f"microbatches = {microbatches}: {method} on {stages} stages needs at least {least}"
    return None


def _one(stage: int, stages: int, microbatches: int) -> int:
    """Count one copy: live weights are the clean ones."""
    del stage, stages, microbatches
    return 1


def _stashed(stage: int, stages: int, microbatches: int) -> int:
    """Count clean, live, and one for each batch in flight."""
    del microbatches
    return 1 if stage == stages - 1 else 2 + stages - stage


def _uniform(stage: int, stages: int, microbatches: int) -> int:
    """Count clean, live, and all versions back to the one that the first stage began with."""
    del stage, microbatches
    return 1 if stages == 1 else 2 + stages - 1


def _double(stage: int, stages: int, microbatches: int) -> int:
    """Count clean, live, and the version before."""
    del stage, microbatches
    return 1 if stages == 1 else 3


def _predicted(stage: int, stages: int, microbatches: int) -> int:
    """Count clean and live."""
    del microbatches
    return 2 if stages - 1 - stage + stage // 2 > 0 else 1


def _predicted_forward(stage: int, stages: int, microbatches: int) -> int:
    """Count clean and live, and one where a stage is never behind."""
    del microbatches
    return 1 if stage == stages - 1 else 2


def _bellwether(stage: int, stages: int, microbatches: int) -> int:
    """Count clean, live, and for each batch in flight what its first micro-batch read."""
    if stages == 1:
        return 1
    return 2 if microbatches == 1 else 3 + -(-(stages - 1 - stage) // microbatches)


def _drifting(stage: int, stages: int, microbatches: int) -> int:
    """Count clean, live, and the averaged drift."""
    del microbatches
    return 1 if stage == stages - 1 else 3


_LOOK_AHEAD = tuple(PREDICTORS)

METHODS: Mapping[str, MethodSpec] = {
    "spectrain": MethodSpec(
        summary="both passes read weights predicted for one moment",
        weight_copies=_predicted,
        several=True,
        predictors=_LOOK_AHEAD,
    ),
    "spectrain-damped": MethodSpec(
        summary="spectrain with learning rates that shrink with the delay of a stage",
        weight_copies=_predicted,
        several=True,
        predictors=_LOOK_AHEAD,
    ),
    "spectrain-v2": MethodSpec(
        summary="forwards predict the weights of their own update, backwards read the same again",
        weight_copies=_stashed,
        predictors=_LOOK_AHEAD,
    ),
    "spectrain-v2-damped": MethodSpec(
        summary="spectrain-v2 with learning rates that shrink with the delay of a stage",
        weight_copies=_stashed,
        predictors=_LOOK_AHEAD,
    ),
    "pipeoptim": MethodSpec(
        summary="forwards predict the weights of their own backward, which reads the newest",
        weight_copies=_predicted_forward,
        several=True,
        predictors=_LOOK_AHEAD,
    ),
    "xpipe": MethodSpec(
        summary="the first micro-batch of a mini-batch predicts for all of its forwards",
        weight_copies=_bellwether,
        several=True,
        predictors=_LOOK_AHEAD,
    ),
    "vanilla": MethodSpec(
        summary="every pass reads the newest weights",
        weight_copies=_one,
    ),
    "paci": MethodSpec(
        summary="vanilla with one update for several micro-batches",
        weight_copies=_one,
        several=True,
        least_microbatches=lambda _: 2,
    ),
    "stash": MethodSpec(
        summary="backwards read what their forward read",
        weight_copies=_stashed,
    ),
    "stash-damped": MethodSpec(
        summary="stash with learning rates that shrink with the delay of a stage",
        weight_copies=_stashed,
    ),
    "vertical-sync": MethodSpec(
        summary="both passes read, on all stages, the version that the first stage began with",
        weight_copies=_uniform,
        remembered=lambda _, stages: stages - 1,
    ),
    "2bw": MethodSpec(
        summary="both passes read, on all stages, the version before the newest",
        weight_copies=_double,
        remembered=lambda _, stages: min(1, stages - 1),
        several=True,
        least_microbatches=lambda stages: max(1, stages - 1),
    ),
    "nesterov": MethodSpec(
        summary="stash under NAdam, whose momentum looks ahead",
        weight_copies=_stashed,
        optimizers=("NAdam",),
    ),
    "pipemare": MethodSpec(
        summary="early stages learn slower at first; backwards go back along the drift",
        weight_copies=_drifting,
        remembered=lambda stage, stages: min(1, stages - 1 - stage),
    ),
    "sync": MethodSpec(
        summary="nothing is in flight across an update",
        weight_copies=_one,
        schedule=Schedule.FLUSHED,
        several=True,
    ),
}
"""Every staleness method by name."""
