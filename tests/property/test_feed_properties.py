"""Laws of the feed: every sample once per epoch, and one answer whoever asks in whatever order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from spectrain.coordinator.feed import Feed, order
from spectrain.protocol.schedule import Kind, Op, Schedule, stage_ops

torch.set_num_threads(1)


@dataclass(frozen=True)
class Shape:
    samples: int
    test_samples: int
    batch_size: int
    epochs: int
    microbatches: int
    seed: int

    def feed(self, kept_batches: int = 64) -> Feed:
        return Feed(
            _counting(self.samples),
            _counting(self.test_samples) if self.test_samples else None,
            batch_size=self.batch_size,
            seed=self.seed,
            epochs=self.epochs,
            microbatches=self.microbatches,
            kept_batches=kept_batches,
        )


def _counting(samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(samples), -torch.arange(samples))


SHAPES = st.builds(
    Shape,
    samples=st.integers(1, 40),
    test_samples=st.integers(0, 10),
    batch_size=st.integers(1, 12),
    epochs=st.integers(1, 3),
    microbatches=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)


def _ops(feed: Feed) -> list[Op]:
    """Return every op that reads data, as a stage of a flushed pipeline meets them."""
    return [
        op
        for op in stage_ops(Schedule.FLUSHED, 0, 1, feed.work)
        if op.kind in (Kind.FORWARD, Kind.EVALUATE)
    ]


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(1, 200))
def test_an_order_is_a_permutation(seed: int, epoch: int, samples: int) -> None:
    assert sorted(order(seed, epoch, samples).tolist()) == list(range(samples))


@given(SHAPES)
def test_every_sample_is_trained_once_per_epoch_and_tested_once_per_round(shape: Shape) -> None:
    feed = shape.feed()
    trained: dict[int, list[int]] = {}
    tested: dict[int, list[int]] = {}
    for op in _ops(feed):
        if op.kind is Kind.FORWARD:
            trained.setdefault(feed.work.epoch_of(op.batch), []).extend(feed.sample_ids(op))
        else:
            tested.setdefault(op.batch, []).extend(feed.sample_ids(op))
    assert list(trained) == list(range(shape.epochs))
    assert all(sorted(ids) == list(range(shape.samples)) for ids in trained.values())
    assert list(tested) == (list(range(shape.epochs)) if shape.test_samples else [])
    assert all(ids == list(range(shape.test_samples)) for ids in tested.values())


@given(SHAPES)
def test_microbatches_of_a_batch_differ_by_at_most_one_sample_and_none_is_empty(
    shape: Shape,
) -> None:
    feed = shape.feed()
    sizes: dict[int, list[int]] = {}
    for op in _ops(feed):
        if op.kind is Kind.FORWARD:
            sizes.setdefault(op.batch, []).append(feed.batch(op).samples)
    assert all(min(size) >= 1 and max(size) - min(size) <= 1 for size in sizes.values())
    for batch, size in sizes.items():
        assert feed.batch(Op(Kind.FORWARD, batch)).batch_samples == sum(size)


@given(SHAPES, st.randoms(use_true_random=False), st.integers(1, 3))
def test_any_order_of_requests_gives_the_samples_of_the_op(shape, random, kept_batches) -> None:  # noqa: ANN001
    feed = shape.feed(kept_batches)
    requests = [(part, op) for op in _ops(feed) for part in ("inputs", "targets")]
    random.shuffle(requests)
    for part, op in requests:
        value = feed.part(part, op).value
        assert isinstance(value, Tensor)
        sign = 1 if part == "inputs" else -1
        assert (sign * value).tolist() == feed.sample_ids(op)


@given(SHAPES)
def test_nothing_stays_behind_when_both_ends_have_had_all(shape: Shape) -> None:
    feed = shape.feed()
    for op in _ops(feed):
        feed.part("inputs", op)
        feed.part("targets", op)
    assert feed._kept == {}
