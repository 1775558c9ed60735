"""Raw bytes one way between two ranks over a plain socket: Unix on one host, else TCP.

The bytes are not encrypted, as they are not with NCCL or gloo either.

Measured against gloo (torch 2.13), whose process groups this replaces on CPU: gloo does not tell
a waiter when its connection dies under a message, and cannot be made to let go of it, so every
such fault left a thread behind for ever. A socket reports both ends' death at once.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import time
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from .rendezvous import Exchange
from .socket_meeting import meet_at_socket
from .socket_reader import SocketReader, limit, with_length

__all__ = ["SocketWire", "open_socket_wire"]

_SMALL_BYTES = 64 << 10
"""Below that a copy costs less than another call of the system; a socket holds it twice over."""

_COUNT = struct.Struct("i")


def open_socket_wire(
    rank: int, *, address: str, exchange: Exchange, timeout_s: float
) -> SocketWire:
    """Build one end.

    Args:
        rank: 0 sends, 1 receives.
        address: numeric address of this host that the peer can reach.
        exchange: swaps rendezvous values with the peer.
        timeout_s: for the connection.

    Raises:
        OSError: it could not be built, or not in time (``TimeoutError``).
    """
    return SocketWire(meet_at_socket(rank, address=address, exchange=exchange, timeout_s=timeout_s))


class SocketWire:
    """One end; see ``link.NotingWire``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._incoming = SocketReader(connection)

    def send(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Send each part; return when the system has all of it."""
        self.send_bytes(b"", parts, timeout_s)

    def send_noted(self, note: bytes, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Send the note and each part; return when the system has all of it."""
        self.send_bytes(with_length(note), parts, timeout_s)

    def send_bytes(self, before: bytes, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Send bytes and each part; what is small goes together."""
        limit(self._connection, timeout_s)
        if sum(part.numel() for part in parts) <= _SMALL_BYTES:
            self._connection.sendall(b"".join((before, *(part.numpy().data for part in parts))))
            return
        if before:
            self._connection.sendall(before)
        for part in parts:
            self._connection.sendall(part.numpy().data)

    def leaves_at_once(self, parts: Sequence[Tensor]) -> bool:
        """Tell whether the parts are small, and little waits to leave before them."""
        return sum(part.numel() for part in parts) <= _SMALL_BYTES and self.is_idle()

    def is_idle(self) -> bool:
        """Tell whether there is room for something small without waiting."""
        unsent = fcntl.ioctl(self._connection, termios.TIOCOUTQ, _COUNT.pack(0))
        return _COUNT.unpack(unsent)[0] < _SMALL_BYTES

    def receive(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Fill each part."""
        deadline_s = time.monotonic() + timeout_s
        for part in parts:
            self._incoming.fill(part.numpy().data, deadline_s)

    def receive_note(self, timeout_s: float) -> bytes:
        """Return the next note."""
        return self._incoming.note(time.monotonic() + timeout_s)

    def receive_bytes(self, count: int, timeout_s: float) -> bytes:
        """Return the next bytes."""
        room = bytearray(count)
        self._incoming.fill(memoryview(room), time.monotonic() + timeout_s)
        return bytes(room)

    def abort(self) -> None:
        """Free a waiting thread; nothing is carried any more."""
        with suppress(OSError):  # the peer, or ``close``, was quicker
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
