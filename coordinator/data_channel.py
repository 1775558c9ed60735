"""The thread that answers the first and the last stage's requests for batches, and takes weights.

It is a server of pure questions: any op may be asked for at any time and by any incarnation, so a
restarted worker asks again and nobody keeps a position for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..protocol.codec import Buffer
from ..protocol.errors import ProtocolError
from ..protocol.messages import FeedBatch, FeedRequest, Message, WeightsPart
from ..protocol.schedule import Kind, Op
from ..protocol.sockets import Received, Server, Waker

if TYPE_CHECKING:  # both import torch, which the control loop must not wait for
    from .feed import Feed

__all__ = ["DataChannel"]

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_FED = (Kind.FORWARD, Kind.EVALUATE)


class DataChannel:
    """Owns the data socket once started.

    Args:
        server: the bound data socket.
        on_weights: called in this thread with each tensor a finished stage sends.
        on_error: called in this thread with an exception of the data set or of a weights part.
    """

    def __init__(
        self,
        server: Server,
        *,
        on_weights: Callable[[WeightsPart, Buffer], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._server = server
        self._on_weights = on_weights
        self._on_error = on_error
        self._waker = Waker()
        self._closing = False
        self._lock = threading.Lock()
        self._newest_asked = -1
        self._limit: int | None = None
        self._thread: threading.Thread | None = None

    def start(self, feed: Feed) -> None:
        """Begin to answer from this feed; does nothing after ``close``."""
        thread = threading.Thread(target=self._run, args=(feed,), name="data", daemon=True)
        with self._lock:
            if not self._closing:
                self._thread = thread
                thread.start()

    def stop_feeding(self, at_least: int = 0) -> int:
        """Give out no batch that nobody has asked for yet; return the first such batch.

        Args:
            at_least: the batches before this one may have been asked for before this process
                began, and are given out.
        """
        with self._lock:
            if self._limit is None:
                self._limit = max(self._newest_asked + 1, at_least)
            return self._limit

    def stop_feeding_before(self, batch: int) -> None:
        """Give out no batch from ``batch`` on, as was decided before this process began."""
        with self._lock:
            self._limit = batch

    def close(self) -> None:
        """End the thread and close the socket."""
        with self._lock:  # the job may just be loaded, in another thread
            self._closing = True
        self._waker.wake()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._server.close()
        self._waker.close()

    def _run(self, feed: Feed) -> None:
        while not self._closing:
            received = self._server.receive(_POLL_S, self._waker.fd)
            if received is None:
                continue
            try:
                self._answer(feed, received)
            except ProtocolError as error:
                logger.warning("dropped a message of %s: %s", received.identity, error)
            except Exception as error:  # noqa: BLE001  the data set is the user's code
                self._on_error(error)
                return

    def _answer(self, feed: Feed, received: Received) -> None:
        message: Message = received.message
        if isinstance(message, WeightsPart):
            if len(received.payload) != 1:
                raise ProtocolError(f"{message.name!r} came with {len(received.payload)} frames")
            self._on_weights(message, received.payload[0])
        elif isinstance(message, FeedRequest):
            for op in _ops_of(message):
                if self._admit(op):
                    self._send_batch(feed, received.identity, message.part, op)

    def _admit(self, op: Op) -> bool:
        if op.kind is not Kind.FORWARD:
            return True
        with self._lock:
            if self._limit is not None and op.batch >= self._limit:
                return False
            self._newest_asked = max(self._newest_asked, op.batch)
            return True

    def _send_batch(self, feed: Feed, identity: str, part: str, op: Op) -> None:
        from .frames import to_frames

        batch = feed.part(part, op)
        boundary, frames = to_frames(batch.value, part)
        self._server.send(
            identity,
            FeedBatch(
                part=part,
                op=str(op),
                samples=batch.samples,
                batch_samples=batch.batch_samples,
                ids_digest=batch.ids_digest,
                boundary=boundary,
            ),
            frames,
        )


def _ops_of(request: FeedRequest) -> list[Op]:
    """Return the ops that are asked for; raise ProtocolError if the feed has no such thing."""
    try:
        ops = [Op.parse(text) for text in request.ops]
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    if request.part not in ("inputs", "targets") or not all(op.kind in _FED for op in ops):
        raise ProtocolError(f"there are no {request.part} for {', '.join(request.ops)}")
    return ops
