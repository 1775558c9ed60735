"""Whoever dies whenever: the run ends as if nobody had; and a plan of snapshots keeps its laws."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import ListFeed, assert_same_bits, make_job, regression, sgd, train
from replay import Pipeline, cut, noisy_model

from spectrain.protocol.schedule import Kind, Op, Schedule, Work, stage_ops
from spectrain.worker.pipeline import Outcome
from spectrain.worker.snapshotter import Plan

torch.set_num_threads(1)

UPDATES = 9
JOB = make_job(noisy_model, optimizer=sgd(lr=0.05, momentum=0.9))


def feed() -> ListFeed:
    pairs = regression(UPDATES + 1)
    return ListFeed(pairs[:UPDATES], test=pairs[UPDATES:], epoch_batches=3)


@cache
def quiet(stages: int, method: str) -> Outcome:
    return train(JOB, feed(), cut(stages), method)


@settings(max_examples=40, deadline=None)
@given(
    stages=st.integers(1, 5),
    method=st.sampled_from(
        ["spectrain", "vanilla", "sync", "spectrain-v2", "vertical-sync", "xpipe", "pipemare"]
    ),
    every=st.integers(0, 6),
    seed=st.integers(0, 1000),
    deaths=st.dictionaries(st.integers(0, 400), st.sets(st.integers(0, 4), min_size=1), max_size=5),
)
def test_no_set_of_deaths_changes_a_bit(
    stages: int, method: str, every: int, seed: int, deaths: dict[int, set[int]]
) -> None:
    def kill(event: int) -> list[int]:
        return sorted(index for index in deaths.get(event, ()) if index < stages)

    with tempfile.TemporaryDirectory() as directory:
        pipeline = Pipeline(
            job=JOB, feed=feed(), layer_counts=cut(stages), directory=Path(directory),
            method=method, every=every,
        )  # fmt: skip
        pipeline.run(Random(seed), kill)
    outcome = quiet(stages, method)
    assert list(pipeline.losses.values()) == outcome.batches
    assert list(pipeline.rounds.values()) == outcome.evaluations
    assert_same_bits(pipeline.state(), outcome.state)
    assert pipeline.staleness() == outcome.staleness


@given(
    plan=st.builds(Plan, st.integers(0, 50), st.integers(0, 9)),
    low=st.integers(0, 100),
    length=st.integers(0, 30),
)
def test_a_range_holds_a_planned_snapshot_exactly_if_one_of_its_updates_is_planned(
    plan: Plan, low: int, length: int
) -> None:
    high = low + length
    expected = any(plan.includes(update) for update in range(low, high + 1))
    assert plan.includes_any(low, high) == expected
    assert not plan.includes_any(high + 1, high)


@given(
    schedule=st.sampled_from(Schedule),
    stage=st.integers(0, 4),
    batches=st.integers(1, 12),
    epoch=st.integers(1, 5),
    updates=st.integers(1, 12),
)
def test_the_ops_after_an_update_are_the_tail_of_the_whole_list(
    schedule: Schedule, stage: int, batches: int, epoch: int, updates: int
) -> None:
    work = Work(
        train_batches=batches, epoch_batches=epoch, evaluation_batches=2, microbatches=3,
        last_microbatches=2,
    )  # fmt: skip
    updates = min(updates, batches)
    whole = list(stage_ops(schedule, stage, 5, work))
    start = whole.index(Op(Kind.UPDATE, updates - 1)) + 1
    assert list(stage_ops(schedule, stage, 5, work, updates=updates)) == whole[start:]
