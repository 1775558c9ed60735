"""ZeroMQ sockets that carry messages; the only file that sets socket options. Decides nothing.

A ``Server`` is bound and talks to many named peers; a ``Client`` is connected to one server and
reconnects by itself for as long as it exists. On the network every byte is encrypted and every
peer proves its key (CURVE); on one host the lock is a directory that only its owner may enter.

A socket belongs to the thread that uses it. The two exceptions are made for other threads:
``Waker.wake`` ends that thread's ``receive``, and ``dropped`` and ``sent`` may be read anywhere.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import zmq

from .codec import (
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    Buffer,
    Decoder,
    Encoder,
    InvalidMessageError,
    Reason,
)
from .errors import HostError
from .keys import ZAP_DOMAIN, Authority, KeyPair
from .messages import Message

__all__ = ["Authority", "Client", "KeyPair", "Received", "Server", "Waker"]

_RECONNECT_MS = 100
_CONNECT_TIMEOUT_MS = 2000  # a lost SYN must not cost the system's minutes
_ENCRYPTION_BYTES = 64  # at least what CURVE adds to a frame
_IPC_PATH_BYTES = 107  # what a Unix socket's address holds


class Waker:
    """Lets another thread end a ``receive``: one file descriptor that is readable when woken."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self._lock = Lock()  # a wake that comes late must not write to a descriptor used anew

    def wake(self) -> None:
        """Make ``fd`` readable, from any thread; does nothing after ``close``."""
        with self._lock:
            if self._open:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make ``fd`` quiet again; call it before looking at what the wake was about."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return  # nobody woke us

    def close(self) -> None:
        """Release the descriptor."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Received:
    """A message that a server accepted; the payload is the socket's own memory, not a copy."""

    identity: str
    message: Message
    payload: list[Buffer]


class Server:
    """A bound ROUTER socket, or two of them behind one face: ipc and encrypted tcp.

    Whatever a peer sends, ``receive`` does not raise: what is not a whole, new message of this
    run from a peer that may use its name is dropped and counted in ``dropped`` by reason. A frame
    above the socket's own limit costs its sender the connection and never arrives.

    Args:
        context: the process's ZeroMQ context.
        run_id: 16 bytes; messages of other runs are dropped.
        ipc: path of a socket file, in a directory that only its owner may enter.
        tcp: numeric address to listen on, "10.0.0.1", "[::1]" or with ":port"; without a port
            the system chooses one.
        keys: this server's own pair; needed for tcp.
        authority: who may connect over tcp; needed for tcp.
        max_frame_bytes: the largest frame a peer may send; MAX_PAYLOAD_BYTES where weights come.
        high_water: messages that may wait for one slow peer, or from it.
        heartbeat_s: how often an idle connection is probed.
        lease_s: silence after which a connection is given up.

    Raises:
        HostError: it cannot listen there.
        ValueError: ``tcp`` is not an address.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        run_id: bytes,
        ipc: Path | None = None,
        tcp: str | None = None,
        keys: KeyPair | None = None,
        authority: Authority | None = None,
        max_frame_bytes: int = MAX_MESSAGE_BYTES,
        high_water: int = 1000,
        heartbeat_s: float = 1.0,
        lease_s: float = 10.0,
    ) -> None:
        assert ipc is not None or tcp is not None, "a server listens somewhere"
        self.dropped: Counter[Reason] = Counter()
        self.ipc_endpoint = self.tcp_endpoint = ""
        self._encoder = Encoder(run_id)
        self._decoder = Decoder(run_id)
        self._authority = authority
        self._routes: dict[str, zmq.Socket[bytes]] = {}
        self._sockets: list[zmq.Socket[bytes]] = []

        def bind(endpoint: str) -> str:
            socket = context.socket(zmq.ROUTER)
            self._sockets.append(socket)
            _set_options(socket, max_frame_bytes, heartbeat_s, lease_s)
            socket.sndhwm = socket.rcvhwm = high_water
            socket.router_mandatory = True
            # A peer that reconnects before its broken connection is noticed keeps its name.
            socket.router_handover = True
            if endpoint.startswith("tcp"):
                assert keys is not None, "tcp needs keys"
                assert authority is not None, "tcp needs an authority"
                _set_server_keys(socket, keys)
            return _bind(socket, endpoint)

        try:
            if ipc is not None:
                self.ipc_endpoint = bind(_ipc_endpoint(ipc))
            if tcp is not None:
                self.tcp_endpoint = bind(_tcp_endpoint(tcp))
        except BaseException:
            self.close()
            raise

    def receive(self, timeout_s: float, wake_fd: int | None = None) -> Received | None:
        """Return the next valid message, or None.

        Args:
            timeout_s: how long to wait, at least 0.
            wake_fd: returns None as soon as this descriptor is readable; it is not read.
        """
        deadline_s = time.monotonic() + timeout_s
        while (ready := _wait(self._sockets, deadline_s, wake_fd)) is not None:
            received = self._take(ready)
            # Looked at here too, lest a peer that sends nothing but junk keeps us for ever.
            if received is not None or time.monotonic() >= deadline_s:
                return received
        return None

    def send(self, identity: str, message: Message, payload: Sequence[Buffer] = ()) -> bool:
        """Queue a message for a peer that has been heard from; never waits.

        Large payload frames are not copied: leave them unchanged from here on.

        Returns:
            False if the peer is unknown or gone, or ``high_water`` messages wait for it already.

        Raises:
            ProtocolError: the message is larger than a receiver accepts.
        """
        socket = self._routes.get(identity)
        if socket is None:
            return False
        frames = [identity.encode(), *self._encoder.encode(message, payload)]
        try:
            socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            del self._routes[identity]
            return False
        return True

    def close(self, flush_s: float = 0.0) -> None:
        """Close; what is still queued is lost unless ``flush_s`` grants it time to leave.

        It then leaves while ``context.term()`` waits, not here: end the process by that.
        """
        for socket in self._sockets:
            socket.close(linger=math.ceil(1000 * flush_s))

    def _take(self, ready: zmq.Socket[bytes]) -> Received | None:
        # The other socket goes first next time, so that neither starves.
        self._sockets.sort(key=lambda socket: socket is ready)
        peer, *frames = ready.recv_multipart(copy=False)
        try:
            identity = self._identify(ready, peer)
            message, payload = self._decoder.decode(peer.bytes, [frame.buffer for frame in frames])
        except InvalidMessageError as error:
            self.dropped[error.reason] += 1
            return None
        self._routes[identity] = ready
        return Received(identity, message, payload)

    def _identify(self, socket: zmq.Socket[bytes], peer: zmq.Frame) -> str:
        """Return the peer's name if it is one and the key it has proved stands for it."""
        identity = peer.bytes.decode("latin-1")
        if not (identity.isascii() and identity.isprintable()):
            raise InvalidMessageError("identity", f"{peer.bytes!r} is not a name")
        if socket.curve_server:
            assert self._authority is not None
            key = str(peer.get("User-Id"))
            if not self._authority.permits(key, identity):
                self._routes.pop(identity, None)  # whoever holds this route now is an impostor
                raise InvalidMessageError("identity", f"key {key} does not stand for {identity!r}")
        return identity


class Client:
    """A DEALER socket that is connected to one server, and connected again whenever that returns.

    Args:
        context: the process's ZeroMQ context.
        run_id: 16 bytes; messages of other runs are dropped.
        identity: this peer's name, such as "worker/2/0"; ASCII, at most 255 characters.
        endpoint: the server's, "tcp://10.0.0.1:5000" or "ipc:///path".
        server_key: the server's public key; not used on ipc.
        keys: this peer's own pair; not used on ipc.
        heartbeat_s: how often an idle connection is probed.
        lease_s: silence after which the connection is given up and made anew.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        run_id: bytes,
        identity: str,
        endpoint: str,
        server_key: str = "",
        keys: KeyPair | None = None,
        heartbeat_s: float = 1.0,
        lease_s: float = 10.0,
    ) -> None:
        encrypted = endpoint.startswith("tcp:")
        assert keys or not encrypted, "tcp needs keys"
        self.dropped: Counter[Reason] = Counter()
        self.sent = 0
        self._encoder = Encoder(run_id)
        self._decoder = Decoder(run_id)
        self._socket = context.socket(zmq.DEALER)
        _set_options(self._socket, MAX_PAYLOAD_BYTES, heartbeat_s, lease_s)
        # No high-water mark: a send never waits. What may pile up while the server is away is
        # bounded by the lease, after which this process ends.
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.routing_id = identity.encode("ascii")
        self._socket.reconnect_ivl = _RECONNECT_MS
        self._socket.connect_timeout = _CONNECT_TIMEOUT_MS
        self._socket.ipv6 = "[" in endpoint
        if keys and encrypted:
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.curve_serverkey = server_key.encode()
        self._socket.connect(endpoint)

    def send(self, message: Message, payload: Sequence[Buffer] = ()) -> None:
        """Queue a message; never waits, whether or not the server is there.

        Large payload frames are not copied: leave them unchanged from here on.

        Raises:
            ProtocolError: the message is larger than the receiver accepts.
        """
        self._socket.send_multipart(self._encoder.encode(message, payload), copy=False)
        self.sent += 1

    def receive(
        self, timeout_s: float, wake_fd: int | None = None
    ) -> tuple[Message, list[Buffer]] | None:
        """Return the next valid message and its payload, or None; as ``Server.receive``."""
        deadline_s = time.monotonic() + timeout_s
        while _wait([self._socket], deadline_s, wake_fd) is not None:
            frames = self._socket.recv_multipart(copy=False)
            try:
                return self._decoder.decode(b"server", [frame.buffer for frame in frames])
            except InvalidMessageError as error:
                self.dropped[error.reason] += 1
            if time.monotonic() >= deadline_s:
                break
        return None

    def close(self, flush_s: float = 0.0) -> None:
        """Close; what is still queued is lost unless ``flush_s`` grants it time to leave.

        It then leaves while ``context.term()`` waits, not here: end the process by that.
        """
        self._socket.close(linger=math.ceil(1000 * flush_s))


# -- options and addresses ----------------------------------------------------------------------


def _set_options(
    socket: zmq.Socket[bytes], max_frame_bytes: int, heartbeat_s: float, lease_s: float
) -> None:
    socket.linger = 0
    socket.maxmsgsize = max_frame_bytes + _ENCRYPTION_BYTES
    socket.heartbeat_ivl = math.ceil(1000 * heartbeat_s)
    socket.heartbeat_timeout = math.ceil(1000 * lease_s)


def _set_server_keys(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    socket.curve_server = True
    socket.curve_secretkey = keys.secret.encode()
    # Enforced: without an answer from the authority nobody gets in, rather than everybody.
    socket.zap_domain = ZAP_DOMAIN.encode()
    socket.zap_enforce_domain = True


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    socket.ipv6 = "[" in endpoint
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise HostError(
            f"cannot listen on {endpoint}: {error.strerror}. It must be an address of this host "
            "with a port that is free"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _ipc_endpoint(path: Path) -> str:
    mode = path.parent.stat().st_mode & 0o777
    if mode & 0o077:
        raise HostError(
            f"{path.parent} has mode {mode:o}: the directory of an ipc socket must be closed to "
            f"all but its owner; chmod 700 {path.parent}"
        )
    if len(os.fsencode(path)) > _IPC_PATH_BYTES:
        raise HostError(
            f"{path} has {len(os.fsencode(path))} bytes: a socket's path holds at most "
            f"{_IPC_PATH_BYTES}; choose a shorter directory, for example by TMPDIR"
        )
    return f"ipc://{path}"


def _tcp_endpoint(address: str) -> str:
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(:\d+)?", address)
    if match is None:
        raise ValueError(
            f"not an address to listen on: {address!r} (expected 10.0.0.1, 10.0.0.1:5000 or [::1])"
        )
    host, port = match.groups()
    return f"tcp://{host}{port or ':*'}"


def _wait(
    sockets: Sequence[zmq.Socket[bytes]], deadline_s: float, wake_fd: int | None
) -> zmq.Socket[bytes] | None:
    """Return the first of ``sockets`` with a message; None when woken or past the deadline."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    if wake_fd is not None:
        poller.register(wake_fd, zmq.POLLIN)
    left_ms = math.ceil(1000 * max(0.0, deadline_s - time.monotonic()))
    ready = dict(poller.poll(left_ms))
    if wake_fd in ready:
        return None
    return next((socket for socket in sockets if socket in ready), None)
