"""Where the first stage gets its inputs and the last its targets: asked for ahead, op by op.

The coordinator's feed answers any op at any time, so what a stage holds and asks for is decided
here alone: at most ``LOOK_AHEAD`` ops more than it has taken.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
import zmq
from torch import Tensor

from ..protocol.bootstrap import WorkerBirth
from ..protocol.codec import Buffer
from ..protocol.errors import DeadlineError
from ..protocol.messages import FeedBatch, FeedRequest, TensorSpec
from ..protocol.schedule import Kind, Op
from ..protocol.sockets import Client, Waker
from .boundary import Parcel, assemble

__all__ = ["LOOK_AHEAD", "FeedInbox"]

LOOK_AHEAD = 3
"""Batches asked for before they are needed: one in use, one ready, one on its way."""


class FeedInbox:
    """The stream of one part ("inputs" or "targets") from the coordinator.

    Args:
        part: "inputs" or "targets".
        birth: who we are and whom to call.
        context: the process's ZeroMQ context.
        ops: makes the op list of this stage, afresh at every call.
        device: where the tensors are wanted.
        wait_timeout_s: how long ``take`` waits.
    """

    def __init__(
        self,
        part: str,
        *,
        birth: WorkerBirth,
        context: zmq.Context[zmq.Socket[bytes]],
        ops: Callable[[], Iterator[Op]],
        device: torch.device,
        wait_timeout_s: float,
    ) -> None:
        self._part = part
        self._birth = birth
        self._context = context
        self._device = device
        self._wait_timeout_s = wait_timeout_s
        self._ops = ops
        self._wanted = self._fed(ops())
        self._taken = 0
        self._outstanding: set[Op] = set()  # asked for and not taken yet
        self._cut: int | None = None
        self._to_request: deque[str] = deque()
        self._arrived: dict[Op, Parcel] = {}
        self._lock = threading.Condition()
        self._closing = False
        self._waker = Waker()
        self._request(LOOK_AHEAD)
        self._thread = threading.Thread(target=self._run, name=f"feed {part}", daemon=True)
        self._thread.start()

    def take(self, op: Op) -> Parcel | None:
        """Wait for what this op needs and return it; None once ``stop_before`` has cut it off.

        Raises:
            DeadlineError: it did not come in time.
        """
        deadline = time.monotonic() + self._wait_timeout_s
        with self._lock:
            while op not in self._arrived:
                if self._is_cut(op):
                    return None
                if not self._lock.wait(deadline - time.monotonic()):
                    raise DeadlineError(
                        f"stage {self._birth.stage} waited {self._wait_timeout_s:g} s for the "
                        f"{self._part} of {op} from the coordinator; is the data set that slow? "
                        "--wait-timeout sets the limit"
                    )
            self._taken += 1
            self._outstanding.discard(op)
            self._request(1)
            parcel = self._arrived.pop(op)
        self._waker.wake()
        return parcel

    def ready(self, op: Op) -> bool:
        """Tell whether ``take`` would return at once."""
        with self._lock:
            return op in self._arrived

    def stop_before(self, batch: int) -> None:
        """Give up ``batch`` and all later ones; ``ops`` must leave them out from now on."""
        with self._lock:
            self._cut = batch
            kept = {op for op in self._outstanding if not self._is_cut(op)}
            rest = itertools.islice(self._fed(self._ops()), self._taken, None)
            self._wanted = (op for op in rest if op not in kept)
            self._outstanding = set(kept)
            self._request(LOOK_AHEAD - len(kept))
            self._lock.notify_all()
        self._waker.wake()

    def ask_again(self) -> None:
        """Repeat what has not been answered: a coordinator that was restarted knows nothing."""
        with self._lock:
            unanswered = self._outstanding - self._arrived.keys()
            self._to_request = deque(map(str, sorted(unanswered)))
        self._waker.wake()

    def close(self) -> None:
        """End the thread and its socket."""
        with self._lock:
            self._closing = True
        self._waker.wake()
        self._thread.join(timeout=5)
        self._waker.close()

    @staticmethod
    def _fed(ops: Iterator[Op]) -> Iterator[Op]:
        return (op for op in ops if op.kind in (Kind.FORWARD, Kind.EVALUATE))

    def _is_cut(self, op: Op) -> bool:
        return self._cut is not None and op.kind is Kind.FORWARD and op.batch >= self._cut

    def _request(self, count: int) -> None:
        for op in itertools.islice(self._wanted, max(0, count)):
            self._to_request.append(str(op))
            self._outstanding.add(op)

    def _run(self) -> None:
        birth = self._birth
        client = Client(
            self._context,
            run_id=bytes.fromhex(birth.run_id),
            identity=f"{birth.identity}/{self._part}",
            endpoint=birth.data,
            server_key=birth.server_key,
            keys=birth.keys if birth.server_key else None,
            heartbeat_s=birth.heartbeat_s,
            lease_s=birth.lease_s,
        )
        while True:
            with self._lock:
                closing = self._closing
                ops = tuple(self._to_request)
                self._to_request.clear()
            if closing:
                client.close()
                return
            if ops:
                client.send(FeedRequest(part=self._part, ops=ops))
            received = client.receive(self._wait_timeout_s, self._waker.fd)
            self._waker.clear()
            if received is not None:
                message, frames = received
                if isinstance(message, FeedBatch):
                    self._arrive(message, frames)

    def _arrive(self, message: FeedBatch, frames: list[Buffer]) -> None:
        op = Op.parse(message.op)
        specs = [spec for spec in message.boundary.tensors if spec is not None]
        tensors = (
            _tensor_of(spec, frame).to(self._device)
            for spec, frame in zip(specs, frames, strict=True)
        )
        value = assemble(message.boundary, tensors)
        with self._lock:
            if op in self._outstanding:  # else it came twice, or was cut off meanwhile
                self._arrived[op] = Parcel(
                    op, value, samples=message.samples, batch_samples=message.batch_samples
                )
                self._lock.notify_all()


def _tensor_of(spec: TensorSpec, frame: Buffer) -> Tensor:
    """Return a tensor in memory of its own with the bytes of ``frame``."""
    dtype = getattr(torch, spec.dtype)
    if not len(frame):
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(bytearray(frame), dtype=dtype).reshape(spec.shape)
