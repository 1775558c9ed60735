"""What a sender keeps of a stream until nobody can ask for it again. No sockets, no threads.

A parcel has a **number**, its place in the sender's stream over the whole run. A stage that is
restarted from a committed snapshot counts on from the number that the snapshot holds, so that
the same parcel has the same number in every life of its sender. Numbers rise, but may jump:
evaluation parcels that nobody needs any more are not made again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

import torch
import xxhash
from torch import Tensor

from ..protocol.errors import ProtocolError
from ..protocol.messages import Boundary
from ..protocol.schedule import Kind, Op
from .boundary import Parcel, describe, payload_bytes, settled, tensors_of

__all__ = ["LoggedParcel", "StreamLog", "digest_of", "is_needed_after"]

_number_of = attrgetter("number")

_SAMPLES = 16
_SAMPLE_BYTES = 4096


def is_needed_after(op: Op, update: int, epoch_batches: int) -> bool:
    """Tell whether a stage restored to the state after ``update`` updates consumes ``op``.

    It goes on after the update of batch ``update - 1``: with the evaluation that follows that
    very update, if one does, and with the forwards and backwards of batches from ``update`` on.

    Args:
        op: the consumer of a parcel.
        update: at least 0.
        epoch_batches: mini-batches of one epoch; an evaluation round follows the last of them.
    """
    if op.kind is Kind.EVALUATE:
        # The run's last round may follow a shorter epoch; then nothing is trained after it.
        return (op.batch + 1) * epoch_batches >= update
    return op.batch >= update


def digest_of(tensors: Iterable[Tensor]) -> int:
    """Return XXH3 (64 bits) over contiguous tensors, one after the other.

    Of a large tensor it covers evenly spaced samples, the first and the last bytes among them: a
    whole parcel takes as long to read as to send. What makes a stage's second life differ from
    its first spreads over all of what it computes from then on, so that samples tell it too.
    """
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        content = tensor.detach().view(-1).view(torch.uint8)
        if tensor.is_cuda:
            content = torch.cat([content[part] for part in _samples(tensor.nbytes)]).cpu()
        octets = content.numpy().data
        for part in _samples(len(octets)):
            digest.update(octets[part])
    return digest.intdigest()


def _samples(size_bytes: int) -> list[slice]:
    """Return which bytes of so many count: all of a few, else samples of the same size."""
    last = size_bytes - _SAMPLE_BYTES
    if size_bytes <= _SAMPLES * _SAMPLE_BYTES:
        return [slice(size_bytes)]
    starts = (index * last // (_SAMPLES - 1) for index in range(_SAMPLES))
    return [slice(start, start + _SAMPLE_BYTES) for start in starts]


@dataclass(slots=True)
class LoggedParcel:
    """A parcel cut from its graph, with its number.

    Attributes:
        number: its place in the stream.
        op: its consumer.
        tensors: its payload, contiguous; in host memory once it has landed.
        boundary: their form.
        samples: in this micro-batch.
        batch_samples: in the whole mini-batch.
        size_bytes: of the payload.
    """

    number: int
    op: Op
    tensors: list[Tensor]
    boundary: Boundary
    samples: int
    batch_samples: int
    size_bytes: int
    _complete: torch.cuda.Event | None = None  # reached when the tensors are; None on the host

    @classmethod
    def of(cls, parcel: Parcel, number: int) -> LoggedParcel:
        """Settle ``parcel``; on a GPU its tensors may still be in the making.

        Raises:
            JobError: its value cannot cross a stage boundary.
        """
        boundary = describe(parcel.value)
        tensors = [tensor.detach() for tensor in tensors_of(settled(parcel).value)]
        complete = None
        if tensors and tensors[0].is_cuda:
            complete = torch.cuda.Event(blocking=True)
            complete.record(torch.cuda.current_stream(tensors[0].device))
        return cls(
            number=number,
            op=parcel.op,
            tensors=tensors,
            boundary=boundary,
            samples=parcel.samples,
            batch_samples=parcel.batch_samples,
            size_bytes=payload_bytes(boundary),
            _complete=complete,
        )

    def check_size(self) -> None:
        """See that the payload is as large as its form says: the receiver relies on it.

        Raises:
            ProtocolError: the receiver would take what comes after it for a part of it.
        """
        size_bytes = sum(tensor.nbytes for tensor in self.tensors)
        if size_bytes != self.size_bytes:
            raise ProtocolError(
                f"{self.op} has {size_bytes} bytes to send, and by its form {self.size_bytes}: "
                "it was changed after it was put"
            )

    @property
    def is_on_host(self) -> bool:
        """Whether the tensors are complete in host memory."""
        return self._complete is None

    def wait_complete(self) -> None:
        """Wait until the tensors hold what they are to hold."""
        if self._complete is not None:
            self._complete.synchronize()

    def land(self) -> None:
        """Move the tensors from the GPU to pinned host memory; nothing to do on the CPU."""
        if self._complete is not None:
            self.wait_complete()
            landing = [_begin_copy(tensor) for tensor in self.tensors]
            torch.cuda.current_stream(self.tensors[0].device).synchronize()
            self.tensors, self._complete = landing, None


def _begin_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class StreamLog:
    """Numbered parcels in rising order. Not thread-safe.

    Args:
        epoch_batches: mini-batches of one epoch.

    Attributes:
        next_number: of the next parcel that is made for the first time.
        first_number: no receiver may ask for a parcel below it: such were trimmed.
        size_bytes: of the payloads that are kept.
        peak_bytes: the most that ``size_bytes`` has been.
    """

    def __init__(self, epoch_batches: int) -> None:
        self.next_number = 0
        self.first_number = 0
        self.size_bytes = self.peak_bytes = 0
        self._epoch_batches = epoch_batches
        self._parcels: list[LoggedParcel] = []

    def __len__(self) -> int:
        return len(self._parcels)

    def append(self, parcel: LoggedParcel) -> None:
        """Keep ``parcel``; its number is higher than those before and at most ``next_number``."""
        last = self._parcels[-1].number if self._parcels else -1
        assert last < parcel.number <= self.next_number, (
            f"{parcel.op} as parcel {parcel.number}, between {last} and {self.next_number}"
        )
        self._parcels.append(parcel)
        self.size_bytes += parcel.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.size_bytes)
        self.next_number = max(self.next_number, parcel.number + 1)

    def from_number(self, number: int) -> LoggedParcel | None:
        """Return the lowest parcel that has ``number`` or a higher one."""
        index = self._index(number)
        return self._parcels[index] if index < len(self._parcels) else None

    def count_from(self, number: int) -> int:
        """Return how many parcels have ``number`` or a higher one."""
        return len(self._parcels) - self._index(number)

    def trim(self, update: int) -> None:
        """Drop what no stage restored to the state after ``update``, or later, would ask for."""
        kept: list[LoggedParcel] = []
        for parcel in self._parcels:
            if is_needed_after(parcel.op, update, self._epoch_batches):
                kept.append(parcel)
                continue
            self.size_bytes -= parcel.size_bytes
            # An evaluation parcel may lie between forwards that are in flight; nobody wants it
            # any more, so the numbers may jump over it. Only training parcels leave a gap.
            if parcel.op.kind is not Kind.EVALUATE:
                self.first_number = parcel.number + 1
        self._parcels = kept

    def forget_below(self, number: int) -> None:
        """Drop every parcel with a lower number: nobody will ask again."""
        gone = self._index(number)
        self.size_bytes -= sum(parcel.size_bytes for parcel in self._parcels[:gone])
        del self._parcels[:gone]
        self.first_number = max(self.first_number, number)

    def _index(self, number: int) -> int:
        return bisect_left(self._parcels, number, key=_number_of)
