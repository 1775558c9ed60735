"""Raw bytes one way between two ranks, as unforgiving as NCCL but on any machine. For tests.

Strictly in order, no tags, a send waits for its receive, and a dead peer is no error: whoever
waits for it waits until ``abort`` or the time-out. What works over this wire leans on none of
gloo's kindness. Chosen by ``SPECTRAIN_LINK=strict``.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

from torch import Tensor

from ..protocol.sockets import Waker
from .rendezvous import Exchange

__all__ = ["StrictWire", "open_strict_wire"]

_POSTED = b"r"  # the receiver's word that it is ready for one send


def open_strict_wire(
    rank: int, *, address: str, exchange: Exchange, timeout_s: float
) -> StrictWire:
    """Build one end.

    Args:
        rank: 0 sends and listens for its peer, 1 receives.
        address: numeric address of this host that the peer can reach.
        exchange: swaps rendezvous values with the peer.
        timeout_s: for the connection.

    Raises:
        OSError: it could not be built, or not in time (``TimeoutError``).
    """
    if rank == 1:
        host, port = exchange(b"").decode().split()
        return StrictWire(socket.create_connection((host, int(port)), timeout_s))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        exchange(f"{address} {listener.getsockname()[1]}".encode())
        listener.settimeout(timeout_s)
        return StrictWire(listener.accept()[0])


class StrictWire:
    """One end; see ``link.Wire``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._aborted = Waker()

    def send(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Send each part; return when the system has all of it."""
        deadline_s = time.monotonic() + timeout_s
        self._read(memoryview(bytearray(len(_POSTED))), deadline_s)
        for part in parts:
            self._write(part.numpy().data, deadline_s)

    def receive(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Fill each part."""
        deadline_s = time.monotonic() + timeout_s
        self._write(memoryview(_POSTED), deadline_s)
        for part in parts:
            self._read(part.numpy().data, deadline_s)

    def abort(self) -> None:
        """Free a waiting thread; nothing is carried any more."""
        self._aborted.wake()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        self._aborted.close()

    def _read(self, room: memoryview, deadline_s: float) -> None:
        while room:
            self._wait(select.POLLIN, deadline_s)
            try:
                count = self._connection.recv_into(room)
            except ConnectionError:
                count = 0
            if not count:
                self._wait(0, deadline_s)  # the peer is dead, which NCCL would not tell
            room = room[count:]

    def _write(self, data: memoryview, deadline_s: float) -> None:
        while data:
            self._wait(select.POLLOUT, deadline_s)
            try:
                data = data[self._connection.send(data) :]
            except ConnectionError:
                self._wait(0, deadline_s)

    def _wait(self, events: int, deadline_s: float) -> None:
        """Return when one of ``events`` happens; with none of them, only the end does."""
        poll = select.poll()
        if events:
            poll.register(self._connection, events)
        poll.register(self._aborted.fd, select.POLLIN)
        ready = dict(poll.poll(1000 * max(0.0, deadline_s - time.monotonic())))
        if self._aborted.fd in ready:
            raise RuntimeError("the link was aborted")
        if not ready:
            raise TimeoutError("the peer was silent")
