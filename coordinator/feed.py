"""Which samples make which batch, and their tensors: a pure function of (job, seed, batch).

It knows ops and data sets; it must not know sockets, stages or who asks. A batch holds its
samples in the first dimension of its tensors. Not for several threads at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..protocol.errors import JobError
from ..protocol.schedule import Kind, Op, Work
from .loader import Loader, Value, derived_seed, length

__all__ = ["Batch", "Feed", "Part", "Value", "order"]


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one op.

    Attributes:
        inputs: what the first layer is called with.
        targets: what the loss is called with, after the outputs.
        samples: samples of this op.
        batch_samples: samples of the whole mini-batch, of which this may be one micro-batch.
        ids_digest: over the sample ids, so that both ends can tell that they speak of the same.
    """

    inputs: Value
    targets: Value
    samples: int
    batch_samples: int
    ids_digest: str


@dataclass(frozen=True, slots=True)
class Part:
    """What one end of the pipeline needs of a ``Batch``: its inputs or its targets."""

    value: Value
    samples: int
    batch_samples: int
    ids_digest: str


@dataclass(frozen=True, slots=True)
class _Kept:
    """One mini-batch, by micro-batch, and the parts of it that nobody has asked for yet."""

    batches: list[Batch]
    awaited: set[tuple[str, int]]


def order(seed: int, epoch: int, samples: int) -> Tensor:
    """Return the order of the training samples in one epoch: a permutation, int64 ``[samples]``."""
    generator = torch.Generator().manual_seed(derived_seed("order", seed, epoch))
    return torch.randperm(samples, generator=generator)


class Feed:
    """All batches of one run.

    Batches in order stream from one ``DataLoader``; any other request starts it anew at that
    batch, with the same result. A mini-batch is kept until both ends of the pipeline have had all
    of it, so that it is loaded once.

    Attributes:
        work: how many batches there are.
    """

    def __init__(
        self,
        train: Any,
        test: Any,
        *,
        batch_size: int,
        seed: int,
        epochs: int = 1,
        max_batches: int | None = None,
        microbatches: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        kept_batches: int = 64,
    ) -> None:
        """Plan the run; no sample is read yet.

        Args:
            train: map-style data set.
            test: map-style data set for the evaluation rounds, or None for none.
            batch_size: samples per mini-batch; an epoch's last one may be smaller.
            seed: with the epoch it decides the order, with the batch the draws that a data set
                makes from torch's generator while its samples are read.
            epochs: passes over ``train``.
            max_batches: fewer mini-batches than the epochs have; None: all of them.
            microbatches: parts that a mini-batch is split into, where it has so many samples.
            collate: list of samples → ``(inputs, targets)``; None: torch's default.
            kept_batches: mini-batches kept at most for the end that lags behind; should exceed
                the number of stages plus the look-ahead, or batches are loaded twice.

        Raises:
            JobError: a data set is empty or not map-style.
        """
        samples = length(train, "training")
        test_samples = 0 if test is None else length(test, "test")
        epoch_batches = -(-samples // batch_size)
        all_batches = epochs * epoch_batches
        last_samples = samples - (epoch_batches - 1) * batch_size
        self.work = Work(
            train_batches=all_batches if max_batches is None else min(max_batches, all_batches),
            epoch_batches=epoch_batches,
            evaluation_batches=-(-test_samples // batch_size),
            microbatches=min(microbatches, batch_size, samples),
            last_microbatches=min(microbatches, last_samples),
        )
        self._batch_size = batch_size
        self._test_samples = test_samples
        self._order = lru_cache(maxsize=2)(partial(order, seed, samples=samples))
        loader = partial(Loader, collate=collate or default_collate, seed=seed)
        self._train = loader(
            train, name="training", batches=self.work.train_batches, ids_of=self._train_ids
        )
        self._test = loader(
            test, name="test", batches=self.work.evaluation_batches, ids_of=self._test_ids
        )
        self._kept: dict[Op, _Kept] = {}  # oldest first
        self._kept_batches = kept_batches

    def sample_ids(self, op: Op) -> list[int]:
        """Return the positions, in their data set, of the samples of an ``F`` or ``E`` op."""
        if op.kind is Kind.EVALUATE:
            return self._test_ids(op.micro)
        ids = torch.tensor(self._train_ids(op.batch))
        return ids.tensor_split(self.work.microbatches_of(op.batch))[op.micro].tolist()

    def batch(self, op: Op) -> Batch:
        """Return the data of an ``F`` or ``E`` op.

        Raises:
            JobError: reading a sample or collating fails, the result is not
                ``(inputs, targets)`` of tensors, or it cannot be split into micro-batches.
        """
        return self._keep(op).batches[_index_in_whole(op)]

    def part(self, part: str, op: Op) -> Part:
        """Return what one end of the pipeline needs for an ``F`` or ``E`` op.

        Args:
            part: "inputs" or "targets"; a mini-batch is let go when both were asked for.
            op: as for ``batch``.

        Raises:
            JobError: as ``batch``.
        """
        assert part in ("inputs", "targets"), part
        kept = self._keep(op)
        batch = kept.batches[_index_in_whole(op)]
        kept.awaited.discard((part, _index_in_whole(op)))
        if not kept.awaited:
            del self._kept[_whole(op)]
        value = batch.inputs if part == "inputs" else batch.targets
        return Part(value, batch.samples, batch.batch_samples, batch.ids_digest)

    def _keep(self, op: Op) -> _Kept:
        whole = _whole(op)
        if whole not in self._kept:
            batches = self._load(whole)
            awaited = {(part, i) for part in ("inputs", "targets") for i in range(len(batches))}
            self._kept[whole] = _Kept(batches, awaited)
            if len(self._kept) > self._kept_batches:
                del self._kept[next(iter(self._kept))]
        return self._kept[whole]

    def _load(self, whole: Op) -> list[Batch]:
        if whole.kind is Kind.EVALUATE:
            ids, micros = self._test_ids(whole.micro), [whole]
            inputs, targets = self._test.load(whole.micro)
        else:
            ids = self._train_ids(whole.batch)
            count = self.work.microbatches_of(whole.batch)
            micros = [Op(Kind.FORWARD, whole.batch, micro) for micro in range(count)]
            inputs, targets = self._train.load(whole.batch)
        parts = zip(
            micros, _split(inputs, len(micros), len(ids)), _split(targets, len(micros), len(ids)),
            strict=True,
        )  # fmt: skip
        return [
            Batch(part_inputs, part_targets, len(part_ids), len(ids), _digest(part_ids))
            for micro, part_inputs, part_targets in parts
            for part_ids in [self.sample_ids(micro)]
        ]

    def _train_ids(self, batch: int) -> list[int]:
        start = batch % self.work.epoch_batches * self._batch_size
        return self._order(self.work.epoch_of(batch))[start : start + self._batch_size].tolist()

    def _test_ids(self, index: int) -> list[int]:
        start = index * self._batch_size
        return list(range(start, min(start + self._batch_size, self._test_samples)))


def _whole(op: Op) -> Op:
    """Return the op that stands for all micro-batches of ``op``'s mini-batch."""
    assert op.kind in (Kind.FORWARD, Kind.EVALUATE), op
    return op if op.kind is Kind.EVALUATE else Op(Kind.FORWARD, op.batch)


def _index_in_whole(op: Op) -> int:
    return 0 if op.kind is Kind.EVALUATE else op.micro


def _split(value: Value, parts: int, samples: int) -> Sequence[Value]:
    """Split along the samples into ``parts`` whose sizes differ by at most one."""
    if parts == 1:
        return [value]
    if isinstance(value, Tensor):
        return _split_tensor(value, parts, samples)
    items = value.values() if isinstance(value, dict) else value
    columns = [
        [None] * parts if item is None else _split_tensor(item, parts, samples) for item in items
    ]
    rows = list(zip(*columns, strict=True))
    return [dict(zip(value, row, strict=True)) for row in rows] if isinstance(value, dict) else rows


def _split_tensor(tensor: Tensor, parts: int, samples: int) -> Sequence[Tensor]:
    if tensor.dim() == 0 or len(tensor) != samples:
        raise JobError(
            f"a tensor of shape {list(tensor.shape)} cannot be split into {parts} micro-batches: "
            f"its first dimension must be the {samples} samples of the batch. Give every sample "
            f"its own row, or run with one micro-batch"
        )
    return tensor.tensor_split(parts)


def _digest(ids: list[int]) -> str:
    return hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=8).hexdigest()
