"""Sends a finished stage's clean weights to the coordinator, one message per tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import zmq
from torch import Tensor

from ..protocol.bootstrap import WorkerBirth
from ..protocol.messages import TensorSpec, WeightsPart
from ..protocol.sockets import Client

__all__ = ["deliver_weights"]


def deliver_weights(
    birth: WorkerBirth, context: zmq.Context[zmq.Socket[bytes]], state: Mapping[str, Tensor]
) -> Client:
    """Queue every tensor; keep the client that is returned until the process ends.

    What is queued is lost with its socket, and only the coordinator knows when all has arrived.
    """
    client = Client(
        context,
        run_id=bytes.fromhex(birth.run_id),
        identity=f"{birth.identity}/weights",
        endpoint=birth.data,
        server_key=birth.server_key,
        keys=birth.keys if birth.server_key else None,
        heartbeat_s=birth.heartbeat_s,
        lease_s=birth.lease_s,
    )
    for name, tensor in state.items():
        own = tensor.detach().cpu().contiguous()
        spec = TensorSpec(dtype=str(own.dtype).removeprefix("torch."), shape=tuple(own.shape))
        frame = own.reshape(-1).view(torch.uint8).numpy().data
        part = WeightsPart(
            stage=birth.stage, incarnation=birth.incarnation, name=name, spec=spec
        )  # fmt: skip
        client.send(part, [frame])
    return client
