"""The end of a stream that a stage puts its parcels into; the protocol is in ``stream``."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import zmq

from ..protocol.codec import pack_body
from ..protocol.errors import LinkError, ProtocolError, ReplayMismatchError
from ..protocol.messages import Announce, Peer, StreamHello, StreamRefused, StreamWelcome
from ..protocol.sockets import Client, KeyPair
from .boundary import Parcel
from .link import SENDER, Link
from .stream_end import LINK_TIMEOUT_S, StreamEnd, Target, stream_identity
from .stream_log import LoggedParcel, StreamLog, digest_of

__all__ = ["SendingStream"]

_ANSWER_TIMEOUT_S = 1.0  # then the hello is said anew: a link under construction waits no longer
_RETRY_PAUSE_S = 0.1
_IDLE_S = 60.0


class SendingStream(StreamEnd):
    """An ``Outbox`` that a neighbour empties, and that can give again what it gave before.

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
        log_bytes: payload that may be kept for a neighbour that is restarted; with more, ``put``
            waits until ``trim``. None keeps nothing: neighbours are not restarted.
        least_parcels: kept whatever their size, at least 1: with fewer, no snapshot round could be
            reached that would make room.
        wait_timeout_s: how long ``put`` waits while the link stands.
        epoch_batches: mini-batches of one epoch.
        backend: of the link, see ``link.default_backend``.
        on_link_lost: told why, in the stream's own thread, once for each link that broke.
        on_fault: given what ended the stream, in its own thread.

    Attributes:
        sent: parcels that left by a link, some of them perhaps again.
        suppressed: parcels that were made again for a receiver that had them.
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
        log_bytes: int | None,
        least_parcels: int,
        wait_timeout_s: float,
        epoch_batches: int,
        backend: str,
        on_link_lost: Callable[[str], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        super().__init__(
            name,
            stage=stage,
            rank=SENDER,
            address=address,
            device=device,
            window=window,
            wait_timeout_s=wait_timeout_s,
            epoch_batches=epoch_batches,
            backend=backend,
            on_link_lost=on_link_lost,
            on_fault=on_fault,
        )
        self.sent = 0
        self.suppressed = 0
        self._context = context
        self._run_id = run_id
        self._incarnation = incarnation
        self._keys = keys
        self._log_bytes = log_bytes
        self._least_parcels = least_parcels
        # Guarded by the gate:
        self._log = StreamLog(epoch_batches)
        self._next = 0  # lower numbers were sent, or suppressed
        self._thread_sends = False  # the thread has the next parcel in hand
        # The thread's own:
        self._client: Client | None = None
        self._server: Peer | None = None  # of the client
        self._attempt = 0
        self._peer_position = 0  # what it said when we last met
        self._digests: dict[int, int] = {}  # by number, of what it has that we have not made yet

    @property
    def number(self) -> int:
        """Number that the next parcel will have, for the thread that puts."""
        return self._log.next_number

    @property
    def log_bytes_used(self) -> int:
        """Payload that is kept for a neighbour that is restarted, in bytes."""
        return self._log.size_bytes

    @property
    def peak_log_bytes(self) -> int:
        """The most that ``log_bytes_used`` has been, in bytes."""
        return self._log.peak_bytes

    def resume_at(self, number: int) -> None:
        """Give the next new parcel this number; to be said before the first ``connect``."""
        assert self._thread is None, "a stream that runs has numbers of its own"
        self._log.next_number = number

    def connect(self, generation: int, peer: Peer) -> None:
        """Build this generation of the link, trying until it stands or a newer is asked for.

        Does nothing if this generation or a newer one was asked for before.
        """
        self._want(Target(generation, peer))

    def put(self, parcel: Parcel, number: int | None = None) -> None:
        """Send ``parcel`` soon, and keep it until it is trimmed.

        Waits while ``window`` parcels wait already, or while the log is full.

        Args:
            parcel: what the neighbour will take.
            number: that it had in a former incarnation; below ``self.number``, and rising.

        Raises:
            JobError: the value cannot cross a stage boundary.
            LinkError: the stream was closed.
            ProtocolError: the neighbour refuses the link.
            ReplayMismatchError: the neighbour had something else from our former incarnation.
            DeadlineError: the neighbour did not take parcels in time, or the log stayed full.
        """
        logged = LoggedParcel.of(parcel, self.number if number is None else number)
        with self._gate:
            self._gate.check()
            self.waited_s += self._wait_for_queue(self._window - 1)
            self.waited_s += self._wait_for_room(logged)
            self._log.append(logged)
            is_left_to_thread = not self._sent_at_once(logged)
        if is_left_to_thread:
            self._waker.wake()

    def trim(self, update: int) -> None:
        """Drop what only a stage restored to before the state of ``update`` would ask for."""
        with self._gate:
            self._log.trim(update)

    def flush(self, timeout_s: float) -> None:
        """Wait until all that was put has left for a receiver that has room for it.

        The last bytes may still be under way, and a neighbour that is restarted may want them
        again: close when the peer is known to be done. Time counts while the link stands.

        Raises:
            LinkError: the stream was closed.
            DeadlineError: the time is up.
        """
        with self._gate:
            self._wait_for_queue(0, timeout_s)

    def _wait_for_queue(self, most: int, timeout_s: float | None = None) -> float:
        def what() -> str:
            head = self._log.from_number(self._next)
            return f"{self._peer_name()} to take {head.op if head else 'parcels'}"

        return self._gate.wait(lambda: self._log.count_from(self._next) <= most, what, timeout_s)

    def _wait_for_room(self, parcel: LoggedParcel) -> float:
        log, limit_bytes = self._log, self._log_bytes
        if limit_bytes is None:
            return 0.0
        return self._gate.wait(
            lambda: (
                len(log) < self._least_parcels or log.size_bytes + parcel.size_bytes <= limit_bytes
            ),
            lambda: (
                f"room for {parcel.op} in what it keeps of its {self._name}: the log is full with "
                f"{len(log)} parcels of {log.size_bytes} bytes, allowed are {limit_bytes}"
            ),
            advice="take snapshots more often (--snapshot-every) or allow more (--log-memory)",
        )

    def _sent_at_once(self, parcel: LoggedParcel) -> bool:
        """Send a new parcel from the stage's own thread if that needs no waiting.

        Waking another thread would take longer than handing over what is small, or the address
        of what is not.
        """
        link, target = self._link, self._connected
        if link is None or target is None or target != self._wanted or self._thread_sends:
            return False
        is_next = self._next == parcel.number >= self._peer_position
        if not is_next or not parcel.is_on_host or not link.leaves_at_once(parcel.tensors):
            return False
        note = pack_body(self._announcement(target, parcel))
        try:
            link.send(parcel.tensors, what=str(parcel.op), timeout_s=LINK_TIMEOUT_S, note=note)
        except LinkError:
            return False  # the thread will find the same
        self._was_sent(parcel)
        return True

    def _announcement(self, target: Target, parcel: LoggedParcel) -> Announce:
        parcel.check_size()
        return Announce(
            op=str(parcel.op),
            samples=parcel.samples,
            batch_samples=parcel.batch_samples,
            boundary=parcel.boundary,
            generation=target.generation,
            position=parcel.number,
        )

    def _was_sent(self, parcel: LoggedParcel) -> None:
        self._next = parcel.number + 1
        self.sent += 1
        if self._log_bytes is None:
            self._log.forget_below(self._next)

    # -- in the stream's own thread -----------------------------------------------------------

    def _step(self, target: Target) -> None:
        if target == self._lost:
            self._rest(_IDLE_S)
            return
        link = self._standing_link(target)
        if link is None:
            self._build(target)
            return
        with self._gate:
            parcel = self._log.from_number(self._next)
            self._thread_sends = parcel is not None
        try:
            if parcel is None:
                self._rest(_IDLE_S)
            elif parcel.number < self._peer_position:
                self._suppress(target, parcel)
            else:
                self._transmit(target, link, parcel)
        finally:
            self._thread_sends = False

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
            if self._peer_position < self._log.first_number:
                raise ReplayMismatchError(
                    f"{target.name} needs parcel {self._peer_position} of the {self._name}; "
                    f"stage {self._stage} has only those from {self._log.first_number} on"
                )
            self._next = min(self._next, self._peer_position)
            self._stand(target)

    def _greet(self, target: Target, own: bytes) -> bytes:
        """Say hello with our rendezvous value and return the one in the answer."""
        assert self._client is not None
        self._attempt += 1
        with self._gate:
            number = self._next
        hello = StreamHello(
            stream=self._name,
            stage=self._stage,
            incarnation=self._incarnation,
            generation=target.generation,
            attempt=self._attempt,
            backend=self._backend,
            address=own,
            number=number,
        )
        self._client.send(hello)
        deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            received = self._client.receive(left_s, self._waker.fd)
            self._waker.clear()
            if self._is_closing or self._wanted != target:
                break
            answer = received[0] if received else None
            if isinstance(answer, StreamRefused) and answer.attempt == self._attempt:
                raise ProtocolError(f"{target.name} refuses the {self._name} link: {answer.reason}")
            if isinstance(answer, StreamWelcome) and answer.attempt == self._attempt:
                self._peer_position = answer.position
                self._digests = {each.number: each.digest for each in answer.digests}
                return answer.address
        raise LinkError("no answer")

    def _suppress(self, target: Target, parcel: LoggedParcel) -> None:
        """Do not send what the receiver has; see that it is the same."""
        parcel.land()
        theirs = self._digests.pop(parcel.number, None)  # None: it had that from before a restart
        if theirs is not None and (ours := digest_of(parcel.tensors)) != theirs:
            raise ReplayMismatchError(
                f"stage {self._stage} was restarted and has made parcel {parcel.number} of its "
                f"{self._name}, {parcel.op}, anew with digest {ours:016x}; {target.name} has it "
                f"with {theirs:016x}. The same work must give the same bits: is there chance in "
                "the model that is not torch's, or is the device another?"
            )
        with self._gate:
            self._next = parcel.number + 1
            self.suppressed += 1

    def _transmit(self, target: Target, link: Link, parcel: LoggedParcel) -> None:
        announce = self._announcement(target, parcel)
        note = None
        if link.carries_notes:
            note = pack_body(announce)
        else:
            assert self._client is not None
            self._client.send(announce)
        if self._backend == "nccl":
            parcel.wait_complete()
            tensors = [tensor.to(self._device) for tensor in parcel.tensors]  # a copy if sent again
        else:
            parcel.land()
            tensors = parcel.tensors
        link.send(tensors, what=announce.op, timeout_s=LINK_TIMEOUT_S, note=note)
        parcel.land()
        with self._gate:
            self._was_sent(parcel)

    def _close_socket(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
