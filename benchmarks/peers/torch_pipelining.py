"""torch.distributed.pipelining over gloo: synchronous pipelines that flush at every update."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from measure import Place
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from work import Work, sgd

__all__ = ["train_1f1b", "train_zbv"]


def train_1f1b(place: Place, work: Work, microbatches: int) -> Iterator[None]:
    """Train with 1F1B, one stage per process, and yield after each batch."""
    place.join()
    stage = _stage(work, place.rank, place.processes)
    schedule = Schedule1F1B(stage, n_microbatches=microbatches, loss_fn=work.loss)
    yield from _train([stage], schedule, work)


def train_zbv(place: Place, work: Work, microbatches: int) -> Iterator[None]:
    """Train with zero bubbles, two stages per process in a V, and yield after each batch."""
    place.join()
    number = 2 * place.processes
    stages = [_stage(work, index, number) for index in (place.rank, number - 1 - place.rank)]
    schedule = ScheduleZBVZeroBubble(stages, n_microbatches=microbatches, loss_fn=work.loss)
    yield from _train(stages, schedule, work)


def _stage(work: Work, index: int, stages: int) -> PipelineStage:
    return PipelineStage(work.stage(index, stages), index, stages, torch.device("cpu"))


def _train(
    stages: list[PipelineStage], schedule: Schedule1F1B | ScheduleZBVZeroBubble, work: Work
) -> Iterator[None]:
    optimizer = sgd([param for stage in stages for param in stage.submod.parameters()])
    has_inputs = any(stage.is_first for stage in stages)
    has_loss = any(stage.is_last for stage in stages)
    batch = work.batches()
    for number in count():
        inputs, targets = batch(number) if has_inputs or has_loss else (None, None)
        optimizer.zero_grad()
        schedule.step(
            *([inputs] if has_inputs else []),
            **({"target": targets, "losses": []} if has_loss else {}),
        )
        optimizer.step()
        yield
