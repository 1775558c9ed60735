"""Keys, messages and peers that the tests of the sockets share; asserts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from spectrain.protocol.codec import (
    HEADER,
    PROTOCOL_VERSION,
)
from spectrain.protocol.keys import Authority, KeyPair
from spectrain.protocol.messages import (
    Boundary,
    FeedBatch,
    TensorSpec,
    WeightsPart,
)
from spectrain.protocol.sockets import Client, Server

RUN = bytes(range(16))
OTHER_RUN = bytes(16)
LONG_S = 20.0  # far more than anything here takes
SPEC = TensorSpec(dtype="uint8", shape=(8 << 20,))
PART = WeightsPart(stage=0, incarnation=0, name="0.weight", spec=SPEC)
BATCH = FeedBatch(
    part="inputs",
    op="F0",
    samples=1,
    batch_samples=1,
    ids_digest="",
    boundary=Boundary(form="tensor", tensors=(SPEC,)),
)
SERVER_KEYS, AGENT_KEYS, WORKER_KEYS = KeyPair.new(), KeyPair.new(), KeyPair.new()
ALLOWED = {AGENT_KEYS.public: "agent/0", WORKER_KEYS.public: "worker/"}

Opened = Callable[..., Any]


def ipc_client(opened: Opened, server: Server, identity: str = "worker/0/0") -> Client:
    return opened(Client, run_id=RUN, identity=identity, endpoint=server.ipc_endpoint)


def tcp_client(
    opened: Opened, server: Server, identity: str, keys: KeyPair, run_id: bytes = RUN
) -> Client:
    return opened(
        Client,
        run_id=run_id,
        identity=identity,
        endpoint=server.tcp_endpoint,
        server_key=SERVER_KEYS.public,
        keys=keys,
    )


def raw_dealer(context: zmq.Context[Any], server: Server, identity: bytes | None) -> Any:
    """Connect a peer that may send what it likes."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if identity is not None:
        dealer.routing_id = identity
    dealer.connect(server.ipc_endpoint)
    return dealer


@contextmanager
def watched(server: Server, events: int) -> Iterator[Callable[[], Any]]:
    """Watch a server's only socket; what is yielded waits for the next of ``events``."""
    (bound,) = server._sockets
    monitor = bound.get_monitor_socket(events)

    def next_event() -> Any:
        assert monitor.poll(LONG_S * 1000)
        return recv_monitor_message(monitor)["event"]

    try:
        yield next_event
    finally:
        bound.disable_monitor()
        monitor.close()


def tcp_arguments(authority: Authority) -> dict[str, Any]:
    return {"run_id": RUN, "keys": SERVER_KEYS, "authority": authority}


def header(sequence: int = 1) -> bytes:
    return HEADER.pack(b"SPT", PROTOCOL_VERSION, RUN, sequence)
