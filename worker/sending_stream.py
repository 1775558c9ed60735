"""The end of a stream that a stage puts its parcels into; the protocol is in ``stream``."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
import zmq

from ..protocol.errors import LinkError, ProtocolError
from ..protocol.messages import Announce, Boundary, Peer, StreamHello, StreamRefused, StreamWelcome
from ..protocol.schedule import Op
from ..protocol.sockets import Client, KeyPair
from .boundary import Parcel, describe, settled, tensors_of
from .link import SENDER, Link
from .stream_end import LINK_TIMEOUT_S, StreamEnd, Target, stream_identity

__all__ = ["SendingStream"]

_ANSWER_TIMEOUT_S = 1.0  # then the hello is said anew: a link under construction waits no longer
_RETRY_PAUSE_S = 0.1
_IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A parcel that waits to be sent, cut from its graph."""

    op: Op
    tensors: list[torch.Tensor]
    boundary: Boundary
    samples: int
    batch_samples: int
    complete: torch.cuda.Event | None  # reached when the tensors are; None on CPU


class SendingStream(StreamEnd):
    """An ``Outbox`` that a neighbour empties.

    Args:
        name: "activations" or "gradients".
        context: the process's ZeroMQ context.
        run_id: 16 bytes.
        stage: ours.
        incarnation: ours.
        address: numeric address of this host that the peer can reach.
        keys: our own pair; None where all workers are on one host.
        device: where the tensors are.
        window: parcels that may wait to be sent, at least 1; with more, ``put`` waits.
        wait_timeout_s: how long ``put`` waits.
        backend: of the link, see ``link.default_backend``.
    """

    def __init__(
        self,
        name: str,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        run_id: bytes,
        stage: int,
        incarnation: int,
        address: str,
        keys: KeyPair | None,
        device: torch.device,
        window: int,
        wait_timeout_s: float,
        backend: str,
    ) -> None:
        super().__init__(
            name,
            stage=stage,
            rank=SENDER,
            address=address,
            device=device,
            window=window,
            wait_timeout_s=wait_timeout_s,
            backend=backend,
        )
        self._context = context
        self._run_id = run_id
        self._incarnation = incarnation
        self._keys = keys
        self._queue: deque[_Outgoing] = deque()  # guarded by the gate
        self._client: Client | None = None
        self._server: Peer | None = None  # of the client
        self._attempt = 0
        self._peer_position = 0  # what it said when we last met

    def connect(self, generation: int, peer: Peer) -> None:
        """Build this generation of the link, trying until it stands or another is asked for."""
        self._want(Target(generation, peer))

    def put(self, parcel: Parcel) -> None:
        """Send ``parcel`` soon; waits only while ``window`` parcels wait already.

        Raises:
            JobError: the value cannot cross a stage boundary.
            LinkError: the neighbour is gone.
            DeadlineError: the neighbour did not take parcels in time.
        """
        outgoing = self._outgoing(parcel)
        with self._gate:
            self._gate.check()
            self.waited_s += self._wait_for_queue(self._window - 1)
            self._queue.append(outgoing)
        self._waker.wake()

    def flush(self, timeout_s: float) -> None:
        """Wait until all that was put has left for a receiver that has room for it.

        The last bytes may still be under way; close when the peer is known to be done.

        Raises:
            LinkError: the neighbour is gone.
            DeadlineError: the time is up.
        """
        with self._gate:
            self._wait_for_queue(0, timeout_s)

    def _wait_for_queue(self, most: int, timeout_s: float | None = None) -> float:
        return self._gate.wait(
            lambda: len(self._queue) <= most,
            lambda: f"{self._peer_name()} to take {self._queue[0].op}",
            timeout_s,
        )

    def _outgoing(self, parcel: Parcel) -> _Outgoing:
        boundary = describe(parcel.value)
        kept = settled(parcel)
        complete = None
        if self._device.type == "cuda":
            complete = torch.cuda.Event(blocking=True)
            complete.record(torch.cuda.current_stream(self._device))
        return _Outgoing(
            op=kept.op,
            tensors=tensors_of(kept.value),
            boundary=boundary,
            samples=kept.samples,
            batch_samples=kept.batch_samples,
            complete=complete,
        )

    # -- in the stream's own thread -----------------------------------------------------------

    def _step(self, target: Target) -> None:
        with self._gate:
            head = self._queue[0] if self._queue else None
            link = self._standing_link(target)
            has_failed = self._gate.has_failed
        if has_failed:
            with self._gate:
                self._gate.wait_without_limit(lambda: not self._gate.has_failed or self._is_closing)
        elif link is None:
            self._build(target)
        elif head is None:
            self._rest(_IDLE_S)
        else:
            self._transmit(target, link, head)

    def _rest(self, timeout_s: float) -> None:
        # Reading also clears away the receiver's probes.
        assert self._client is not None
        self._client.receive(timeout_s, self._waker.fd)
        self._waker.clear()

    def _build(self, target: Target) -> None:
        if self._server != target.peer:
            self._close_socket()
            self._client = Client(
                self._context,
                run_id=self._run_id,
                identity=stream_identity(self._stage, self._incarnation, self._name),
                endpoint=target.peer.endpoint,
                server_key=target.peer.public_key,
                keys=self._keys,
            )
            self._server = target.peer
        if not self._open_link(target, partial(self._greet, target)):
            self._rest(_RETRY_PAUSE_S)
            return
        with self._gate:
            while self._queue and self._position < self._peer_position:
                self._sent()  # it had arrived, only the last link could not tell us
            if self._position != self._peer_position:
                raise LinkError(
                    f"{target.name} needs parcel {self._peer_position} of the {self._name}; "
                    f"stage {self._stage} has only those from {self._position} on"
                )
            self._connected = target

    def _greet(self, target: Target, own: bytes) -> bytes:
        """Say hello with our rendezvous value and return the one in the answer."""
        assert self._client is not None
        self._attempt += 1
        hello = StreamHello(
            stream=self._name,
            stage=self._stage,
            incarnation=self._incarnation,
            generation=target.generation,
            attempt=self._attempt,
            backend=self._backend,
            address=own,
        )
        self._client.send(hello)
        deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            received = self._client.receive(left_s, self._waker.fd)
            self._waker.clear()
            if self._is_closing or self._wanted != target:
                break
            answer = received[0] if received else None
            if isinstance(answer, StreamRefused):
                raise ProtocolError(f"{target.name} refuses the {self._name} link: {answer.reason}")
            if isinstance(answer, StreamWelcome) and answer.attempt == self._attempt:
                self._peer_position = answer.position
                return answer.address
        raise LinkError("no answer")

    def _transmit(self, target: Target, link: Link, outgoing: _Outgoing) -> None:
        assert self._client is not None
        announce = Announce(
            op=str(outgoing.op),
            samples=outgoing.samples,
            batch_samples=outgoing.batch_samples,
            boundary=outgoing.boundary,
            generation=target.generation,
            position=self._position,
        )
        self._client.send(announce)
        if outgoing.complete is not None:
            outgoing.complete.synchronize()
        link.send(outgoing.tensors, what=str(outgoing.op), timeout_s=LINK_TIMEOUT_S)
        with self._gate:
            self._sent()

    def _sent(self) -> None:
        self._queue.popleft()
        self._position += 1

    def _close_socket(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
