"""The four stream ends of one stage: activations and gradients, in and out. Moves nothing itself.

A stage in the middle has all four; the first has no upstream, the last no downstream neighbour.
"""

from __future__ import annotations

from pathlib import Path

import torch
import zmq

from ..protocol.bootstrap import WorkerBirth
from ..protocol.keys import Authority
from ..protocol.messages import Connect, WorkerReady
from ..protocol.settings import Settings
from .link import default_backend
from .receiving_stream import ReceivingStream
from .sending_stream import SendingStream

__all__ = ["Neighbours"]

_LOOPBACK = "127.0.0.1"
_SPARE_PARCELS = 2
"""Window beyond the micro-batches in flight: a forward's parcel may arrive before the parcels of
an evaluation round that are taken first."""


class Neighbours:
    """Opens and closes the ends together.

    Args:
        birth: who we are.
        context: the process's ZeroMQ context.
        authority: who may connect over tcp; None where all stages share this host.
        settings: the run's.
        device: where the tensors are.

    Attributes:
        activations_in: from upstream; None on the first stage.
        activations_out: to downstream; None on the last.
        gradients_in: from downstream; None on the last.
        gradients_out: to upstream; None on the first.
    """

    def __init__(
        self,
        birth: WorkerBirth,
        context: zmq.Context[zmq.Socket[bytes]],
        authority: Authority | None,
        settings: Settings,
        device: torch.device,
    ) -> None:
        self._birth = birth
        self._settings = settings
        same_host = birth.address is None
        keys = None if same_host else birth.keys
        ipc_dir = Path(birth.ipc_dir) if same_host else None
        window = settings.stages - birth.stage + _SPARE_PARCELS

        def receiving(name: str) -> ReceivingStream:
            return ReceivingStream(
                name,
                context=context,
                run_id=bytes.fromhex(birth.run_id),
                stage=birth.stage,
                incarnation=birth.incarnation,
                address=birth.address or _LOOPBACK,
                ipc_dir=ipc_dir,
                keys=keys,
                authority=authority,
                device=device,
                window=window,
                wait_timeout_s=settings.wait_timeout_s,
                backend=default_backend(device),
            )

        def sending(name: str) -> SendingStream:
            return SendingStream(
                name,
                context=context,
                run_id=bytes.fromhex(birth.run_id),
                stage=birth.stage,
                incarnation=birth.incarnation,
                address=birth.address or _LOOPBACK,
                keys=keys,
                device=device,
                window=window,
                wait_timeout_s=settings.wait_timeout_s,
                backend=default_backend(device),
            )

        has_upstream = birth.stage > 0
        has_downstream = birth.stage < settings.stages - 1
        self.activations_in = receiving("activations") if has_upstream else None
        self.gradients_out = sending("gradients") if has_upstream else None
        self.gradients_in = receiving("gradients") if has_downstream else None
        self.activations_out = sending("activations") if has_downstream else None

    def ready(self, parameters: int) -> WorkerReady:
        """Tell where neighbours may connect.

        Args:
            parameters: numbers in this stage's weights and buffers, for the user.
        """
        birth = self._birth
        return WorkerReady(
            stage=birth.stage,
            incarnation=birth.incarnation,
            parameters=parameters,
            activations_endpoint=self.activations_in.endpoint if self.activations_in else "",
            gradients_endpoint=self.gradients_in.endpoint if self.gradients_in else "",
            public_key=birth.keys.public,
        )

    def connect(self, message: Connect) -> None:
        """Build all links of this generation and wait until they stand.

        Raises:
            LinkError: a neighbour is gone or refuses.
            DeadlineError: it took too long.
        """
        generation = message.generation
        if message.upstream is not None:
            assert self.activations_in is not None
            assert self.gradients_out is not None
            self.activations_in.expect(generation, message.upstream)
            self.gradients_out.connect(generation, message.upstream)
        if message.downstream is not None:
            assert self.activations_out is not None
            assert self.gradients_in is not None
            self.gradients_in.expect(generation, message.downstream)
            self.activations_out.connect(generation, message.downstream)
        for end in self._ends():
            end.wait_connected(self._settings.start_timeout_s)

    def stop_before(self, batch: int) -> None:
        """Let nobody wait for activations of ``batch`` or later: they will never come."""
        if self.activations_in is not None:
            self.activations_in.stop_before(batch)

    def flush(self) -> None:
        """Wait until the neighbours have all that was put."""
        for end in (self.activations_out, self.gradients_out):
            if end is not None:
                end.flush(self._settings.wait_timeout_s)

    def _ends(self) -> list[ReceivingStream | SendingStream]:
        ends = (self.activations_in, self.activations_out, self.gradients_in, self.gradients_out)
        return [end for end in ends if end is not None]
