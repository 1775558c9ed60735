"""Streams in memory that keep logs and lose what is on the way, by the rules of the real ones."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from pipelines import ListFeed

from spectrain.protocol.schedule import Kind, Op, Work
from spectrain.worker.boundary import Parcel, copied, tensors_of


class Sender:
    """An ``Outbox`` that keeps what it sent."""

    def __init__(self) -> None:
        self.number = 0
        self.log: dict[int, Parcel] = {}
        self.offer: Callable[[Parcel], None] = lambda _: None

    def resume_at(self, number: int) -> None:
        self.number = number

    def put(self, parcel: Parcel, number: int | None = None) -> None:
        if number is None:
            number, self.number = self.number, self.number + 1
        assert number not in self.log, f"{parcel.op} was sent twice"
        self.log[number] = copied(replace(parcel, number=number))
        self.offer(self.log[number])

    def trim(self, update: int, work: Work) -> None:
        first_round = work.epoch_of(update - 1)
        for number, parcel in list(self.log.items()):
            first = first_round if parcel.op.kind is Kind.EVALUATE else update
            if parcel.op.batch < first:
                del self.log[number]


class Receiver:
    """An ``Inbox`` that knows what it has had."""

    def __init__(self) -> None:
        self.position = 0
        self.wants: Callable[[Op], bool] = lambda _: True
        self.digests: dict[int, str] = {}
        self._parcels: dict[Op, Parcel] = {}

    def resume_at(self, number: int) -> None:
        self.position = number

    def take(self, op: Op) -> Parcel:
        return self._parcels.pop(op)

    def ready(self, op: Op) -> bool:
        return op in self._parcels

    def arrive(self, parcel: Parcel) -> None:
        assert parcel.number >= self.position, f"{parcel.op} came twice"
        self.position = parcel.number + 1
        self.digests[parcel.number] = digest(parcel)
        if self.wants(parcel.op):
            self._parcels[parcel.op] = copied(parcel)


class Link:
    """Carries parcels late, and loses them when it is built anew."""

    def __init__(self, sender: Sender, receiver: Receiver) -> None:
        self._receiver = receiver
        self._wire = deque(
            parcel for number, parcel in sorted(sender.log.items()) if number >= receiver.position
        )
        sender.offer = self._offer

    def _offer(self, parcel: Parcel) -> None:
        if parcel.number >= self._receiver.position:
            self._wire.append(parcel)
            return
        known = self._receiver.digests.get(parcel.number)
        assert known in (None, digest(parcel)), f"{parcel.op} differs when it is made again"

    def deliver(self) -> None:
        if self._wire:
            self._receiver.arrive(self._wire.popleft())


def digest(parcel: Parcel) -> str:
    content = b"".join(
        tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for tensor in tensors_of(parcel.value)
    )
    return hashlib.sha256(str(parcel.op).encode() + content).hexdigest()


class FeedEnd:
    """One part of the feed as an inbox."""

    def __init__(self, feed: ListFeed, part: str) -> None:
        self._feed = feed
        self._part = part

    def take(self, op: Op) -> Parcel:
        fed = self._feed.part(self._part, op)
        return copied(Parcel(op, fed.value, fed.samples, fed.batch_samples))

    def ready(self, _: Op) -> bool:
        return True
