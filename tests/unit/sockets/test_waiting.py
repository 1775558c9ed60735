"""A receive ends by a message, its timeout or a wake; nothing else."""

from __future__ import annotations

import threading
from typing import Any

import zmq
from socket_peers import LONG_S, Opened, ipc_client, raw_dealer

from spectrain.protocol.messages import (
    Go,
)
from spectrain.protocol.sockets import Received, Server, Waker


def test_receive_gives_up_after_its_timeout(opened: Opened, ipc_server: Server) -> None:
    client = ipc_client(opened, ipc_server)
    assert ipc_server.receive(0.01) is None
    assert client.receive(0.01) is None
    assert client.receive(0) is None


def test_a_wake_ends_receive_until_it_is_cleared(
    opened: Opened, ipc_server: Server, waker: Waker
) -> None:
    client = ipc_client(opened, ipc_server)
    client.send(Go())
    waker.wake()
    waker.wake()
    assert ipc_server.receive(LONG_S, waker.fd) is None
    assert client.receive(LONG_S, waker.fd) is None
    waker.clear()
    assert ipc_server.receive(LONG_S, waker.fd) == Received("worker/0/0", Go(), [])


def test_another_thread_can_wake_a_receive(ipc_server: Server, waker: Waker) -> None:
    waiting = threading.Event()
    results: list[Received | None] = []

    def receive() -> None:
        waiting.set()
        results.append(ipc_server.receive(3600, waker.fd))

    thread = threading.Thread(target=receive)
    thread.start()
    waiting.wait()
    waker.wake()
    thread.join(LONG_S)
    assert results == [None]


def test_clearing_a_quiet_waker_does_nothing(waker: Waker) -> None:
    waker.clear()
    waker.wake()
    waker.clear()
    waker.clear()


def test_a_wake_after_close_does_nothing(waker: Waker) -> None:
    waker.close()
    waker.wake()
    waker.close()


def test_junk_without_end_does_not_outlast_the_timeout(
    context: zmq.Context[Any], ipc_server: Server
) -> None:
    with raw_dealer(context, ipc_server, b"worker/0/0") as dealer:
        for _ in range(3):
            dealer.send_multipart([b"junk"])
        assert ipc_server._sockets[0].poll(LONG_S * 1000)
        assert ipc_server.receive(0) is None
    assert ipc_server.dropped == {"header": 1}
