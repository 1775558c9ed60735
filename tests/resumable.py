"""A stream in one process whose ends die and come back, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import zmq
from links import receiving_peer, receiving_stream, sending_peer, sending_stream

from spectrain.protocol.schedule import Op
from spectrain.worker.boundary import Parcel
from spectrain.worker.stream import ReceivingStream, SendingStream

FLOATS = 6
PARCEL_BYTES = 4 * FLOATS


def op(text: str) -> Op:
    return Op.parse(text)


def parcel(text: str, floats: int = FLOATS) -> Parcel:
    """Return the one parcel that may ever be sent for this op."""
    wanted = op(text)
    generator = torch.Generator().manual_seed(1000 * wanted.batch + wanted.micro)
    return Parcel(wanted, torch.randn(floats, generator=generator), 1, 1)


class Stream:
    """A stream from stage 0 to stage 1 that outlives its ends."""

    def __init__(
        self, context: zmq.Context, ipc_dir: Path, *, backend: str = "gloo", window: int = 8
    ) -> None:
        self._context = context
        self._ipc_dir = ipc_dir
        self._changes = {"backend": backend, "window": window, "wait_timeout_s": 20}
        self._generation = 0
        self._incarnations = [-1, -1]
        self.faults: list[Exception] = []
        self.sender: SendingStream
        self.receiver: ReceivingStream
        self.start_sender()
        self.start_receiver()

    def start_sender(self, number: int = 0) -> SendingStream:
        self._incarnations[0] += 1
        self.sender = sending_stream(
            self._context,
            incarnation=self._incarnations[0],
            on_fault=self.faults.append,
            **self._changes,
        )
        self.sender.resume_at(number)
        return self.sender

    def start_receiver(
        self, number: int = 0, is_wanted: Callable[[Op], bool] = bool
    ) -> ReceivingStream:
        self._incarnations[1] += 1
        self.receiver = receiving_stream(
            self._context,
            self._ipc_dir,
            incarnation=self._incarnations[1],
            is_wanted=is_wanted,
            **self._changes,
        )
        self.receiver.resume_at(number)
        return self.receiver

    def connect(self) -> None:
        self._generation += 1
        sender, receiver = self._incarnations
        self.receiver.expect(self._generation, sending_peer(incarnation=sender))
        self.sender.connect(
            self._generation, receiving_peer(self.receiver.endpoint, incarnation=receiver)
        )
        self.sender.wait_connected(timeout_s=20)
        self.receiver.wait_connected(timeout_s=20)

    def put(self, *texts: str) -> None:
        for text in texts:
            self.sender.put(parcel(text))

    def take(self, *texts: str) -> list[int]:
        """Take these and return their numbers; all must be what was put for that op."""
        taken = [self.receiver.take(op(text)) for text in texts]
        for text, each in zip(texts, taken, strict=True):
            assert torch.equal(each.value, parcel(text).value), text
        return [each.number for each in taken]


@contextmanager
def resumable_stream(ipc_dir: Path, **changes: object) -> Iterator[Stream]:
    """Make a stream that is connected; close what lives at the end."""
    with zmq.Context() as context:
        stream = Stream(context, ipc_dir, **changes)
        try:
            stream.connect()
            yield stream
        finally:
            stream.sender.close()
            stream.receiver.close()
