"""Servers, clients and authorities that close with the test that opened them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from socket_peers import ALLOWED, RUN, SERVER_KEYS, Opened
from zmq.utils.garbage import gc as zmq_collector

from spectrain.protocol.keys import Authority
from spectrain.protocol.sockets import Server, Waker


@pytest.fixture(scope="module", autouse=True)
def _collector_of_uncopied_frames() -> Iterator[None]:
    """Start pyzmq's own thread here, so that it is nobody's leak, and end it."""
    zmq.Frame(bytes(1 << 17), copy=False)
    yield
    zmq_collector.stop()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    """Make a context that must be terminable once the test's sockets are closed."""
    with zmq.Context() as context:
        yield context


@pytest.fixture
def opened(context: zmq.Context[Any]) -> Iterator[Opened]:
    """Open servers, clients, authorities by class and close them after the test."""
    things: list[Any] = []

    def open_one(kind: Any, **arguments: Any) -> Any:
        things.append(kind(context, **arguments))
        return things[-1]

    yield open_one
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control"


@pytest.fixture
def ipc_server(opened: Opened, path: Path) -> Server:
    return opened(Server, run_id=RUN, ipc=path)


@pytest.fixture
def authority(opened: Opened) -> Authority:
    return opened(Authority, allowed=ALLOWED)


@pytest.fixture
def tcp_server(opened: Opened, authority: Authority) -> Server:
    return opened(Server, run_id=RUN, tcp="127.0.0.1", keys=SERVER_KEYS, authority=authority)


@pytest.fixture
def waker() -> Iterator[Waker]:
    waker = Waker()
    yield waker
    waker.close()
