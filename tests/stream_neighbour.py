"""A neighbour in a process of its own, for tests. Arguments: ROLE IPC_DIR BACKEND.

As "sender" it is stage 0: it reads the receiver's endpoint from stdin and puts ``F0``, ``F1``, …
as often as stdin says "put". As "receiver" it is stage 1, prints its endpoint, and never takes
anything; its window holds one parcel. It ends with stdin.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import zmq
from links import receiving_peer, receiving_stream, sending_peer, sending_stream

from spectrain.protocol.schedule import Kind, Op
from spectrain.worker.boundary import Parcel


def neighbours_parcel(number: int) -> Parcel:
    """Return what the sender sends as its parcel of this number; its length differs each time."""
    generator = torch.Generator().manual_seed(number)
    hidden = torch.randn(1 + number * 37 % 101, 16, generator=generator)
    value = (hidden, None, hidden[:, 0] > 0)
    return Parcel(Op(Kind.FORWARD, number), value, len(hidden), len(hidden))


def main(role: str, ipc_dir: str, backend: str) -> None:
    torch.set_num_threads(1)
    with zmq.Context() as context:
        if role == "sender":
            end = sending_stream(context, backend=backend)
            end.connect(1, receiving_peer(sys.stdin.readline().strip()))
        else:
            end = receiving_stream(context, Path(ipc_dir), backend=backend, window=1)
            end.expect(1, sending_peer())
            print(end.endpoint, flush=True)
        for number, _ in enumerate(sys.stdin):
            end.put(neighbours_parcel(number))
        end.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
