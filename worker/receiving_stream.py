"""The end of a stream that a stage takes its parcels from; the protocol is in ``stream``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
import zmq

from ..protocol.codec import unpack_body
from ..protocol.errors import LinkError, ProtocolError
from ..protocol.messages import (
    Announce,
    Message,
    ParcelDigest,
    Peer,
    StreamHello,
    StreamProbe,
    StreamRefused,
    StreamWelcome,
)
from ..protocol.schedule import Kind, Op
from ..protocol.sockets import Authority, KeyPair, Server
from .boundary import Parcel, allocate, assemble, tensors_of
from .link import RECEIVER, Link
from .stream_end import LINK_TIMEOUT_S, StreamEnd, Target, stream_identity
from .stream_log import digest_of, is_needed_after

__all__ = ["ReceivingStream"]

_PROBE_INTERVAL_S = 0.5
_MOST_DIGESTS = 1 << 14  # in a welcome, which has its size limit; a mismatch shows in the first


class ReceivingStream(StreamEnd):
    """What a neighbour fills and a stage's loop takes from; an ``Inbox`` that can be cut short.

    Args:
        name: "activations" or "gradients".
        context: the process's ZeroMQ context.
        run_id: 16 bytes.
        stage: ours.
        incarnation: ours.
        address: numeric address of this host that the peer can reach.
        ipc_dir: a private directory for the socket if all workers are on this host; None: tcp.
        keys: our own pair; None with ``ipc_dir``.
        authority: who may connect over tcp; None with ``ipc_dir``.
        device: where the tensors are wanted.
        window: parcels that may be here before they are taken, at least 1. With more, the sender
            waits: this is the only back-pressure there is.
        wait_timeout_s: how long ``take`` waits while the link stands.
        epoch_batches: mini-batches of one epoch.
        backend: of the link, see ``link.default_backend``.
        is_wanted: whether the stage has yet to execute this op; asked in the stream's own thread
            when the parcel for it is here. One that is not wanted is thrown away.
        on_link_lost: told why, in the stream's own thread, once for each link that broke.
        on_fault: given what ended the stream, in its own thread.

    Attributes:
        endpoint: where the sender is to connect to.
        discarded: parcels that were not wanted.
        refused: hellos of old generations or incarnations.
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
        ipc_dir: Path | None,
        keys: KeyPair | None,
        authority: Authority | None,
        device: torch.device,
        window: int,
        wait_timeout_s: float,
        epoch_batches: int,
        backend: str,
        is_wanted: Callable[[Op], bool],
        on_link_lost: Callable[[str], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._server = Server(
            context,
            run_id=run_id,
            ipc=ipc_dir / f"{name}-{stage}-{incarnation}" if ipc_dir else None,
            tcp=None if ipc_dir else f"[{address}]" if ":" in address else address,
            keys=keys,
            authority=authority,
        )
        super().__init__(
            name,
            stage=stage,
            rank=RECEIVER,
            address=address,
            device=device,
            window=window,
            wait_timeout_s=wait_timeout_s,
            epoch_batches=epoch_batches,
            backend=backend,
            on_link_lost=on_link_lost,
            on_fault=on_fault,
        )
        self.endpoint = self._server.ipc_endpoint or self._server.tcp_endpoint
        self.discarded = 0
        self.refused = 0
        self._is_wanted = is_wanted
        # Guarded by the gate:
        self._position = 0  # no parcel with a lower number is needed
        self._parcels: dict[Op, Parcel] = {}
        self._digests: dict[int, tuple[Op, int]] = {}  # by number, rising
        self._cut: int | None = None
        # The thread's own:
        self._last_op: Op | None = None
        self._hello: StreamHello | None = None  # the newest that is not answered yet

    def resume_at(self, number: int) -> None:
        """Need nothing below this number: that of the first input in flight in a snapshot.

        To be said before the first ``expect``.
        """
        assert self._thread is None, "a stream that runs has a position of its own"
        self._position = number

    def expect(self, generation: int, peer: Peer) -> None:
        """Let this sender, and no other, build this generation of the link.

        Does nothing if this generation or a newer one was asked for before.
        """
        self._want(Target(generation, peer))

    def take(self, op: Op) -> Parcel | None:
        """Return the parcel for ``op``, waiting for it; parcels may be taken in any order.

        It has its number. Returns None for a forward that ``stop_before`` has cut off.

        Raises:
            LinkError: the stream was closed.
            ProtocolError: the neighbour does not keep to the protocol.
            DeadlineError: the parcel did not come in time.
        """
        with self._gate:
            self.waited_s += self._gate.wait(
                lambda: op in self._parcels or self._is_cut(op), lambda: self._missing(op)
            )
            parcel = self._parcels.pop(op, None)
        for tensor in tensors_of(parcel.value) if parcel else ():
            if tensor.is_cuda:  # made under our thread's stream, read and freed under the caller's
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return parcel

    def ready(self, op: Op) -> bool:
        """Tell whether ``take(op)`` would return at once."""
        return op in self._parcels

    def stop_before(self, batch: int) -> None:
        """Free whoever waits for the forward of ``batch`` or a later one: it was never fed."""
        with self._gate:
            self._cut = batch

    def trim(self, update: int) -> None:
        """Forget what was only to be compared with a life from before the state of ``update``."""
        with self._gate:
            self._digests = {
                number: (op, digest)
                for number, (op, digest) in self._digests.items()
                if is_needed_after(op, update, self._epoch_batches)
            }

    def _is_cut(self, op: Op) -> bool:
        return self._cut is not None and op.kind is Kind.FORWARD and op.batch >= self._cut

    def _missing(self, op: Op) -> str:
        newest = f"the newest from there is {self._last_op}" if self._last_op else "none came yet"
        return f"{op} from {self._peer_name()} ({newest})"

    # -- in the stream's own thread -----------------------------------------------------------

    def _step(self, target: Target) -> None:
        link = self._standing_link(target)
        if link is not None and link.carries_notes:
            # Whoever wants another link aborts this one; so does the death of the peer.
            announce = unpack_body(link.receive_note(LINK_TIMEOUT_S))
            if not isinstance(announce, Announce) or announce.generation != target.generation:
                raise ProtocolError(f"{target.name} sent {announce} on its {self._name} link")
            self._receive(target, link, announce)
            return
        hello = self._answerable_hello(target)
        # Only the newest hello counts, so look for another before answering one.
        received = self._server.receive(0 if hello else _PROBE_INTERVAL_S, self._waker.fd)
        self._waker.clear()
        if received is None and hello is not None:
            self._build(target, hello)
        elif received is None:
            self._probe(target)
        elif isinstance(received.message, StreamHello):
            hello = received.message
            if received.identity == stream_identity(hello.stage, hello.incarnation, self._name):
                self._hello = hello
        elif isinstance(received.message, Announce):
            sender = stream_identity(target.peer.stage, target.peer.incarnation, self._name)
            is_late = received.message.generation != target.generation  # from before a restart
            if link is not None and received.identity == sender and not is_late:
                self._receive(target, link, received.message)

    def _answerable_hello(self, target: Target) -> StreamHello | None:
        """Return the hello that can be answered now; refuse one that never can be.

        Of two ends that are told of a new generation, one hears it first. Hellos of a later
        generation are kept until we hear; those of an earlier one are not worth an answer.
        """
        hello = self._hello
        if hello is None or hello.generation > target.generation:
            return None
        theirs = (hello.stage, hello.incarnation, hello.backend)
        ours = (target.peer.stage, target.peer.incarnation, self._backend)
        if hello.generation == target.generation and theirs == ours:
            return hello
        self._hello = None
        self.refused += 1
        if hello.generation == target.generation:
            reason = f"stage, incarnation and backend are {theirs}; expected {ours}"
            refusal = StreamRefused(reason=reason, attempt=hello.attempt)
            self._say(hello.stage, hello.incarnation, refusal)
        return None

    def _build(self, target: Target, hello: StreamHello) -> None:
        self._hello = None

        def exchange(own: bytes) -> bytes:
            if not self._say(hello.stage, hello.incarnation, self._welcome(hello, own)):
                raise LinkError(f"{target.name} is gone")
            return hello.address

        if self._open_link(target, exchange):
            with self._gate:
                self._stand(target)

    def _welcome(self, hello: StreamHello, own: bytes) -> StreamWelcome:
        with self._gate:
            digests = (
                ParcelDigest(number=number, digest=digest)
                for number, (_, digest) in self._digests.items()
                if number >= hello.number
            )
            return StreamWelcome(
                generation=hello.generation,
                attempt=hello.attempt,
                position=self._position,
                address=own,
                digests=tuple(islice(digests, _MOST_DIGESTS)),
            )

    def _receive(self, target: Target, link: Link, announce: Announce) -> None:
        op = self._due_op(announce)
        with self._gate:
            self._gate.wait_without_limit(
                lambda: (
                    len(self._parcels) < self._window or self._is_closing or self._wanted != target
                )
            )
            if self._is_closing or self._wanted != target:
                return
        tensors = allocate(announce.boundary, self._device)
        link.receive(tensors, what=str(op), timeout_s=LINK_TIMEOUT_S)
        digest = digest_of(tensors)  # now: once it can be taken, the stage may write to it
        value = assemble(announce.boundary, tensors)
        number = announce.position
        parcel = Parcel(op, value, announce.samples, announce.batch_samples, number)
        is_wanted = self._is_wanted(op)
        with self._gate:
            self._position = number + 1
            self._last_op = op
            self._digests[number] = op, digest
            if is_wanted:
                self._parcels[op] = parcel
            else:
                self.discarded += 1

    def _due_op(self, announce: Announce) -> Op:
        """Return what comes next; raise ProtocolError if it cannot come next."""
        op = Op.parse(announce.op)
        if announce.position < self._position or op in self._parcels:
            raise ProtocolError(
                f"{self._peer_name()} announced {op} as parcel {announce.position} of its "
                f"{self._name}; parcel {self._position} or a later one is due"
            )
        if not 1 <= announce.samples <= announce.batch_samples:
            raise ProtocolError(f"{op} has {announce.samples} of {announce.batch_samples} samples")
        return op

    def _probe(self, target: Target) -> None:
        """Notice the death of a neighbour that owes us nothing at the moment."""
        if self._standing_link(target) is None:
            return
        if not self._say(target.peer.stage, target.peer.incarnation, StreamProbe()):
            raise LinkError(
                f"{target.name} is gone: it closed its {self._name} connection to stage "
                f"{self._stage}"
            )

    def _say(self, stage: int, incarnation: int, message: Message) -> bool:
        return self._server.send(stream_identity(stage, incarnation, self._name), message)

    def _close_socket(self) -> None:
        self._server.close()
