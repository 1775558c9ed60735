"""How two ranks meet at a socket: Unix where both share a host, else TCP. Carries no payload.

The meeting is arranged over the caller's encrypted channel, and a token that came that way proves
to the listener who connects. Whether both share a host need not be known: a Unix name is known to
one host (one network namespace) only, so whoever can connect to it is there.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from ipaddress import ip_address

from .rendezvous import Exchange
from .socket_reader import read_some

__all__ = ["meet_at_socket", "read_exactly"]

_TOKEN_BYTES = 16
_BUFFER_BYTES = 4 << 20  # the system may give less

_QUIET_S = 2
_UNANSWERED = 4
"""A connection to another host whose end hears nothing asks for a sign of life every so many
seconds, and breaks after so many questions. Else a receiver would wait for ever behind a cable that
is out; a sender is told by its receiver, which has a new link built.
"""


def meet_at_socket(
    rank: int, *, address: str, exchange: Exchange, timeout_s: float
) -> socket.socket:
    """Return this rank's end of a connection with the other rank.

    Args:
        rank: 0 listens for its peer, 1 connects.
        address: numeric address of this host that the peer can reach; with a loopback address
            no port is opened, since the peer is on this host.
        exchange: swaps rendezvous values with the peer.
        timeout_s: for the connection.

    Raises:
        OSError: there was no connection, or not in time (``TimeoutError``).
    """
    if rank == 1:
        return _tuned(_connect(exchange(b"").decode(), timeout_s))
    token = secrets.token_bytes(_TOKEN_BYTES)
    with ExitStack() as stack:
        unix = stack.enter_context(_listen_on_host())
        listeners, name = [unix], unix.getsockname()[1:].decode()
        if not ip_address(address).is_loopback:
            tcp = stack.enter_context(_listen_on_network(address))
            listeners.append(tcp)
            name = f"{name} {address} {tcp.getsockname()[1]}"
        exchange(f"{token.hex()} {name}".encode())
        return _tuned(_accept(listeners, token, timeout_s))


def read_exactly(connection: socket.socket, room: memoryview, deadline_s: float) -> None:
    """Fill ``room``.

    Raises:
        ConnectionError: the peer closed the connection, or it broke.
        TimeoutError: the deadline, by the monotonic clock, has passed.
    """
    while room:
        room = room[read_some(connection, room, deadline_s) :]


def _listen_on_host() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    # A name without a file: it is gone with the socket, however that ends.
    listener.bind(f"\0spectrain-{secrets.token_hex(_TOKEN_BYTES)}")
    listener.listen()
    return listener


def _listen_on_network(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def _accept(listeners: Sequence[socket.socket], token: bytes, timeout_s: float) -> socket.socket:
    """Return the connection that knows the token; others are turned away."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        listener = _called(listeners, deadline_s)
        connection, _ = listener.accept()
        shown = bytearray(_TOKEN_BYTES)
        with suppress(OSError):
            read_exactly(connection, memoryview(shown), deadline_s)
        if hmac.compare_digest(shown, token):
            return connection
        connection.close()


def _called(listeners: Sequence[socket.socket], deadline_s: float) -> socket.socket:
    """Return a listener at which somebody waits."""
    poll = select.poll()
    for listener in listeners:
        listener.settimeout(max(0.001, deadline_s - time.monotonic()))  # they may go away again
        poll.register(listener, select.POLLIN)
    ready = dict(poll.poll(1000 * max(0.0, deadline_s - time.monotonic())))
    called = next((listener for listener in listeners if listener.fileno() in ready), None)
    if called is None:
        raise TimeoutError("the peer did not connect in time")
    return called


def _connect(offer: str, timeout_s: float) -> socket.socket:
    token, unix_name, *network = offer.split()
    try:
        connection = _connect_on_host(unix_name, timeout_s)
    except ConnectionRefusedError:  # no such name here: the peer is on another host
        if not network:
            raise
        host, port = network
        connection = socket.create_connection((host, int(port)), timeout_s)
    connection.sendall(bytes.fromhex(token))
    return connection


def _connect_on_host(name: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return connection


def _tuned(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _QUIET_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _UNANSWERED)
    return connection
