"""A neighbour in a process of its own, for tests. Arguments: ROLE IPC_DIR BACKEND INCARNATION.

A "sender" is stage 0, a "receiver" stage 1, whose window holds one parcel. Either says where it
listens, if it does, and then obeys lines until its stdin ends::

    resume NUMBER                          go on from this parcel
    connect GENERATION INCARNATION [ENDPOINT]
    put                                    the next parcel of a sender
    take NUMBER                            print "NUMBER DIGEST" of this parcel of a receiver
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import zmq
from links import receiving_peer, receiving_stream, sending_peer, sending_stream

from spectrain.protocol.schedule import Kind, Op
from spectrain.worker.boundary import Parcel, tensors_of
from spectrain.worker.stream import ReceivingStream, SendingStream
from spectrain.worker.stream_log import digest_of


def neighbours_parcel(number: int) -> Parcel:
    """Return what the sender sends as its parcel of this number: small ones and large in turn."""
    generator = torch.Generator().manual_seed(number)
    width = 2048 if number % 2 else 16
    hidden = torch.randn(1 + number * 37 % 101, width, generator=generator)
    value = (hidden, None, hidden[:, 0] > 0)
    return Parcel(Op(Kind.FORWARD, number), value, len(hidden), len(hidden))


def neighbours_digest(number: int) -> int:
    """Return the digest of that parcel."""
    return digest_of(tensors_of(neighbours_parcel(number).value))


def main(role: str, ipc_dir: str, backend: str, incarnation: str) -> None:
    torch.set_num_threads(1)
    own = {"backend": backend, "incarnation": int(incarnation)}
    with zmq.Context() as context:
        end: SendingStream | ReceivingStream
        if role == "sender":
            end = sending_stream(context, **own)
        else:
            end = receiving_stream(context, Path(ipc_dir), window=1, **own)
            print(end.endpoint, flush=True)
        for line in sys.stdin:
            obey(end, *line.split())
        end.close()


def obey(end: SendingStream | ReceivingStream, command: str, *arguments: str) -> None:
    if command == "resume":
        end.resume_at(int(arguments[0]))
    elif isinstance(end, SendingStream):
        if command == "connect":
            generation, incarnation, endpoint = arguments
            peer = receiving_peer(endpoint, incarnation=int(incarnation))
            end.connect(int(generation), peer)
        else:
            end.put(neighbours_parcel(end.number))
    elif command == "connect":
        generation, incarnation = map(int, arguments)
        end.expect(generation, sending_peer(incarnation=incarnation))
    else:
        taken = end.take(Op(Kind.FORWARD, int(arguments[0])))
        print(taken.number, digest_of(tensors_of(taken.value)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
