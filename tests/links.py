"""Both ends of links and streams inside one process, for tests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import zmq

from spectrain.protocol.messages import Peer
from spectrain.worker.link import RECEIVER, SENDER, Link, open_link
from spectrain.worker.rendezvous import Exchange
from spectrain.worker.stream import ReceivingStream, SendingStream

CPU = torch.device("cpu")
BACKENDS_ON_CPU = ("direct", "socket", "gloo", "strict")
RUN_ID = bytes(16)


@contextmanager
def link_pair(backend: str, device: torch.device = CPU) -> Iterator[tuple[Link, Link]]:
    """Open a link with both ends here; the first sends to the second."""
    with ThreadPoolExecutor(2) as pool:
        sender, receiver = (
            pool.submit(
                open_link,
                backend,
                rank,
                peer=f"stage {1 - rank}",
                address="127.0.0.1",
                device=device,
                exchange=exchange,
                timeout_s=10,
            )
            for rank, exchange in zip((SENDER, RECEIVER), exchanges(), strict=True)
        )
        ends = sender.result(), receiver.result()
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def exchanges() -> tuple[Exchange, Exchange]:
    """Return what swaps rendezvous values between two threads."""
    mailboxes: tuple[queue.Queue, queue.Queue] = queue.Queue(), queue.Queue()

    def exchange_of(rank: int) -> Exchange:
        def exchange(own: bytes) -> bytes:
            mailboxes[rank].put(own)
            return mailboxes[1 - rank].get(timeout=10)

        return exchange

    return exchange_of(0), exchange_of(1)


def over_network() -> tuple[Exchange, Exchange]:
    """Return the same as ``exchanges``, but sockets find no Unix name, as between two hosts."""
    listening, connecting = exchanges()

    def exchange(own: bytes) -> bytes:
        token, _, *network = connecting(own).split()
        return b" ".join((token, b"nobody", *network))

    return listening, exchange


class StreamPair(NamedTuple):
    """A stream from stage 0 to stage 1, both here, and what they told of."""

    sender: SendingStream
    receiver: ReceivingStream
    lost_by_sender: list[str]
    lost_by_receiver: list[str]
    faults: list[Exception]

    def connect(self, generation: int = 1) -> None:
        """Build this generation of the link and wait for it."""
        self.receiver.expect(generation, sending_peer())
        self.sender.connect(generation, receiving_peer(self.receiver.endpoint))
        self.sender.wait_connected(timeout_s=20)
        self.receiver.wait_connected(timeout_s=20)


def sending_peer(incarnation: int = 0) -> Peer:
    return Peer(stage=0, incarnation=incarnation, endpoint="", public_key="")


def receiving_peer(endpoint: str, public_key: str = "", incarnation: int = 0) -> Peer:
    return Peer(stage=1, incarnation=incarnation, endpoint=endpoint, public_key=public_key)


def ignore(_: object) -> None:
    """Want to know nothing."""


def sending_stream(context: zmq.Context, **changes: object) -> SendingStream:
    arguments = {
        "context": context,
        "run_id": RUN_ID,
        "stage": 0,
        "incarnation": 0,
        "address": "127.0.0.1",
        "keys": None,
        "device": CPU,
        "window": 4,
        "log_bytes": 1 << 30,
        "least_parcels": 1,
        "wait_timeout_s": 20,
        "epoch_batches": 1000,
        "backend": "gloo",
        "on_link_lost": ignore,
        "on_fault": ignore,
    }
    return SendingStream("activations", **{**arguments, **changes})


def receiving_stream(
    context: zmq.Context, ipc_dir: Path | None, **changes: object
) -> ReceivingStream:
    arguments = {
        "context": context,
        "run_id": RUN_ID,
        "stage": 1,
        "incarnation": 0,
        "address": "127.0.0.1",
        "ipc_dir": ipc_dir,
        "keys": None,
        "authority": None,
        "device": CPU,
        "window": 4,
        "wait_timeout_s": 20,
        "epoch_batches": 1000,
        "backend": "gloo",
        "is_wanted": bool,  # of any op: yes
        "on_link_lost": ignore,
        "on_fault": ignore,
    }
    return ReceivingStream("activations", **{**arguments, **changes})


@contextmanager
def stream_pair(
    ipc_dir: Path, *, log_bytes: int = 1 << 30, window: int = 4, **changes: object
) -> Iterator[StreamPair]:
    """Make both ends of a stream, not connected yet; close them at the end."""
    lost_by_sender: list[str] = []
    lost_by_receiver: list[str] = []
    faults: list[Exception] = []
    changes = {**changes, "window": window, "on_fault": faults.append}
    with zmq.Context() as context:
        sender = sending_stream(
            context, **changes, log_bytes=log_bytes, on_link_lost=lost_by_sender.append
        )
        receiver = receiving_stream(
            context, ipc_dir, **changes, on_link_lost=lost_by_receiver.append
        )
        try:
            yield StreamPair(sender, receiver, lost_by_sender, lost_by_receiver, faults)
        finally:
            sender.close()
            receiver.close()


@contextmanager
def in_background(function: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run ``function`` in a thread that has ended when the block has."""
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(30)
        assert not thread.is_alive()
